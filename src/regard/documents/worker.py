"""Reads or writes one document in its own process: ``python -m regard.documents.worker SECONDS``.

Documents of clients are not trusted: a small file can be made so that reading it takes minutes or gigabytes. The server
therefore starts this process for each of them, with limits of CPU time and memory and with low priority, and can stop
it. A task comes from standard input; the result goes to standard output, as a line of JSON and the bytes of a document.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
from contextlib import suppress
from typing import Any, NamedTuple

from regard.documents import DocumentOptions, format_of_name
from regard.documents.base import SentenceTranslation
from regard.errors import RegardError

MEMORY_BYTES = 1 << 30
NICENESS = 5


class DocumentTask(NamedTuple):
    """A document to read, or to write with the translations of its sentences."""

    name: str
    """its suffix tells the format"""
    content: bytes
    options: DocumentOptions
    translations: list[SentenceTranslation] | None = None


def perform(task: DocumentTask) -> tuple[dict[str, Any], bytes]:
    """The sentences of a document and whether they have inline elements, or the translated document; or an error."""
    document_format = format_of_name(task.name)
    assert document_format is not None, task.name
    try:
        document = document_format(task.options).parse(task.content)
        if task.translations is not None:
            return {}, document.write(task.translations)
        return {"sentences": document.sentences, "has_elements": document.has_elements}, b""
    except (ValueError, RegardError) as error:
        return {"error": str(error)}, b""
    except RecursionError:
        return {"error": "its elements are nested too deeply"}, b""
    except MemoryError:
        return {"error": f"reading it takes more than {MEMORY_BYTES >> 30} GiB of memory"}, b""


def main(seconds: int) -> None:
    """Perform a task. seconds: of CPU time, after which the process is killed."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with suppress(ValueError, OSError):  # not on macOS
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.nice(NICENESS)
    description, content = perform(pickle.load(sys.stdin.buffer))
    sys.stdout.buffer.write(json.dumps(description).encode() + b"\n" + content)


if __name__ == "__main__":
    main(int(sys.argv[1]))

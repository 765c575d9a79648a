"""A folder is written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.errors import RegardError
from regard.run import PARTIAL


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A folder beside out to write into. It takes out's name at the end; on any error it is gone."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RegardError(f"{out}: exists already; give --out another name, or remove it")
    partial = out.with_name(f".{out.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.replace(out)
    except OSError as error:
        raise RegardError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)

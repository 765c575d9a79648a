"""Documents on the command line: which arguments are documents, where they go, and how they are translated."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.cli.translation_job import TranslationJob
    from regard.documents import DocumentOptions, ParsedDocument
    from regard.documents.base import SentenceTranslation
    from regard.recipe import DecodingOptions
    from regard.tasks import Translator

CHUNK_SENTENCES = 256
"""sentences that are translated and stored together; an interrupted translation resumes after the last chunk"""

# ---------------------------------------------------------------------------------------------
# Arguments


def find_documents(texts: Sequence[str]) -> list[Path]:
    """The documents that the arguments name, or none if the arguments are texts.

    A document has the suffix of a known format and no surrounding spaces. A pattern such as ``*.md`` is expanded;
    ``docs/*`` is a pattern if documents match it.
    """
    candidates = [text for text in texts if re.search(r"\.\w+$", text) and text == text.strip()]
    wild = [text for text in texts if "*" in text and not any(map(str.isspace, text))]
    if not candidates and not wild:
        return []
    from regard.documents import format_of_name

    named = list(filter(format_of_name, candidates))
    documents: list[Path] = []
    for text in wild:
        files = matching_files(text) if text not in named else []
        other_files = [file for file in files if not format_of_name(file)]
        if len(other_files) == len(files):
            continue
        if other_files:
            raise RegardError(
                f"{other_files[0]}: matches {text} but is not a document; add a suffix to the pattern"
            )
        named.append(text)
    for text in named:
        if Path(text).is_file():
            documents.append(Path(text))
        elif matches := matching_files(text):
            documents += matches
        elif not any(map(str.isspace, text)):
            raise RegardError(f"{text}: no such file")
    for text in candidates:
        if text not in named and Path(text).is_file():
            raise RegardError(
                f"{text}: unknown document format; to translate its lines, use --input {text}"
            )
    if documents and len(named) < len(texts):
        first_text = next(text for text in texts if text not in named)
        raise RegardError(f"cannot mix documents and texts: {first_text!r} is not a document")
    return documents


def matching_files(pattern: str) -> list[Path]:
    """The files that match a pattern such as ``docs/*.md``, in order; hidden ones only if the pattern names them."""
    anchor = Path(pattern).anchor
    try:
        paths = Path(anchor or ".").glob(pattern[len(anchor) :])
        hidden = Path(pattern).name.startswith(".")
        return sorted(path for path in paths if path.is_file() and (hidden or path.name[0] != "."))
    except ValueError:  # a text such as **this**
        return []


def refuse_document_as_lines(run: Path, input: Path) -> None:
    """Refuse a document as ``--input``; the error message says how to translate it."""
    from regard.documents import format_of_content, format_of_name

    document_format = format_of_name(input)
    if document_format is None or not document_format.why_not_lines:
        document_format = format_of_content(input)
    if document_format is None or not document_format.why_not_lines:
        return
    named = (
        input
        if document_format is format_of_name(input)
        else input.with_suffix(document_format.suffixes[0])
    )
    rename = "" if named == input else f"rename it to {named.name}, then "
    columns = " --columns NAME" if ".csv" in document_format.suffixes else ""
    command = (
        f"regard translate {shlex.quote(str(run))} {shlex.quote(str(named))}{columns} --output FILE"
    )
    raise RegardError(
        f"--input {input}: if translated line by line, {document_format.why_not_lines}; {rename}use  {command}"
    )


@dataclass
class Destination:
    """Documents and where their translations go."""

    outputs: dict[Path, Path | None]
    """the output of each document; None: standard output"""
    as_json: bool
    """whether the sentences are printed"""

    @classmethod
    def of(cls, documents: Sequence[Path], output: Path | None, as_json: bool) -> Destination:
        """output: a file for one document, or a folder, which is created."""
        from regard.documents import format_of_name

        if output is None:
            document_format = format_of_name(documents[0])
            if (
                len(documents) > 1
                or as_json
                or document_format is None
                or not document_format.is_text
            ):
                raise RegardError(
                    f"{documents[0]}: needs --output FILE, or --output FOLDER for several documents"
                )
            return cls({documents[0]: None}, as_json)
        if len(documents) == 1 and not output.is_dir() and not str(output).endswith("/"):
            if format_of_name(output) is not format_of_name(documents[0]):
                suffix = documents[0].suffix
                raise RegardError(
                    f"--output {output}: must end in {suffix}, as {documents[0]} does"
                )
            pairs = {documents[0]: output}
        else:
            pairs = {document: output / document.name for document in documents}
        cls._check(pairs)
        if len(documents) > 1 or pairs[documents[0]] != output:
            try:
                output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RegardError(f"--output {output}: {error.strerror}") from None
        return cls(dict(pairs), as_json)

    @staticmethod
    def _check(pairs: dict[Path, Path]) -> None:
        owners: dict[Path, Path] = {}
        sources = {document.resolve() for document in pairs}
        for document, output in pairs.items():
            if output.resolve() in sources:
                raise RegardError(
                    f"--output {output}: is also an input; choose another name or folder"
                )
            owner = owners.setdefault(output.resolve(), document)
            if owner != document:
                raise RegardError(f"{document} and {owner} would both be written to {output}")


# ---------------------------------------------------------------------------------------------
# Translation


def translate_documents(
    job: TranslationJob, destination: Destination, columns: str | None, overwrite: bool
) -> None:
    """Translate documents one after the other."""
    from regard.cli.translation_job import languages_of
    from regard.documents import DocumentOptions, read_document

    if job.model.needs_trees:
        raise RegardError(
            "documents: not supported by a model with position: tree, which needs a parse of every sentence"
        )
    names = tuple(name.strip() for name in columns.split(",")) if columns else ()
    tables = [path for path in destination.outputs if ".csv" in _suffixes(path)]
    if names and not tables:
        raise RegardError(f"--columns {columns}: only for CSV and TSV documents")
    source, target = languages_of(job.model) or ("", "")
    options = DocumentOptions(source, target, names)
    job = replace(job, decoding=protect_placeholders(job.model, job.decoding))
    # All documents are read first, so that a damaged one is reported at once.
    documents = {path: read_document(path, options) for path in destination.outputs}
    typer.echo(f"Computing in {job.model.engine.summary}.", err=True)
    for path, output in destination.outputs.items():
        work = DocumentWork(job, path, documents[path], options, destination.as_json)
        if output is None:
            sentences = work.document.sentences
            translations = work.translate(sentences, 0) if sentences else []
            sys.stdout.flush()
            sys.stdout.buffer.write(work.document.write(translations))
        else:
            work.write(output, overwrite)


def _suffixes(path: Path) -> tuple[str, ...]:
    from regard.documents import format_of_name

    document_format = format_of_name(path)
    return document_format.suffixes if document_format else ()


def protect_placeholders(model: Translator, decoding: dict[str, Any]) -> dict[str, Any]:
    """Decoding options that also copy placeholders, if the model and the other options allow it."""
    if "protect" in decoding or model.non_autoregressive:
        return decoding
    config = model.decoding_for(cast("DecodingOptions", decoding))
    if config.is_sampling or config.mbr or config.beam_groups > 1:
        return decoding
    return {**decoding, "protect": tuple(dict.fromkeys((*config.protect, "placeholders")))}


@dataclass
class DocumentWork:
    """The translation of one document."""

    job: TranslationJob
    path: Path
    document: ParsedDocument
    options: DocumentOptions
    as_json: bool

    def write(self, output: Path, overwrite: bool) -> None:
        """Translate the document in steps that survive a crash, and write it."""
        from regard.storage.resumable_output import ResumableRecords
        from regard.training.progress import ProgressLine

        key = {**self.job.resume_key(self.path, None), "columns": self.options.columns}
        build = partial(build_document, self.document)
        sentences = self.document.sentences
        report = partial(typer.echo, err=True)
        with ResumableRecords(output, key, build, overwrite, report) as resumable:
            done = resumable.done
            if done:
                typer.echo(f"{output}: resuming after sentence {done:,}", err=True)
            line = ProgressLine(f"{self.path}, sentences: ", len(sentences), done)
            with closing(line) as progress:
                while done < len(sentences) and not resumable.complete:
                    chunk = sentences[done : done + CHUNK_SENTENCES]
                    records = [
                        write_record(translation) for translation in self.translate(chunk, done)
                    ]
                    resumable.add(len(chunk), ["".join(f"{record}\n" for record in records)])
                    done += len(chunk)
                    progress.advance(done)
        typer.echo(f"{output}: {len(sentences):,} sentences", err=True)

    def translate(self, sentences: Sequence[str], start: int) -> list[SentenceTranslation]:
        """Translate sentences, each distinct one once. start: the number of sentences before them."""
        from regard.documents.base import SentenceTranslation

        rows = slice(start, start + len(sentences))
        contexts = self.document.contexts(self.job.model.recipe.data.context)[rows]
        inputs = list(zip(sentences, contexts, strict=True))
        distinct = list(dict.fromkeys(inputs))
        translations = self.job.translate_sentences(*map(list, zip(*distinct, strict=True)))
        translation_of = dict(zip(distinct, translations, strict=True))
        results = []
        for number, (sentence_input, has_elements) in enumerate(
            zip(inputs, self.document.has_elements[rows], strict=True), start + 1
        ):
            sentence, text = sentence_input[0], translation_of[sentence_input].text
            self.job.report(
                f"{self.path}, sentence {number}", sentence, translation_of[sentence_input]
            )
            if self.as_json:
                entry = {"file": str(self.path), "source": sentence, "translation": text}
                print(json.dumps(entry | self.job.memory_entry(sentence), ensure_ascii=False))
            needs_alignment = has_elements and text != sentence
            alignment = self._align(sentence, text) if needs_alignment else None
            results.append(SentenceTranslation(text, alignment))
        return results

    def _align(self, sentence: str, translation: str) -> Any:
        from regard.inspection.alignment import align

        if not sentence.strip() or not translation.strip():
            return None
        try:
            return align(self.job.model, sentence, translation)
        except RegardError:  # longer than the model's maximum length
            return None


def write_record(translation: SentenceTranslation) -> str:
    """A translated sentence as a line."""
    alignment = translation.alignment
    weights = (
        None if alignment is None else [[round(float(x), 4) for x in row] for row in alignment]
    )
    return json.dumps([translation.text, weights], ensure_ascii=False)


def read_record(line: str) -> SentenceTranslation:
    import numpy as np

    from regard.documents.base import SentenceTranslation

    text, weights = json.loads(line)
    return SentenceTranslation(text, None if weights is None else np.array(weights, np.float32))


def build_document(document: ParsedDocument, records: Iterable[str]) -> bytes:
    return document.write([read_record(line) for line in records])

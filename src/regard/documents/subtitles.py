"""Subtitles: SubRip and WebVTT."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

from regard.documents.base import (
    DOCUMENT_FORMATS,
    Slot,
    Template,
    TextFormat,
)
from regard.documents.markup import (
    Document,
    Inline,
    InlineKind,
    add_run,
    escape_html,
    text_token,
    unescaped_tokens,
)
from regard.documents.text_formats import (
    LINE_BREAK,
    Line,
    border,
    lines_of,
    soft_break,
)

_CUE_TIME = re.compile(r"\s*(?:\d+:)?\d{1,2}:\d\d[,.]\d{3}\s*-->\s*(?:\d+:)?\d{1,2}:\d\d[,.]\d{3}")
_CUE_MARKUP = re.compile(
    r"<(?P<slash>/?)(?P<tag>[a-zA-Z]\w*)[^<>\n]*>|(?P<time><[\d:.]+>)|(?P<style>\{\\[^{}\n]*\})"
)
_SPEAKER = re.compile(r"(?P<markup>(?:<[^<>\n]*>|\{\\[^{}\n]*\})*)(?P<dash>[-–—]\s*(?=\S))")
"""the dash of a speaker at the beginning of a line, after its styles"""


class Subtitles(TextFormat):
    """Cues with a time and a few lines of text. A cue is translated as one text and then broken into lines again."""

    why_not_lines = "its time stamps would be translated"
    line_length = 42
    """maximum number of characters in a line, as broadcasters allow"""

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        lines = [line for line in beginning.split("\n") if line.strip()][:2]
        return any(map(_CUE_TIME.match, lines))

    def decode_text(self, text: str) -> Iterator[Inline]:
        yield text_token(text)

    def encode_text(self, text: str) -> str:
        return text

    def split(self, text: str) -> Template:
        template = Template()
        lines = lines_of(text)
        done = number = 0
        while number < len(lines):
            is_time = _CUE_TIME.match(lines[number].text)
            number += 1
            if not is_time:
                continue
            first = number
            while number < len(lines) and lines[number].text.strip():
                number += 1
            if cue := lines[first:number]:
                template.add(text[done : cue[0].start], self._slot(text, cue))
                done = cue[-1].end
        template.add(text[done:])
        return template

    def _slot(self, text: str, cue: Sequence[Line]) -> Slot:
        run: list[Inline] = []
        speakers = len(cue) > 1 and any(_SPEAKER.match(line.text) for line in cue[1:])
        for number, line in enumerate(cue):
            speaker = _SPEAKER.match(line.text) if speakers else None
            if number:
                ending = text[cue[number - 1].end : line.start]
                run.append((border if speaker else soft_break)(ending))
            if speaker:
                run += [*self._tokens(speaker["markup"]), border(speaker["dash"])]
            run += self._tokens(line.text[speaker.end() if speaker else 0 :])
        document = Document(escape=self.encode_text)
        add_run(document, run, self.options.source)
        newline = LINE_BREAK.search(text)
        line_length = max(self.line_length, *(len(line.text) for line in cue))
        raw = text[cue[0].start : cue[-1].end]
        return Slot(
            document, raw, partial(break_lines, line_length, newline[0] if newline else "\n")
        )

    def _tokens(self, line: str) -> Iterator[Inline]:
        done = 0
        for match in _CUE_MARKUP.finditer(line):
            yield from self.decode_text(line[done : match.start()])
            kind = InlineKind.ANCHOR
            if name := match["tag"]:
                kind = InlineKind.CLOSE if match["slash"] else InlineKind.OPEN
            yield Inline(match[0], kind, name or "")
            done = match.end()
        yield from self.decode_text(line[done:])


def break_lines(line_length: int, newline: str, text: str) -> str:
    """Break lines that are too long into lines of about equal length; tags do not count."""
    return newline.join(newline.join(_broken(line, line_length)) for line in LINE_BREAK.split(text))


def _broken(line: str, line_length: int) -> list[str]:
    words = re.findall(r"(?:<[^<>]*>|\{\\[^{}]*\}|\S)+", line)
    lengths = [len(_CUE_MARKUP.sub("", word)) + 1 for word in words]
    count = math.ceil((sum(lengths) - 1) / line_length)
    if count < 2:
        return [line]
    target, lines, total_length = sum(lengths) / count, [""], 0.0
    for word, length in zip(words, lengths, strict=True):
        if lines[-1] and total_length + length / 2 > target * len(lines) and len(lines) < count:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
        total_length += length
    return lines


@DOCUMENT_FORMATS.register("srt")
class SubRip(Subtitles):
    """SubRip subtitles: the numbers and times of cues stay as they are"""

    suffixes = (".srt",)


@DOCUMENT_FORMATS.register("vtt")
class WebVtt(Subtitles):
    """WebVTT subtitles: times, identifiers, settings, notes and styles stay as they are"""

    suffixes = (".vtt",)

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        return re.match(r"WEBVTT(?=\s|$)", beginning) is not None

    def decode_text(self, text: str) -> Iterator[Inline]:
        return unescaped_tokens(text, soft_breaks=True)

    def encode_text(self, text: str) -> str:
        return escape_html(text)

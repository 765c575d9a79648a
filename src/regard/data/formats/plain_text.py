"""Plain text: two line-parallel files, one file without targets, or one file with a pair per line."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import zip_longest

from regard.data.formats.base import INPUT_FORMATS, InputFormat
from regard.data.pairs import Pair
from regard.data.text_files import BadLine, DataFile, decoded_lines
from regard.errors import RegardError


@INPUT_FORMATS.register("parallel")
class ParallelText(InputFormat):
    """two line-parallel text files: line n of one translates line n of the other"""

    keys = ("source", "target")

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        source_path, target_path = paths
        sources, targets = decoded_lines(source_path), decoded_lines(target_path)
        for number, (source, target) in enumerate(zip_longest(sources, targets)):
            if source is None or target is None:
                longer = number + 1 + sum(1 for _ in (targets if source is None else sources))
                counts = (number, longer) if source is None else (longer, number)
                raise RegardError(
                    f"{source_path} has {counts[0]:,} lines but {target_path} has {counts[1]:,}: "
                    "line n of one must translate line n of the other"
                )
            if isinstance(source, BadLine):
                self.bad(f"{source_path}:{number + 1}", source.problem)
            elif isinstance(target, BadLine):
                self.bad(f"{target_path}:{number + 1}", target.problem)
            else:
                yield Pair(source, target)


@INPUT_FORMATS.register("text")
class PlainText(InputFormat):
    """text without targets, for language modelling"""

    keys = ("text",)

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        return (Pair(line.strip(), "") for _, line in self.lines(path))


class LineFormat(InputFormat):
    """A format with one pair per line."""

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        for number, line in self.lines(path):
            try:
                pair = self.parse(line)
            except ValueError as error:
                self.bad(f"{path}:{number}", str(error))
            else:
                yield pair

    @abstractmethod
    def parse(self, line: str) -> Pair:
        """The pair of a line; raises ValueError."""

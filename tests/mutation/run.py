"""Mutation testing: ``make mutants``, or ``python -m tests.mutation.run --help``.

Every mutant of ``mutants.py`` and ``sampling.py`` is tested by the unit tests that run the changed lines, until one
fails. A mutant for which all pass has survived: a test is missing, or the change makes no difference.

The tests of a mutant run in a fork of this process, which has imported torch and the other libraries already, in a copy
of the repository. A first run with coverage finds out which tests run which lines.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutation.mutants import ROOT, Mutant, named_mutants, read_source
from tests.mutation.sampling import EXCLUDED, PACKAGES, sampled_mutants, source_files

EXTRA_TESTS = (
    "tests/cli/test_runs.py",
    "tests/cli/test_worker_pool.py",
    "tests/unit/interop/test_huggingface.py",
)
OUT = ROOT / ".mutants"
"""the coverage of each test file, and the results of the last run"""
TESTED_BY = (*PACKAGES, "storage", "tasks", "inspection")
"""the packages whose unit tests are run"""
TOO_SLOW = ("test_openapi.py", "constant_memory", "million", "test_every_choice", "resumed_run")
"""parts of the names of tests that are left out"""
TREE = ("src", "tests", "recipes", "pyproject.toml", "README.md", "docs")
LIBRARIES = (
    *("beartype", "fastapi", "httptools", "httpx", "hypothesis.strategies", "numpy"),
    *("prometheus_client", "pyarrow.parquet", "pydantic", "rich", "sacrebleu"),
    *("safetensors.torch", "sentencepiece", "starlette.testclient", "tensorboard", "torch"),
    *("torch.utils.tensorboard", "typer", "uvicorn", "yaml"),
)
"""imported once, before the forks"""
PYTEST_OPTIONS = (
    *("-x", "-q", "--no-header", "-p", "no:cacheprovider"),
    *("-p", "_hypothesis_pytestplugin", "--hypothesis-seed=0"),
)
MAX_SECONDS = 20.0
"""of tests for one mutant, by their durations in the coverage run; the fastest come first"""
EXAMPLES = 20
"""of each property for one mutant"""
CPU_LIMIT = 60
"""seconds of CPU time after which a mutant counts as killed: the tests take less than a third without it"""
ALL_PASSED = 42
"""exit status of a process whose tests have all run; a mutant can end its process with 0 before they have"""
TIME_LIMIT = 600
"""the same for a mutant that waits, in seconds; long, because other programs may use the cores"""


@dataclass
class Coverage:
    """What the tests of one file run."""

    seconds: dict[str, float]
    """of each test, by its node id"""
    lines: dict[str, dict[str, list[int]]]
    """source file -> test -> lines"""


# ---------------------------------------------------------------------------------------------
# Copies of the repository, and forks that run pytest in them


def make_tree(folder: Path) -> Path:
    """Copy what the tests need to an empty folder."""
    folder.mkdir(parents=True)
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def fork(tree: Path, log: Path, body: Callable[[], int]) -> int:
    """Run ``body`` in a fork whose folder is the tree; its result is the exit status. Returns the process id."""
    process = os.fork()
    if process:
        return process
    status = 99
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[:] = [str(tree / "src"), str(tree), *sys.path]
        os.environ["PYTHONPATH"] = str(tree / "src")
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# ---------------------------------------------------------------------------------------------
# Which tests run which lines


class FewExamples:
    """Tries each property with this many examples at most."""

    def __init__(self, count: int) -> None:
        self.count = count

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            function: Any = getattr(item, "obj", None)
            settings = getattr(function, "_hypothesis_internal_use_settings", None)
            if settings is not None and settings.max_examples > self.count:
                few = type(settings)(settings, max_examples=self.count)
                function._hypothesis_internal_use_settings = few


class ContextPlugin:
    """Tells coverage which test is running, and measures how long it takes."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not any(name in item.nodeid for name in TOO_SLOW)]

    def pytest_collection_finish(self) -> None:
        self.coverage.start()  # imports need not be measured, and would take minutes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        start = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - start
            self.coverage.switch_context("")


def measure(test_files: Mapping[str, Path]) -> int:
    """Run test files with coverage and write the ``Coverage`` of each, without the tests that fail."""
    import coverage

    measured = coverage.Coverage(data_file=None, include=["src/regard/*"], messages=False)
    plugin = ContextPlugin(measured)
    few = FewExamples(3)  # the lines that a property runs do not depend on their number
    pytest.main(["-q", *PYTEST_OPTIONS[2:], *test_files], [plugin, few])
    measured.stop()
    found = {name: Coverage({}, {}) for name in test_files}
    for test in plugin.seconds.keys() - plugin.failed:
        found[test.partition("::")[0]].seconds[test] = plugin.seconds[test]
    data, here = measured.get_data(), Path.cwd()
    for path in data.measured_files():
        file = Path(path).relative_to(here).as_posix()
        for line, tests in data.contexts_by_lineno(path).items():
            for test in set(tests) & plugin.seconds.keys() - plugin.failed:
                lines = found[test.partition("::")[0]].lines
                lines.setdefault(file, {}).setdefault(test, []).append(line)
    for name, out in test_files.items():
        out.write_text(json.dumps(vars(found[name])))
    return 0


def test_files() -> list[Path]:
    """The files whose tests are run."""
    folders = [ROOT / "tests" / "unit" / package for package in TESTED_BY]
    found = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    return [*found, *(ROOT / name for name in EXTRA_TESTS)]


def coverage_of_tests(trees: Sequence[Path]) -> list[Coverage]:
    """The coverage of every test file, from the last time it was measured if it has not changed since.

    The files of a folder are run in one process, the folders in parallel, one in each tree.
    """
    sources = _hash(path for package in PACKAGES for path in source_files(package))
    folder = OUT / "coverage"
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        path.relative_to(ROOT).as_posix(): folder
        / f"{path.parent.name}-{path.stem}-{_hash([path])[:8]}-{sources[:8]}.json"
        for path in test_files()
    }
    groups: dict[str, dict[str, Path]] = {}
    for name, file in files.items():
        if not file.exists():
            groups.setdefault(Path(name).parent.name, {})[name] = file
    waiting, running = list(groups), dict[int, Path]()
    while waiting or running:
        for tree in [tree for tree in trees if tree not in running.values()]:
            if waiting:
                group = waiting.pop(0)
                print(f"measuring the coverage of tests of {group}", flush=True)
                log = folder / f"{group}.log"
                process = fork(tree, log, partial(measure, groups[group]))
                running[process] = tree
        process, status = os.wait()
        running.pop(process)
        if status:
            sys.exit(f"the tests cannot be run: see {folder}")
    return [Coverage(**json.loads(file.read_text())) for file in files.values()]


def _hash(files: Iterable[Path | str]) -> str:
    return hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in files)).hexdigest()


class Ranked(NamedTuple):
    """A test, in the order in which tests are run."""

    elsewhere: bool
    """not in the file that mirrors the mutant's"""
    seconds: float
    test: str


def select_tests(mutant: Mutant, coverages: Sequence[Coverage]) -> list[str]:
    """The tests that run a changed line, those of the mirrored file first, then the fastest.

    A line that runs when its module is imported belongs to the test that happens to import it first, and one that runs
    only in a fork or in a thread to none: such a mutant is tested by the tests that run any line of its file, and by
    those of the mirrored file.
    """
    changed = _changed_lines(mutant) & _lines_in_functions(mutant.file)
    near, anywhere = list[Ranked](), list[Ranked]()
    mirrored = mutant.file.replace("src/regard/", "tests/unit/").rpartition("/")
    mirrored_file = f"{mirrored[0]}/test_{mirrored[2]}"
    for coverage in coverages:
        lines = coverage.lines.get(mutant.file, {})
        for test, seconds in coverage.seconds.items():
            ranked = Ranked(not test.startswith(mirrored_file), seconds, test)
            if test in lines or not ranked.elsewhere:
                anywhere.append(ranked)
            if changed & {*lines.get(test, ())}:
                near.append(ranked)
    selected, total = list[str](), 0.0
    for _, seconds, test in sorted(near or anywhere):
        total += seconds
        if selected and total > MAX_SECONDS:
            break
        selected.append(test)
    return selected


@cache
def _lines_in_functions(file: str) -> set[int]:
    """The lines that run when a function is called, without its decorators and defaults."""
    functions = [
        node
        for node in ast.walk(ast.parse(read_source(file)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        line
        for function in functions
        for line in range(function.body[0].lineno, (function.end_lineno or 0) + 1)
    }


def _changed_lines(mutant: Mutant) -> set[int]:
    before = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()
    after = mutant.code.splitlines()
    last = len(before)
    while last > mutant.line and after[last - len(before) - 1] == before[last - 1]:
        last -= 1
    return set(range(mutant.line, last + 1))


# ---------------------------------------------------------------------------------------------
# Testing the mutants


@dataclass
class Result:
    """What became of a mutant."""

    key: str
    file: str
    line: int
    name: str
    diff: list[str]
    outcome: str
    """killed, timeout, survived, or untested: no test runs the file"""
    tests: int
    seconds: float
    killer: str = ""
    """the first test that failed"""


class Slot:
    """A copy of the repository in which one mutant at a time is tested."""

    def __init__(self, folder: Path) -> None:
        self.tree = make_tree(folder)
        self.log = folder.with_suffix(".log")
        self.written = time.time() + 10

    def start(self, mutant: Mutant, tests: Sequence[str]) -> None:
        self._write(mutant.file, mutant.code)
        self.mutant, self.tests, self.began = mutant, tests, time.monotonic()

        def body() -> int:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT))
            plugins = [FewExamples(EXAMPLES)]
            return int(pytest.main([*PYTEST_OPTIONS, *tests], plugins)) or ALL_PASSED

        self.process = fork(self.tree, self.log, body)

    def poll(self) -> str | None:
        """What became of the mutant; None while its tests run."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            outcomes = {ALL_PASSED: "survived", -signal.SIGKILL: "timeout"}
            return outcomes.get(code, "killed")
        if time.monotonic() - self.began < TIME_LIMIT:
            return None
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        return "timeout"

    def finish(self, outcome: str) -> Result:
        mutant = self.mutant
        self._write(mutant.file, (ROOT / mutant.file).read_text(encoding="utf-8"))
        seconds = round(time.monotonic() - self.began, 1)
        place = (mutant.key, mutant.file, mutant.line, mutant.name, mutant.diff)
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        killers = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return Result(*place, outcome, len(self.tests), seconds, *killers[:1])

    def _write(self, file: str, code: str) -> None:
        """Each version gets its own time: Python would otherwise take an older one from its cache."""
        path, self.written = self.tree / file, self.written + 2
        path.write_text(code, encoding="utf-8")
        os.utime(path, (self.written, self.written))


def run_mutants(
    mutants: Iterable[Mutant], coverages: Sequence[Coverage], slots: list[Slot]
) -> Iterator[Result]:
    """Test the mutants, one at a time in each slot."""
    waiting, busy = iter(mutants), list[Slot]()
    free, left = list(slots), True
    while left or busy:
        while left and free:
            mutant = next(waiting, None)
            if mutant is None:
                left = False
                break
            tests = select_tests(mutant, coverages)
            if not tests:
                place = (mutant.key, mutant.file, mutant.line, mutant.name, mutant.diff)
                yield Result(*place, "untested", 0, 0.0)
                continue
            slot = free.pop()
            slot.start(mutant, tests)
            busy.append(slot)
        for slot in list(busy):
            if (outcome := slot.poll()) is not None:
                busy.remove(slot)
                free.append(slot)
                yield slot.finish(outcome)
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=420, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--named", action="store_true", help="only the mistakes of named.yaml")
    parser.add_argument("--again", action="store_true", help="only what survived the last run")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--file", default="", help="only files whose path contains this")
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take longer than most tests
    for name in LIBRARIES:
        importlib.import_module(name)

    sampled = () if arguments.named else sampled_mutants(arguments.count, arguments.seed)
    results_file = OUT / "results.jsonl"
    keep = arguments.again or arguments.resume
    old = read_results(results_file) if keep else {}
    survivors = {key for key, result in old.items() if result.outcome in ("survived", "untested")}
    mutants = (
        mutant
        for mutant in chain(named_mutants(), sampled)
        if arguments.file in mutant.file
        and not (arguments.again and mutant.key not in survivors)
        and not (arguments.resume and mutant.key in old)
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        slots = [Slot(Path(folder) / f"tree{number}") for number in range(arguments.jobs)]
        coverages = coverage_of_tests([slot.tree for slot in slots])
        with results_file.open("a" if keep else "w", encoding="utf-8") as file:
            for number, result in enumerate(run_mutants(mutants, coverages, slots), 1):
                file.write(json.dumps(vars(result)) + "\n")
                file.flush()
                show(result, number)
    report(read_results(results_file).values())


def read_results(file: Path) -> dict[str, Result]:
    """The last result of each mutant."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(one := Result(**json.loads(line))).key: one for line in lines}


def show(result: Result, number: int) -> None:
    where = f"{result.file}:{result.line}"
    cost = f"{result.tests} tests, {result.seconds:.0f} s"
    print(f"{number} {result.outcome}: {where} {result.name} ({cost})", flush=True)
    if result.outcome in ("survived", "untested"):
        print("\n".join(f"    {line}" for line in result.diff), flush=True)


def report(results: Iterable[Result]) -> None:
    """Print the share of killed mutants, of each package and of all."""
    packages: dict[str, Counter[str]] = {}
    for result in results:
        counts = packages.setdefault(result.file.split("/")[2], Counter())
        counts["killed" if result.outcome in ("killed", "timeout") else "survived"] += 1
    packages["all"] = sum(packages.values(), Counter())
    print(f"\n{'package':12}{'mutants':>9}{'killed':>9}{'survived':>10}")
    for package, counts in packages.items():
        share = f"{100 * counts['killed'] / max(1, counts.total()):.1f}%"
        print(f"{package:12}{counts.total():9}{share:>9}{counts['survived']:10}")
    for file, reason in EXCLUDED.items():
        print(f"not mutated: {file}: {reason}")


if __name__ == "__main__":
    main()

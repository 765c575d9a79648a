"""Environment variables: set by the command line, never by an import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.cli.main import limit_onednn_cache
from tests.cli.commands import environment

IMPORT_ALL = """
import os
before = dict(os.environ)
import importlib, pkgutil, regard
for module in pkgutil.walk_packages(regard.__path__, "regard."):
    if module.name not in ("regard.__main__", "regard.nn.triton_kernels", "regard.decoding.fused_top_k"):
        importlib.import_module(module.name)
changed = {key for key in before.keys() | os.environ.keys() if before.get(key) != os.environ.get(key)}
print(sorted(key for key in changed if key.startswith(("ONEDNN", "LRU_CACHE", "OMP"))), sorted(changed))
"""


def test_importing_regard_changes_no_environment_variable() -> None:
    """In a clean environment: this process has imported regard, and would pass on the variables that it set."""
    kept = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL],
        env={name: os.environ[name] for name in kept if name in os.environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[] []"


def test_the_size_of_the_onednn_cache_is_limited_unless_the_user_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "")
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    limit_onednn_cache()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert os.environ["LRU_CACHE_CAPACITY"] == "64"


@pytest.mark.parametrize(
    ("command", "kernels"),
    [
        (["train", "demo"], "256"),
        (["experiment", "demo"], "256"),
        (["lab", "run"], "256"),
        (["data", "score"], "256"),
        (["data", "check"], "64"),
        (["translate", "train"], "64"),
        ([], "64"),
    ],
)
def test_commands_that_train_cache_more_kernels(
    monkeypatch: pytest.MonkeyPatch, command: list[str], kernels: str
) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "")
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    limit_onednn_cache(command)
    assert os.environ["LRU_CACHE_CAPACITY"] == kernels


INTERRUPTED_IMPORT = """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "regard.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from regard.__main__ import main
main()
"""


def test_an_interrupt_while_the_command_is_imported_is_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from regard.errors import RegardError
from regard.storage.run_dir import RunDir
def weights(self):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:  # as a library does that reads a file
        raise RegardError("model.safetensors: damaged") from None
RunDir.weights = weights
from regard.cli.main import main
main()
"""


def test_an_interrupt_that_a_library_turns_into_an_error_is_still_one(finished_run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "translate", str(finished_run), "a"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_the_command_line_starts_before_libraries_that_start_threads() -> None:
    """Their threads are limited by ``main``, which runs after the import."""
    code = "import sys, regard.cli.main; print([m for m in ('numpy', 'pyarrow', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

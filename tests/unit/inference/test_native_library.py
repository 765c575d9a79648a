"""The native library is found, built, cached, or its absence is explained."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.inference import native_library as module
from regard.inference.native_library import NativeLibrary, build_library, library_name


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """Loads the library anew, with an empty cache, and an empty package folder unless a test changes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(module.VARIABLE, raising=False)
    monkeypatch.delenv(module.LIMIT_VARIABLE, raising=False)
    return module.load_native_library


def reload() -> NativeLibrary:
    library: NativeLibrary = module.load_native_library()
    return library


@pytest.mark.usefixtures("load")
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.VARIABLE, "off")
    assert reload() == NativeLibrary(None, "REGARD_NATIVE=off")


@pytest.mark.usefixtures("load")
def test_a_file_that_is_no_library_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "missing.so"))
    assert "missing.so" in reload().reason


@pytest.mark.usefixtures("load")
def test_without_a_compiler_the_reason_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = tmp_path / "native"  # without a library of the wheel
    shutil.copytree(module.SOURCES, sources, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert reload().reason == "there is no C++ compiler to build it with"


def test_threads_that_need_it_at_the_same_time_load_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def load() -> NativeLibrary:
        calls.append(1)
        time.sleep(0.05)
        return NativeLibrary(None, "test")

    monkeypatch.setattr(module, "_load_once", cache(load))
    uncached = module.native_library.__wrapped__
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(uncached) for _ in range(4)]]
    assert (len(calls), {library.reason for library in found}) == (1, {"test"})


@pytest.mark.usefixtures("load")
def test_a_failed_build_leaves_nothing_and_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = tmp_path / "native"
    sources.mkdir()
    for file in module.SOURCES.glob("*.[ch]*"):
        (sources / file.name).write_text("#error this cannot be compiled\n")
    monkeypatch.setattr(module, "SOURCES", sources)
    assert "it could not be built" in reload().reason
    assert not any((tmp_path / "regard").iterdir())
    assert "The native library is not used: it could not be built: " in caplog.text


HEADERS = {
    "atomic": ("atomic", "memory_order_relaxed"),
    "algorithm": ("binary_search", "copy_n", "max", "min", "partial_sort", "stable_sort"),
    "condition_variable": ("condition_variable",),
    "functional": ("function", "greater"),
    "memory": ("make_unique", "unique_ptr"),
    "mutex": ("lock_guard", "mutex", "unique_lock"),
    "new": ("bad_alloc",),
    "system_error": ("system_error",),
    "thread": ("this_thread", "thread"),
    "utility": ("move",),
    "vector": ("vector",),
}
"""Names of the C++ standard library by header."""


def test_every_source_includes_what_it_uses() -> None:
    """Compilers differ in which headers include others, so a missing one may only fail on another machine."""
    shared = (module.SOURCES / "threads.h").read_text()
    for file in module.SOURCES.glob("*.cpp"):
        text = file.read_text()
        text += shared if '#include "threads.h"' in text else ""
        for header, names in HEADERS.items():
            if any(f"std::{name}" in text for name in names):
                assert f"#include <{header}>" in text, f"{file.name} needs <{header}>"


def test_another_version_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = library_name()
    monkeypatch.setattr(module, "COMMON_OPTIONS", (*module.COMMON_OPTIONS, "-DX"))
    assert library_name() != name


@pytest.mark.usefixtures("load")
def test_a_built_library_is_loaded_from_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if module.native_library().functions is None:
        pytest.skip(module.native_library().reason)
    built = tmp_path / "regard" / library_name()
    built.parent.mkdir()
    shutil.copy(module.native_library().path, built)
    monkeypatch.setenv("PATH", "")  # it must not be built again
    sources = tmp_path / "native"
    shutil.copytree(module.SOURCES, sources, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(module, "SOURCES", sources)
    assert reload().path == str(built)
    monkeypatch.setenv(module.VARIABLE, str(built))
    assert reload().path == str(built)
    monkeypatch.setenv(module.LIMIT_VARIABLE, "sse")
    with pytest.raises(RegardError, match="REGARD_NATIVE_KERNELS sse: must be avx2, avx512, amx"):
        reload()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        build_library(tmp_path / "file")

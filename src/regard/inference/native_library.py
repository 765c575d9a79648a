"""The native library: finds, builds and loads the C++ code of ``native/``.

The library is optional. In this order, it is

1. the file that the environment variable ``REGARD_NATIVE`` names (``off``: none),
2. the file in the package, which a wheel has if a compiler was there when it was built,
3. the file in the user's cache, built there on first use if there is a compiler.

Without it, inference runs on torch alone, and ``NativeLibrary.reason`` says why. One file has the kernels of all
instruction sets; the best one that the CPU has is selected when it is loaded. The name of a file has a hash of the
sources and options, so a file of another version is never loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Iterable
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "native"
VARIABLE = "REGARD_NATIVE"
"""environment variable: the path of a library, or ``off``"""
COMPILE_SECONDS = 300

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_FMA = ("-mavx2", "-mfma", "-mf16c")
COMMON_OPTIONS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-math-errno")
OBJECTS: dict[str, tuple[str, ...]] = {
    "decoder": ("decoder.cpp",),
    "avx2": ("kernels.cpp", "-DREGARD_AVX2", *_FMA),
    "avx512": ("kernels.cpp", "-DREGARD_AVX512", *_FMA, *_AVX512),
    "amx": ("kernels.cpp", "-DREGARD_AMX", *_FMA, *_AVX512, "-mamx-tile", "-mamx-int8"),
    "training": ("training.cpp",),
    "training_avx2": ("training.cpp", "-DREGARD_SET=avx2", "-Wno-psabi", *_FMA),
    "training_avx512": ("training.cpp", "-DREGARD_SET=avx512", "-Wno-psabi", *_FMA, *_AVX512),
}
"""The object files: a source and its options. Kernels are compiled once for each instruction set."""
LINK_OPTIONS = ("-shared", "-pthread")

INSTRUCTION_SETS = {"avx2": 1, "avx512": 2, "amx": 3}
"""from the oldest to the newest"""
LIMIT_VARIABLE = "REGARD_NATIVE_KERNELS"
"""environment variable: the newest instruction set to use, ``avx2``, ``avx512`` or ``amx``, for comparison"""


class NativeLibrary(NamedTuple):
    """The loaded library, or the reason why there is none."""

    functions: ctypes.CDLL | None
    reason: str
    """why there is no library; empty if there is one"""
    kernels: str = ""
    """the instruction set that is used"""
    path: str = ""


@cache
def native_library() -> NativeLibrary:
    """The library, loaded on the first call, and built if necessary."""
    with _LOADING:  # several threads may call it first
        return _load_once()


def load_native_library() -> NativeLibrary:
    """Find or build the library, and load it."""
    try:
        path = _find_or_build()
        functions = _load(path)
    except (OSError, NoLibraryError) as error:
        return NativeLibrary(None, str(error))
    limit = os.environ.get(LIMIT_VARIABLE) or "amx"
    if limit not in INSTRUCTION_SETS:
        from regard.errors import RegardError  # here, because wheels are built without the package

        raise RegardError(f"{LIMIT_VARIABLE} {limit}: must be {', '.join(INSTRUCTION_SETS)}")
    name = functions.regard_initialize(INSTRUCTION_SETS[limit])
    if name is None:
        return NativeLibrary(None, "the CPU has no AVX2")
    return NativeLibrary(functions, "", name.decode(), str(path))


_LOADING = threading.Lock()
_load_once = cache(load_native_library)


class NoLibraryError(Exception):
    """There is no library, and none can be built."""


def _find_or_build() -> Path:
    variable = os.environ.get(VARIABLE, "")
    if variable == "off":
        raise NoLibraryError(f"{VARIABLE}=off")
    if variable:
        return Path(variable)
    if os.name != "posix" or os.uname().machine.lower() not in ("x86_64", "amd64"):
        import platform

        raise NoLibraryError(f"no native code for {platform.system()} on {platform.machine()}")
    name = library_name()
    for folder in (SOURCES, cache_dir()):
        if (folder / name).is_file():
            return folder / name
    return build_library(cache_dir())


def library_name() -> str:
    """The file name of the library of this version of the sources."""
    digest = hashlib.sha256(repr((COMMON_OPTIONS, OBJECTS, LINK_OPTIONS)).encode())
    for file in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(file.read_bytes())
    return f"libregard-{sys.platform}-{digest.hexdigest()[:16]}.so"


def cache_dir() -> Path:
    """The folder for built libraries."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "regard"


def build_library(folder: Path) -> Path:
    """Compile the library into a folder, and return its path."""
    import logging
    import shutil
    import tempfile

    compiler = next(filter(None, map(shutil.which, [os.environ.get("CXX") or "c++", "g++"])), None)
    if compiler is None:
        raise NoLibraryError("there is no C++ compiler to build it with")
    folder.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger(__name__)
    log.warning(
        "Building the native library with %s; this happens once and takes a few seconds.", compiler
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as temporary:
        objects = [str(Path(temporary, f"{name}.o")) for name in OBJECTS]
        built = Path(temporary, "library.so")
        try:
            _run_all(
                [compiler, *COMMON_OPTIONS, *options, "-c", str(SOURCES / source), "-o", output]
                for output, (source, *options) in zip(objects, OBJECTS.values(), strict=True)
            )
            _run_all([[compiler, *LINK_OPTIONS, *objects, "-o", str(built)]])
        except NoLibraryError as error:
            log.warning(
                "The native library is not used: %s. Computation is slower without it. To try another compiler, set "
                "CXX; to not try again, set %s=off.",
                *(error, VARIABLE),
            )
            raise
        path = folder / library_name()
        built.replace(path)
    return path


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run some commands at the same time."""
    import subprocess

    processes = [
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        for command in commands
    ]
    try:
        messages = [process.communicate(timeout=COMPILE_SECONDS)[1] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise NoLibraryError(f"it could not be built: {error}") from None
    finally:
        for process in processes:
            with process:  # waits for it, and closes its pipe
                process.kill()
    for process, text in zip(processes, messages, strict=True):
        if process.returncode:
            errors = [line for line in text.splitlines() if "error" in line] or ["unknown error"]
            raise NoLibraryError(f"it could not be built: {errors[0]}")


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    floats, integers = POINTER(c_float), POINTER(c_int32)
    pointer, int32, int64 = c_void_p, c_int32, c_int64
    signatures: dict[str, tuple[object, list[object]]] = {
        "regard_initialize": (c_char_p, [c_int32]),
        "regard_levels": (c_int32, []),
        "regard_linear_pack": (c_void_p, [c_void_p, c_void_p, c_void_p, c_int32, c_int32]),
        "regard_linear_free": (None, [c_void_p]),
        "regard_linear_apply": (
            c_int32,
            [c_void_p, c_void_p, c_int32, c_float, c_int32, c_int32, c_void_p],
        ),
        "regard_job_new": (c_void_p, [c_void_p]),
        "regard_job_free": (None, [c_void_p]),
        "regard_job_stop": (None, [c_void_p]),
        "regard_job_run": (c_int32, [c_void_p]),
        "regard_job_sizes": (None, [c_void_p, integers, POINTER(c_int64), POINTER(c_int64)]),
        "regard_job_results": (
            None,
            [c_void_p, integers, POINTER(c_uint8), POINTER(c_double), integers, floats],
        ),
        "regard_dropout": (None, [pointer, pointer, int64, int32, c_uint32, c_float, int32]),
        "regard_attention": (None, [pointer, int32]),
        "regard_attention_backward": (None, [pointer, int32]),
        "regard_cross_entropy": (
            None,
            [
                *(pointer, int32, int64, int64, pointer, int64),
                *(c_float, c_float, int32, int32, pointer, int32),
            ],
        ),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise NoLibraryError(f"{path}: not a library of this version") from error
        function.restype, function.argtypes = result, arguments
    return library


if __name__ == "__main__":
    print(build_library(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES))

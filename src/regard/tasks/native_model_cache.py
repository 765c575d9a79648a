"""Cached models: translation models in the form that the native decoder reads, in the user's cache folder.

When a run is loaded, its weights are read, checked, quantized and calibrated with torch. The result is stored, so that
the next process that translates with the run needs neither torch nor numpy, whose import takes many times as long as a
short translation. The weights are memory-mapped. Whatever the file does not contain (other decoding methods, attention,
the unpacked network) is loaded from the run when it is first used.

Each file belongs to one run folder. It is used only if

- the files of the run are those it was made from: the same contents of the recipe, the tokenizer and the card, and the
  same size, inode and times of the weights, which would take too long to read,
- the code and the CPU's kernels are the same, and
- its own checksum is correct.

Otherwise it is written again. If it cannot be written, every process prepares the model itself. Nothing in it is
executed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard import __version__
from regard.errors import RegardError
from regard.inference.native_decoder import (
    NativeWeights,
    PositionTable,
    StoredTensor,
    stored_weights,
)
from regard.inference.native_library import cache_dir, library_name, native_library
from regard.recipe.registry import CHECKED_NAMES
from regard.storage.atomic_files import map_tensors
from regard.storage.run_dir import RunDir, sha256

if TYPE_CHECKING:
    from regard.inference.packed_transformer import PackedTransformer
    from regard.nn.transformer import Transformer
    from regard.recipe import Device, Precision, Recipe

VARIABLE = "REGARD_PREPARED"
"""environment variable: the folder for cached models, or ``off``"""
MAX_BYTES = 1 << 30
"""size of all cached models; the oldest are deleted"""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
"""On a machine with one of these, a GPU may be the default device, which only torch can tell."""
SUFFIX = ".safetensors"

CacheKey = dict[str, Any]
"""what a cached model depends on"""


def cache_key(run: RunDir, device: Device, precision: Precision) -> CacheKey | None:
    """What the cached model of a run depends on now; None if the native decoder cannot be used.

    Only for finished runs: during training, the weights change.
    """
    if precision not in ("auto", "int8") or device not in ("auto", "cpu"):
        return None
    if os.environ.get(VARIABLE) == "off" or not run.card_file.is_file():
        return None
    if device == "auto" and any(map(os.path.exists, GPU_DEVICES)):
        return None
    library = native_library()
    if library.functions is None:
        return None
    try:
        weights = run.weights_file.stat()
        files = [run.recipe_file, *run.tokenizer_files(), run.card_file]
        return {
            "version": __version__,
            "code": [library_name(), library.path, library.kernels, _code_hash()],
            "files": {path.name: sha256(path) for path in files},
            "weights": [weights.st_size, weights.st_ino, weights.st_mtime_ns, weights.st_ctime_ns],
        }
    except OSError:
        return None


def _code_hash() -> str:
    """A hash of the code that quantizes and calibrates, and of the recipe classes whose properties are stored."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for package in ("recipe", "decoding", "inference"):
        for path in sorted((Path(__file__).parents[1] / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _path(run: RunDir) -> Path:
    folder = os.environ.get(VARIABLE) or cache_dir() / "models"
    name = hashlib.sha256(os.fsencode(run.folder.resolve())).hexdigest()[:32]
    return Path(folder, name + SUFFIX)


# ---------------------------------------------------------------------------------------------
# Reading


def read_cached_model(
    run: RunDir, key: CacheKey, longer_positions: Callable[[str, int], PositionTable]
) -> tuple[Recipe, NativeWeights] | None:
    """The recipe and the weights of a cached model; None if there is none with this key.

    longer_positions: see ``stored_weights``.
    """
    try:
        tensors, metadata, owner = map_tensors(_path(run))
        if metadata["state"] != key:
            return None
        stored = {name: StoredTensor(*tensor) for name, tensor in tensors.items()}
        weights = stored_weights(stored, metadata["weights"], longer_positions, owner)
        recipe: Any = StoredSection(metadata["recipe"], cache(run.recipe))
        # Other decoding options are checked together with this one, whose registry imports torch.
        name = "length_normalization"
        CHECKED_NAMES.add((f"decoding.{name}", getattr(recipe.decoding, name)))
        return recipe, weights
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged
        return None


class StoredSection:
    """A section of a recipe from a cached model: its values and properties. For all else the recipe is loaded."""

    def __init__(self, stored: Mapping[str, Any], load: Callable[[], Any]) -> None:
        """stored: a result of ``section_values``. load: returns the section of the recipe."""
        sections = {
            name: StoredSection(values, partial(_attribute, load, name))
            for name, values in stored["sections"].items()
        }
        values = {name: _tuples(value) for name, value in stored["values"].items()}
        properties = {name: _tuples(value) for name, value in stored["properties"].items()}
        self.__dict__.update({**properties, **values, **sections})
        self.__dict__.update({"_load": load, "_values": values, "_complete": stored["complete"]})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._load(), name)

    def model_dump(self) -> dict[str, Any]:
        return dict(self._values) if self._complete else self._load().model_dump()

    def __eq__(self, other: object) -> bool:
        same = other._load() if isinstance(other, StoredSection) else other
        return bool(self._load() == same)

    def __hash__(self) -> int:
        return hash(self._load())

    def __repr__(self) -> str:
        return repr(self._load())


def _attribute(load: Callable[[], Any], name: str) -> Any:
    return getattr(load(), name)


def _tuples(value: Any) -> Any:
    """Convert JSON lists to the tuples that a recipe has."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------
# Writing


def write_cached_model(
    run: RunDir, key: CacheKey, recipe: Recipe, network: Transformer, packed: PackedTransformer
) -> None:
    """Store a model that was loaded from a run with this key. Errors are not reported."""
    import tempfile

    from regard.inference.native_packing import quantized_weights
    from regard.storage.atomic_files import write_tensors

    tensors, description = quantized_weights(network, packed)
    metadata = {"state": key, "weights": description, "recipe": section_values(recipe)}
    path = _path(run)
    with suppress(OSError, RegardError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="new-") as folder:
            write_tensors(Path(folder, path.name), tensors, metadata)
            _delete_oldest(path.parent, MAX_BYTES - Path(folder, path.name).stat().st_size)
            Path(folder, path.name).replace(path)


def section_values(section: Any) -> dict[str, Any]:
    """The fields of a section that are sections or plain values, and its properties that are plain values."""
    from pydantic import BaseModel

    section_class = type(section)
    fields = {name: getattr(section, name) for name in section_class.model_fields}
    names = [
        name for name, attribute in vars(section_class).items() if isinstance(attribute, property)
    ]
    properties = {name: getattr(section, name) for name in names}
    values = {name: value for name, value in fields.items() if _is_plain(value)}
    return {
        "values": values,
        "complete": len(values) == len(fields),
        "sections": {
            name: section_values(value)
            for name, value in fields.items()
            if isinstance(value, BaseModel)
        },
        "properties": {name: value for name, value in properties.items() if _is_plain(value)},
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def _delete_oldest(folder: Path, limit: int) -> None:
    """Delete the oldest cached models until the others have at most this many bytes."""
    files = [(path, path.stat()) for path in folder.glob(f"*{SUFFIX}")]
    total = 0
    for path, status in sorted(files, key=lambda file: -file[1].st_mtime):
        total += status.st_size
        if total > limit:
            path.unlink(missing_ok=True)

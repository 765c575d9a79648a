"""The models of a server: each is loaded when it is first needed, within a limit of memory, and found by its languages.

A route leads from one language to another: through one model, or through two with a pivot language between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from regard.documents.markup import Floats
from regard.errors import RegardError
from regard.inspection.alignment import align, word_links
from regard.server.dynamic_batching import Batcher, SearchModel
from regard.server.prometheus import Metrics
from regard.server.schemas import RequestRefused, Settings
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

if TYPE_CHECKING:
    from regard.recipe import Recipe

log = logging.getLogger("regard.server")


class ServedModel(SearchModel, Protocol):
    """What the server needs of a model."""

    @property
    def recipe(self) -> Recipe: ...


class LoadedModel:
    """A model in memory with its queue."""

    def __init__(self, model: ServedModel, settings: Settings, metrics: Metrics, name: str) -> None:
        self.model = model
        self.batcher = Batcher(
            model,
            settings,
            metrics.of_model(name),
            is_concurrent(model),
            model.recipe.decoding.beam,
        )
        self.users = 0
        """running requests that use it"""
        self.unused = asyncio.Event()
        self.unused.set()
        self.following: asyncio.Task[None] | None = None
        """loads the weights of a running training"""

    @property
    def can_align(self) -> bool:
        return isinstance(self.model, Translator)

    def align(self, sentence: str, translation: str, to: str | None) -> Floats | None:
        """The word alignment, to place inline tags; None if it is not possible, so that positions decide.

        to: the target language of a multilingual model.
        """
        return (
            align(self.model, sentence, translation, to)
            if isinstance(self.model, Translator)
            else None
        )

    def word_links(self, sentence: str, translation: str, to: str | None) -> list[tuple[int, int]]:
        """The source word of each word of a translation."""
        if not isinstance(self.model, Translator):
            raise RegardError("alignment: this model cannot align words")
        return word_links(self.model, sentence, translation, to)

    async def close(self) -> None:
        """Free what the model uses besides memory, once no request uses it."""
        await self.unused.wait()
        if self.following is not None:
            self.following.cancel()
        self.batcher.close()
        if isinstance(self.model, Translator):
            self.model.engine.stop_workers()


def is_concurrent(model: ServedModel) -> bool:
    """Whether several threads may use the model. Not while its run is training, because its weights may change."""
    if not isinstance(model, Translator):
        return False
    finished = model.run is None or model.run.card_file.is_file()
    return finished and model.engine.is_concurrent(model.recipe.decoding)


@dataclass(eq=False)
class ModelEntry:
    """A model of the server, in memory or not."""

    name: str
    """the name of its run folder"""
    recipe: Recipe
    load: Callable[[], ServedModel]
    card: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0
    """bytes of its weights in memory; an estimate until it is loaded"""
    run: RunDir | None = None
    loaded: LoadedModel | None = None

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        return self.recipe.data.language_pairs

    @cached_property
    def is_multilingual(self) -> bool:
        return bool(self.recipe.data.targets)

    def to(self, target: str) -> str | None:
        """The ``to`` argument of the model for a target language."""
        return target if self.is_multilingual else None


class Route(NamedTuple):
    """How to translate from one language to another."""

    languages: tuple[str, ...]
    """source, pivot if there is one, target"""
    entries: tuple[ModelEntry, ...]
    """the model from each language to the next"""

    @property
    def name(self) -> str:
        return ", ".join(entry.name for entry in self.entries)

    def stages(self, loaded: Loaded) -> list[RouteStage]:
        return [
            RouteStage(loaded[entry], source, entry.to(target), number == 0)
            for number, (entry, source, target) in enumerate(
                zip(self.entries, self.languages, self.languages[1:], strict=False)
            )
        ]


class RouteStage(NamedTuple):
    """A model of a route."""

    model: LoadedModel
    source: str
    to: str | None
    """the ``to`` argument of the model"""
    is_first: bool


Loaded = Mapping[ModelEntry, LoadedModel]


class ModelPool:
    """All models of a server, the least recently used ones evicted to stay within ``settings.memory``.

    follow: starts a task that loads new weights of a model whose run is still training.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        settings: Settings,
        metrics: Metrics,
        follow: Callable[[LoadedModel], asyncio.Task[None] | None] = lambda _: None,
    ) -> None:
        assert entries, "a server has at least one model"
        self.entries = list(entries)
        self.settings = settings
        self.metrics = metrics
        self._follow = follow
        self._recent: OrderedDict[ModelEntry, None] = OrderedDict()
        """the models in memory, least recently used first"""
        self._making_room = asyncio.Lock()
        self._waiting: dict[tuple[ModelEntry, ...], list[asyncio.Future[Loaded]]] = {}
        """requests that wait for models"""
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopping = False
        """the server is about to stop; set by signal handlers"""
        self.closed = False
        """new requests are refused"""
        for entry in self.entries:
            metrics.loaded.labels(entry.name).set(0)

    # -----------------------------------------------------------------------------------------
    # Languages

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All pairs of languages that the server translates, also through a pivot; those of the first model first."""
        direct_pairs = [pair for entry in self.entries for pair in entry.pairs]
        pivoted = [
            (source, target)
            for source, middle in direct_pairs
            for between, target in direct_pairs
            if middle == between and middle in self.settings.pivots and source != target
        ]
        return list(dict.fromkeys(direct_pairs + pivoted))

    def sources(self, target: str | None = None, model: str | None = None) -> list[str]:
        """The languages that can be translated, into this target or any, with this model or any."""
        pairs = self.pairs if model is None else self.entry(model).pairs
        return list(dict.fromkeys(source for source, to in pairs if target in (None, to)))

    def entry(self, name: str | None) -> ModelEntry:
        """The model of this name; the first one for None."""
        for entry in self.entries:
            if name in (None, entry.name):
                return entry
        names = ", ".join(entry.name for entry in self.entries)
        raise RequestRefused(400, f"model {str(name)[:100]!r}: this server has {names}")

    def route(self, source: str, target: str, model: str | None = None) -> Route | None:
        """The first model for a pair of languages, or the given one; else two models with a pivot between them."""
        if model is not None:
            entry = self.entry(model)
            return Route((source, target), (entry,)) if (source, target) in entry.pairs else None
        if direct := self._first(source, target):
            return Route((source, target), (direct,))
        for pivot in self.settings.pivots:
            first, second = self._first(source, pivot), self._first(pivot, target)
            if first and second and source != target:
                return Route((source, pivot, target), (first, second))
        return None

    def _first(self, source: str, target: str) -> ModelEntry | None:
        return next((entry for entry in self.entries if (source, target) in entry.pairs), None)

    # -----------------------------------------------------------------------------------------
    # Loading

    @asynccontextmanager
    async def use(self, *entries: ModelEntry, admitted: bool = False) -> AsyncIterator[Loaded]:
        """The models of these entries; they stay in memory inside the block. Loads them if needed.

        admitted: the request called ``check_open`` before.
        """
        if not admitted:
            self.check_open()
        distinct = tuple(dict.fromkeys(entries))
        loaded = self._hold(distinct) or await self._load(distinct)
        try:
            yield loaded
        finally:
            _release(loaded)

    def check_open(self) -> None:
        """Refuse a request if the server is about to end; one that is admitted will be finished."""
        if self.closed:
            raise RequestRefused(503, "the server is shutting down")

    def _hold(self, entries: Sequence[ModelEntry]) -> Loaded | None:
        """The models of these entries, which cannot be evicted until they are released; None if one is missing."""
        held = {entry: entry.loaded for entry in entries if entry.loaded is not None}
        if len(held) < len(entries):
            return None
        for entry, loaded in held.items():
            loaded.users += 1
            loaded.unused.clear()
            self._recent.move_to_end(entry)
        return held

    async def _load(self, entries: tuple[ModelEntry, ...]) -> Loaded:
        """Load models and hold them. They are loaded once for all requests that wait, even if these are cancelled."""
        waiting: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(entries, []).append(waiting)
        if len(self._waiting[entries]) == 1:
            task = asyncio.create_task(self._load_for_all(entries))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and not waiting.exception():
                _release(waiting.result())
            raise

    async def _load_for_all(self, entries: tuple[ModelEntry, ...]) -> None:
        """Load models and give them to all requests that wait for them.

        The requests hold them from here on: before they continue, another one could evict the models. And they hold
        either all models of a route or none: with one of them, a request would wait for itself to make room.
        """
        async with self._making_room:
            try:
                for entry in entries:
                    if entry.loaded is None:
                        await self._make_room(entry.size, entries)
                        self.add(entry, await asyncio.to_thread(entry.load))
            except Exception as error:
                if isinstance(error, RegardError):
                    log.error("%s cannot be loaded: %s", entry.name, error)
                    reason = f"model {entry.name} cannot be loaded; see the server's log"
                    error = RequestRefused(503, reason, retry_after=60)
                for waiting in self._waiting.pop(entries):
                    if not waiting.done():
                        waiting.set_exception(error)
                return
            for waiting in self._waiting.pop(entries):
                if not waiting.done():
                    loaded = self._hold(entries)
                    assert loaded is not None
                    waiting.set_result(loaded)

    async def _make_room(self, size: int, kept: Sequence[ModelEntry]) -> None:
        """Evict models until a model of this size fits, the least recently used first, but not those to keep.

        Requests that use an evicted model finish first; later ones load it again.
        """
        limit = self.settings.memory
        while limit and self.loaded_bytes + size > limit:
            entry = next((candidate for candidate in self._recent if candidate not in kept), None)
            if entry is None:
                return
            del self._recent[entry]
            loaded, entry.loaded = entry.loaded, None
            assert loaded is not None
            await loaded.close()
            self.metrics.loaded.labels(entry.name).set(0)

    @property
    def loaded_bytes(self) -> int:
        return sum(entry.size for entry in self.entries if entry.loaded is not None)

    def add(self, entry: ModelEntry, model: ServedModel) -> None:
        """Use a model that is in memory."""
        entry.loaded = LoadedModel(model, self.settings, self.metrics, entry.name)
        if entry.run is not None:
            entry.size = loaded_bytes(entry.run, model)
        self._recent[entry] = None
        self.metrics.loaded.labels(entry.name).set(1)
        self.metrics.loads.labels(entry.name).inc()
        self.start_following(entry)

    def start_following(self, entry: ModelEntry) -> None:
        """Start to follow the training of a model, if an event loop is running."""
        loaded = entry.loaded
        if loaded is not None and loaded.following is None and _loop_is_running():
            loaded.following = self._follow(loaded)

    # -----------------------------------------------------------------------------------------
    # Start and end

    def start(self) -> None:
        self.stopping = self.closed = False
        for entry in self.entries:
            if entry.loaded is not None:
                entry.loaded.batcher.closed = False
                self.start_following(entry)

    def refuse(self) -> None:
        """Refuse new requests from now on. The queues stay open for those that wait for a model, or read a file."""
        self.stopping = self.closed = True

    async def drain(self) -> None:
        """Refuse new requests and translate what is in the queues."""
        self.refuse()
        for entry in self.entries:
            loaded = entry.loaded  # it may be evicted meanwhile
            if loaded is not None:
                await loaded.batcher.drain()
                if loaded.following is not None:
                    loaded.following.cancel()
                    loaded.following = None


def _release(held: Loaded) -> None:
    for loaded in held.values():
        loaded.users -= 1
        if not loaded.users:
            loaded.unused.set()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# ---------------------------------------------------------------------------------------------
# Entries of run folders


def entries_of_runs(
    runs: Sequence[Path],
    load: Callable[[Path], Translator],
    languages: tuple[str, str] | None = None,
) -> list[ModelEntry]:
    """An entry for each run folder, not loaded yet. Recipes and cards are read here, so that errors are found early.

    languages: codes of source and target of a single run, if its recipe names none or others.
    """
    if languages and len(runs) > 1:
        raise RegardError(
            f"--languages {','.join(languages)}: only for one run, not for {len(runs)}, whose recipes must name them"
        )
    folders = [run.resolve() for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if folders.count(folder) > 1:
            raise RegardError(f"{run}: given twice")
    names = [folder.name for folder in folders]
    return [
        _entry_of_run(run, name if names.count(name) == 1 else str(run), load, languages)
        for run, name in zip(runs, names, strict=True)
    ]


def _entry_of_run(
    path: Path, name: str, load: Callable[[Path], Translator], languages: tuple[str, str] | None
) -> ModelEntry:
    run = RunDir(path)
    recipe = with_languages(run.recipe(), path, languages)
    Translator.class_for(recipe, run)

    def load_with_languages() -> Translator:
        model = load(path)
        model.recipe = with_languages(model.recipe, path, languages)
        return model

    if not run.weights_file.is_file():
        load(path)  # raises the error
    estimate = 2 * run.weights_file.stat().st_size
    return ModelEntry(name, recipe, load_with_languages, run.card(), estimate, run)


def with_languages(recipe: Recipe, path: Path, languages: tuple[str, str] | None) -> Recipe:
    if not languages:
        return recipe
    if recipe.data.targets:
        raise RegardError(
            f"--languages {','.join(languages)}: {path} has several target languages, "
            "which its recipe names; omit --languages"
        )
    data = recipe.data.model_copy(update={"languages": languages})
    return recipe.model_copy(update={"data": data})


def loaded_bytes(run: RunDir, model: ServedModel) -> int:
    """The memory of the weights of a model: as stored, for traces and alignments, and packed for translation."""
    packed = model.engine.packed if isinstance(model, Translator) else None
    return run.weights_file.stat().st_size + (0 if packed is None else packed.bytes)


def check_memory(
    entries: Sequence[ModelEntry], memory: int | None, pivots: Sequence[str] = ()
) -> None:
    """Refuse a limit in which a model does not fit even alone, or two that are combined do not fit together."""
    if not memory:
        return
    for entry in entries:
        if entry.size > memory:
            raise RegardError(
                f"--memory {memory / 1e6:,.1f} MB: {entry.name} alone needs about {entry.size / 1e6:,.1f} MB"
            )
    entry_of_pair: dict[tuple[str, str], ModelEntry] = {}
    for entry in entries:
        for pair in entry.pairs:
            entry_of_pair.setdefault(pair, entry)
    routed = set(entry_of_pair)
    for pivot in pivots:  # the first one that connects two languages is used
        into = [
            (source, entry) for (source, target), entry in entry_of_pair.items() if target == pivot
        ]
        out_of = [
            (target, entry) for (source, target), entry in entry_of_pair.items() if source == pivot
        ]
        for (source, first), (target, second) in product(into, out_of):
            if source == target or (source, target) in routed:
                continue
            routed.add((source, target))
            size = first.size + (0 if second is first else second.size)
            if size > memory:
                raise RegardError(
                    f"--memory {memory / 1e6:,.1f} MB: {source} to {pivot} to {target} needs {first.name} and "
                    f"{second.name} together, about {size / 1e6:,.1f} MB"
                )

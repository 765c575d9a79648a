"""The engine: the one path from source ids to hypotheses.

    Request -> Engine.generate(requests, decoding, observer) -> hypotheses

The command line, Python, the server, the live stream, traces, validation and distillation all use it, so the same
options give the same output everywhere. What the native decoder supports is decoded by it (``native_decoder.py``). For
the rest, the engine forms batches of similar length and runs them on the packed network where there is one, on several
CPU cores at once (``network_decoder.py``).

An engine with a native decoder from a file needs no network at first, and no torch: both are loaded when a request
needs them. This module must therefore not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from regard.data.special_tokens import BOS, EOS
from regard.decoding.hypothesis import Hypothesis, Phrase, tokens_needed
from regard.errors import RegardError
from regard.inference.native_decoder import MAX_SLOTS, NativeDecoder, NativeRequest
from regard.inference.worker_pool import (
    BACKGROUND_NICE,
    SharedFlag,
    WorkerDied,
    WorkerPool,
    in_background,
    map_in_threads,
    on_one_core,
)

if TYPE_CHECKING:
    import torch

    from regard import recipe
    from regard.data.dependency_trees import TokenTree
    from regard.data.tokenizer import Vocabulary
    from regard.inference.network_decoder import NetworkDecoder
    from regard.inference.packed_transformer import PackedEnsemble, PackedTransformer
    from regard.nn.network import Network
    from regard.nn.positions import Tree
    from regard.recipe import DecodingConfig, Precision

Observer = Callable[[Any], None]
"""Called with a ``BeamStep`` after each step of beam search, or an ``Iteration`` of mask-predict."""

LENGTH_COST = 8
"""A length candidate of mask-predict needs as much memory as this many beams: the logits of all its tokens at once."""


DecodingPath = Literal["constrained", "network", "native"]
"""How a request is decoded: by the network in torch, with constraints or without, or by the native decoder."""
DECODING_PATHS: tuple[DecodingPath, ...] = ("constrained", "network", "native")
"""Requests are decoded in this order: the native decoder starts threads, after which no process can be forked."""


class SearchInterrupted(RegardError):  # noqa: N818
    """The search was stopped between two steps, because ``Engine.interrupt`` was set."""


class Request(NamedTuple):
    """One sequence to generate."""

    source: list[int]
    """source ids without EOS"""
    prefix: Sequence[int] = ()
    """token ids the output must begin with"""
    phrases: Sequence[Phrase] = ()
    """phrases the output must contain"""
    tree: TokenTree | None = None
    """dependency tree of the source, for ``position: tree``"""
    sample: int = 0
    """sampling: the number of the sample among several of the same source"""
    prompt: bool = False
    """language models: source is the beginning of the sequence, and is not closed by EOS"""
    start: int = BOS
    """the first token the decoder reads"""
    limit: int | None = None
    """largest number of tokens; None: as the decoding options say"""


class DecodingBatch(NamedTuple):
    """Requests that go through the network together, and how. It can be sent to another process."""

    requests: Sequence[Request]
    decoding: DecodingConfig
    nbest: int
    length: int | None
    use_packed: bool
    """use the packed network, not the plain one"""
    total: int
    """number of requests of the whole call"""


class Engine:
    """Generates output sequences with one network, or an ensemble.

    config: the model section of the network's recipe; an ensemble has its own. network: a network, or a function that
    loads one; then ``native`` is its native decoder. device: None is the CPU.
    """

    def __init__(
        self,
        config: recipe.ModelConfig,
        network: Network | None,
        target: Vocabulary,
        device: torch.device | None,
        precision: Precision,
        threads: int,
        native: NativeDecoder | None = None,
        load: Callable[[], Network] | None = None,
    ) -> None:
        assert (network is None) == (native is not None) == (load is not None)
        self._network, self._load, self._device = network, load, device
        self.target = target
        members: list[recipe.ModelConfig] | None = getattr(network, "configs", None)
        self.configs = members or [config]
        self.precision: Precision = precision
        self.threads = threads
        """batches processed at a time on a CPU"""
        self._packed: PackedTransformer | PackedEnsemble | None = None
        self._packs_later = native is not None
        """whether the network is still to be packed"""
        self.native = native
        """the packed network in native code: int8 on a CPU, if the library and the network allow it"""
        self.native_reason: str | None = None
        """why a network in int8 has no native decoder"""
        self.pool: WorkerPool[DecodingBatch, list[list[Hypothesis]]] | None = None
        """worker processes; None: threads"""
        self.forks_later = False
        """whether worker processes are to be started when they are needed"""
        self.background_pool: WorkerPool[DecodingBatch, list[list[Hypothesis]]] | None = None
        """worker processes of low priority, for threads of low priority"""
        self.interrupt = SharedFlag()
        """while it is set, searches stop at their next step with ``SearchInterrupted``, in worker processes too"""
        self._decoder: NetworkDecoder | None = None

    # Preparation

    @property
    def network(self) -> Network:
        """The plain network, loaded if necessary."""
        if self._network is None:
            assert self._load is not None
            with on_one_core():  # workers can be forked only from a process without threads
                self._network = self._load()
        return self._network

    @property
    def device(self) -> torch.device:
        if self._device is None:
            import torch

            self._device = torch.device("cpu")
        return self._device

    @property
    def on_cpu(self) -> bool:
        return self._device is None or self._device.type == "cpu"

    @property
    def packed(self) -> PackedTransformer | PackedEnsemble | None:
        """The network with packed weights, once ``freeze`` was called and if the network supports it."""
        self._load_packed()
        return self._packed

    @packed.setter
    def packed(self, packed: PackedTransformer | PackedEnsemble | None) -> None:
        self._packed, self._packs_later = packed, False

    def _load_packed(self) -> None:
        """Pack the network now, if that was left for later."""
        if self._packs_later:
            network = self.network
            with on_one_core():
                self.packed = self._pack(network)
            self._make_native_decoder()  # this one shares the packed weights

    @property
    def is_packed(self) -> bool:
        """Whether ``packed`` is there, or will be there when it is needed."""
        return self._packs_later or self._packed is not None

    def freeze(self) -> None:
        """The weights are final: pack them for inference, if the network supports it."""
        from regard.inference.precision import default_precision, select_precision

        self.stop_workers()
        if (reason := self._unsupported_reason()) is None:
            self.precision = select_precision(self.precision, self.device)
            self.packed = self._pack(self.network)
            self.native, self.native_reason = None, None
            if self.precision == "int8":
                self._make_native_decoder()
        elif self.precision == "int8":
            raise RegardError(
                f"precision int8: this model does not support it ({reason}); use fp32, bf16 or auto"
            )
        elif self.precision == "auto":
            self.precision = default_precision(self.device)

    def _pack(self, network: Network) -> PackedTransformer | PackedEnsemble:
        from regard.inference.packed_transformer import PackedEnsemble
        from regard.inference.precision import pack_network
        from regard.nn.ensemble import Ensemble
        from regard.nn.transformer import Transformer

        def pack(member: Network) -> PackedTransformer:
            assert isinstance(member, Transformer)
            return pack_network(member, self.precision)

        if isinstance(network, Ensemble):
            return PackedEnsemble(list(map(pack, network.members)))
        return pack(network)

    def _unsupported_reason(self) -> str | None:
        """The first choice of a recipe that packed inference does not support; None if it supports all."""
        from regard.inference.precision import unsupported_reason

        reasons = map(unsupported_reason, self.configs)
        return next((reason for reason in reasons if reason is not None), None)

    def _make_native_decoder(self) -> None:
        """Set ``native``, or ``native_reason`` if native code does not support the network."""
        from regard.inference.native_packing import native_weights, unsupported_network
        from regard.inference.packed_transformer import PackedTransformer
        from regard.nn.transformer import Transformer

        network, packed = self.network, self.packed
        if not isinstance(network, Transformer) or not isinstance(packed, PackedTransformer):
            self.native_reason = "an ensemble"
            return
        self.native_reason = unsupported_network(network, packed)
        if self.native_reason is None:
            self.native = NativeDecoder(native_weights(network, packed))

    def start_workers(self, background: bool = False) -> None:
        """Use worker processes from now on, if that is faster, and if this process has no other threads.

        A model with a native decoder, which needs none, starts them only for the first requests that the native
        decoder does not support. background: start them now, because this process starts threads later, and also start
        workers of low priority, for threads of low priority.
        """
        self.stop_workers()
        if not self.is_packed or self.threads == 1 or not self.on_cpu:
            return
        self.forks_later = not background and self.native is not None
        if not self.forks_later:
            self._fork_workers(background)

    def _fork_workers(self, background: bool = False) -> None:
        self.forks_later = False
        # The workers share what is loaded before they are forked.
        self._load_packed()
        self._load_decoder()
        with suppress(OSError):  # no more processes can be started: use threads
            if WorkerPool.is_safe():
                self.pool = WorkerPool(self.generate_batch, self.threads)
                if background:
                    self.background_pool = WorkerPool(
                        self.generate_batch, self.threads, BACKGROUND_NICE
                    )

    def stop_workers(self) -> None:
        self.forks_later = False
        for pool in (self.pool, self.background_pool):
            if pool is not None:
                pool.end()
        self.pool = self.background_pool = None

    def is_concurrent(self, decoding: DecodingConfig) -> bool:
        """Whether several threads may search, and another one may read attention meanwhile: with packed weights."""
        return self.is_packed and not reads_attention(decoding)

    @property
    def summary(self) -> str:
        """The precision and device it computes on, in words."""
        device = "cpu" if self.on_cpu else self.device.type
        if not self.is_packed:
            reason = self._unsupported_reason() or "the weights may still change"
            return f"{self.precision} on {device}, without packed weights ({reason})"
        workers = "thread" if self.pool is None else "worker process"
        plural = "" if self.threads == 1 else "es" if self.pool else "s"
        parallelism = f", {self.threads} {workers}{plural}" if self.on_cpu else ""
        weights = self.packed if self.native is None else self.native.weights
        assert weights is not None
        return f"{self.precision} on {device}{self._kernels}{parallelism}, {weights.bytes / 1e6:.1f} MB of weights"

    @property
    def _kernels(self) -> str:
        """Which code runs, in words, where there is a choice."""
        if self.native is not None:
            return f", native decoder ({self.native.kernels})"
        return f", torch's kernels ({self.native_reason})" if self.native_reason else ""

    @property
    def cpu_seconds(self) -> float:
        """CPU time of this process and its workers so far."""
        return time.process_time() + (0.0 if self.pool is None else self.pool.cpu_seconds)

    # Generation

    def generate(
        self,
        requests: Sequence[Request],
        decoding: DecodingConfig,
        *,
        nbest: int = 1,
        length: int | None = None,
        observer: Observer | None = None,
        plain: bool = False,
    ) -> list[list[Hypothesis]]:
        """The ``nbest`` best hypotheses of each request, best first; for sampling, ``nbest`` samples.

        length: number of output tokens, for non-autoregressive models. observer: called after each step; for a single
        request. plain: use the plain network, whose attention can be recorded and changed, not the packed one.
        """
        # Attention can only be read from the plain network.
        use_packed = self.is_packed and not plain and not reads_attention(decoding)

        def batch_of(group: Sequence[Request]) -> DecodingBatch:
            # A copy can be sent to other processes; the options of a cached model (``StoredSection``) cannot.
            options, total = decoding.model_copy(), len(requests)
            return DecodingBatch(group, options, nbest, length, use_packed, total)

        if observer is not None and not decoding.is_sampling:
            assert len(requests) == 1, "an observer watches one request"
            return self.generate_batch(batch_of(requests), observer)
        results: dict[int, list[Hypothesis]] = {}
        native = use_packed and self.native is not None and self.native.supports(decoding)
        paths = [self._decoding_path(request, decoding, native) for request in requests]
        for path in sorted(set(paths), key=DECODING_PATHS.index):
            rows = [row for row, path_of_row in enumerate(paths) if path_of_row == path]
            group = [requests[row] for row in rows]
            if path == "native":
                hypotheses = self._in_native_code(group, decoding, nbest)
            else:
                hypotheses = self._in_batches(batch_of(group))
            results |= dict(zip(rows, hypotheses, strict=True))
        return [results[row] for row in range(len(requests))]

    def _decoding_path(
        self, request: Request, decoding: DecodingConfig, native: bool
    ) -> DecodingPath:
        """How a request is decoded. Constraints need a wider beam, so they get batches of their own.

        native: whether the native decoder supports the decoding options.
        """
        if request.phrases:
            return "constrained"
        if not native or request.prefix or request.prompt:
            return "network"
        slots = max(len(request.source), decoding.beam * (self.max_tokens(request, decoding) + 1))
        return "native" if slots < MAX_SLOTS else "network"

    def _in_native_code(
        self, requests: Sequence[Request], decoding: DecodingConfig, nbest: int
    ) -> list[list[Hypothesis]]:
        """All requests in one call, on all threads; hypotheses in the order of the requests."""
        assert self.native is not None
        (start,) = {request.start for request in requests}
        results = self.native.search(
            [
                NativeRequest([*request.source, EOS], self.max_tokens(request, decoding))
                for request in requests
            ],
            decoding,
            nbest=nbest,
            start=start,
            suppressed=self.target.suppressed_tokens,
            interrupt=self.interrupt.address,
            threads=self.threads,
        )
        if results is None:
            raise SearchInterrupted("the search was interrupted")
        return results

    def _in_batches(self, whole: DecodingBatch) -> list[list[Hypothesis]]:
        """Divide it into batches of similar length, and decode them, possibly in parallel.

        The hypotheses are in the order of the requests.
        """
        from regard.inference.network_decoder import plan_rows

        requests, decoding = whole.requests, whole.decoding
        if not requests:
            return []
        if decoding.is_sampling:  # every sample is a row of its own
            samples = decoding.mbr or whole.nbest
            requests = [
                request._replace(sample=request.sample + number)
                for request in requests
                for number in range(samples)
            ]
        parallel = whole.use_packed and self.on_cpu
        lengths = [len(request.source) for request in requests]
        width = self.width(decoding, whole.nbest, bool(requests[0].phrases), whole.length)
        # The longest first: what is left at the end, when not all workers are busy, is short.
        workers = self.threads if parallel else 1
        rows = [*plan_rows(lengths, self.device, self.target.size, width, workers)][::-1]
        batches = [
            whole._replace(requests=[requests[row] for row in batch_rows]) for batch_rows in rows
        ]
        results = self._parallel(batches) if parallel else map(self.generate_batch, batches)
        by_row = {
            row: hypotheses
            for batch_rows, batch_results in zip(rows, results, strict=True)
            for row, hypotheses in zip(batch_rows, batch_results, strict=True)
        }
        ordered = [by_row[row] for row in range(len(requests))]
        if decoding.is_sampling:
            return [
                [hypothesis for (hypothesis,) in ordered[start : start + samples]]
                for start in range(0, len(ordered), samples)
            ]
        return ordered

    def width(
        self, decoding: DecodingConfig, nbest: int, constrained: bool, length: int | None = None
    ) -> int:
        """How many hypotheses of a request are in memory at once."""
        if self.configs[0].architecture == "non_autoregressive":
            return LENGTH_COST * (1 if length is not None else max(decoding.length_beam, nbest))
        if decoding.is_sampling:
            return 1
        return max(decoding.beam, decoding.constrained_beam) if constrained else decoding.beam

    def _parallel(self, batches: Sequence[DecodingBatch]) -> list[list[list[Hypothesis]]]:
        if self.forks_later:
            self._fork_workers()
        pool = self.background_pool if in_background() else self.pool
        if pool is not None:
            try:
                return pool.map(batches)
            except WorkerDied as error:
                import logging

                log = logging.getLogger(__name__)
                log.warning("%s; using threads from now on", error)
                if in_background():
                    self.background_pool = None
                else:
                    self.pool = None
        return map_in_threads(self.generate_batch, batches, self.threads)

    def generate_batch(
        self, batch: DecodingBatch, observer: Observer | None = None
    ) -> list[list[Hypothesis]]:
        """Decode one batch on the network."""
        return self.network_decoder.generate_batch(batch, observer)

    @property
    def network_decoder(self) -> NetworkDecoder:
        """What decodes batches on the network; it needs torch."""
        return self._load_decoder()

    def _load_decoder(self) -> NetworkDecoder:
        if self._decoder is None:
            from regard.inference.network_decoder import NetworkDecoder

            self._decoder = NetworkDecoder(self)
        return self._decoder

    def max_tokens(self, request: Request, decoding: DecodingConfig) -> int:
        """The largest number of output tokens."""
        if request.limit is not None:
            return request.limit
        limit = len(request.source) + decoding.extra_length
        if decoding.max_length is not None:
            limit = min(limit, decoding.max_length)
        if request.phrases:  # required phrases are never cut off
            limit = max(limit, len(request.prefix) + tokens_needed(request.phrases))
        longest = self._max_length
        return limit if longest is None else min(limit, longest - 1)

    @property
    def _max_length(self) -> int | None:
        """The largest number of positions of the network, which visits all its layers to find it; others store it."""
        if self.native is not None:
            return self.native.weights.max_length
        from regard.inference.packed_transformer import PackedTransformer

        packed = self.packed
        network = packed if isinstance(packed, PackedTransformer) else self.network
        return network.max_length

    def trees(self, requests: Sequence[Request]) -> Tree | None:
        """The dependency trees of a batch, where the model uses them."""
        from regard.inference.network_decoder import batch_trees

        return batch_trees(requests, self.device)


def reads_attention(decoding: DecodingConfig) -> bool:
    """Whether a logits processor needs attention weights, which only the plain network can record."""
    return any(processor.needs_attention for processor in decoding.logits_processors)

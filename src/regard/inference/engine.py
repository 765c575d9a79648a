"""The engine: the one path from source ids to hypotheses.

    Request -> Engine.generate(requests, decoding, observer) -> hypotheses

The command line, Python, the server, the live stream, traces, validation and distillation all use it, so the same
options give the same output everywhere. The engine selects the decoding method (beam search, greedy search, sampling or
mask-predict), forms batches of similar length, and runs them on the packed network where there is one, on several CPU
cores at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard import recipe
from regard.data.batching import collate_trees, plan_sorted
from regard.data.dependency_trees import TokenTree
from regard.data.special_tokens import BOS, EOS, MASK, PAD
from regard.data.tokenizer import Vocabulary
from regard.decoding.beam_search import beam_search
from regard.decoding.constraints import Constraints, Phrase, WordBoundaries, tokens_needed
from regard.decoding.greedy_and_sampling import greedy, sample
from regard.decoding.hypotheses import Hypothesis
from regard.decoding.length_penalty_and_stopping import LENGTH_NORMALIZATIONS
from regard.decoding.logits_processors import (
    DecodingContext,
    LastAttention,
    LogitsProcessor,
    enabled_processors,
)
from regard.decoding.mask_predict import mask_predict
from regard.errors import RegardError
from regard.inference.native_decoder import (
    MAX_SLOTS,
    NativeDecoder,
    NativeRequest,
    unsupported_network,
)
from regard.inference.packed_ensemble import PackedEnsemble
from regard.inference.packed_transformer import PackedTransformer, inference_context
from regard.inference.precision import (
    autocast,
    pack_network,
    select_precision,
    unsupported_reason,
)
from regard.inference.worker_pool import (
    BACKGROUND_NICE,
    SharedFlag,
    WorkerDied,
    WorkerPool,
    in_background,
    map_in_threads,
)
from regard.nn.ensemble import Ensemble
from regard.nn.multi_head_attention import record_attention
from regard.nn.network import Network
from regard.nn.non_autoregressive import NonAutoregressiveTransformer
from regard.nn.positions import Tree
from regard.nn.transformer import Transformer
from regard.recipe import MBR_TEMPERATURE, DecodingConfig, Precision

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

Observer = Callable[[Any], None]
"""Called with a ``BeamStep`` after each step of beam search, or an ``Iteration`` of mask-predict."""

CPU_TOKENS = 4_096
"""source tokens, padding included, times beam size, of a batch on a CPU"""
GPU_TOKENS_PER_GB = 8_192
"""the same on a GPU, per gigabyte of its memory"""
LENGTH_COST = 8
"""A length candidate of mask-predict needs as much memory as this many beams: the logits of all its tokens at once."""


KINDS = ("constrained", "plain", "native")
"""How requests are decoded, in this order: the native decoder starts threads, after which no process can be forked."""


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
    total: int | None
    """how many requests were given in all; None: use the plain network, not the packed one"""


class Engine:
    """Generates output sequences with one network, or an ensemble.

    config: the model section of the network's recipe; an ensemble has its own.
    """

    def __init__(
        self,
        config: recipe.ModelConfig,
        network: Network,
        target: Vocabulary,
        device: torch.device,
        precision: Precision,
        threads: int,
    ) -> None:
        self.network, self.target, self.device = network, target, device
        self.configs = network.configs if isinstance(network, Ensemble) else [config]
        self.precision: Precision = precision
        self.threads = threads
        """batches processed at a time on a CPU"""
        self.packed: PackedTransformer | PackedEnsemble | None = None
        """the network with packed weights, once ``freeze`` was called and if the network supports it"""
        self.native: NativeDecoder | None = None
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
        self._boundaries: WordBoundaries | None = None

    # Preparation

    def freeze(self) -> None:
        """The weights are final: pack them for inference, if the network supports it."""
        self.stop_workers()
        if (reason := self._unsupported_reason()) is None:
            self.precision = select_precision(self.precision, self.device)
            self.packed = self._pack()
            self.native, self.native_reason = None, None
            if self.precision == "int8":
                self.native_reason = self._unsupported_by_native_code()
        elif self.precision == "int8":
            raise RegardError(
                f"precision int8: this model does not support it ({reason}); use fp32, bf16 or auto"
            )

    def _pack(self) -> PackedTransformer | PackedEnsemble:
        if isinstance(self.network, Ensemble):
            return PackedEnsemble([self._pack_one(member) for member in self.network.members])
        return self._pack_one(self.network)

    def _pack_one(self, network: Network) -> PackedTransformer:
        assert isinstance(network, Transformer)
        return pack_network(network, self.precision)

    def _unsupported_reason(self) -> str | None:
        """The first choice of a recipe that packed inference does not support; None if it supports all."""
        reasons = map(unsupported_reason, self.configs)
        return next((reason for reason in reasons if reason is not None), None)

    def _unsupported_by_native_code(self) -> str | None:
        """Make the native decoder, or return the reason why there is none."""
        if not isinstance(self.network, Transformer) or not isinstance(
            self.packed, PackedTransformer
        ):
            return "an ensemble"
        reason = unsupported_network(self.network, self.packed)
        if reason is None:
            self.native = NativeDecoder(self.network, self.packed)
        return reason

    def start_workers(self, background: bool = False) -> None:
        """Use worker processes from now on, if that is faster, and if this process has no other threads.

        A model with a native decoder, which needs none, starts them only for the first requests that the native
        decoder does not support. background: start them now, because this process starts threads later, and also start
        workers of low priority, for threads of low priority.
        """
        self.stop_workers()
        if self.packed is None or self.threads == 1 or self.device.type != "cpu":
            return
        self.forks_later = not background and self.native is not None
        if not self.forks_later:
            self._fork_workers(background)

    def _fork_workers(self, background: bool = False) -> None:
        self.forks_later = False
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
        reads_attention = any(one.needs_attention for one in enabled_processors(decoding))
        return self.packed is not None and not reads_attention

    @property
    def summary(self) -> str:
        """The precision and device it computes on, in words."""
        if self.packed is None:
            reason = self._unsupported_reason() or "the weights may still change"
            return f"{self.precision} on {self.device.type}, without packed weights ({reason})"
        many = f", {self.threads} batches at a time" if self.device.type == "cpu" else ""
        size = self.packed.bytes / 1e6
        return (
            f"{self.precision} on {self.device.type}{self._kernels}{many}, {size:.1f} MB of weights"
        )

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

    @torch.inference_mode()
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
        reads_attention = any(one.needs_attention for one in enabled_processors(decoding))
        plain = plain or self.packed is None or reads_attention
        total = None if plain else len(requests)
        if observer is not None and not decoding.is_sampling:
            assert len(requests) == 1, "an observer watches one request"
            return self.generate_batch(
                DecodingBatch(requests, decoding, nbest, length, total), observer
            )
        found: dict[int, list[Hypothesis]] = {}
        native = total is not None and self.native is not None and self.native.supports(decoding)
        kinds = [self._kind(one, decoding, native) for one in requests]
        for kind in sorted(set(kinds), key=KINDS.index):
            rows = [row for row, other in enumerate(kinds) if other == kind]
            some = [requests[row] for row in rows]
            if kind == "native":
                hypotheses = self._in_native_code(some, decoding, nbest)
            else:
                hypotheses = self._in_batches(some, decoding, nbest, length, total)
            found |= dict(zip(rows, hypotheses, strict=True))
        return [found[row] for row in range(len(requests))]

    def _kind(
        self, request: Request, decoding: DecodingConfig, native: bool
    ) -> Literal["constrained", "plain", "native"]:
        """How a request is decoded. Constraints need a wider beam, so they get batches of their own.

        native: whether the native decoder supports the decoding options.
        """
        if request.phrases:
            return "constrained"
        if not native or request.prefix or request.prompt:
            return "plain"
        slots = max(len(request.source), decoding.beam * (self._limit(request, decoding) + 1))
        return "native" if slots < MAX_SLOTS else "plain"

    def _in_native_code(
        self, requests: Sequence[Request], decoding: DecodingConfig, nbest: int
    ) -> list[list[Hypothesis]]:
        """All requests in one call, on all threads; hypotheses in the order of the requests."""
        assert self.native is not None
        (start,) = {one.start for one in requests}
        found = self.native.search(
            [NativeRequest([*one.source, EOS], self._limit(one, decoding)) for one in requests],
            decoding,
            nbest=nbest,
            start=start,
            suppressed=self.target.suppressed_tokens,
            interrupt=self.interrupt.address,
            threads=self.threads,
        )
        if found is None:
            raise SearchInterrupted("the search was interrupted")
        return found

    def _in_batches(
        self,
        requests: Sequence[Request],
        decoding: DecodingConfig,
        nbest: int,
        length: int | None,
        total: int | None,
    ) -> list[list[Hypothesis]]:
        """Batches of similar length, possibly in parallel; hypotheses in the order of the requests."""
        if not requests:
            return []
        if decoding.is_sampling:  # every sample is a row of its own
            samples = decoding.mbr or nbest
            requests = [
                one._replace(sample=one.sample + number)
                for one in requests
                for number in range(samples)
            ]
        parallel = total is not None and self.device.type == "cpu"
        lengths = [len(one.source) for one in requests]
        width = self._width(decoding, nbest, bool(requests[0].phrases), length)
        # The longest first: what is left at the end, when not all workers are busy, is short.
        rows = [*self.plan(lengths, width, self.threads if parallel else 1)][::-1]
        batches = [
            DecodingBatch([requests[row] for row in some], decoding, nbest, length, total)
            for some in rows
        ]
        results = self._parallel(batches) if parallel else map(self.generate_batch, batches)
        found = {
            row: hypotheses
            for some, each in zip(rows, results, strict=True)
            for row, hypotheses in zip(some, each, strict=True)
        }
        ordered = [found[row] for row in range(len(requests))]
        if decoding.is_sampling:
            return [
                [one for (one,) in ordered[start : start + samples]]
                for start in range(0, len(ordered), samples)
            ]
        return ordered

    def _width(
        self, decoding: DecodingConfig, nbest: int, constrained: bool, length: int | None = None
    ) -> int:
        """How many hypotheses of a request are in memory at once."""
        if isinstance(self.network, NonAutoregressiveTransformer):
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
                log.warning("%s; using threads from now on", error)
                if in_background():
                    self.background_pool = None
                else:
                    self.pool = None
        return map_in_threads(self.generate_batch, batches, self.threads)

    def generate_batch(
        self, batch: DecodingBatch, observer: Observer | None = None
    ) -> list[list[Hypothesis]]:
        """Decode one batch with the selected method."""
        requests, decoding, nbest, length, total = batch
        packed = None if total is None or self.packed is None else self.packed.for_sentences(total)
        network = packed or self.network
        assert len({(one.prompt, one.start) for one in requests}) == 1, "requests of one kind"
        closing = [] if requests[0].prompt else [EOS]
        sources = pad_rows([[*one.source, *closing] for one in requests], self.device)
        context = (
            inference_context(self.device) if packed else autocast(self.precision, self.device)
        )
        with context, self._processors(network, sources, requests, decoding) as processors:
            memory: Any = network.encode(sources, self.trees(requests))
            state = network.start(memory)
            max_lengths = [self._limit(one, decoding) for one in requests]
            if isinstance(self.network, NonAutoregressiveTransformer):
                return self._mask_predict(state, decoding, max_lengths, nbest, length, observer)
            method = partial(
                self._method(requests, decoding, nbest, observer),
                max_lengths=max_lengths,
                bos=requests[0].start,
                eos=EOS,
                prefixes=[list(one.prefix) for one in requests],
                suppressed=self.target.suppressed_tokens,
                device=self.device,
                processors=processors,
            )
            step = self._interruptible(network.step)
            return [one if isinstance(one, list) else [one] for one in method(step, state)]

    def _interruptible(self, step: Callable[P, R]) -> Callable[P, R]:
        """The step function, which raises ``SearchInterrupted`` once ``interrupt`` is set."""

        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            if self.interrupt.is_set():
                raise SearchInterrupted("the search was interrupted")
            return step(*arguments, **options)

        return checked

    def _method(
        self,
        requests: Sequence[Request],
        decoding: DecodingConfig,
        nbest: int,
        observer: Observer | None,
    ) -> Callable[..., list[list[Hypothesis]] | list[Hypothesis]]:
        """Sampling, greedy search or beam search."""
        rule = LENGTH_NORMALIZATIONS[decoding.length_normalization]
        if decoding.is_sampling:
            temperature = decoding.temperature or MBR_TEMPERATURE
            return partial(
                sample,
                temperature=temperature,
                top_k=decoding.top_k,
                top_p=decoding.top_p,
                seeds=[sample_seed(decoding.seed, one) for one in requests],
            )
        constrained = bool(requests[0].phrases)
        if decoding.beam == 1 and nbest == 1 and not constrained and observer is None:
            return partial(
                greedy, length_penalty=decoding.length_penalty, length_normalization=rule
            )
        return partial(
            beam_search,
            beam=self._width(decoding, nbest, constrained),
            length_penalty=decoding.length_penalty,
            length_normalization=rule,
            nbest=nbest,
            observer=observer,
        )

    def _mask_predict(
        self,
        state: Any,
        decoding: DecodingConfig,
        max_lengths: Sequence[int],
        nbest: int,
        length: int | None,
        observer: Observer | None,
    ) -> list[list[Hypothesis]]:
        network = self.network
        assert isinstance(network, NonAutoregressiveTransformer)
        lengths = network.choose_lengths(state, max_lengths, decoding.length_beam, length)
        return mask_predict(
            self._interruptible(partial(network.predict_masked, state=state)),
            lengths,
            iterations=decoding.iterations,
            mask=MASK,
            pad=PAD,
            eos=EOS,
            nbest=nbest,
            suppressed=[
                *self.target.suppressed_tokens,
                *([] if network.length.predicts_eos else [EOS]),
            ],
            observer=observer,
        )

    @contextmanager
    def _processors(
        self,
        network: Network | PackedTransformer | PackedEnsemble,
        sources: Tensor,
        requests: Sequence[Request],
        decoding: DecodingConfig,
    ) -> Iterator[list[LogitsProcessor]]:
        """The logits processors of a batch. They live as long as the with-block."""
        processors: list[LogitsProcessor] = []
        if any(one.phrases for one in requests):
            # First, because it must see the tokens of its phrases before others mask them.
            phrases = [one.phrases for one in requests]
            processors.append(Constraints(phrases, self.boundaries, EOS))
        with ExitStack() as recording:
            context = DecodingContext(
                source_mask=(sources != PAD) & (sources != EOS),
                record_cross_attention=partial(record_cross_attention, network, recording),
                eos=EOS,
            )
            for processor in enabled_processors(decoding):
                processors.append(processor.from_options(decoding, context))
            yield processors

    @property
    def boundaries(self) -> WordBoundaries:
        """Which tokens of the target vocabulary begin and end words."""
        if self._boundaries is None:
            opens, closes = (
                torch.tensor(flags, device=self.device) for flags in self.target.word_boundaries()
            )
            opens[EOS] = closes[BOS] = True
            self._boundaries = WordBoundaries(opens, closes)
        return self._boundaries

    def _limit(self, request: Request, decoding: DecodingConfig) -> int:
        """The largest number of output tokens."""
        if request.limit is not None:
            return request.limit
        limit = len(request.source) + decoding.extra_length
        if decoding.max_length is not None:
            limit = min(limit, decoding.max_length)
        if request.phrases:  # required phrases are never cut off
            limit = max(limit, len(request.prefix) + tokens_needed(request.phrases))
        # A network visits all its layers to find it; a packed one has it stored.
        network = self.packed if isinstance(self.packed, PackedTransformer) else self.network
        longest = network.max_length
        return limit if longest is None else min(limit, longest - 1)

    # Batches

    def plan(self, lengths: Sequence[int], width: int, workers: int = 1) -> Iterator[list[int]]:
        """The row numbers of each batch; rows of similar length go together."""
        return plan_rows(lengths, self.device, self.target.size, width, workers)

    def trees(self, requests: Sequence[Request]) -> Tree | None:
        """The dependency trees of a batch, where the model uses them."""
        trees = [one.tree for one in requests if one.tree is not None]
        if not trees:
            return None
        assert len(trees) == len(requests)
        return Tree(*(part.long().to(self.device) for part in collate_trees(trees)))


def record_cross_attention(
    network: Network | PackedTransformer | PackedEnsemble, recording: ExitStack
) -> LastAttention:
    """Record cross-attention until ``recording`` is closed; return a function for the weights of the last step."""
    assert isinstance(network, Network), "a packed network does not record attention"
    layers = network.attentions().get("cross_attention", [])
    if not layers or not all(layer.pattern.keeps_tokens for layer in layers):
        raise RegardError(
            "coverage_penalty: this model has no cross-attention to source tokens; set it to 0"
        )
    recorded = recording.enter_context(record_attention(layers))

    def mean_weights() -> Tensor:
        """The mean over layers and heads; the beams of a sentence are rows of the queries."""
        return torch.stack([one.weights.float().mean(1) for one in recorded.values()]).mean(0)

    return mean_weights


def sample_seed(seed: int, request: Request) -> int:
    """The seed of one sample. It depends on the text, not on the row or on other texts of the call."""
    if request.prompt:  # a language model continues one text
        return seed + request.sample
    sequence = np.random.SeedSequence([seed, request.sample, *request.source])
    return int(sequence.generate_state(1)[0])


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, T] token ids, padded at the end."""
    longest = max(map(len, rows))
    ids = [[*row, *[PAD] * (longest - len(row))] for row in rows]
    # Through numpy, which reads lists three times as fast as torch.
    return torch.from_numpy(np.array(ids, dtype=np.int64)).to(device)


def plan_rows(
    lengths: Sequence[int], device: torch.device, vocab_size: int, width: int = 1, workers: int = 1
) -> Iterator[list[int]]:
    """The row numbers of each batch, in order of length; ``width`` rows of the network for each row."""
    sizes = np.array(lengths, dtype=np.int64)
    tokens, rows = CPU_TOKENS, CPU_TOKENS
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        tokens = GPU_TOKENS_PER_GB * (memory >> 30)
        rows = memory // 4 // (16 * vocab_size)  # logits, 16 bytes each, take a quarter of it
    most = max(1, rows // width)
    for part in plan_sorted(sizes, sizes, tokens // width, workers):
        for first in range(0, len(part), most):
            yield part[first : first + most].tolist()

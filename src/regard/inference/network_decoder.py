"""Decodes batches of requests with a torch network, packed or plain: beam and greedy search, sampling, mask-predict.

The engine calls it for all that the native decoder does not decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.data.batching import collate_trees, plan_sorted
from regard.data.special_tokens import BOS, EOS, MASK, PAD
from regard.decoding.beam_search import beam_search
from regard.decoding.constraints import Constraints, WordBoundaries
from regard.decoding.greedy_and_sampling import greedy, sample
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.length_penalty_and_stopping import LENGTH_NORMALIZATIONS
from regard.decoding.mask_predict import mask_predict
from regard.decoding.options_and_logits_processors import DecodingContext, LogitsProcessor
from regard.decoding.search_state import LastAttention
from regard.errors import RegardError
from regard.inference.engine import SearchInterrupted
from regard.inference.packed_transformer import PackedEnsemble, PackedTransformer, inference_context
from regard.inference.precision import autocast
from regard.nn.multi_head_attention import record_attention
from regard.nn.network import Network
from regard.nn.non_autoregressive import NonAutoregressiveTransformer
from regard.nn.positions import Tree
from regard.recipe import MBR_TEMPERATURE, DecodingConfig

if TYPE_CHECKING:
    from regard.inference.engine import DecodingBatch, Engine, Observer, Request

P = ParamSpec("P")
R = TypeVar("R")

CPU_TOKENS = 4_096
"""source tokens, padding included, times beam size, of a batch on a CPU"""
GPU_TOKENS_PER_GB = 8_192
"""the same on a GPU, per gigabyte of its memory"""


class NetworkDecoder:
    """Decodes the batches of an engine with its network."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.device, self.target = engine, engine.device, engine.target
        self._boundaries: WordBoundaries | None = None

    @torch.inference_mode()
    def generate_batch(
        self, batch: DecodingBatch, observer: Observer | None = None
    ) -> list[list[Hypothesis]]:
        """Decode one batch with the selected method."""
        requests, decoding, nbest, length, use_packed, total = batch
        packed = self.engine.packed if use_packed else None
        if packed is not None:
            packed = packed.for_sentences(total)
        network = packed or self.engine.network
        assert len({(request.prompt, request.start) for request in requests}) == 1, (
            "requests of one kind"
        )
        closing = [] if requests[0].prompt else [EOS]
        sources = pad_rows([[*request.source, *closing] for request in requests], self.device)
        precision, device = self.engine.precision, self.device
        context = inference_context(device) if packed else autocast(precision, device)
        with context, self._processors(network, sources, requests, decoding) as processors:
            encoder_output: Any = network.encode(sources, batch_trees(requests, self.device))
            state = network.start(encoder_output)
            max_lengths = [self.engine.max_tokens(request, decoding) for request in requests]
            if isinstance(self.engine.network, NonAutoregressiveTransformer):
                return self._mask_predict(state, decoding, max_lengths, nbest, length, observer)
            method = partial(
                self._method(requests, decoding, nbest, observer),
                max_lengths=max_lengths,
                bos=requests[0].start,
                eos=EOS,
                prefixes=[list(request.prefix) for request in requests],
                suppressed=self.target.suppressed_tokens,
                device=self.device,
                processors=processors,
            )
            step = self._interruptible(network.step)
            return [
                result if isinstance(result, list) else [result] for result in method(step, state)
            ]

    def _interruptible(self, step: Callable[P, R]) -> Callable[P, R]:
        """The step function, which raises ``SearchInterrupted`` once ``interrupt`` is set."""

        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            if self.engine.interrupt.is_set():
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
                seeds=[sample_seed(decoding.seed, request) for request in requests],
            )
        constrained = bool(requests[0].phrases)
        if decoding.beam == 1 and nbest == 1 and not constrained and observer is None:
            return partial(
                greedy, length_penalty=decoding.length_penalty, length_normalization=rule
            )
        return partial(
            beam_search,
            beam=self.engine.width(decoding, nbest, constrained),
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
        network = self.engine.network
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
        if any(request.phrases for request in requests):
            # First, because it must see the tokens of its phrases before others mask them.
            phrases = [request.phrases for request in requests]
            processors.append(Constraints(phrases, self.boundaries, EOS))
        with ExitStack() as recording:
            context = DecodingContext(
                source_mask=(sources != PAD) & (sources != EOS),
                record_cross_attention=partial(record_cross_attention, network, recording),
                eos=EOS,
            )
            for processor in decoding.logits_processors:
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


def batch_trees(requests: Sequence[Request], device: torch.device) -> Tree | None:
    """The dependency trees of a batch, where the model uses them."""
    trees = [request.tree for request in requests if request.tree is not None]
    if not trees:
        return None
    assert len(trees) == len(requests)
    return Tree(*(tensor.long().to(device) for tensor in collate_trees(trees)))


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
        weights = [intermediates.weights.float().mean(1) for intermediates in recorded.values()]
        return torch.stack(weights).mean(0)

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
    max_rows = max(1, rows // width)
    for batch in plan_sorted(sizes, sizes, tokens // width, workers):
        for start in range(0, len(batch), max_rows):
            yield batch[start : start + max_rows].tolist()

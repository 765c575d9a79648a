"""NativeDecoder: a whole search (encoder, decoder steps, beam or greedy search) in one call of native code.

It has the weights and the calibration of a ``PackedTransformer`` in int8, and computes the same function with the same
quantization; only the rounding of sums in float32 and of cached keys and values (float16) differs. The search is that
of ``decoding/beam_search.py`` and ``decoding/greedy_and_sampling.py``. Networks and options that the native code does
not know run on the packed network, see ``unsupported_network`` and ``supports``.

``native/decoder.cpp`` has the code, ``native_library.py`` builds and loads it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint8, c_void_p
from functools import partial
from operator import itemgetter
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.special_tokens import EOS
from regard.decoding.hypotheses import Hypothesis
from regard.decoding.logits_processors import enabled_processors
from regard.errors import RegardError
from regard.inference.native_library import native_library
from regard.inference.packed_transformer import (
    Packed,
    PackedDecoderLayer,
    PackedEncoderLayer,
    PackedFeedForward,
    PackedGatedFeedForward,
    PackedTransformer,
    Sublayer,
)
from regard.inference.quantization import Int8Embedding, Int8Linear, NativeInt8
from regard.inference.worker_pool import map_in_threads
from regard.nn.layers import DecoderLayer, EncoderLayer, FeedForward, Gated, PreNorm
from regard.nn.norms import LayerNorm, NoNorm, RMSNorm
from regard.nn.transformer import Decoder, Encoder, Transformer
from regard.recipe import DecodingConfig

# ---------------------------------------------------------------------------------------------
# The structures of native/decoder.cpp


class LinearSpec(Structure):
    _fields_ = (("linear", c_void_p), ("scale", c_float), ("zero_point", c_int32))


class NormSpec(Structure):
    _fields_ = (("kind", c_int32), ("epsilon", c_float), ("weight", c_void_p), ("bias", c_void_p))


class EmbeddingSpec(Structure):
    _fields_ = (("weight", c_void_p), ("scale", c_void_p))


class LayerSpec(Structure):
    _fields_ = (
        *(
            (name, LinearSpec)
            for name in ("qkv", "self_output", "cross_query", "cross_key_value", "cross_output")
        ),
        ("inner", LinearSpec),
        ("outer", LinearSpec),
        ("self_norm", NormSpec),
        ("cross_norm", NormSpec),
        ("feed_forward_norm", NormSpec),
    )


class ModelSpec(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("width", "heads", "features", "hidden")),
        *((name, c_int32) for name in ("pre_norm", "activation", "gated")),
        *((name, c_int32) for name in ("encoder_layers", "decoder_layers", "vocabulary")),
        ("source", EmbeddingSpec),
        ("target", EmbeddingSpec),
        ("encoder", POINTER(LayerSpec)),
        ("decoder", POINTER(LayerSpec)),
        ("encoder_norm", NormSpec),
        ("decoder_norm", NormSpec),
        ("projection", LinearSpec),
    )


class JobSpec(Structure):
    _fields_ = (
        ("model", POINTER(ModelSpec)),
        *((name, c_int32) for name in ("sentences", "capacity", "team")),
        *(
            (name, c_void_p)
            for name in (
                "tokens",
                "offsets",
                "max_lengths",
                "source_positions",
                "target_positions",
            )
        ),
        *((name, c_int32) for name in ("start", "eos", "beam", "nbest", "rule")),
        ("length_penalty", c_double),
        ("suppressed", c_void_p),
        ("suppressed_count", c_int32),
        ("interrupt", c_void_p),
    )


ACTIVATIONS: dict[Callable[[Tensor], Tensor], int] = {F.relu: 1, F.gelu: 2, F.silu: 3}
KNOWN_PARTS = {"norm", "pre_norm", "heads", "rotary", "activation"} | {
    *("qkv", "query", "key_value", "output"),
    *("inner", "gate_inner", "outer"),
}
"""the attributes of packed sub-layers that the native code reads, or that the checks below exclude"""
LENGTH_RULES = {"gnmt": 0, "transformers": 1, "ctranslate2": 2}
MAX_SLOTS = 1 << 16
"""keys and values of a sentence that the attention kernel has room for"""
LANES = 16
"""features of a head must be a multiple of this"""
INTERRUPTED, OUT_OF_MEMORY = 1, 2

# ---------------------------------------------------------------------------------------------
# What is supported


def unsupported_network(network: Transformer, packed: PackedTransformer) -> str | None:
    """Why a network has no native decoder; None: it has one."""
    if (library := native_library()).functions is None:
        return library.reason
    layers = [*_layers(network.encoder), *_layers(network.decoder)]
    norms = {type(layer.attention_residual.norm) for layer in layers}
    if not norms <= {LayerNorm, RMSNorm}:
        return "its norm is neither layer nor rms"
    stacks: list[PackedEncoderLayer] = [*packed.encoder, *packed.decoder]
    if any(layer.self_attention.rotary is not None for layer in stacks):
        return "its position is rotary"
    if unknown := sorted(set().union(*map(_parts, stacks)) - KNOWN_PARTS):
        return f"native code does not know {', '.join(unknown)}"
    maps = [one for one in packed.weights if not isinstance(one, Int8Embedding)]
    if not all(isinstance(one, Int8Linear) and one.is_frozen for one in maps):
        return "some of its linear maps are not calibrated"
    features, width = _features(layers[0]), network.encoder.embedding.weight.shape[1]
    if features % LANES or width % LANES:
        return f"d_model {width} or d_k {features} is not a multiple of {LANES}"
    return None


def _parts(layer: PackedEncoderLayer) -> set[str]:
    """The attributes of the sub-layers of a layer, and its activation if it is unknown."""
    sublayers: list[Sublayer] = [layer.self_attention, layer.feed_forward]
    if isinstance(layer, PackedDecoderLayer):
        sublayers.append(layer.cross_attention)
    parts = {name for one in sublayers for name in vars(one)}
    activation = getattr(layer.feed_forward, "activation", None)
    if activation is not None and activation not in ACTIVATIONS:
        parts.add("this activation")
    return parts


def _layers(stack: Encoder | Decoder) -> list[EncoderLayer]:
    return list(cast(Iterable[EncoderLayer], stack.layers))


def _features(layer: EncoderLayer) -> int:
    """The features of a head."""
    return layer.attention.query.out_features // layer.attention.heads


class NativeRequest(NamedTuple):
    """A sequence to generate."""

    source: Sequence[int]
    """with EOS"""
    max_length: int
    """of the output, EOS not counted"""


# ---------------------------------------------------------------------------------------------
# The decoder


ROWS = 160
"""hypotheses that a thread processes at a time, about: more make matrix products no faster"""
MAX_TEAM = 4
"""threads that share the matrix products of one sentence"""


class NativeDecoder:
    """Searches with a packed network in native code."""

    def __init__(self, network: Transformer, packed: PackedTransformer) -> None:
        """The network must be supported, see ``unsupported_network``."""
        library = native_library().functions
        assert library is not None
        self.library, self.packed = library, packed
        self._tensors: list[Tensor] = []
        """what the structures point to"""
        layers = _layers(network.encoder)
        feed_forward = packed.encoder[0].feed_forward
        gated = isinstance(feed_forward, PackedGatedFeedForward)
        activation = 0
        if isinstance(feed_forward, PackedFeedForward):
            activation = ACTIVATIONS[feed_forward.activation or F.relu]
        self.source_vocabulary = len(network.encoder.embedding.weight)
        self.vocabulary = len(network.projection.weight)
        self.model = ModelSpec(
            width=network.encoder.embedding.weight.shape[1],
            heads=layers[0].attention.heads,
            features=_features(layers[0]),
            hidden=cast(FeedForward | Gated, layers[0].feed_forward).outer.in_features,
            pre_norm=isinstance(layers[0].attention_residual, PreNorm),
            activation=activation,
            gated=gated,
            encoder_layers=len(packed.encoder),
            decoder_layers=len(packed.decoder),
            vocabulary=self.vocabulary,
            source=self._embedding(packed.source.embedding),
            target=self._embedding(packed.target.embedding),
            encoder=self._stack(network.encoder, packed.encoder),
            decoder=self._stack(network.decoder, packed.decoder),
            encoder_norm=self._norm(network.encoder.norm),
            decoder_norm=self._norm(network.decoder.norm),
            projection=_linear(packed.projection),
        )

    def _embedding(self, embedding: Packed) -> EmbeddingSpec:
        assert isinstance(embedding, Int8Embedding)
        return EmbeddingSpec(self._pointer(embedding.weight), self._pointer(embedding.scale))

    def _stack(
        self, stack: Encoder | Decoder, packed: Sequence[PackedEncoderLayer]
    ) -> ctypes.Array[LayerSpec]:
        specs = [self._layer(*both) for both in zip(_layers(stack), packed, strict=True)]
        return (LayerSpec * len(specs))(*specs)

    def _layer(self, layer: EncoderLayer, packed: PackedEncoderLayer) -> LayerSpec:
        attention, feed_forward = packed.self_attention, packed.feed_forward
        if isinstance(feed_forward, PackedGatedFeedForward):
            inner, outer = feed_forward.gate_inner, feed_forward.outer
        else:
            assert isinstance(feed_forward, PackedFeedForward)
            inner, outer = feed_forward.inner, feed_forward.outer
        spec = LayerSpec(
            qkv=_linear(attention.qkv),
            self_output=_linear(attention.output),
            inner=_linear(inner),
            outer=_linear(outer),
            self_norm=self._norm(layer.attention_residual.norm),
            feed_forward_norm=self._norm(layer.feed_forward_residual.norm),
        )
        if isinstance(layer, DecoderLayer):
            assert isinstance(packed, PackedDecoderLayer)
            spec.cross_query = _linear(packed.cross_attention.query)
            spec.cross_key_value = _linear(packed.cross_attention.key_value)
            spec.cross_output = _linear(packed.cross_attention.output)
            spec.cross_norm = self._norm(layer.cross_attention_residual.norm)
        return spec

    def _norm(self, norm: nn.Module) -> NormSpec:
        if isinstance(norm, LayerNorm):
            return NormSpec(1, norm.eps, self._pointer(norm.weight), self._pointer(norm.bias))
        if isinstance(norm, RMSNorm):
            assert norm.weight is not None
            assert norm.eps is not None
            return NormSpec(2, norm.eps, self._pointer(norm.weight), None)
        assert isinstance(norm, NoNorm)
        return NormSpec(0, 0.0, None, None)

    def _pointer(self, tensor: Tensor) -> int:
        """The address of a tensor, which stays valid as long as this object."""
        tensor = tensor.detach().contiguous()
        self._tensors.append(tensor)
        return tensor.data_ptr()

    @property
    def kernels(self) -> str:
        """The instruction set it uses."""
        return native_library().kernels

    # Search

    def supports(self, decoding: DecodingConfig) -> bool:
        """Whether it knows all the decoding options. A request must not need ``MAX_SLOTS`` or more."""
        return not decoding.is_sampling and not enabled_processors(decoding)

    def search(
        self,
        requests: Sequence[NativeRequest],
        decoding: DecodingConfig,
        *,
        nbest: int,
        start: int,
        suppressed: Sequence[int],
        interrupt: int,
        threads: int,
    ) -> list[list[Hypothesis]] | None:
        """The ``nbest`` best hypotheses of each request, best first; None if it was interrupted.

        start: the first token that the decoder reads. suppressed: tokens that are never generated. interrupt: the
        address of a byte; the search stops when it is not 0. threads: sentences are divided among them.
        """
        if not 1 <= nbest <= decoding.beam:
            raise RegardError(f"nbest {nbest}: must be between 1 and beam, {decoding.beam}")
        # The longest first: what is left at the end, when not all threads are busy, is short.
        order = sorted(range(len(requests)), key=lambda row: -len(requests[row].source))
        sources = [requests[row].source for row in order]
        tokens = np.array([token for source in sources for token in source], dtype=np.int32)
        assert 0 <= tokens.min() <= tokens.max() < self.source_vocabulary, "unknown source token"
        assert 0 <= start < self.vocabulary, "unknown first token"
        offsets = np.cumsum([0, *map(len, sources)], dtype=np.int64)
        max_lengths = np.array([requests[row].max_length for row in order], dtype=np.int32)
        positions = (
            self.packed.source.positions(len(sources[0])),
            self.packed.target.positions(int(max_lengths.max()) + 1),
        )
        forbidden = np.array(sorted(set(suppressed)), dtype=np.int32)
        workers = min(threads, len(requests))
        capacity = min(-(-len(requests) // workers), max(1, ROWS // decoding.beam))
        spec = JobSpec(
            model=ctypes.pointer(self.model),
            sentences=len(requests),
            capacity=capacity,
            team=min(MAX_TEAM, threads // workers),
            tokens=tokens.ctypes.data,
            offsets=offsets.ctypes.data,
            max_lengths=max_lengths.ctypes.data,
            source_positions=positions[0].data_ptr(),
            target_positions=positions[1].data_ptr(),
            start=start,
            eos=EOS,
            beam=decoding.beam,
            nbest=nbest,
            rule=LENGTH_RULES[decoding.length_normalization],
            length_penalty=decoding.length_penalty,
            suppressed=forbidden.ctypes.data,
            suppressed_count=len(forbidden),
            interrupt=interrupt,
        )
        job = self.library.regard_job_new(ctypes.byref(spec))
        if not job:
            raise MemoryError("the native decoder")
        try:
            outcomes = self._run(job, len(requests), workers, threads)
            if OUT_OF_MEMORY in outcomes:
                raise MemoryError("the native decoder")
            if INTERRUPTED in outcomes:
                return None
            found = self._results(job, len(requests))
        finally:
            self.library.regard_job_free(job)
        return [
            hypotheses
            for _, hypotheses in sorted(zip(order, found, strict=True), key=itemgetter(0))
        ]

    def _run(self, job: int, sentences: int, workers: int, threads: int) -> list[int]:
        """Work on a job in some of the threads. Returns the outcome of each."""
        run, stop = self.library.regard_job_run, partial(self.library.regard_job_stop, job)
        if sentences == 1:
            return [run(job)]
        return map_in_threads(run, [job] * workers, threads, stop)

    def _results(self, job: int, sentences: int) -> list[list[Hypothesis]]:
        counts = (c_int32 * sentences)()
        hypotheses, total = c_int64(), c_int64()
        self.library.regard_job_sizes(job, counts, hypotheses, total)
        lengths, ended = (c_int32 * hypotheses.value)(), (c_uint8 * hypotheses.value)()
        scores = (c_double * hypotheses.value)()
        tokens, log_probabilities = (c_int32 * total.value)(), (c_float * total.value)()
        self.library.regard_job_results(job, lengths, ended, scores, tokens, log_probabilities)
        found, all_tokens, each = [], tokens[:], log_probabilities[:]
        end = 0
        for length, by_eos, score in zip(lengths, ended, scores, strict=True):
            begin, end = end, end + length
            own = each[begin:end]
            ids = all_tokens[begin : end - by_eos]
            found.append(Hypothesis(ids, sum(own, 0.0), score, own, bool(by_eos)))
        rest = iter(found)
        return [[next(rest) for _ in range(count)] for count in counts]


def _linear(linear: Packed) -> LinearSpec:
    assert isinstance(linear, Int8Linear)
    assert isinstance(linear.kernels, NativeInt8)
    return LinearSpec(linear.kernels.handle, linear.scale, linear.zero_point)

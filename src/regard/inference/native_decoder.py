"""NativeDecoder: a whole search (encoder, decoder steps, beam or greedy search) in one call of native code.

It has the weights and the calibration of a ``PackedTransformer`` in int8, and computes the same function with the same
quantization; only the rounding of sums in float32 and of cached keys and values (float16) differs. The search is that
of ``decoding/beam_search.py`` and ``decoding/greedy_and_sampling.py``. Networks and options that the native code does
not know run on the packed network, see ``native_packing.unsupported_network`` and ``supports``.

The weights come from a packed network (``native_packing.py``) or from a file (``stored_weights``). Neither this module
nor what it imports needs torch or numpy, whose import takes longer than a short translation.

``native/decoder.cpp`` has the code, ``native_library.py`` builds and loads it.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint8, c_void_p
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.data.special_tokens import EOS
from regard.decoding.hypothesis import Hypothesis
from regard.errors import RegardError
from regard.inference.native_library import native_library
from regard.inference.worker_pool import map_in_threads

if TYPE_CHECKING:
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
            for name in ("tokens", "offsets", "max_lengths", "source_positions", "target_positions")
        ),
        *((name, c_int32) for name in ("start", "eos", "beam", "nbest", "rule")),
        ("length_penalty", c_double),
        ("suppressed", c_void_p),
        ("suppressed_count", c_int32),
        ("interrupt", c_void_p),
    )


LENGTH_RULES = {"gnmt": 0, "transformers": 1, "ctranslate2": 2}
"""the length normalizations that the native code has, and their numbers there"""
MAX_SLOTS = 1 << 16
"""keys and values of a sentence that the attention kernel has room for"""
INTERRUPTED, OUT_OF_MEMORY = 1, 2

LINEARS = ("qkv", "self_output", "cross_query", "cross_key_value", "cross_output", "inner", "outer")
NORMS = ("self_norm", "cross_norm", "feed_forward_norm")
"""the parts of a layer; those of cross-attention are only in the decoder"""

# ---------------------------------------------------------------------------------------------
# Weights


class PositionTable(NamedTuple):
    """What is added to the tokens at each position: [positions, width] in float32."""

    address: int
    owner: object
    """holds the memory"""


@dataclass(frozen=True)
class NativeWeights:
    """What the native decoder reads of a network."""

    sizes: Mapping[str, int]
    """the numbers of ``ModelSpec``, and source_vocabulary"""
    parts: Mapping[str, Structure]
    """linear maps, norms and embeddings by name: encoder.0.qkv, decoder.1.cross_norm, encoder_norm, source …"""
    bytes: int
    """size of the weights"""
    max_length: int | None
    """largest number of positions"""
    positions: Callable[[str, int], PositionTable]
    """for source or target, a table with at least this many positions"""
    owner: object
    """holds the memory that the parts point to"""


class StoredTensor(NamedTuple):
    """A tensor in a file that is mapped into memory."""

    shape: tuple[int, ...]
    address: int


def stored_weights(
    tensors: Mapping[str, StoredTensor],
    description: Mapping[str, Any],
    longer_positions: Callable[[str, int], PositionTable],
    owner: object,
) -> NativeWeights:
    """Weights in a file, as ``native_packing.quantized_weights`` described them.

    longer_positions: for more positions than the file has. owner: holds the memory of the tensors.
    """
    library = native_library().functions
    assert library is not None

    def address(name: str) -> int | None:
        return tensors[name].address if name in tensors else None

    parts: dict[str, Structure] = {}
    handles: list[int] = []
    for name, (scale, zero_point) in description["linears"].items():
        outputs, inputs = tensors[f"{name}.weight"].shape
        arrays = [address(f"{name}.{suffix}") for suffix in ("weight", "scale", "bias")]
        handle = library.regard_linear_pack(*arrays, outputs, inputs)
        if not handle:
            raise MemoryError("the weights of the native decoder")
        handles.append(handle)
        parts[name] = LinearSpec(handle, scale, zero_point)
    for name, (norm_type, epsilon) in description["norms"].items():
        weight, bias = address(f"{name}.weight"), address(f"{name}.bias")
        parts[name] = NormSpec(norm_type, epsilon, weight, bias)
    for name, stored in description["embeddings"].items():
        parts[name] = EmbeddingSpec(address(f"{stored}.weight"), address(f"{stored}.scale"))

    def positions(side: str, end: int) -> PositionTable:
        table = tensors[f"{side}.positions"]
        if end > table.shape[0]:
            return longer_positions(side, end)
        return PositionTable(table.address, owner)

    weights = NativeWeights(
        description["sizes"],
        parts,
        description["bytes"],
        description["max_length"],
        positions,
        owner,
    )
    weakref.finalize(weights, _free_all, library.regard_linear_free, handles).atexit = False
    return weights


def _free_all(free: Callable[[int], object], handles: Sequence[int]) -> None:
    for handle in handles:
        free(handle)


# ---------------------------------------------------------------------------------------------
# The decoder


ROWS = 160
"""hypotheses that a thread processes at a time, about: more make matrix products no faster"""
MAX_TEAM = 4
"""threads that share the matrix products of one sentence"""


class NativeRequest(NamedTuple):
    """A sequence to generate."""

    source: Sequence[int]
    """with EOS"""
    max_length: int
    """of the output, EOS not counted"""


class NativeDecoder:
    """Searches with a packed network in native code."""

    def __init__(self, weights: NativeWeights) -> None:
        library = native_library().functions
        assert library is not None
        self.library, self.weights = library, weights
        sizes, parts = dict(weights.sizes), weights.parts
        self.source_vocabulary = sizes.pop("source_vocabulary")
        self.vocabulary = sizes["vocabulary"]
        self.model = ModelSpec(
            **sizes,
            source=parts["source"],
            target=parts["target"],
            encoder=_stack(parts, "encoder", sizes["encoder_layers"]),
            decoder=_stack(parts, "decoder", sizes["decoder_layers"]),
            encoder_norm=parts["encoder_norm"],
            decoder_norm=parts["decoder_norm"],
            projection=parts["projection"],
        )

    @property
    def kernels(self) -> str:
        """The instruction set it uses."""
        return native_library().kernels

    # Search

    def supports(self, decoding: DecodingConfig) -> bool:
        """Whether it knows all the decoding options. A request must not need ``MAX_SLOTS`` or more."""
        knows_lengths = decoding.length_normalization in LENGTH_RULES
        return knows_lengths and not decoding.is_sampling and not decoding.logits_processors

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
        tokens = array("i", [token for source in sources for token in source])
        assert 0 <= min(tokens) <= max(tokens) < self.source_vocabulary, "unknown source token"
        assert 0 <= start < self.vocabulary, "unknown first token"
        offsets = array("q", accumulate(map(len, sources), initial=0))
        max_lengths = array("i", [requests[row].max_length for row in order])
        tables = (
            self.weights.positions("source", len(sources[0])),
            self.weights.positions("target", max(max_lengths) + 1),
        )
        forbidden = array("i", sorted(set(suppressed)))
        workers = min(threads, len(requests))
        capacity = min(-(-len(requests) // workers), max(1, ROWS // decoding.beam))
        spec = JobSpec(
            model=ctypes.pointer(self.model),
            sentences=len(requests),
            capacity=capacity,
            team=min(MAX_TEAM, threads // workers),
            tokens=tokens.buffer_info()[0],
            offsets=offsets.buffer_info()[0],
            max_lengths=max_lengths.buffer_info()[0],
            source_positions=tables[0].address,
            target_positions=tables[1].address,
            start=start,
            eos=EOS,
            beam=decoding.beam,
            nbest=nbest,
            rule=LENGTH_RULES[decoding.length_normalization],
            length_penalty=decoding.length_penalty,
            suppressed=forbidden.buffer_info()[0],
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
            results = self._results(job, len(requests))
        finally:
            self.library.regard_job_free(job)
        return [
            hypotheses
            for _, hypotheses in sorted(zip(order, results, strict=True), key=itemgetter(0))
        ]

    def _run(self, job: int, sentences: int, workers: int, threads: int) -> list[int]:
        """Work on a job in some of the threads. Returns the outcome of each."""
        run, stop = self.library.regard_job_run, partial(self.library.regard_job_stop, job)
        if sentences == 1:
            return [run(job)]
        return map_in_threads(run, [job] * workers, threads, stop)

    def _results(self, job: int, sentences: int) -> list[list[Hypothesis]]:
        counts = (c_int32 * sentences)()
        hypothesis_count, token_count = c_int64(), c_int64()
        self.library.regard_job_sizes(job, counts, hypothesis_count, token_count)
        lengths, ended = (c_int32 * hypothesis_count.value)(), (c_uint8 * hypothesis_count.value)()
        scores = (c_double * hypothesis_count.value)()
        tokens, log_probabilities = (c_int32 * token_count.value)(), (c_float * token_count.value)()
        self.library.regard_job_results(job, lengths, ended, scores, tokens, log_probabilities)
        hypotheses, all_tokens, all_log_probabilities = [], tokens[:], log_probabilities[:]
        end = 0
        for length, by_eos, score in zip(lengths, ended, scores, strict=True):
            begin, end = end, end + length
            values = all_log_probabilities[begin:end]
            ids = all_tokens[begin : end - by_eos]
            hypotheses.append(Hypothesis(ids, sum(values, 0.0), score, values, bool(by_eos)))
        remaining = iter(hypotheses)
        return [[next(remaining) for _ in range(count)] for count in counts]


def _stack(parts: Mapping[str, Structure], name: str, count: int) -> ctypes.Array[LayerSpec]:
    """The layers of the encoder or the decoder."""
    layers = (LayerSpec * count)()
    for number, layer in enumerate(layers):
        for part in (*LINEARS, *NORMS):
            if (spec := parts.get(f"{name}.{number}.{part}")) is not None:
                setattr(layer, part, spec)
    return layers

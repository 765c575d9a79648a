"""The self-test: whether the fast paths give correct results on this machine.

Each check compares a fast path with a slower reference implementation, or trains a small model. It needs no data, no
files of the repository and no network. A check returns its figures, or raises ``CheckFailed`` or ``CheckSkipped``.
"""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.batching import Batch, collate, pack, packed_size, plan_packed
from regard.data.cleaning import EncodedPair
from regard.data.special_tokens import BOS, EOS, SPECIAL_TOKENS
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.data.tokenizer import Tokenizer
from regard.decoding.beam_search import beam_search
from regard.inference.native_decoder import NativeDecoder, NativeRequest
from regard.inference.native_packing import native_weights, unsupported_network
from regard.inference.precision import formats, pack_network, select_precision
from regard.inference.worker_pool import SharedFlag
from regard.nn.architectures import ARCHITECTURES
from regard.nn.attention import Attention
from regard.nn.attention_mask import AttentionMask
from regard.nn.attention_patterns import PATTERNS
from regard.nn.kv_cache import KeyValue
from regard.nn.loss import Seq2SeqLoss
from regard.nn.positions import AttentionPosition
from regard.nn.transformer import Transformer
from regard.recipe import Precision, Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.cuda_graph import CUDAGraphStep
from regard.training.optimizers import OPTIMIZERS
from regard.training.run import train
from regard.training.train_step import StepScalars, TrainStep

VOCABULARY = 50


class CheckFailed(Exception):  # noqa: N818
    """A check found a wrong result; the message has the figures."""


class CheckSkipped(Exception):  # noqa: N818
    """A check does not apply to this machine; the message is the reason."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    status: Literal["ok", "failed", "skipped"]
    details: str
    """the figures, or the reason"""
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:8}{self.name:26}{self.details}  ({self.seconds:.1f} s)"


Check = Callable[[torch.device], str]
CHECKS: dict[str, Check] = {}
"""all checks by name, in the order in which they run"""


def check(name: str) -> Callable[[Check], Check]:
    """Add a function to the checks."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def run_checks(device: torch.device) -> Iterator[CheckResult]:
    """Run all checks, one after the other."""
    for name, function in CHECKS.items():
        start = time.monotonic()
        status: Literal["ok", "failed", "skipped"] = "ok"
        try:
            # torch warns about its own compiler, and training reports its progress.
            with (
                warnings.catch_warnings(),
                redirect_stdout(StringIO()),
                redirect_stderr(StringIO()),
            ):
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                details = function(device)
        except CheckSkipped as reason:
            status, details = "skipped", str(reason)
        except CheckFailed as reason:
            status, details = "failed", str(reason)
        except Exception as error:
            status, details = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        yield CheckResult(name, status, details, time.monotonic() - start)


# ---------------------------------------------------------------------------------------------
# Helpers


def require(condition: bool, details: str) -> str:
    """The details, or a failure with them."""
    if not condition:
        raise CheckFailed(details)
    return details


def require_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise CheckSkipped("needs a GPU")


def require_close(results: list[Tensor], expected: list[Tensor], limit: float) -> str:
    """Compare tensors; an error is relative to the largest value of its tensor."""
    results, expected = (
        [tensor.detach().double() for tensor in side] for side in (results, expected)
    )
    errors = [
        float((actual - reference).abs().max() / reference.abs().max().clamp(min=1e-9))
        for actual, reference in zip(results, expected, strict=True)
    ]
    worst = max(errors, key=lambda error: (error != error, error))  # NaN is the worst
    return require(worst <= limit, f"largest relative error {worst:.1e} (limit {limit:.0e})")


def small_recipe(**model: Any) -> Recipe:
    """A recipe of a small model without dropout, for packed batches."""
    sizes = {"preset": "tiny", "d_model": 96, "heads": 3, "d_ff": 128, "dropout": 0.0}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    sections = {"data": {"train": {"pairs": "x"}}, "training": {"batching": "packed"}}
    return make_recipe({**sections, "model": {**sizes, **layers, **model}}, "selftest")


def loss_fn_of(recipe: Recipe, device: torch.device) -> Seq2SeqLoss:
    torch.manual_seed(0)
    network = ARCHITECTURES["transformer"](recipe.model, VOCABULARY, VOCABULARY)
    return Seq2SeqLoss(cast(Any, network.to(device)), recipe.training)


def heads(batch: int, tokens: int, width: int, device: torch.device) -> Tensor:
    """Random vectors of 3 heads, side by side in memory, as linear layers return them."""
    return torch.randn(batch, tokens, 3, width, device=device).transpose(1, 2).requires_grad_()


def random_texts(path: Path) -> TokenDataset:
    """A dataset of 48 pairs of random texts of 3 to 39 tokens."""
    draw = np.random.default_rng(1)

    def text() -> list[int]:
        ids: list[int] = draw.integers(
            len(SPECIAL_TOKENS), VOCABULARY, draw.integers(3, 40)
        ).tolist()
        return ids

    def rows(*arguments: Any) -> Iterator[EncodedPair]:
        arguments[-1]["kept"] = 48
        return (EncodedPair(text(), text()) for _ in range(48))

    write_dataset(path, [], cast(Tokenizer, None), None, rows)
    return TokenDataset(path)


# ---------------------------------------------------------------------------------------------
# Attention


def compare_pattern(pattern: str, device: torch.device) -> str:
    """The fast path of an attention pattern and its gradients, against the formula in float64."""
    options = {"encoder": pattern} | ({"window_size": 20} if pattern == "window" else {})
    model = small_recipe(attention=options).model
    attention = Attention(model, AttentionPosition(model)).to(device)
    layer = PATTERNS[pattern](model, "encoder").to(device)
    length = torch.tensor([150, 97], device=device)
    non_pad = torch.arange(150, device=device) < length[:, None]
    results, expected = list[Tensor](), list[Tensor]()
    for causal in (False, True):
        vectors = [heads(2, 150, 32, device) for _ in range(3)]
        exact_vectors = [vector.detach().double().requires_grad_() for vector in vectors]
        mask = AttentionMask(non_pad, causal)
        fast = layer(attention, vectors[0], KeyValue(*vectors[1:]), mask)
        expected_output = layer.attention_with_weights(
            attention, exact_vectors[0], KeyValue(*exact_vectors[1:]), mask
        )
        gradient = torch.randn_like(fast) * non_pad[:, None, :, None]
        results += [fast, *torch.autograd.grad(fast, vectors, gradient)]
        expected += [
            expected_output.output,
            *torch.autograd.grad(expected_output.output, exact_vectors, gradient.double()),
        ]
    padding = ~non_pad[:, None, :, None]  # what a padding position computes is never used
    results, expected = (
        [tensor.masked_fill(padding, 0.0) for tensor in side] for side in (results, expected)
    )
    return require_close(results, expected, limit=2e-5 if device.type == "cpu" else 1e-4)


@check("attention")
def full_attention(device: torch.device) -> str:
    """torch's fused attention against softmax(q k^T / sqrt(d_k)) v."""
    return compare_pattern("full", device)


@check("window attention")
def window_attention(device: torch.device) -> str:
    """Blocks on a CPU, the kernel for spans on a GPU."""
    return compare_pattern("window", device)


@check("packed attention kernel")
def packed_attention(device: torch.device) -> str:
    """The Triton kernel and its gradients against masked attention in float64; dropout keeps the mean."""
    require_gpu(device)
    from regard.nn.triton_kernels import packed_attention_kernel

    lengths = [7, 22, 9, 20, 3, 44, 99]
    tokens, ends = sum(lengths), np.cumsum(lengths)
    start, end = (
        torch.tensor(np.repeat(bound, lengths), dtype=torch.int32, device=device)
        for bound in (ends - lengths, ends)
    )
    spans = [edge.expand(2, -1).contiguous() for edge in (start, end, start, end)]
    vectors = [heads(2, tokens, width, device) for width in (32, 32, 16)]
    seed = torch.tensor([7], dtype=torch.int32, device=device)
    output, _ = packed_attention_kernel(*vectors, *spans, seed, 0.2, 0.0)
    query, key, value = exact_vectors = [
        vector.detach().double().requires_grad_() for vector in vectors
    ]
    allowed = (start[:, None] == start)[None, None]
    scores = (query @ key.mT * 0.2).masked_fill(~allowed, -torch.inf)
    expected_output = scores.softmax(-1) @ value
    gradient = torch.randn_like(output)
    results = [output, *torch.autograd.grad(output, vectors, gradient)]
    expected = [
        expected_output,
        *torch.autograd.grad(expected_output, exact_vectors, gradient.double()),
    ]
    details = require_close(results, expected, limit=2e-5)
    ones = torch.ones_like(vectors[2]).requires_grad_()
    dropped, _ = packed_attention_kernel(*vectors[:2], ones, *spans, seed, 0.2, 0.3)
    mean = float(dropped.detach().mean())
    (weights,) = torch.autograd.grad(dropped.sum(), (ones,))
    same_mask = abs(float(weights.sum() / dropped.detach().sum()) - 1) < 1e-4
    require(same_mask, f"{details}; the backward pass of dropout uses a different mask")
    return require(abs(mean - 1) < 0.05, f"{details}; mean weight with dropout {mean:.3f}")


@check("decode attention kernel")
def decode(device: torch.device) -> str:
    """The Triton kernel for a step of beam search against the formula in float64."""
    require_gpu(device)
    from regard.nn.triton_kernels import decode_attention

    query = torch.randn(3, 5, 2, 64, device=device).transpose(1, 2) / 8
    key, value = torch.randn(2, 3, 2, 40, 64, device=device)
    bias = torch.where(torch.rand(3, 1, 1, 40, device=device) < 0.5, -torch.inf, 0.0)
    bias[..., -1] = 0.0  # each query attends to at least one key
    scores = query.double() @ key.double().mT + bias.double()
    expected = (scores.softmax(-1) @ value.double()).transpose(1, 2).flatten(2)
    return require_close([decode_attention(query, key, value, bias)], [expected], limit=2e-6)


@check("layer norm kernel")
def layer_norm_kernel(device: torch.device) -> str:
    """The compiled norm and its gradients, in bfloat16, against float64."""
    require_gpu(device)
    from regard.nn.triton_kernels import layer_norm

    x = (torch.randn(2, 333, 512, device=device) * 2 + 1).requires_grad_()
    gain, bias = (torch.randn(512, device=device).requires_grad_() for _ in range(2))
    gradient = torch.randn(2, 333, 512, device=device).bfloat16()
    normed = torch.compile(layer_norm, fullgraph=True)(x, gain, bias, 1e-5)
    results = torch.autograd.grad(normed, (x, gain, bias), gradient)
    exact_tensors = [tensor.detach().double().requires_grad_() for tensor in (x, gain, bias)]
    expected_output = F.layer_norm(
        exact_tensors[0], (512,), exact_tensors[1], exact_tensors[2], 1e-5
    )
    expected = torch.autograd.grad(expected_output, exact_tensors, gradient.double())
    require_close([normed], [expected_output], limit=0.01)  # bfloat16
    return require_close([*results], [*expected], limit=1e-3)


@check("top-k kernel")
def top_k_kernel(device: torch.device) -> str:
    """The most probable tokens by the Triton kernel against log-softmax in float64."""
    require_gpu(device)
    from regard.decoding.fused_top_k import top_tokens

    logits = 3 * torch.randn(50, 20_000, device=device)
    suppressed = torch.tensor([0, 3], device=device)
    expected = logits.double().log_softmax(-1).index_fill(1, suppressed, -torch.inf).topk(10)
    values, tokens = top_tokens(logits, 10, suppressed)
    require(torch.equal(tokens, expected.indices), "the tokens differ from those of log-softmax")
    return require_close([values], [expected.values], limit=2e-6)


# ---------------------------------------------------------------------------------------------
# Training steps


@check("packed batches")
def packed_batches(device: torch.device) -> str:
    """Texts concatenated in one row against one text per row: loss and gradients."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = random_texts(Path(folder) / "texts")
        size = packed_size(dataset.source_lengths, dataset.target_lengths, 512)
        rows = plan_packed(dataset.source_lengths, dataset.target_lengths, size, 1, 0)[0]
        batches = [collate(dataset, rows), pack(dataset, rows, size)]
    loss_fn = loss_fn_of(small_recipe(), device)
    if device.type == "cpu":
        loss_fn = loss_fn.double()  # the kernel on a GPU computes in float32
    padded, packed = (_gradients(loss_fn, batch.to(device)) for batch in batches)
    return require_close(packed, padded, limit=1e-9 if device.type == "cpu" else 1e-3)


def _gradients(loss_fn: nn.Module, batch: Batch) -> list[Tensor]:
    position_info = () if batch.position_info is None else (batch.position_info,)
    loss = loss_fn(batch.source, batch.target, batch.labels, *position_info)
    return [loss.detach(), *torch.autograd.grad(loss, list(loss_fn.parameters()))]


@check("CUDA graph")
def recorded_steps(device: torch.device) -> str:
    """Training steps replayed from a CUDA graph against eager ones: 12 losses each."""
    require_gpu(device)
    with tempfile.TemporaryDirectory() as folder:
        dataset = random_texts(Path(folder) / "texts")
        lengths = dataset.source_lengths, dataset.target_lengths
        size = packed_size(*lengths, 512)
        plan = [rows for epoch in range(9) for rows in plan_packed(*lengths, size, 1, epoch)][:12]
        batches = [pack(dataset, rows, size) for rows in plan]
    curves = []
    for recorded in (False, True):
        recipe = small_recipe()
        loss_fn = loss_fn_of(recipe, device)
        optimizer = OPTIMIZERS["adam"](loss_fn, recipe.training)
        step: Any = TrainStep(loss_fn, optimizer, recipe.training, device)
        step = CUDAGraphStep(step, loss_fn.network) if recorded else step
        curves.append(
            [float(step([batch], StepScalars(1 / batch.tokens, 1e-3))) for batch in batches]
        )
    eager, graph = map(torch.tensor, curves)
    worst = float(((graph - eager) / eager).abs().max())
    details = f"loss {eager[0]:.3f} to {eager[-1]:.3f}, largest relative difference {worst:.1e}"
    return require(worst <= 0.02, f"{details} (limit 2e-02)")


# ---------------------------------------------------------------------------------------------
# Packed networks


def random_network(preset: str, vocabulary: int, device: torch.device) -> Transformer:
    model = make_recipe(
        {"data": {"train": {"pairs": "x"}}, "model": {"preset": preset}}, "selftest"
    ).model
    torch.manual_seed(0)
    network = ARCHITECTURES["transformer"](model, vocabulary, vocabulary)
    return cast(Transformer, network.to(device).eval())


def random_sources(count: int, length: int, vocabulary: int, device: torch.device) -> Tensor:
    source = torch.randint(len(SPECIAL_TOKENS), vocabulary, (count, length), device=device)
    source[:, -1] = EOS
    return source


@torch.inference_mode()
def compare_precision(precision: Precision, limit: float, device: torch.device) -> str:
    """The logits of a packed network after three steps, against the plain network."""
    if precision not in formats(device):
        raise CheckSkipped(f"this machine's {device.type} does not support {precision}")
    network = random_network("tiny", 1000, device)
    packed = pack_network(network, select_precision(precision, device))
    source = random_sources(16, 12, 1000, device)
    plain_state = network.start(network.encode(source))
    packed_state = packed.start(packed.encode(source))
    for number in range(3):
        tokens = source[:, number]
        expected, plain_state = network.step(tokens, plain_state)
        packed_logits, packed_state = packed.step(tokens, packed_state)
    error = float((packed_logits - expected).norm() / expected.norm())
    details = f"relative error of the logits {error:.1e} (limit {limit:.0e})"
    return require(error <= limit, details)


@check("fp32 packed network")
def fp32(device: torch.device) -> str:
    return compare_precision("fp32", 1e-5 if device.type == "cpu" else 1e-4, device)


@check("bf16 packed network")
def bf16(device: torch.device) -> str:
    # On a CPU only the products are bf16, on a GPU also the states between them.
    return compare_precision("bf16", 2e-2 if device.type == "cpu" else 5e-2, device)


@check("int8 packed network")
def int8(device: torch.device) -> str:
    return compare_precision("int8", 5e-2, device)


@check("native decoder")
@torch.inference_mode()
def native_decoder(device: torch.device) -> str:
    """The scores of beam search in native code, against those of the packed network with torch's operations."""
    if device.type != "cpu" or "int8" not in formats(device):
        raise CheckSkipped("needs a CPU with int8")
    network = random_network("tiny", 1000, device)
    packed = pack_network(network, "int8")
    if (reason := unsupported_network(network, packed)) is not None:
        raise CheckSkipped(reason)
    native = NativeDecoder(native_weights(network, packed))
    source, length = random_sources(16, 12, 1000, device), 12
    decoding = make_recipe({"data": {"train": {"pairs": "x"}}}, "selftest").decoding
    flag = SharedFlag()
    results = native.search(
        [NativeRequest(row, length) for row in source.tolist()],
        decoding,
        nbest=1,
        start=BOS,
        suppressed=(),
        interrupt=flag.address,
        threads=2,
    )
    expected = beam_search(
        packed.step,
        packed.start(packed.encode(source)),
        max_lengths=[length] * len(source),
        bos=BOS,
        eos=EOS,
        beam=decoding.beam,
        length_penalty=decoding.length_penalty,
    )
    assert results is not None
    scores = [torch.tensor([nbest[0].score for nbest in side]) for side in (results, expected)]
    return f"{native.kernels}; " + require_close(scores[:1], scores[1:], 5e-2)


@check("translation speed")
@torch.inference_mode()
def translation_speed(device: torch.device) -> str:
    """Beam search with the packed network of this machine's precision against the plain network, best of 3."""
    count, length, vocabulary = 32, 20, 8000
    network = random_network("small", vocabulary, device)
    precision = select_precision("auto", device)
    source = random_sources(count, length, vocabulary, device)
    seconds: dict[str, float] = {}
    for name, model in (("plain", network), ("packed", pack_network(network, precision))):
        for repeat in range(4):
            start = time.perf_counter()
            results = beam_search(
                cast(Any, model).step,
                cast(Any, model).start(model.encode(source)),
                max_lengths=[length] * count,
                bos=BOS,
                eos=EOS,
                beam=4,
                length_penalty=0.6,
                device=device,
            )
            elapsed = time.perf_counter() - start
            if repeat:  # the first is a warm-up
                seconds[name] = min(seconds.get(name, elapsed), elapsed)
    require(len(results) == count, f"{len(results)} translations of {count} sentences")
    speeds = {name: count / elapsed for name, elapsed in seconds.items()}
    ratio = speeds["packed"] / speeds["plain"]
    details = (
        f"{speeds['packed']:.0f} sentences/s in {precision}, {ratio:.1f} times the plain network"
    )
    return require(ratio > 0.5, f"{details} (limit 0.5)")


# ---------------------------------------------------------------------------------------------
# From text to translations


@check("training learns copy")
def learns_copy(device: torch.device) -> str:
    """Train on random sequences of letters and translate unseen ones, also with the packed network."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unseen = _write_sequences(folder)
        train(copy_recipe(folder, device), folder / "run")
        loss = float(RunDir(folder / "run").card()["valid"]["loss"])
        device_type = cast(Any, device.type)
        translations = {
            precision: Translator.load(folder / "run", device_type, precision).translate(unseen)
            for precision in cast(tuple[Precision, ...], ("fp32", "auto"))
        }
    correct = {
        precision: sum(map(str.__eq__, unseen, outputs))
        for precision, outputs in translations.items()
    }
    details = (
        f"loss {loss:.3f}; {correct['fp32']} of {len(unseen)} unseen sequences correct in fp32, "
        f"{correct['auto']} in {select_precision('auto', device)}"
    )
    return require(min(correct.values()) >= 0.9 * len(unseen), details)


def _write_sequences(folder: Path) -> list[str]:
    """Write training and validation data, and return other sequences."""
    draw = random.Random(1)
    sequences = list(
        {" ".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(3000)}
    )
    sequences.sort()
    draw.shuffle(sequences)
    unseen, parts = sequences[:100], {"valid": sequences[100:150], "train": sequences[150:]}
    for name, lines in parts.items():
        text = "".join(f"{line}\t{line}\n" for line in lines)
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    return unseen


def copy_recipe(folder: Path, device: torch.device) -> Recipe:
    files = {name: {"pairs": str(folder / f"{name}.tsv")} for name in ("train", "valid")}
    sizes = {"d_model": 64, "heads": 4, "d_ff": 128, "encoder_layers": 1, "decoder_layers": 1}
    training = {"steps": 400, "tokens_per_batch": 512, "schedule": "cosine", "warmup": 40}
    training_options = {"learning_rate": 0.005, "label_smoothing": 0.0, "validate_every": 400}
    return make_recipe(
        {
            "data": files,
            "tokenizer": {"kind": "word", "vocab_size": 40},
            "model": {**sizes, "dropout": 0.0, "norm_order": "pre"},
            "training": {
                **training,
                **training_options,
                "validate_sentences": 20,
                "device": device.type,
            },
            "decoding": {"beam": 2},
        },
        "selftest",
    )

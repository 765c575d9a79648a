"""Private torch functions: their public fallbacks compute the same."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from regard.inference import quantization
from regard.inference.native_library import NativeLibrary
from regard.inference.quantization import BF16Linear, FP32Linear, Int8Linear, quantize_rows
from regard.nn import torch_internals
from regard.nn.torch_internals import (
    FBGEMM,
    PlainInt8,
    foreach_lerp_,
    has_avx512_bf16,
    has_onednn_bf16,
    has_vnni,
    pack_int8_linear,
    pack_linear,
    without_torch_function,
)


@pytest.fixture
def without_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without its private functions."""
    monkeypatch.setattr(torch_internals, "_find", lambda path: None)


def inputs(rows: int = 9, width: int = 40, out: int = 30) -> tuple[Any, Any, Any]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=draw)
    return x, torch.randn(out, width, generator=draw), torch.randn(out, generator=draw)


def test_the_private_functions_exist_in_this_version_of_torch() -> None:
    """If this fails, the fallbacks are used: correct, but slow."""
    _, weight, bias = inputs()
    assert pack_linear(weight)[0] is not torch_internals._plain_linear
    assert isinstance(pack_int8_linear(*quantize_rows(weight), bias, False), FBGEMM)
    assert not isinstance(without_torch_function(), nullcontext)
    for name in ("cpu._is_vnni_supported", "cpu._is_avx512_bf16_supported"):
        assert torch_internals._find(name) is not None
    assert torch_internals._find("ops.mkldnn._is_mkldnn_bf16_supported") is not None
    assert torch_internals._find("_no_such_function") is None


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("kind", "tolerance"), [(FP32Linear, 1e-5), (BF16Linear, 2**-7)])
def test_linear_maps_equal_their_fallback(
    kind: type[FP32Linear], tolerance: float, relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = inputs()
    for maybe_bias in (bias, None):
        expected = kind(weight, maybe_bias, relu)(x)
        with monkeypatch.context() as patch:
            patch.setattr(torch_internals, "_find", lambda path: None)
            plain = kind(weight, maybe_bias, relu)
        assert plain.multiply is torch_internals._plain_linear
        error = (plain(x) - expected).abs().max()
        assert float(error) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("relu", [False, True])
def test_int8_linear_maps_equal_their_fallback(relu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs()
    without = NativeLibrary(None, "for this test")
    for maybe_bias in (bias, None):
        native = Int8Linear(weight, maybe_bias, relu)  # FBGEMM if there is no library
        with monkeypatch.context() as patch:
            patch.setattr(quantization, "native_library", lambda: without)
            packed = Int8Linear(weight, maybe_bias, relu)
            patch.setattr(torch_internals, "_find", lambda path: None)
            plain = Int8Linear(weight, maybe_bias, relu)
        assert isinstance(packed.kernels, FBGEMM)
        assert isinstance(plain.kernels, PlainInt8)
        step = float(x.max() - x.min()) / 127 * float(weight.abs().max())
        for one in (native, packed, plain):
            assert one.multiply == one._multiply_and_observe
            # Without a fixed range they may round to different steps.
            assert float((plain(x) - one(x)).abs().max()) <= 10 * step
        plain.freeze(1.0)
        for one in (native, packed):
            one.freeze(1.0)
            if plain.kernels.levels == one.kernels.levels:
                assert torch.allclose(plain(x), one(x), rtol=1e-4, atol=1e-4)
            outside = 10 * x  # all clip
            assert float((plain(outside) - one(outside)).abs().max()) <= 10 * step


def test_moving_averages_equal_their_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    for weight in (0.1, torch.tensor(0.1)):
        means, targets = [list(torch.randn(2, 3, 4).unbind()) for _ in range(2)]
        plain = [mean.clone() for mean in means]
        foreach_lerp_(means, targets, weight)
        with monkeypatch.context() as patch:
            patch.setattr(torch_internals, "_find", lambda path: None)
            foreach_lerp_(plain, targets, weight)
        assert all(map(torch.equal, plain, means))


@pytest.mark.usefixtures("without_private")
def test_features_that_cannot_be_queried_count_as_missing() -> None:
    assert not has_vnni()
    assert not has_avx512_bf16()
    assert not has_onednn_bf16()
    with without_torch_function():
        assert torch.ones(2).sum() == 2


def test_eight_bits_are_256_values() -> None:
    kernels = PlainInt8(torch.ones(1, 1, dtype=torch.int8), torch.ones(1), None, relu=False)
    x = torch.arange(256.0).unsqueeze(1)
    assert torch.equal(kernels.dynamic(x), x)
    assert torch.equal(kernels.static(1.0, 56)(2 * x - 100), (2 * x - 100).clamp(-56, 199))

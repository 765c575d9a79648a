"""Which precision is chosen."""

import pytest
import torch

from regard.inference.precision import (
    autocast,
    default_precision,
    formats,
)


@pytest.mark.parametrize("supported", [True, False])
def test_mixed_precision_only_where_the_gpu_supports_it(
    monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert default_precision(gpu) == ("bf16" if supported else "fp32")
    assert [*formats(gpu)] == (["fp32", "bf16"] if supported else ["fp32"])
    assert default_precision(cpu) == "fp32"
    assert "fp32" in formats(cpu)


def test_autocast_changes_matrix_products_only_in_bf16() -> None:
    cpu, x = torch.device("cpu"), torch.ones(2, 2)
    with autocast("bf16", cpu):
        assert (x @ x).dtype == torch.bfloat16
    with autocast("fp32", cpu):
        assert (x @ x).dtype == torch.float32
    with autocast("auto", cpu):
        assert (x @ x).dtype == torch.float32

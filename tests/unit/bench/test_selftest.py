"""The self-test: its checks find errors, and every outcome is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.bench import selftest
from regard.bench.selftest import CHECKS, CheckFailed, CheckSkipped, run_checks
from regard.inference import packed_transformer
from tests.cli.commands import inside

CPU = torch.device("cpu")
GPU_CHECKS = [
    "packed attention kernel",
    "decode attention kernel",
    "layer norm kernel",
    "top-k kernel",
    "CUDA graph",
]


def fails(device: torch.device) -> str:
    return selftest.require(1 > 2, "1 is less than 2")


def skips(device: torch.device) -> str:
    raise CheckSkipped("needs two moons")


def breaks(device: torch.device) -> str:
    raise ValueError("first line\nsecond line")


def passes(device: torch.device) -> str:
    return "7 of 7"


@pytest.mark.parametrize(
    ("checks", "status", "lines"),
    [
        (
            {"one": passes, "two": fails, "three": skips, "four": breaks},
            1,
            [
                "ok      one                       7 of 7",
                "failed  two                       1 is less than 2",
                "skipped three                     needs two moons",
                "failed  four                      ValueError: first line",
                "1 ok, 2 failed, 1 skipped, in",
            ],
        ),
        ({"one": passes, "two": skips}, 0, ["ok", "skipped", "1 ok, 0 failed, 1 skipped, in"]),
    ],
    ids=["failed", "ok"],
)
def test_every_outcome_is_one_line_and_a_failure_is_status_1(
    checks: dict[str, Any],
    status: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(selftest, "CHECKS", checks)
    done = inside("selftest", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == status
    title, *printed = done.stdout.splitlines()
    assert f"torch {torch.__version__}" in title
    for line, expected in zip(printed, lines, strict=True):
        assert line.startswith(expected)


def test_checks_of_kernels_are_skipped_without_a_gpu() -> None:
    for name in GPU_CHECKS:
        with pytest.raises(CheckSkipped, match="needs a GPU"):
            CHECKS[name](CPU)


def test_a_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "largest relative error" in CHECKS["attention"](CPU)
    plain: Callable[..., Tensor] = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: plain(*a, **o) * 1.001)
    with pytest.raises(CheckFailed, match=r"largest relative error 1\.\de-03 \(limit 2e-05\)"):
        CHECKS["attention"](CPU)


def test_a_wrong_packed_network_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "relative error of the logits" in CHECKS["fp32 packed network"](CPU)
    plain = packed_transformer.dot_product_attention
    monkeypatch.setattr(
        packed_transformer, "dot_product_attention", lambda *arguments: plain(*arguments) * 1.001
    )
    with pytest.raises(CheckFailed, match="limit 1e-05"):
        CHECKS["fp32 packed network"](CPU)


def test_nan_is_an_error() -> None:
    fine, broken = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    for order in ([fine, broken], [broken, fine]):
        with pytest.raises(CheckFailed, match="nan"):
            selftest.require_close(order, [torch.ones(3)] * 2, 0.1)


def test_a_check_reports_nothing_but_its_figures(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def talks(device: torch.device) -> str:
        print("progress")
        return "fine"

    monkeypatch.setattr(selftest, "CHECKS", {"one": talks})
    (result,) = run_checks(CPU)
    assert (result.status, result.details) == ("ok", "fine")
    assert capfd.readouterr() == ("", "")

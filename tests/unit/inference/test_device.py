"""Which device is chosen."""

import pytest
import torch

from regard.errors import RegardError
from regard.inference.device import choose_device, default_device


@pytest.mark.parametrize("gpu", [True, False])
def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert choose_device("cpu").type == "cpu"
    assert default_device().type == ("cuda" if gpu else "cpu")
    assert choose_device("auto").type == "cpu"  # in tests, see conftest.py
    if gpu:
        assert choose_device("cuda").type == "cuda"
    else:
        with pytest.raises(RegardError, match=r"^device cuda: torch finds no GPU; use device cpu"):
            choose_device("cuda")

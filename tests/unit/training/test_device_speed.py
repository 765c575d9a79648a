"""The speed of a device."""

import time

import pytest
import torch

from regard.training.device_speed import PARALLEL_EFFICIENCY, DeviceSpeed, measure_device


def test_the_speed_of_a_device_falls_with_the_cost_of_the_model() -> None:
    speed = DeviceSpeed("cuda", 1_200.0)
    assert [speed.tokens_per_second(cost) for cost in (0.5, 1, 12)] == [2_400, 1_200, 100]
    measured = measure_device(torch.device("cpu"))
    assert measured.device == "cpu"
    assert measured.reference > 10


def test_the_speed_is_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    try:
        alone = measure_device(torch.device("cpu"))
        monkeypatch.setenv("WORLD_SIZE", "3")
        together = measure_device(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    assert (alone.name, alone.spare_cores) == ("2 CPU cores", 1)
    assert (together.name, together.spare_cores) == ("6 CPU cores in 3 processes", 0)
    # A step takes one tick. Alone it has a row of 1,000 tokens for each thread.
    assert (alone.reference, together.reference) == pytest.approx(
        (2_000, 3 * PARALLEL_EFFICIENCY * 1_000), rel=0.02
    )

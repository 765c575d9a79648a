"""The speed of a device."""

import torch

from regard.training.device_speed import DeviceSpeed, measure_device


def test_the_speed_of_a_device_falls_with_the_cost_of_the_model() -> None:
    speed = DeviceSpeed("cuda", 1_200.0)
    assert [speed.tokens_per_second(cost) for cost in (0.5, 1, 12)] == [2_400, 1_200, 100]
    measured = measure_device(torch.device("cpu"))
    assert measured.device == "cpu"
    assert measured.reference > 10

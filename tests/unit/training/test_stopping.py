"""When training stops: early stopping."""

import pytest

from regard.recipe import make_recipe
from regard.training.checkpoint import TrainingState
from regard.training.stopping import StopReason, finished


@pytest.mark.parametrize(
    ("steps", "stop"),
    [([100, 150, 170, 190], StopReason.NONE), ([100, 200, 300], StopReason.PATIENCE)],
)
def test_a_validation_at_a_time_limit_costs_no_patience(steps: list[int], stop: StopReason) -> None:
    """The first validation is the best. Training in several sessions must not stop sooner."""
    state = TrainingState(step=steps[-1], validations=[(step, step / 100, 1.0) for step in steps])
    training = make_recipe(
        {
            "data": {"train": {"pairs": "x.tsv"}},
            "training": {"patience": 2, "validate_every": 100},
        },
        "test",
    ).training
    assert finished(state, training) is stop


def test_if_the_last_checkpoint_is_kept_patience_counts_losses() -> None:
    training = make_recipe(
        {
            "data": {"train": {"pairs": "x.tsv"}},
            "training": {"patience": 2, "validate_every": 100, "best_checkpoint_metric": "last"},
        },
        "test",
    ).training
    validations = [(100, -100.0, 2.0), (200, -200.0, 3.0), (300, -300.0, 3.0)]
    assert (
        finished(TrainingState(step=200, validations=validations[:2]), training) is StopReason.NONE
    )
    assert finished(TrainingState(step=300, validations=validations), training).name == "PATIENCE"


def test_the_start_of_fine_tuning_costs_no_patience() -> None:
    """A model that becomes worse at first may still improve."""
    training = make_recipe(
        {
            "data": {"train": {"pairs": "x.tsv"}},
            "training": {"patience": 2, "validate_every": 100, "steps": 9_000, "warmup": 1},
        },
        "test",
    ).training
    losses = [(0, 1.0), (100, 4.0), (200, 3.0), (300, 2.0)]
    state = TrainingState(step=300, validations=[(step, loss, loss) for step, loss in losses])
    assert finished(state, training) is StopReason.NONE
    assert (state.start, state.is_start_best) == ((1.0, 1.0), True)
    state.validations += [(400, 0.5, 0.5), (500, 2.0, 2.0), (600, 2.0, 2.0)]
    assert finished(state, training) is StopReason.PATIENCE
    assert not state.is_start_best
    assert not TrainingState().is_start_best


@pytest.mark.parametrize(
    ("steps", "reason"), [(1, "the only step is done"), (1_200, "all 1,200 steps are done")]
)
def test_the_reason_is_a_sentence(steps: int, reason: str) -> None:
    values = {"data": {"train": {"pairs": "x.tsv"}}, "training": {"steps": steps, "warmup": 1}}
    training = make_recipe(values, "test").training
    assert StopReason.ALL_STEPS.describe(training) == reason

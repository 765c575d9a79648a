"""The kept inputs of the fuzz targets break nothing."""

import pytest

from tests.fuzz.targets import TARGETS, seeds


@pytest.mark.parametrize("target", TARGETS)
def test_the_kept_inputs_of_a_target(target: str) -> None:
    inputs = seeds(target)
    assert len(inputs) >= 5
    for path in inputs:
        try:
            TARGETS[target](path.read_bytes())
        except Exception as error:
            error.add_note(f"input: {path}")
            raise

"""The mistakes in named.yaml still apply to the source code. ``make mutants`` checks that tests notice them."""

import ast

import pytest

from tests.mutation.mutants import Mutant, named_mutants


@pytest.mark.parametrize("mutant", named_mutants(), ids=lambda one: one.name)
def test_a_named_mutant_is_another_program(mutant: Mutant) -> None:
    ast.parse(mutant.code)
    assert mutant.diff
    changed = [line for line in mutant.diff if line.startswith("+")]
    assert changed

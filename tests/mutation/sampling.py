"""Random mutants, made by Cosmic Ray's operators.

Another comparison, another arithmetic operator, a number plus or minus 1, a condition negated, a loop that never runs,
an exception that is not caught, a decorator removed.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from tests.mutation.mutants import ROOT, Mutant, read_source

PACKAGES = ("nn", "decoding", "training", "data", "metrics", "inference", "server")
EXCLUDED = {
    "nn/triton_kernels.py": "run on a GPU only: regard selftest --device cuda",
    "decoding/fused_top_k.py": "runs on a GPU only: regard selftest --device cuda",
    "training/distributed.py": "needs several processes: tests/long/test_distributed.py",
}
"""files without mutants, and what tests them instead"""

OPERATORS = (
    "AddNot",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ReplaceAndWithOr",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceBinaryOperator_BitOr_BitAnd",
    "ReplaceBinaryOperator_Div_Mul",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceBinaryOperator_Mod_FloorDiv",
    "ReplaceBinaryOperator_Mul_Div",
    "ReplaceBinaryOperator_Pow_Mul",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBreakWithContinue",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Invert",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_USub_UAdd",
    "ZeroIterationForLoop",
)
"""Of Cosmic Ray's operators, one replacement of each kind: the one that is hardest to notice."""

UNTESTABLE_DECORATORS = ("abstractmethod", "cache", "cached_property", "overload", "override")
"""Without them a program computes the same."""


def sampled_mutants(count: int, seed: int) -> Iterator[Mutant]:
    """``count`` mutants, drawn at random from all possible ones; a quarter of them change a number."""
    keys = set[str]()
    for file, operator, occurrence, line in _shuffled_positions(seed):
        try:
            code = mutate_code(read_source(file), get_operator(f"core/{operator}")(), occurrence)
        except AttributeError:  # ExceptionReplacer cannot replace a name with a dot
            continue
        assert code is not None
        mutant = Mutant(file, f"{operator} {occurrence}", line, code)
        if _is_other_program(code, read_source(file)) and mutant.key not in keys:
            keys.add(mutant.key)
            yield mutant
        if len(keys) == count:
            return


def _shuffled_positions(seed: int) -> Iterator[tuple[str, str, int, int]]:
    """File, operator, occurrence and line of every possible mutant; each fourth changes a number."""
    positions = [
        (file, operator, occurrence, line)
        for package in PACKAGES
        for file in source_files(package)
        for operator in OPERATORS
        for occurrence, line in mutable_lines(file, operator)
    ]
    random.Random(seed).shuffle(positions)
    numbers = (one for one in positions if one[1] == "NumberReplacer")
    others = (one for one in positions if one[1] != "NumberReplacer")
    for number, position in enumerate(others, 1):
        yield position
        if number % 3 == 0:
            yield from islice(numbers, 1)


def source_files(package: str) -> list[str]:
    """The files of a package that have mutants."""
    folder = ROOT / "src" / "regard"
    names = [path.relative_to(folder).as_posix() for path in (folder / package).rglob("*.py")]
    return [f"src/regard/{name}" for name in sorted(names) if not name.startswith(tuple(EXCLUDED))]


def mutable_lines(file: str, operator: str) -> Iterator[tuple[int, int]]:
    """Every place of a file where an operator applies and a test could notice it: its number and line."""
    skipped = _skipped_positions(read_source(file))
    instance = get_operator(f"core/{operator}")()
    places = (
        (node, start) for node in _nodes(file) for start, _ in instance.mutation_positions(node)
    )
    for occurrence, (node, start) in enumerate(places):
        if getattr(node.parent, "type", "") == "parameters":
            continue  # the star before arguments that are given by name
        decorator = operator == "RemoveDecorator" and node.get_code().strip()
        if decorator and any(name in decorator for name in UNTESTABLE_DECORATORS):
            continue
        if not any(first <= tuple(start) < last for first, last in skipped):
            yield occurrence, start[0]


@cache
def _nodes(file: str) -> list[Any]:
    return list(ast_nodes(get_ast(read_source(file))))


def _is_other_program(code: str, source: str) -> bool:
    try:
        return ast.dump(ast.parse(code)) != _syntax_tree(source)
    except SyntaxError:
        return False


@cache
def _syntax_tree(source: str) -> str:
    return ast.dump(ast.parse(source))


Position = tuple[int, int]


@cache
def _skipped_positions(source: str) -> list[tuple[Position, Position]]:
    """Type annotations, assertions and error messages, from their first position to the one after their last."""
    skipped: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            skipped += [node.returns, *(argument.annotation for argument in arguments)]
        elif isinstance(node, ast.AnnAssign):
            skipped.append(node.annotation)
        elif isinstance(node, ast.Assert | ast.Raise):
            skipped.append(node)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            skipped.append(node.value)  # an assertion, too
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped += [node.test, *node.body]
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in skipped
        if isinstance(node, ast.expr | ast.stmt)
    ]

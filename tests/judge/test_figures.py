"""The judge's numbers are defined in thresholds.py and policy.py only, each with a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from surefoot.judge import policy, thresholds

HOMES = [Path(module.__file__) for module in (policy, thresholds)]
PACKAGE = HOMES[0].parent
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if path not in HOMES)
SETTABLE = 30
DATA = ("remedies.py", "rank_causes.py", "cause_confidences.py")
SCALE = {name for name in vars(thresholds) if name.isupper()}


def numbers(tree: ast.AST) -> Iterator[float]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            yield node.value


def assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign, ast.stmt | None]]:
    """Names that are assigned, the assignment, and the statement after it."""
    for node, next_node in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            yield from ((name, node, next_node) for name in names)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_defines_numbers(path: Path) -> None:
    """Multiples of a scale constant are allowed, and so are tables of remedies and cause rules, which are data."""
    body = ast.parse(path.read_text()).body
    given = [(name, node) for name, node, _ in assigned(body) if path.name not in DATA and [*numbers(node)]]
    assert [name for name, node in given if not SCALE & {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}] == []


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_comparison_with_a_bare_number(path: Path) -> None:
    """Except counts up to three, halves, and guards against division by zero."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            bare = [v for side in (node.left, *node.comparators) for v in numbers(side)]
            assert [v for v in bare if v not in (0, 0.5, 1, 2, 3) and v > 1e-3] == [], ast.unparse(node)


def test_at_most_thirty_figures_can_be_set() -> None:
    figures = [*figures_of(policy.Policy())]
    assert {"max_norm_ratio", "thresholds.false_alarms"} <= set(figures)
    assert len(figures) <= SETTABLE, figures


def figures_of(settings: Any, prefix: str = "") -> Iterator[str]:
    """Names of all fields that hold a number, or may hold one, those of nested settings included."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from figures_of(value, f"{prefix}{field.name}.")
        elif not isinstance(value, bool):
            assert value is None or isinstance(value, int | float), field.name
            yield prefix + field.name


def test_fewer_false_alarms_raise_every_bound() -> None:
    usual, rare = thresholds.Thresholds(), thresholds.Thresholds(false_alarms=0.01)
    for name in ("level_sigmas", "mean_level_sigmas", "loss_jump_sigmas"):
        assert getattr(rare, name) > 1.1 * getattr(usual, name)


@pytest.mark.parametrize("path", HOMES, ids=lambda path: path.name)
def test_each_number_has_a_docstring(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    parts = [body, *(node.body for node in body if isinstance(node, ast.ClassDef))]
    silent = [
        name
        for part in parts
        for name, _, next_node in assigned(part)
        if not (isinstance(next_node, ast.Expr) and isinstance(next_node.value, ast.Constant))
    ]
    assert silent == []

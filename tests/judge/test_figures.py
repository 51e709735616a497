"""The numbers of the judge stand in thresholds.py and policy.py, each with its meaning."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.judge import policy, thresholds

HOMES = [Path(module.__file__) for module in (policy, thresholds)]
PACKAGE = HOMES[0].parent
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if path not in HOMES)
DATA = ("remedies.py", "rank_causes.py")
SCALE = {name for name in vars(thresholds) if name.isupper()}


def numbers(tree: ast.AST) -> Iterator[float]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            yield node.value


def assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign, ast.stmt | None]]:
    """What is given a value, how, and what stands right below it."""
    for one, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            yield from ((name, one, below) for name in names)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_defines_numbers(path: Path) -> None:
    """A multiple of a scale constant is fine, and so are the remedies and the clues for causes, which are data."""
    body = ast.parse(path.read_text()).body
    given = [(name, one) for name, one, _ in assigned(body) if path.name not in DATA and [*numbers(one)]]
    assert [name for name, one in given if not SCALE & {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}] == []


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_compared_with_a_bare_number(path: Path) -> None:
    """Beyond counts up to three, halves, and guards against dividing by nothing."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            bare = [v for side in (node.left, *node.comparators) for v in numbers(side)]
            assert [v for v in bare if v not in (0, 0.5, 1, 2, 3) and v > 1e-3] == [], ast.unparse(node)


@pytest.mark.parametrize("path", HOMES, ids=lambda path: path.name)
def test_each_number_says_what_it_means(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    parts = [body, *(one.body for one in body if isinstance(one, ast.ClassDef))]
    silent = [
        name
        for part in parts
        for name, _, below in assigned(part)
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
    ]
    assert silent == []

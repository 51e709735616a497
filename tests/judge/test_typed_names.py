"""Causes, detectors, remedies, severities and actions are compared as enums, and never looked up by a string."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.judge.harm import HarmKind
from surefoot.records import Action, Cause, FindingKind, RemedyId, Severity

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("src/surefoot", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
READERS = (
    "src/surefoot/kinds.py",
    "src/surefoot/records.py",
    "src/surefoot/journal/aliases.py",
    "src/surefoot/journal/policy_aliases.py",
)
"""Where the names are defined, and where those of earlier versions are."""
NAMES_OF_OTHERS = {"float32", "nonfinite"}
"""Names that are compared elsewhere too: a dtype of recipes, and a column."""
NAMES = {
    member.value for enum in (Cause, FindingKind, RemedyId, Severity, HarmKind, Action) for member in enum
} - NAMES_OF_OTHERS
OTHER_MEANINGS = {
    "clip": "an argument, and a column",
    "jump": "a label of a log, and an earlier name of a threshold",
    "labels": "a part of a batch",
    "loss_scale": "a number of a run, and an option of a decision",
    "mode": "how a run is protected",
    "momentum": "an option of optimizers",
    "origin": "a part of a note",
    "plateau": "a label of a log",
    "progress": "an argument, and a part of a saved state",
    "schedule": "a part of a run",
    "stale_grads": "a column",
}
"""Names that are keys of something else too; they are only looked for in comparisons."""
OTHER_COMPARISONS = {
    "src/surefoot/guard/checkpointer.py": {"stop"},
    "src/surefoot/guard/preemption.py": {"stop"},
}
"""Comparisons with what the ranks agree on."""
LOOKUPS = ("get", "pop", "setdefault")


def literals(node: ast.AST) -> Iterator[str]:
    """The strings that this expression, or each part of it if it is a collection, is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for part in node.elts:
            yield from literals(part)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("frozenset", "set", "tuple"):
        for part in node.args:
            yield from literals(part)


def compared(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from (text for side in (node.left, *node.comparators) for text in literals(side))
        elif isinstance(node, ast.MatchValue):
            yield from literals(node.value)


def keys(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            yield from literals(node.slice)
        elif isinstance(node, ast.Dict):
            yield from (text for key in node.keys if key is not None for text in literals(key))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKUPS:
            yield from (text for argument in node.args[:1] for text in literals(argument))


def offences(source: str, *, also: frozenset[str] | set[str] = frozenset()) -> list[str]:
    tree = ast.parse(source)
    by_key = (text for text in keys(tree) if text not in OTHER_MEANINGS)
    return sorted({text for text in (*compared(tree), *by_key) if text in NAMES - also})


def test_no_name_is_compared_as_a_string() -> None:
    names = {path.relative_to(ROOT).as_posix(): path for path in SOURCES}
    assert names.keys() >= {*READERS, *OTHER_COMPARISONS}
    found = {
        name: offences(path.read_text(), also=OTHER_COMPARISONS.get(name, set()))
        for name, path in names.items()
        if name not in READERS
    }
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('event["detector"] == "loss_level"', "loss_level"),
        ('cause in ("labels", "drift")', "labels"),
        ('advice = {"bad_batch": "look at it"}', "bad_batch"),
        ('remedies.get("wait_out")', "wait_out"),
        ('if finding.severity != "severe": pass', "severe"),
        ('match action:\n    case "rewind": pass', "rewind"),
    ],
)
def test_what_counts_as_a_comparison(source: str, found: str) -> None:
    assert found in offences(source)
    assert offences('log.info("rewind"); words = ["labels"]') == []

"""YAML as people mean it: 1e-4 is a number, off and no are words, a key stands once, and nothing is made but data."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from surefoot.train.recipe.mistakes import Place

_TAG = "tag:yaml.org,2002:"
_DIGITS = 100
_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0[0-9_]+|0x[0-9a-fA-F_]+)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
)
"""The scalars of YAML 1.2 that are no text, and what they may begin with; dates, yes, off and 1:30 stay text."""


class Loader(yaml.SafeLoader):
    """Makes plain data only; a tag that asks for anything else is refused."""


def _make_int(loader: Loader, node: ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    if len(text) > _DIGITS:
        raise yaml.MarkedYAMLError(problem=f"a number of {len(text)} digits", problem_mark=node.start_mark)
    return int(text, 16 if "x" in text else 10)


def _make_mapping(loader: Loader, node: MappingNode) -> Any:
    """As the safe loader does, but a key that stands twice is refused rather than forgotten."""
    seen: dict[Any, Node] = {}
    for key, _ in node.value:
        if not isinstance(key, ScalarNode) or key.tag == f"{_TAG}merge":
            continue
        if key.value in seen:
            first = seen[key.value].start_mark.line + 1
            raise yaml.MarkedYAMLError(
                problem=f"{key.value} stands here again, and first in line {first}; keep one of the two",
                problem_mark=key.start_mark,
            )
        seen[key.value] = key
    yield from loader.construct_yaml_map(node)


Loader.yaml_implicit_resolvers = {}  # none of those it inherits
for _kind, _pattern, _first in _RESOLVERS:
    Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern})$"), ["" if c == "\0" else c for c in _first])
Loader.add_constructor(f"{_TAG}int", _make_int)
Loader.add_constructor(f"{_TAG}map", _make_mapping)
for _kind in ("binary", "timestamp", "omap", "pairs", "set"):
    Loader.add_constructor(_TAG + _kind, Loader.construct_undefined)


def parse(text: str) -> tuple[Any, dict[Place, int]]:
    """What a document holds, and the line of each of its keys; YAMLError when it is none."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        value = loader.construct_document(node)
    finally:
        loader.dispose()
    return value, dict(_lines(node, ()))


def scalar(text: str) -> Any:
    """What a single word or sentence means: 3e-4, true, null, or the text itself."""
    loader = Loader("")
    tag = loader.resolve(ScalarNode, text, (True, False))
    return loader.construct_document(ScalarNode(tag, text))


def _lines(node: Node, above: Place, depth: int = 0) -> list[tuple[Place, int]]:
    """Lines of keys, as deep as a recipe goes; a document may refer to itself."""
    if not isinstance(node, MappingNode) or depth > 3:
        return []
    found: list[tuple[Place, int]] = []
    for key, value in node.value:
        if isinstance(key, ScalarNode):
            place = (*above, key.value)
            found += [(place, key.start_mark.line + 1), *_lines(value, place, depth + 1)]
    return found

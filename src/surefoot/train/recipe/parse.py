"""Reads a recipe file, YAML or JSON, as plain data; errors name line and column.

YAML is read the way people mean it: 1e-4 is a number, off and no are words, a key may occur once, and tags that would
construct objects are refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from surefoot.train.recipe.errors import KeyPath, RecipeError, RecipeOrigin

_MAX_BYTES = 1 << 20
_MAX_VALUES, _MAX_DEPTH, _MAX_DIGITS = 20_000, 12, 100
_COPY = "Start from one that works: surefoot recipes lm-tiny --to mine.yaml"
_TAG = "tag:yaml.org,2002:"
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
"""Scalars that are not text, as in YAML 1.2, and their first characters; dates, yes, off and 1:30 stay text."""


def read_file(path: Path) -> tuple[dict[str, Any], RecipeOrigin]:
    """The keys and values of a recipe file, and the line of each key."""
    text = _read_text(path)
    if not text.strip():
        raise RecipeError(f"{path} is empty. {_COPY}")
    try:
        value, lines = _parse_json(text, path) if path.suffix.lower() == ".json" else parse_yaml(text)
    except yaml.YAMLError as error:
        _raise_yaml_error(path, error)
    except RecursionError:
        raise RecipeError(f"{path} is nested too deep for a recipe. {_COPY}") from None
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{path}: {error}.") from None
    if value is None:
        raise RecipeError(f"{path} has no keys, only comments. {_COPY}")
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise RecipeError(f"{path} holds {kind}; a recipe is keys and values, such as `steps: 1000`. {_COPY}")
    return _plain_copy(value, str(path)), RecipeOrigin(str(path), lines)


def parse_yaml(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """The content of a document and the line of each of its keys; raises YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        value = loader.construct_document(node)
    finally:
        loader.dispose()
    return value, dict(_key_lines(node, ()))


def parse_scalar(text: str) -> Any:
    """The value of an unquoted scalar: 3e-4, true, null, or the text itself."""
    loader = _Loader("")
    tag = loader.resolve(ScalarNode, text, (True, False))
    return loader.construct_document(ScalarNode(tag, text))


class _Loader(yaml.SafeLoader):
    """Makes plain data only; a tag that would make anything else is refused."""


def _construct_int(loader: _Loader, node: ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    if len(text) > _MAX_DIGITS:
        raise yaml.MarkedYAMLError(problem=f"a number of {len(text)} digits", problem_mark=node.start_mark)
    return int(text, 16 if "x" in text else 10)


def _construct_mapping(loader: _Loader, node: MappingNode) -> Any:
    """Like the safe loader's, but a duplicate key is refused instead of ignored."""
    seen: dict[Any, Node] = {}
    for key, _ in node.value:
        if not isinstance(key, ScalarNode) or key.tag == f"{_TAG}merge":
            continue
        if key.value in seen:
            first = seen[key.value].start_mark.line + 1
            raise yaml.MarkedYAMLError(
                problem=f"duplicate key {key.value}, first set in line {first}; keep one of the two",
                problem_mark=key.start_mark,
            )
        seen[key.value] = key
    yield from loader.construct_yaml_map(node)


_Loader.yaml_implicit_resolvers = {}  # without the inherited YAML 1.1 resolvers
for _kind, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(
        _TAG + _kind, re.compile(f"(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )
_Loader.add_constructor(f"{_TAG}int", _construct_int)
_Loader.add_constructor(f"{_TAG}map", _construct_mapping)
for _kind in ("binary", "timestamp", "omap", "pairs", "set"):
    _Loader.add_constructor(_TAG + _kind, _Loader.construct_undefined)


def _key_lines(node: Node, above: KeyPath, depth: int = 0) -> list[tuple[KeyPath, int]]:
    """Lines of keys down to the depth of a recipe; limited, because a document may refer to itself."""
    if not isinstance(node, MappingNode) or depth > 3:
        return []
    lines: list[tuple[KeyPath, int]] = []
    for key, value in node.value:
        if isinstance(key, ScalarNode):
            path = (*above, key.value)
            lines += [(path, key.start_mark.line + 1), *_key_lines(value, path, depth + 1)]
    return lines


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise RecipeError(f"{path} is a folder; name the recipe's file in it.")
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(raw) > _MAX_BYTES:
        raise RecipeError(f"{path} is larger than a recipe can be (1 MiB). Is it the data rather than the recipe?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}, line {line}: not text in UTF-8. Save it as UTF-8 in your editor.") from None


def _raise_yaml_error(path: Path, error: yaml.YAMLError) -> NoReturn:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    if "could not determine a constructor" in problem:
        problem = "a tag (!...) asks for something other than plain data; remove it"
    elif "'\\t'" in problem:
        problem = "a tab where only spaces are allowed; indent with spaces"
    elif "expected a single document" in (getattr(error, "context", None) or ""):
        problem = "a second document begins (---); a recipe is one document"
    elif not problem.startswith("duplicate key "):
        problem = f"not YAML: {problem}. Look for a missing colon, quote or bracket here or just above"
    raise RecipeError(f"{where}: {problem}.") from None


def _parse_json(text: str, path: Path) -> tuple[Any, dict[KeyPath, int]]:
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise RecipeError(f"{where}: not JSON: {error.msg}. Look for a missing comma, quote or bracket.") from None
    try:
        return value, parse_yaml(text)[1]  # most JSON is YAML too, whose parser knows the lines
    except yaml.YAMLError:
        return value, {}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {duplicate} among {', '.join(mapping)}; keep one of the two")
    return mapping


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number a recipe can hold")


def _plain_copy(value: dict[str, Any], source: str) -> dict[str, Any]:
    """A deep copy of scalars, lists and text-keyed mappings; YAML anchors that share or nest endlessly are refused."""
    count = 0

    def copy(value: Any, above: str, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > _MAX_DEPTH or count > _MAX_VALUES:
            raise RecipeError(f"{source}: {above} is nested too deep, or far too long, for a recipe. Shorten it.")
        if isinstance(value, list):
            return [copy(item, above, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        for key in value:
            if not isinstance(key, str):
                raise RecipeError(f"{source}: the key {key!r} {f'in {above} ' if above else ''}must be text; quote it.")
        return {key: copy(item, f"{above}.{key}".lstrip("."), depth + 1) for key, item in value.items()}

    return copy(value, "", 0)

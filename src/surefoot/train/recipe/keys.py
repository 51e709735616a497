"""Every key of a recipe with its type in words, derived from the schema, so that help and errors agree."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from surefoot.train.recipe.errors import KeyPath
from surefoot.train.recipe.schema import NAME_PATTERN, Factory, Recipe

_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_CONTAINERS: dict[Any, str] = {
    list: "a list of text (a single one needs no brackets)",
    tuple: "a list of two numbers",
    dict: "keys and values",
}
FACTORY = "module:name, such as surefoot.models:decoder"
_FACTORY_SECTION = f"{FACTORY}, alone or as `factory` beside its arguments"


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its path, its type in words, its default and its description."""

    path: KeyPath
    kind: str
    default: Any
    required: bool
    description: str
    types: tuple[Any, ...]
    """The types it accepts."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def has_free_keys(self) -> bool:
        """Whether any keys may follow below it: arguments of a factory, fields of the policy."""
        return any(kind is Factory or get_origin(kind) is dict for kind in self.types)

    @property
    def takes_list(self) -> bool:
        return any(get_origin(kind) in (list, tuple) for kind in self.types)

    @property
    def takes_bool(self) -> bool:
        return bool in self.types


@cache
def keys() -> dict[KeyPath, Key]:
    """All keys that hold a value, in the order of the schema."""
    by_path: dict[KeyPath, Key] = {}
    for name, field in Recipe.model_fields.items():
        if section := _section(field):
            by_path |= {(name, inner): _key((name, inner), item) for inner, item in section.model_fields.items()}
        else:
            by_path[(name,)] = _key((name,), field)
    return by_path


@cache
def sections() -> dict[str, str]:
    """The sections with their descriptions."""
    found = {name: _section(field) for name, field in Recipe.model_fields.items()}
    return {name: section.__doc__ or "" for name, section in found.items() if section}


def owner(path: KeyPath) -> Key | None:
    """The key at this path, or the key with free keys that it lies below."""
    for length in range(len(path), 0, -1):
        if key := keys().get(path[:length]):
            return key if length == len(path) or key.has_free_keys else None
    return None


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not Factory else None


def _key(path: KeyPath, field: FieldInfo) -> Key:
    accepted = tuple(_flatten_union(field.annotation))
    *first, last = [_in_words(kind, field.metadata) for kind in accepted]
    words = f"{', '.join(first)} or {last}" if first else last
    default = None if field.is_required() else field.default
    if isinstance(default, BaseModel):
        default = default.model_dump(mode="json")
    return Key(path, words, default, field.is_required(), field.description or "", accepted)


def _flatten_union(kind: Any) -> list[Any]:
    if get_origin(kind) is Annotated:
        return _flatten_union(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [choice for member in get_args(kind) for choice in _flatten_union(member)]
    return [kind]


def _in_words(kind: Any, metadata: list[Any]) -> str:
    if kind is Factory:
        return _FACTORY_SECTION
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if words := _CONTAINERS.get(get_origin(kind)):
        return words
    if kind is str and any(getattr(item, "pattern", None) == NAME_PATTERN for item in metadata):
        return "module:name"
    return _SCALARS[kind] + (_limits(metadata) if kind in (int, float) else "")


def _limits(metadata: list[Any]) -> str:
    limits = []
    for item in metadata:
        match item:
            case bounds.Gt(gt=low):
                limits.append(f"above {low}")
            case bounds.Ge(ge=low):
                limits.append(f"{low} or more")
            case bounds.Lt(lt=high):
                limits.append(f"below {high}")
            case bounds.Le(le=high):
                limits.append(f"{high} at most")
    return f" ({', '.join(limits)})" if limits else ""

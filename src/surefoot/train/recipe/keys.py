"""Every key a recipe may have, with its kind in words, taken from the schema so that help and errors say the same."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from surefoot.train.recipe.mistakes import Place
from surefoot.train.recipe.schema import NAMED, Made, Recipe

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_HOLDING: dict[Any, str] = {
    list: "a list of text (one alone needs no brackets)",
    tuple: "a list of two numbers",
    dict: "keys and values",
}
FACTORY = "module:name, such as surefoot.models:decoder"
_MADE = f"{FACTORY}, alone or as `factory` beside its arguments"


@dataclass(frozen=True, slots=True)
class Key:
    """One key: where it stands, what it takes in words, and what it is by default."""

    place: Place
    kind: str
    default: Any
    required: bool
    description: str
    types: tuple[Any, ...]
    """What it takes; more than one where there is a choice."""

    @property
    def name(self) -> str:
        return ".".join(self.place)

    @property
    def free(self) -> bool:
        """Whether keys of its own may stand below it: the arguments of something."""
        return any(each is Made or get_origin(each) is dict for each in self.types)

    @property
    def takes_list(self) -> bool:
        return any(get_origin(each) in (list, tuple) for each in self.types)

    @property
    def takes_bool(self) -> bool:
        return bool in self.types


@cache
def keys() -> dict[Place, Key]:
    """All keys that hold a value, in the order of the schema."""
    found: dict[Place, Key] = {}
    for name, field in Recipe.model_fields.items():
        if section := _section(field):
            found |= {(name, inner): _key((name, inner), each) for inner, each in section.model_fields.items()}
        else:
            found[(name,)] = _key((name,), field)
    return found


@cache
def sections() -> dict[str, str]:
    """The sections with what they are about."""
    found = {name: _section(field) for name, field in Recipe.model_fields.items()}
    return {name: section.__doc__ or "" for name, section in found.items() if section}


def owner(place: Place) -> Key | None:
    """The key that a place belongs to: itself, or the one whose arguments it is among."""
    for length in range(len(place), 0, -1):
        if key := keys().get(place[:length]):
            return key if length == len(place) or key.free else None
    return None


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not Made else None


def _key(place: Place, field: FieldInfo) -> Key:
    taken = tuple(_choices(field.annotation))
    *words, last = [_words(each, field.metadata) for each in taken]
    kind = f"{', '.join(words)} or {last}" if words else last
    default = None if field.is_required() else field.default
    if isinstance(default, BaseModel):
        default = default.model_dump(mode="json")
    return Key(place, kind, default, field.is_required(), field.description or "", taken)


def _choices(kind: Any) -> list[Any]:
    if get_origin(kind) is Annotated:
        return _choices(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [choice for each in get_args(kind) for choice in _choices(each)]
    return [kind]


def _words(kind: Any, metadata: list[Any]) -> str:
    if kind is Made:
        return _MADE
    if get_origin(kind) is Literal:
        choices = [str(each) for each in get_args(kind)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if words := _HOLDING.get(get_origin(kind)):
        return words
    if kind is str and any(getattr(each, "pattern", None) == NAMED for each in metadata):
        return "module:name"
    return _PLAIN[kind] + (_limits(metadata) if kind in (int, float) else "")


def _limits(metadata: list[Any]) -> str:
    told = []
    for each in metadata:
        match each:
            case bounds.Gt(gt=low):
                told.append(f"above {low}")
            case bounds.Ge(ge=low):
                told.append(f"{low} or more")
            case bounds.Lt(lt=high):
                told.append(f"below {high}")
            case bounds.Le(le=high):
                told.append(f"{high} at most")
    return f" ({', '.join(told)})" if told else ""

"""Where a run stands in its data: a few numbers that go into JSON, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

KIND = "surefoot.data.position"
VERSION = 1
"""Of these fields and of the order itself: a state of another version would go on with other samples."""
_LARGEST = 1 << 63


class WrongPosition(ValueError):
    """A state that is damaged, or belongs to other data; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Position:
    """The next sample of an epoch, counted over all ranks.

    `cursor` is a place in the order of the epoch, banned samples counted too: a ban moves no other sample.
    """

    seed: int
    length: int
    shuffle: bool
    epoch: int = 0
    cursor: int = 0
    banned: tuple[int, ...] = ()
    """In rising order."""

    def state_dict(self) -> dict[str, Any]:
        told = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"kind": KIND, "version": VERSION, **told, "banned": list(self.banned)}

    def at(self, epoch: int, cursor: int) -> Position:
        return replace(self, epoch=epoch, cursor=cursor)

    def with_banned(self, samples: set[int]) -> Position:
        return replace(self, banned=tuple(sorted(samples.union(self.banned))))

    def check_same_data(self, other: Position) -> None:
        """Refuse a position in other data than `other`'s."""
        for name, words in _SAME.items():
            was, now = getattr(self, name), getattr(other, name)
            if was != now:
                raise WrongPosition(f"the data position was saved with {name}={was}, here it is {now}: {words}")


_SAME = {
    "length": "with another number of samples the order is another one, and some would come twice or never. "
    "Use the dataset of the saved run, or start its data anew by leaving the position out.",
    "seed": "the order of the samples would be another one. Pass the seed of the saved run.",
    "shuffle": "the order of the samples would be another one. Pass the same shuffle= as in the saved run.",
}


def parse_position(state: object) -> Position:
    """A position out of what came from a file; whatever is wrong with it is said."""
    if not isinstance(state, Mapping) or state.get("kind") != KIND:
        raise WrongPosition(f"expected a state of kind {KIND!r}, got {_told(state)}: it belongs to another loader")
    if state.get("version") != VERSION:
        raise WrongPosition(
            f"the data position has version {state.get('version')!r}, this surefoot reads version {VERSION}: "
            "go on with the surefoot that saved it"
        )
    length = _whole(state, "length", 1)
    banned = _banned(state, length)
    if not isinstance(state.get("shuffle"), bool):
        raise WrongPosition(f"the data position is damaged: shuffle is {state.get('shuffle')!r}, not true or false")
    return Position(
        seed=_whole(state, "seed", 0, 2 * _LARGEST - 1),
        length=length,
        shuffle=state["shuffle"],
        epoch=_whole(state, "epoch", 0),
        cursor=_whole(state, "cursor", 0, length),
        banned=tuple(banned),
    )


def _whole(state: Mapping[str, Any], name: str, least: int, most: int = _LARGEST - 1) -> int:
    value = state.get(name)
    if type(value) is not int or not least <= value <= most:
        raise WrongPosition(
            f"the data position is damaged: {name} is {value!r:.100}, not a whole number from {least} to {most}"
        )
    return value


def _banned(state: Mapping[str, Any], length: int) -> list[int]:
    banned = state.get("banned")
    if not isinstance(banned, list | tuple) or not all(type(i) is int and 0 <= i < length for i in banned):
        raise WrongPosition(
            f"the data position is damaged: banned is {banned!r:.100}, not a list of samples below {length}"
        )
    found = sorted(set(banned))
    if len(found) == length:
        raise WrongPosition("the data position is damaged: every sample is banned")
    return found


def _told(state: object) -> str:
    if isinstance(state, Mapping):
        return f"a mapping with {', '.join(map(repr, list(state)[:5])) or 'nothing in it'}"
    return f"{type(state).__name__} {state!r:.60}"

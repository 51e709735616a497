"""`bans.json` of a run directory: samples that no process of the run trains on any more, and those that were lifted.

Checkpoints hold the loader's bans of their own time; this file holds them through a resume from an older one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from surefoot.journal.row_file import write_atomically
from surefoot.journal.strict_json import loads_object

BANS_JSON = "bans.json"
BANS_SCHEMA = 1
BY_GUARD, BY_LOOP, BY_COMMAND = "surefoot", "loop", "command"
"""Who bans: the guard by itself, the training loop with `loader.ban`, or `surefoot data RUN --ban`."""
_MAX_BYTES = 1 << 26


class InvalidBans(ValueError):
    """The file is damaged; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """One banned sample."""

    sample: int
    """Its index in the data set."""
    source: str = ""
    """File and line, or row, where the data set knows it."""
    reason: str = ""
    by: str = BY_COMMAND
    time: float = 0.0
    step: int = -1
    attempt: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BanList:
    """All bans of a run, in the order in which they were made."""

    bans: tuple[Ban, ...] = ()
    lifted: tuple[int, ...] = ()
    """Samples that are not banned any more, whatever a checkpoint says."""
    num_samples: int = 0
    """Samples of the data set; 0 where unknown."""

    @property
    def samples(self) -> set[int]:
        return {ban.sample for ban in self.bans}

    def with_bans(self, bans: Iterable[Ban]) -> BanList:
        """The list with these; a sample that is banned already keeps its entry."""
        known, new = self.samples, {ban.sample: ban for ban in bans}
        added = tuple(ban for sample, ban in new.items() if sample not in known)
        lifted = tuple(sample for sample in self.lifted if sample not in new)
        return replace(self, bans=self.bans + added, lifted=lifted)

    def without(self, samples: Iterable[int]) -> BanList:
        gone = set(samples)
        kept = tuple(ban for ban in self.bans if ban.sample not in gone)
        return replace(self, bans=kept, lifted=tuple(sorted(gone.union(self.lifted))))


def read_bans(run_dir: Path) -> BanList:
    """The bans of a run; empty if there is no file; raises InvalidBans."""
    path = run_dir / BANS_JSON
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidBans(f"{path} is larger than {_MAX_BYTES:,} bytes. {_WAY_OUT}")
        content = loads_object(path.read_bytes())
    except FileNotFoundError:
        return BanList()
    except OSError as error:
        raise InvalidBans(f"{path} cannot be read: {error.strerror or error}. {_WAY_OUT}") from None
    if content is None:
        raise InvalidBans(f"{path} is not a JSON object. {_WAY_OUT}")
    if content.get("schema") != BANS_SCHEMA:
        raise InvalidBans(f"{path} has schema {content.get('schema')!r}, this version reads {BANS_SCHEMA}. {_WAY_OUT}")
    bans, lifted, count = content.get("bans"), content.get("lifted"), content.get("num_samples", 0)
    if not isinstance(bans, list) or not isinstance(lifted, list) or not _is_index(count):
        raise InvalidBans(f"{path} is damaged: bans, lifted or num_samples is missing or wrong. {_WAY_OUT}")
    if not all(map(_is_index, lifted)):
        raise InvalidBans(f"{path} is damaged: lifted is not a list of sample numbers. {_WAY_OUT}")
    return BanList(bans=tuple(_parse_ban(ban, path) for ban in bans), lifted=tuple(lifted), num_samples=count)


def write_bans(run_dir: Path, bans: BanList) -> None:
    content = {
        "schema": BANS_SCHEMA,
        "num_samples": bans.num_samples,
        "lifted": list(bans.lifted),
        "bans": [asdict(ban) for ban in bans.bans],
    }
    write_atomically(run_dir / BANS_JSON, json.dumps(content, indent=1).encode("ascii") + b"\n")


_WAY_OUT = f"Repair it, or delete {BANS_JSON} to start with the bans of the checkpoint alone."


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _parse_ban(values: Any, path: Path) -> Ban:
    """Unknown fields are ignored."""
    if not isinstance(values, dict) or not _is_index(values.get("sample")):
        raise InvalidBans(f"{path} is damaged: a ban has no sample number. {_WAY_OUT}")
    known: dict[str, Any] = {}
    for field in fields(Ban):
        value = values.get(field.name, field.default)
        expected = {"str": str, "int": int, "float": float}[str(field.type)]
        if expected is float and isinstance(value, int):
            value = float(value)
        if type(value) is not expected:
            raise InvalidBans(f"{path} is damaged: {field.name} of a ban is {value!r:.60}. {_WAY_OUT}")
        known[field.name] = value
    return Ban(**known)

"""The incident bundles of a run directory: where they lie, and what their `incident.json` says.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.journal.strict_json import loads_object

INCIDENTS_DIR = "incidents"
INCIDENT_JSON = "incident.json"
INCIDENT_SCHEMA = 1
BEFORE_DIR, NOW_DIR, BATCHES_DIR = "before", "now", "batches"
"""The state before the incident, the state when it was noticed, and the batches in between."""
STEPS_JSON = "steps.json"
PARTIAL_PREFIX = ".partial-"
"""Folders with this prefix were being written when the process ended."""
_MAX_BYTES = 1 << 26
"""Size above which a file is not read."""


class InvalidIncident(ValueError):
    """A folder is no incident bundle, or a damaged one; the message says what to do."""


@dataclass(frozen=True, slots=True)
class IncidentBundle:
    """One incident bundle, as its `incident.json` describes it."""

    path: Path
    info: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.info["step"])

    @property
    def kind(self) -> str:
        """What was done: refuse, rewind, constrain, restart or stop."""
        return str(self.info["kind"])

    @property
    def data_missing(self) -> str:
        """Why the bundle has no tensors to replay; empty if it has them."""
        return str(self.info["data_missing"])

    def __str__(self) -> str:
        return f"{self.path.name}: {self.info.get('reason') or self.kind}"


_REQUIRED: dict[str, type] = {
    "kind": str,
    "step": int,
    "attempt": int,
    "onset": int,
    "snapshot": int,
    "data_missing": str,
    "run": dict,
    "events": list,
}


def read_incident(path: Path) -> IncidentBundle:
    """Read the description of a bundle; raises InvalidIncident."""
    file = path / INCIDENT_JSON if path.is_dir() else path
    if not file.is_file() or file.name != INCIDENT_JSON:
        raise InvalidIncident(
            f"{path} is not an incident bundle: it has no {INCIDENT_JSON}. Pass a folder from RUN/{INCIDENTS_DIR}/"
        )
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise InvalidIncident(f"{file} is larger than {_MAX_BYTES:,} bytes, too large for a description")
        info = loads_object(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidIncident):
            raise
        raise InvalidIncident(f"{file} cannot be read: {error}. Copy the bundle again") from None
    if info is None or info.get("schema") != INCIDENT_SCHEMA:
        schema = None if info is None else info.get("schema")
        raise InvalidIncident(
            f"{file} has schema {schema!r}, and this version reads {INCIDENT_SCHEMA}. Use the version that wrote it"
        )
    wrong = [key for key, kind in _REQUIRED.items() if type(info.get(key)) is not kind]
    if wrong:
        raise InvalidIncident(f"{file} is damaged: {', '.join(wrong)} is missing or wrong. Copy the bundle again")
    return IncidentBundle(file.parent, info)


def incident_folders(run_dir: Path) -> list[Path]:
    """The folders of all complete bundles, in order of steps."""
    folder = run_dir / INCIDENTS_DIR
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(PARTIAL_PREFIX))


def read_incidents(run_dir: Path, notes: list[str]) -> Iterator[IncidentBundle]:
    """All bundles of a run; a sentence in `notes` for each that cannot be read."""
    for path in incident_folders(run_dir):
        try:
            yield read_incident(path)
        except InvalidIncident as error:
            notes.append(str(error))

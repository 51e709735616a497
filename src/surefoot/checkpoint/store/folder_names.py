"""Names in the folder of checkpoints: whole ones, those being written, and those on their way out."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Collection
from functools import cache

from surefoot.process_identity import is_running, pid_scope, start_time

_WHOLE = re.compile(r"step-(\d{8,19})(?:-attempt-(\d{8,19})(?:-(\d{1,9}))?)?")
_OWNED = re.compile(r"\.(writing|marking|removing)-.*-([0-9a-f]{12})-(\d{1,10})-(\d{1,19})-[0-9a-f]{16}")


def parsed(name: str) -> tuple[int, int | None, int] | None:
    """Step, attempt and how many of the same there were before, as a checkpoint's name tells; None for other names."""
    found = _WHOLE.fullmatch(name)
    if found is None:
        return None
    step, attempt, again = found.groups()
    return int(step), None if attempt is None else int(attempt), int(again or attempt is not None)


def free_name(taken: Collection[str], step: int, attempt: int) -> str:
    """A name no checkpoint has; after all others of the same step and attempt."""
    name = f"step-{step:08d}"
    if name not in taken and not any(other.startswith(name + "-") for other in taken):
        return name
    name += f"-attempt-{attempt:08d}"
    if name not in taken and not any(other.startswith(name + "-") for other in taken):
        return name
    before = [found[2] for other in taken if (found := parsed(other)) and found[:2] == (step, attempt)]
    return f"{name}-{max(before, default=1) + 1}"


def owned(kind: str, about: str = "") -> str:
    """A name that no other process on any host will ever choose, and that tells who chose it."""
    host = re.sub(r"[^A-Za-z0-9]", "", pid_scope()["host"])[:24] or "host"
    pid = os.getpid()
    return f".{kind}-{about or 'it'}-{host}-{_place()}-{pid}-{start_time(pid) or 0}-{secrets.token_hex(8)}"


def kind_of(name: str) -> str | None:
    """writing, marking or removing; None for a name that `owned` did not make."""
    found = _OWNED.fullmatch(name)
    return found and found[1]


def owner_runs(name: str) -> bool | None:
    """Whether the process that chose the name still runs; None where that cannot be told from this host."""
    found = _OWNED.fullmatch(name)
    if found is None or found[2] != _place():
        return None
    return is_running(int(found[3]), int(found[4]))


def mine(name: str) -> bool:
    """Whether this very process chose the name."""
    found = _OWNED.fullmatch(name)
    pid = os.getpid()
    return found is not None and found.groups()[1:] == (_place(), str(pid), str(start_time(pid) or 0))


@cache
def _place() -> str:
    return hashlib.sha256(repr(sorted(pid_scope().items())).encode()).hexdigest()[:12]

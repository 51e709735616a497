"""Whether the files of all processes make one state, from JSON and headers alone; needs no torch."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.format.mismatch import DoesNotFit, few
from surefoot.checkpoint.format.safetensors_headers import read_entries
from surefoot.checkpoint.format.state_files import own_name, read_states, tensors_in


def check(folder: Path) -> None:
    """Raise DoesNotFit if a tensor that any process tells of was written by none, or not as a whole.

    Who writes what is decided without asking, so this is worth a look before a checkpoint gets its name: processes that
    were thought to hold the same, and do not, are found here and not at the resume.
    """
    told = read_states(folder)
    entries = read_entries(folder, len(told))
    lacking: set[str] = set()
    for one in told:
        own = set(one["own"])
        named = {own_name(name, one["rank"]) if name in own else name for name in one["tensors"]}
        lacking |= {name for name in (*named, *tensors_in(one)) if name not in entries}
    if lacking:
        raise DoesNotFit(f"{folder} lacks {few(sorted(lacking))}, which no process wrote. Take an older checkpoint")

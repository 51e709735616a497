"""How two checkpoints differ: file by file by the hashes they were saved with, and tensor by tensor in those."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from surefoot.checkpoint.store import StoredCheckpoint
from surefoot.inspect import safetensors_file
from surefoot.logs.log_diagnosis import UnreadableInput

_CHUNK = 1 << 20
_MOST = 20
Look = tuple[str, tuple[int, ...], str]
"""Kind, shape and hash of a tensor, or of a part of one."""


@dataclass(slots=True)
class Comparison:
    """Names on both sides, by how they compare."""

    first: str
    second: str
    files: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[str, list[str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second, "files": self.files, "tensors": self.tensors}

    def as_text(self) -> str:
        lines = [f"{self.first} against {self.second}"]
        for what, groups in (("files", self.files), ("tensors", self.tensors)):
            if any(groups.values()):
                lines.append(", ".join(f"{len(names)} {what} {how}" for how, names in groups.items() if names))
            for how, names in groups.items():
                if how != "the same":
                    lines += [f"  {how}: {name}" for name in names[:_MOST]]
                    lines += [f"  ... and {len(names) - _MOST} more"] * (len(names) > _MOST)
        return "\n".join(lines)


def compare(first: StoredCheckpoint, second: StoredCheckpoint) -> Comparison:
    """Two checkpoints whose manifests can be read; raises Unreadable for a file that cannot."""
    found = Comparison(first.name, second.name, _compared(first.files, second.files))
    # Tensors may lie in other files when the number of processes changed, so all files are looked at, unless equal.
    same = {name for name in found.files["the same"] if name.endswith(".safetensors")}
    found.tensors = _compared(_tensors(first, same), _tensors(second, same))
    equal = {name for file in same for name in _names(first, file)} | set(found.tensors["the same"])
    unequal = {name for how, names in found.tensors.items() if how != "the same" for name in names}
    found.tensors["the same"] = sorted(equal - unequal)
    return found


def _compared(first: Any, second: Any) -> dict[str, list[str]]:
    both = sorted(set(first) & set(second))
    return {
        "the same": [name for name in both if first[name] == second[name]],
        "different": [name for name in both if first[name] != second[name]],
        "only in the first": sorted(set(first) - set(second)),
        "only in the second": sorted(set(second) - set(first)),
    }


def _tensors(kept: StoredCheckpoint, leave: set[str]) -> dict[str, list[Look]]:
    """By name, what each file holds of a tensor."""
    looks: dict[str, list[Look]] = defaultdict(list)
    for file in sorted(kept.files):
        if file.endswith(".safetensors") and file not in leave:
            path = kept.folder / file
            table, start = safetensors_file.read_header(path)
            for name, entry in table.items():
                if name != "__metadata__":
                    kind, shape, begin, end = safetensors_file.parse_entry(path, name, entry)
                    looks[name].append((kind, shape, _hash(path, start + begin, end - begin)))
    return looks


def _names(kept: StoredCheckpoint, file: str) -> list[str]:
    return [name for name in safetensors_file.read_header(kept.folder / file)[0] if name != "__metadata__"]


def _hash(path: Path, start: int, size: int) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb") as stream:
        stream.seek(start)
        while size:
            part = stream.read(min(size, _CHUNK))
            if not part:
                raise UnreadableInput(f"{path} is cut off")
            hashed.update(part)
            size -= len(part)
    return hashed.hexdigest()

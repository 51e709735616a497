"""Compares two checkpoints: files by their stored hashes, then the tensors of the files that differ."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from surefoot.checkpoint.store import StoredCheckpoint
from surefoot.inspect.safetensors_file import read_header
from surefoot.logs.log_diagnosis import UnreadableInput

_CHUNK = 1 << 20
_MAX_SHOWN = 20
TensorDigest = tuple[str, tuple[int, ...], str]
"""Dtype, shape and hash of a tensor, or of a shard of one."""


@dataclass(slots=True)
class CheckpointComparison:
    """Names of files and tensors, grouped by how they compare."""

    first: str
    second: str
    files: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[str, list[str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second, "files": self.files, "tensors": self.tensors}

    def as_text(self) -> str:
        lines = [f"{self.first} compared with {self.second}"]
        for kind, groups in (("files", self.files), ("tensors", self.tensors)):
            if any(groups.values()):
                lines.append(", ".join(f"{len(names)} {kind} {group}" for group, names in groups.items() if names))
            for group, names in groups.items():
                if group != "the same":
                    lines += [f"  {group}: {name}" for name in names[:_MAX_SHOWN]]
                    lines += [f"  ... and {len(names) - _MAX_SHOWN} more"] * (len(names) > _MAX_SHOWN)
        return "\n".join(lines)


def compare(first: StoredCheckpoint, second: StoredCheckpoint) -> CheckpointComparison:
    """Compare two checkpoints with readable manifests; raises UnreadableInput for a file that cannot be read."""
    comparison = CheckpointComparison(first.name, second.name, _group(first.files, second.files))
    # With another number of ranks, tensors lie in other files: compare all files that are not equal.
    same = {name for name in comparison.files["the same"] if name.endswith(".safetensors")}
    comparison.tensors = _group(_tensors(first, same), _tensors(second, same))
    equal = {name for file in same for name in _names(first, file)} | set(comparison.tensors["the same"])
    unequal = {name for group, names in comparison.tensors.items() if group != "the same" for name in names}
    comparison.tensors["the same"] = sorted(equal - unequal)
    return comparison


def _group(first: Any, second: Any) -> dict[str, list[str]]:
    both = sorted(set(first) & set(second))
    return {
        "the same": [name for name in both if first[name] == second[name]],
        "different": [name for name in both if first[name] != second[name]],
        "only in the first": sorted(set(first) - set(second)),
        "only in the second": sorted(set(second) - set(first)),
    }


def _tensors(checkpoint: StoredCheckpoint, ignored: set[str]) -> dict[str, list[TensorDigest]]:
    """Digests by tensor name; one per file that holds a part of the tensor."""
    digests: dict[str, list[TensorDigest]] = defaultdict(list)
    for file in sorted(checkpoint.files):
        if file.endswith(".safetensors") and file not in ignored:
            path = checkpoint.folder / file
            for name, span in read_header(path).tensors.items():
                digests[name].append((span.dtype, span.shape, _hash(path, span.begin, span.end - span.begin)))
    return digests


def _names(checkpoint: StoredCheckpoint, file: str) -> list[str]:
    return list(read_header(checkpoint.folder / file).tensors)


def _hash(path: Path, start: int, size: int) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        stream.seek(start)
        while size:
            part = stream.read(min(size, _CHUNK))
            if not part:
                raise UnreadableInput(f"{path} is truncated")
            digest.update(part)
            size -= len(part)
    return digest.hexdigest()

"""A folder that is a checkpoint: shards with an index, the optimizer and the trainer's state beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from surefoot.logs.checkpoint import safefile, structure, torchfile
from surefoot.logs.checkpoint.held import Contents
from surefoot.logs.table import UnreadableInput

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_LEFT_OUT = ("training_args.bin", "rng_state", "random_states", "scheduler.pt")
_WEIGHTS = (
    "model",
    "pytorch_model",
    "adapter_model",
    "diffusion_pytorch_model",
    "consolidated",
    "mp_rank",
    "optimizer",
)
_LOGS = ("trainer_state.json", ".log", ".csv", ".tsv", ".jsonl", ".out", ".wandb", "run.json")
_MOST = 1000


def is_checkpoint(folder: Path) -> bool:
    """Whether weights lie in the folder itself, by names that savers give them."""
    return weights(folder) is not None or any(name.endswith(".distcp") for name in _names(folder))


def weights(folder: Path) -> Path | None:
    names = _names(folder)
    safe = (name for name in names if name.endswith(".safetensors"))
    torch = (name for name in names if name.endswith(_TORCH) and name.startswith(_WEIGHTS))
    name = next(safe, None) or next(torch, None)
    return folder / name if name else None


def has_log(folder: Path) -> bool:
    return any(name.endswith(_LOGS) or "tfevents" in name for name in _names(folder))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return []


def read(folder: Path) -> Contents:
    names = _names(folder)[:_MOST]
    safe = [name for name in names if name.endswith(".safetensors")]
    torch = [name for name in names if name.endswith(_TORCH) and not name.startswith(_LEFT_OUT)]
    if not safe and not torch and any(name.endswith(".distcp") for name in names):
        raise UnreadableInput(
            f"{folder} is a checkpoint of torch.distributed.checkpoint, whose index is a pickle. Convert it first:"
            f" python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pt"
        )
    if safe:  # the same weights once more, as people keep them for older programs
        torch = [name for name in torch if name.startswith(("optim", "scaler"))]
    contents = Contents("checkpoint folder")
    for name in safe:
        contents.take(safefile.read(folder / name))
    for name in torch:
        _take_torch(contents, folder / name, alone=not safe and not contents.weights)
    _against_index(contents, folder, names)
    contents.step = _trainer_step(folder) or contents.step
    return contents


def _take_torch(contents: Contents, path: Path, *, alone: bool) -> None:
    """A file of torch; what stands beside weights that could be read may be missing."""
    try:
        loaded, notes = torchfile.load(path)
    except UnreadableInput as error:
        if alone:
            raise
        contents.notes.append(f"left out: {error}")
        return
    contents.take(structure.sorted_out(loaded))
    contents.notes += notes


def _against_index(contents: Contents, folder: Path, names: list[str]) -> None:
    """Whether every shard and every tensor that an index promises is there."""
    there = {held.name for held in contents.weights} | set(contents.counters)
    for name in names:
        table = _json(folder / name).get("weight_map") if name.endswith(".index.json") else None
        if not isinstance(table, dict):
            continue
        missing = sorted({shard for shard in map(str, table.values()) if not (folder / shard).is_file()})
        if missing:
            contents.damage.append(f"{name} names {len(missing)} files that are not there: {', '.join(missing[:3])}")
        elif not contents.skipped and (lost := [one for one in table if one not in there]):
            contents.damage.append(f"{name} names {len(lost)} tensors that no file holds: {', '.join(lost[:3])}")


def _trainer_step(folder: Path) -> int | None:
    step = _json(folder / "trainer_state.json").get("global_step")
    return step if isinstance(step, int) and step >= 0 else None


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > 1 << 28:
            return {}
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

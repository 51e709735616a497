"""Checkpoint folders: shards with an index, the optimizer and the trainer state beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from surefoot.inspect import safetensors_file, torch_contents, torch_file
from surefoot.inspect.contents import CheckpointContents
from surefoot.logs.log_diagnosis import UnreadableInput

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_IGNORED = ("training_args.bin", "rng_state", "random_states", "scheduler.pt")
_WEIGHT_PREFIXES = (
    "model",
    "pytorch_model",
    "adapter_model",
    "diffusion_pytorch_model",
    "consolidated",
    "mp_rank",
    "optimizer",
)
_LOG_SUFFIXES = ("trainer_state.json", ".log", ".csv", ".tsv", ".jsonl", ".out", ".wandb", "run.json")
_MAX_FILES = 1000


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder directly contains weights, judged by the file names that savers use."""
    return weights(folder) is not None or any(name.endswith(".distcp") for name in _file_names(folder))


def weights(folder: Path) -> Path | None:
    names = _file_names(folder)
    safetensors = (name for name in names if name.endswith(".safetensors"))
    torch_files = (name for name in names if name.endswith(_TORCH_SUFFIXES) and name.startswith(_WEIGHT_PREFIXES))
    name = next(safetensors, None) or next(torch_files, None)
    return folder / name if name else None


def has_log(folder: Path) -> bool:
    return any(name.endswith(_LOG_SUFFIXES) or "tfevents" in name for name in _file_names(folder))


def _file_names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return []


def read(folder: Path) -> CheckpointContents:
    names = _file_names(folder)[:_MAX_FILES]
    safetensors = [name for name in names if name.endswith(".safetensors")]
    torch_files = [name for name in names if name.endswith(_TORCH_SUFFIXES) and not name.startswith(_IGNORED)]
    if not safetensors and not torch_files and any(name.endswith(".distcp") for name in names):
        raise UnreadableInput(
            f"{folder} is a checkpoint of torch.distributed.checkpoint, whose index is a pickle. Convert it first:"
            f" python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pt"
        )
    if safetensors:  # torch files then repeat the same weights for older programs
        torch_files = [name for name in torch_files if name.startswith(("optim", "scaler"))]
    contents = CheckpointContents("checkpoint folder")
    for name in safetensors:
        contents.merge(safetensors_file.read_safetensors(folder / name))
    for name in torch_files:
        _merge_torch_file(contents, folder / name, alone=not safetensors and not contents.weights)
    _check_index(contents, folder, names)
    contents.step = _trainer_step(folder) or contents.step
    return contents


def _merge_torch_file(contents: CheckpointContents, path: Path, *, alone: bool) -> None:
    """Merge a torch.save file; beside readable weights it may be unreadable, which is only noted."""
    try:
        loaded, notes = torch_file.load_tolerant(path)
    except UnreadableInput as error:
        if alone:
            raise
        contents.notes.append(f"skipped: {error}")
        return
    contents.merge(torch_contents.find_contents(loaded))
    contents.notes += notes


def _check_index(contents: CheckpointContents, folder: Path, names: list[str]) -> None:
    """Check that every shard and every tensor named by an index exists."""
    present = {tensor.name for tensor in contents.weights} | set(contents.counters)
    for name in names:
        table = _read_json(folder / name).get("weight_map") if name.endswith(".index.json") else None
        if not isinstance(table, dict):
            continue
        missing = sorted({shard for shard in map(str, table.values()) if not (folder / shard).is_file()})
        if missing:
            contents.damage.append(f"{name} lists {len(missing)} files that do not exist: {', '.join(missing[:3])}")
        elif not contents.skipped and (lost := [tensor for tensor in table if tensor not in present]):
            contents.damage.append(f"{name} lists {len(lost)} tensors that no file contains: {', '.join(lost[:3])}")


def _trainer_step(folder: Path) -> int | None:
    step = _read_json(folder / "trainer_state.json").get("global_step")
    return step if isinstance(step, int) and step >= 0 else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > 1 << 28:
            return {}
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

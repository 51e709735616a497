"""The kept steps of an incident as files: batches, random states and options; and back into kept steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.checkpoint.format.json_state import JsonEncoder, decode
from surefoot.checkpoint.format.rank_files import CheckpointMismatch, TensorEntry, read_entries
from surefoot.checkpoint.format.shard_reader import read_part
from surefoot.checkpoint.format.shards import Shard, can_hold, write_shards
from surefoot.checkpoint.rng import RngStates, get_torch_rng_states
from surefoot.checkpoint.tree import tensors_in
from surefoot.journal.incident_folders import STEPS_JSON, InvalidIncident
from surefoot.records import StepMetrics
from surefoot.trials.kept_steps import KeptStep, copied, num_bytes

KERNEL_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Optimizer options that say how to compute on a device, not what; another machine has its own."""
_MAX_JSON_BYTES = 1 << 28


class CannotKeep(Exception):
    """The steps of an incident cannot be written to files; the message says why."""


@dataclass(slots=True)
class KeptData:
    """The steps that lead to an incident, as they were kept."""

    steps: list[KeptStep] = field(default_factory=list)
    """Oldest first; those from before the snapshot have no batches."""
    probes: list[KeptStep] = field(default_factory=list)
    layers: dict[str, np.ndarray] = field(default_factory=dict)
    """Of each statistic, the last rows of all tensors, [rows, tensors]."""

    @property
    def nbytes(self) -> int:
        return sum(num_bytes(s.batches) for s in (*self.steps, *self.probes))


def copy_steps(steps: Sequence[KeptStep], probes: Sequence[KeptStep], first: int) -> KeptData:
    """A copy that the training loop cannot change, with the batches of the probes and of the steps from `first` on."""
    return KeptData([_copy_step(s, batches=s.attempt >= first) for s in steps], [_copy_step(s) for s in probes])


def _copy_step(step: KeptStep, *, batches: bool = True) -> KeptStep:
    return KeptStep(
        step.attempt,
        list(step.rng_states) if batches else [],
        [copied(batch) for batch in step.batches] if batches else [],
        [weight.detach().clone() for weight in step.weights] if batches else [],
        options=step.options if batches else [],
        row=step.row,
        max_norm=step.max_norm,
        left_out=step.left_out,
    )


# -- writing


def write_steps(folder: Path, data: KeptData) -> None:
    """Write the steps into this folder; raises CannotKeep if a batch holds what no file can."""
    shards: dict[str, Shard] = {}

    def put(path: str, tensor: Tensor) -> dict[str, Any] | None:
        if not can_hold(tensor):
            return None
        shards[path] = Shard(tensor.detach().contiguous(), (0,) * tensor.dim(), tuple(tensor.shape))
        return {"$tensor": path, "host": tensor.device.type == "cpu"}

    encoder = JsonEncoder(put, Tensor)
    encoded = {
        "steps": [encoder.encode(_as_dict(s), f"steps.{s.attempt}") for s in data.steps],
        "probes": [encoder.encode(_as_dict(s), f"probes.{s.attempt}") for s in data.probes],
        "layers": encoder.encode({n: torch.from_numpy(v.copy()) for n, v in data.layers.items()}, "layers"),
    }
    if encoder.left_out:
        raise CannotKeep(f"a batch holds what cannot be written to a file: {encoder.left_out[0]}")
    write_shards(folder, 0, shards)
    with (folder / STEPS_JSON).open("x") as file:
        file.write(json.dumps(encoded, allow_nan=False))
        file.flush()
        os.fsync(file.fileno())


def _as_dict(step: KeptStep) -> dict[str, Any]:
    return {
        "attempt": step.attempt,
        "rng_states": [state for _, state in step.rng_states],
        "batches": step.batches,
        "weights": step.weights,
        "options": step.options,
        "row": None if step.row is None else {name: _plain(value) for name, value in asdict(step.row).items()},
        "max_norm": step.max_norm,
        "left_out": step.left_out,
    }


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


# -- reading


def read_steps(folder: Path, device: torch.device) -> KeptData:
    """Read the steps back, with batches on this device as far as they were on one; raises InvalidIncident."""
    path = folder / STEPS_JSON
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise InvalidIncident(f"{path} is larger than {_MAX_JSON_BYTES:,} bytes, too large for a list of steps")
        encoded = json.loads(path.read_bytes())
        entries = read_entries(folder, 1)
        load = _loader(entries, device)
        current = [set_state for set_state, _ in get_torch_rng_states({device} if device.type == "cuda" else set())]
        parts = {key: [_from_dict(decode(s, None, load), current) for s in encoded[key]] for key in ("steps", "probes")}
        layers = {name: values.numpy() for name, values in decode(encoded["layers"], None, load).items()}
    except InvalidIncident:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, CheckpointMismatch) as error:
        raise InvalidIncident(f"{path} is damaged: {type(error).__name__}: {error}. Copy the bundle again") from None
    return KeptData(parts["steps"], parts["probes"], layers)


def _loader(
    entries: Mapping[str, TensorEntry], device: torch.device
) -> Callable[[str, Mapping[str, Any], Any], Tensor]:
    def load(name: str, reference: Mapping[str, Any], live: Any) -> Tensor:
        if name not in entries:
            raise ValueError(f"the tensor {name} is missing")
        tensor = read_part(entries[name], entries[name].parts[0])
        return tensor if reference.get("host") or name.startswith("layers.") else tensor.to(device)

    return load


def _from_dict(values: Mapping[str, Any], setters: Sequence[Callable[[Any], object]]) -> KeptStep:
    row = values["row"]
    rng_states: RngStates = list(zip(setters, values["rng_states"], strict=False))
    step = KeptStep(
        int(values["attempt"]),
        rng_states,
        list(values["batches"]),
        list(values["weights"]),
        options=[[_portable(group) for group in optimizer] for optimizer in values["options"]],
        row=None if row is None else _row(row),
        max_norm=values["max_norm"],
        left_out=bool(values["left_out"]),
    )
    step.versions = [t._version for t in tensors_in(step.batches)]
    return step


def _row(values: Mapping[str, Any]) -> StepMetrics:
    enums: dict[str, Any] = {f.name: type(f.default) for f in fields(StepMetrics) if isinstance(f.default, Enum)}
    known = {f.name for f in fields(StepMetrics)}
    given: dict[str, Any] = {n: enums[n](v) if n in enums else v for n, v in values.items() if n in known}
    return StepMetrics(**given)


def _portable(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in KERNEL_OPTIONS}

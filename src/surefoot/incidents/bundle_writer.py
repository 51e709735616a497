"""Writes incident bundles to a run directory, behind the training and within limits of disk, memory and number."""

from __future__ import annotations

import copy as shallow
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.background import BackgroundTask, BackgroundWorker
from surefoot.checkpoint.copies import StateCopy, tensor_bytes
from surefoot.checkpoint.format.hashing import write_pieces
from surefoot.checkpoint.format.param_names import StateNames, name_tensors
from surefoot.checkpoint.format.pieces import split_state
from surefoot.checkpoint.snapshot_memory import free_bytes
from surefoot.incidents.kept_data import CannotKeep, KeptData, copy_steps, write_steps
from surefoot.journal.incident_folders import (
    BATCHES_DIR,
    BEFORE_DIR,
    INCIDENT_JSON,
    INCIDENT_SCHEMA,
    INCIDENTS_DIR,
    NOW_DIR,
    PARTIAL_PREFIX,
    incident_folders,
)
from surefoot.journal.reader import Run, read
from surefoot.journal.strict_json import dumps

MAX_BYTES = 1 << 33
"""Bytes of states and batches in one bundle, at most."""
MAX_DISK_FRACTION = 0.05
"""The fraction of the free disk space that one bundle may take."""
MAX_MEMORY_FRACTION = 0.25
"""The fraction of the free memory that copies for a bundle may take."""
FIRST_WITH_DATA, LAST_WITH_DATA = 2, 6
"""Bundles of a run that keep their tensors: the first ones and the newest ones; the others keep their description."""
MAX_FOLDERS = 100
"""Bundles of a run after which only the journal records incidents."""
ROWS = 100
"""Rows of numbers, overall and by layer, that go into a bundle."""


@dataclass(slots=True, kw_only=True)
class Moment:
    """An incident as the training thread captured it."""

    kind: str
    step: int
    attempt: int
    onset: int
    snapshot: int
    """The attempt after which the state before the incident was taken."""
    info: dict[str, Any]
    """Further entries of `incident.json`."""
    data_missing: str = ""
    """Why the bundle has no states and batches; empty if it has."""
    before: StateCopy | None = None
    now: StateCopy | None = None
    """The state when the incident was noticed, where the run did not simply go on."""
    data: KeptData = field(default_factory=KeptData)
    names: StateNames = field(default_factory=StateNames)


class BundleWriter:
    """Captures incidents in the training thread and writes them in another; never raises into training."""

    def __init__(
        self,
        run_dir: Path,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        flush: Callable[[], object],
        report: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._run_dir = run_dir
        self._model, self._optimizers = model, optimizers
        self._flush = flush
        """Waits until the journal is written."""
        self._report = report
        """Takes a sentence about each bundle, from the training thread."""
        self._worker = BackgroundWorker("surefoot-incidents")
        self.task: BackgroundTask[tuple[str, dict[str, Any]]] | None = None
        """A bundle that is being written, or was written and is not reported yet; `poll` reports it."""
        self._count: int | None = None
        """Bundles in the run directory; None before the first one."""

    def capture(self, moment: Moment) -> None:
        """Copy what the bundle needs and start writing it; an error is reported, and training goes on."""
        try:
            self._capture(moment)
        except Exception as error:  # whatever it is, it must not reach the training loop
            self._report(f"no incident bundle was written: {type(error).__name__}: {error}", {})

    def poll(self, *, wait: bool = False) -> None:
        """Report a bundle that was written since the last call."""
        task = self.task
        if task is None or not (wait or task.done):
            return
        self.task = None
        try:
            message, values = task.result()
        except Exception as error:  # such as a full disk
            message, values = f"no incident bundle was written: {type(error).__name__}: {error}", {}
        self._report(message, values)

    def _capture(self, moment: Moment) -> None:
        self.poll()
        if self.task is not None:
            self._report("no incident bundle was written: the one before is still being written", {})
            return
        if self._count is None:
            self._count = len(incident_folders(self._run_dir))
        if self._count >= MAX_FOLDERS:
            return
        self._count += 1
        moment.data_missing = moment.data_missing or self._too_large(moment)
        if moment.data_missing or moment.before is None:
            moment.before = moment.now = None
        else:
            moment.before = _copied_state(moment.before)
            moment.now = None if moment.now is None else _copied_state(moment.now)
            moment.data = copy_steps(moment.data.steps, moment.data.probes, moment.snapshot + 1)
            moment.names = name_tensors([("model", self._model)], self._optimizers)
        self.task = self._worker.submit(lambda: self._write(moment))

    def _too_large(self, moment: Moment) -> str:
        """Why states and batches are more than a bundle may hold; empty if they are not."""
        states = (copy for copy in (moment.before, moment.now) if copy is not None)
        needed = moment.data.nbytes + sum(sum(map(tensor_bytes, copy.tensors)) for copy in states)
        most = min(MAX_BYTES, int(MAX_DISK_FRACTION * shutil.disk_usage(self._run_dir).free))
        return f"states and batches take {needed:,} bytes, and a bundle may take {most:,}" if needed > most else ""

    # -- in the background thread

    def _write(self, moment: Moment) -> tuple[str, dict[str, Any]]:
        self._flush()
        run = read(self._run_dir)
        folder = self._run_dir / INCIDENTS_DIR
        folder.mkdir(exist_ok=True)
        for leftover in folder.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        name = _unused_name(folder, f"{moment.step:08d}-{moment.kind}")
        partial = folder / f"{PARTIAL_PREFIX}{name}"
        partial.mkdir()
        if moment.before is not None:
            moment.data.layers = {stat: run.layers.grid(stat)[-ROWS:] for stat in run.layers.stats}
            try:
                self._write_data(partial, moment)
            except CannotKeep as why:
                moment.data_missing = str(why)
                _remove_data(partial)
        _write_json(partial / INCIDENT_JSON, _description(moment, run))
        partial.rename(folder / name)
        self._thin_out()
        size = sum(f.stat().st_size for f in (folder / name).rglob("*") if f.is_file())
        what = f" without data: {moment.data_missing}" if moment.data_missing else ""
        return f"incident bundle {INCIDENTS_DIR}/{name} written{what}", {"folder": name, "bytes": size}

    def _write_data(self, folder: Path, moment: Moment) -> None:
        for copy, name in ((moment.before, BEFORE_DIR), (moment.now, NOW_DIR)):
            if copy is not None:
                (folder / name).mkdir()
                write_pieces(folder / name, split_state(copy, moment.names))
        (folder / BATCHES_DIR).mkdir()
        write_steps(folder / BATCHES_DIR, moment.data)

    def _thin_out(self) -> None:
        """Drop the tensors of bundles that are neither among the first nor among the newest."""
        with_data = [p for p in incident_folders(self._run_dir) if (p / BEFORE_DIR).is_dir()]
        for path in with_data[FIRST_WITH_DATA : max(FIRST_WITH_DATA, len(with_data) - LAST_WITH_DATA)]:
            _remove_data(path)


def _remove_data(folder: Path) -> None:
    for name in (BEFORE_DIR, NOW_DIR, BATCHES_DIR):
        shutil.rmtree(folder / name, ignore_errors=True)


def _copied_state(copy: StateCopy) -> StateCopy:
    """A copy of a copy of the run, of the model and its optimizers alone; on the host where the device is full."""
    rest = copy.rest
    result = shallow.copy(copy)
    result.rest = replace(
        rest,
        places=[place for place in rest.places if place.root == 0],
        schedulers=[],
        extra={},
        module_extra_states={key: state for key, state in rest.module_extra_states.items() if key[0] == 0},
    )
    copy.wait_on_device()
    on_device: dict[torch.device, int] = {}
    for tensor in copy.tensors:
        if tensor.is_cuda:
            on_device[tensor.device] = on_device.get(tensor.device, 0) + tensor_bytes(tensor)
    full = {device for device, size in on_device.items() if size > MAX_MEMORY_FRACTION * free_bytes(device)}
    result.tensors = [_copied_tensor(t, to_host=t.device in full) for t in copy.tensors]
    return result


def _copied_tensor(tensor: Tensor, *, to_host: bool) -> Tensor:
    if tensor.is_meta:
        return tensor
    return tensor.to("cpu", copy=True) if to_host else tensor.detach().clone()


def _description(moment: Moment, run: Run) -> dict[str, Any]:
    first = min(moment.onset, moment.snapshot)
    rows = slice(max(0, run.scalars.rows - ROWS), None)
    return {
        "schema": INCIDENT_SCHEMA,
        "kind": moment.kind,
        "step": moment.step,
        "attempt": moment.attempt,
        "onset": moment.onset,
        "snapshot": moment.snapshot,
        "time": time.time(),
        "data_missing": moment.data_missing,
        **moment.info,
        "events": [event for event in run.events if event["attempt"] >= first],
        "run": run.info,
        "layer_names": list(run.layers),
        "rows": {name: run.scalars[name][rows].tolist() for name in run.scalars},
    }


def _unused_name(folder: Path, name: str) -> str:
    number, candidate = 1, name
    while (folder / candidate).exists():
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    with path.open("x") as file:
        file.write(dumps(values))
        file.flush()
        os.fsync(file.fileno())

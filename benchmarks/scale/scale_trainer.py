"""Trains scenarios under loops, and reads from surefoot's journal what it saw and did."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import surefoot
from benchmarks.scale.loops import BARE, SUREFOOT, Loop, make_loop
from benchmarks.scale.scale_controls import FAULT_FREE
from benchmarks.scale.scale_run import ScaleRun
from benchmarks.scale.scale_scenario import ScaleScenario
from benchmarks.scale.sizes import ScaleSize
from benchmarks.scale.texts import load_texts
from benchmarks.zoo.scoreboard.scores import SYSTEM_CAUSES
from surefoot.actions.stop import TrainingStopped
from surefoot.models.decoder import Decoder
from surefoot.records import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleResult:
    """How one scenario ended under one loop."""

    scenario: str
    loop: str
    loss: float | None = None
    """Final eval loss; None when the model is broken."""
    updates: int
    """Updates trained for this result; fewer than the run has where it continued from the loop's fault-free run."""
    seconds: float = 0.0
    """Time to train them."""
    stopped: int | None = None
    """The step at which surefoot stopped the run."""
    acted: int = 0
    """Steps from the onset on at which the loop intervened."""
    acted_before: int = 0
    """The same before the onset, where nothing was wrong."""
    seen_after: int | None = None
    """Updates from the onset to surefoot's first finding."""
    cause: str = ""
    """The first cause that surefoot named from the onset on."""
    actions: tuple[str, ...] = ()
    """What surefoot did from the onset on, in order, without repetitions in a row."""
    eval_losses: tuple[tuple[int, float | None], ...] = ()
    error: str = ""
    """The run ended with this exception."""

    @property
    def ms_per_update(self) -> float:
        return 1e3 * self.seconds / self.updates if self.updates else math.nan


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A loop's fault-free run up to the onset."""

    model: Decoder
    optimizer: dict[str, Any]
    loop: Loop


class ScaleTrainer:
    """The decoder and the texts on one device; every run starts from the same weights."""

    def __init__(self, size: ScaleSize, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.texts = load_texts(device)
        torch.manual_seed(0)
        self._initial = Decoder(size.model).to(device)
        self._prefixes: dict[str, _Prefix] = {}
        try:
            self._warm_up()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            torch.use_deterministic_algorithms(True, warn_only=True)  # this device has no such kernel for some of it
            self._warm_up()

    def _warm_up(self) -> None:
        """Load and compile all kernels before anything is timed."""
        with tempfile.TemporaryDirectory() as folder:
            for name in (BARE, SUREFOOT):
                run, loop = self.fresh_run(), make_loop(name, Path(folder))
                loop.begin(run)
                try:
                    run.train(loop, 3)
                    run.eval_loss(1)
                finally:
                    loop.end()
            if problem := read_journal(Path(folder), FAULT_FREE, 0).get("error"):
                raise RuntimeError(f"surefoot disabled itself in a healthy run: {problem}")

    def run(self, scenario: ScaleScenario, loop_name: str, run_dir: Path) -> ScaleResult:
        """Train one scenario under one loop."""
        if loop_name == SUREFOOT or scenario.from_birth:
            run, loop = self.fresh_run(scenario.seed), make_loop(loop_name, run_dir)
        else:
            run, loop = self.continued_run(loop_name)
        start, onset = run.step, scenario.onset(self.size)
        outcome: dict[str, Any] = {}
        try:
            scenario.plant(run, onset)
            if start == 0:
                shutil.rmtree(run_dir, ignore_errors=True)
                loop.begin(run)
            outcome = self._train(run, loop)
        except Exception as failure:  # the other runs go on; the table shows it
            outcome = {"error": f"{type(failure).__name__}: {failure}"}
        finally:
            loop.end()
        if loop_name == SUREFOOT:
            outcome = read_journal(run_dir, scenario, onset) | outcome
        else:
            outcome["acted"] = sum(step >= onset for step in loop.acted)
            outcome["acted_before"] = sum(step < onset for step in loop.acted)
        return ScaleResult(
            scenario=scenario.name,
            loop=loop_name,
            updates=run.step - start,
            eval_losses=tuple((step, _finite(value)) for step, value in run.eval_losses),
            **outcome,
        )

    def _train(self, run: ScaleRun, loop: Loop) -> dict[str, Any]:
        """Train to the end, timed, and evaluate."""
        stopped = None
        self._synchronize()
        began = time.perf_counter()
        try:
            run.train(loop, self.size.updates)
        except TrainingStopped:
            stopped = run.step
        self._synchronize()
        seconds = time.perf_counter() - began
        return {"stopped": stopped, "seconds": seconds, "loss": _finite(run.eval_loss(self.size.final_batches))}

    def fresh_run(self, seed: int = 0) -> ScaleRun:
        """A run before its first update."""
        gc.collect()  # the last run's snapshots
        torch.manual_seed(seed)
        return ScaleRun(self.size, seed, copy.deepcopy(self._initial), self.texts)

    def continued_run(self, loop_name: str) -> tuple[ScaleRun, Loop]:
        """A run at the onset, as this loop left it without a fault; trained when it is first needed."""
        if loop_name not in self._prefixes:
            run, loop = self.fresh_run(), make_loop(loop_name, Path())
            loop.begin(run)
            run.train(loop, self.size.onset)
            self._prefixes[loop_name] = _Prefix(run.model, run.optimizer.state_dict(), loop)
        prefix = self._prefixes[loop_name]
        torch.manual_seed(0)  # as in a fresh run: nothing draws from the global generator before the onset
        run = ScaleRun(self.size, 0, copy.deepcopy(prefix.model), self.texts)
        run.optimizer.load_state_dict(copy.deepcopy(prefix.optimizer))
        run.step = self.size.onset
        return run, copy.deepcopy(prefix.loop)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def read_journal(run_dir: Path, scenario: ScaleScenario, onset: int) -> dict[str, Any]:
    """What surefoot saw and did, as fields of a result."""
    try:
        events = surefoot.read(run_dir).events
    except ValueError:  # it ended before anything was written
        return {}
    seen = [e["attempt"] for e in events if e["kind"] == "finding" and e["attempt"] >= onset]
    causes = [e["cause"] for e in events if e["kind"] == "diagnosis" and e["attempt"] >= onset]
    decisions = [e for e in events if e["kind"] == "decision" and e["applied"] and e["action"] != Action.RELAX]
    actions = [e["action"] for e in decisions if e["attempt"] >= onset]
    degraded = [e["detail"] for e in events if e["kind"] == "note" and e["name"] == "degraded"]
    return {
        **({"error": degraded[0]} if degraded else {}),
        "acted": len({e["attempt"] for e in decisions if e["attempt"] >= onset}),
        "acted_before": len({e["attempt"] for e in decisions if e["attempt"] < onset}),
        "seen_after": min(seen) - onset if seen else None,
        "cause": next((cause for cause in causes if cause not in SYSTEM_CAUSES or cause in scenario.causes), ""),
        "actions": tuple(a for a, before in zip(actions, [None, *actions], strict=False) if a != before),
    }


@contextlib.contextmanager
def reproducible_and_quiet() -> Iterator[None]:
    """Deterministic kernels where torch has them, and no log lines of surefoot between those of the benchmark."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    log = logging.getLogger("surefoot")
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory, log.level
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it would slow down every torch.empty
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]
        log.setLevel(before[2])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Checks what scenarios state: the fault is absent before its onset, and as harmful as stated.

python -m benchmarks.zoo.verify bad_batch drift      these two, in every family, strength and seed
python -m benchmarks.zoo.verify                      all of them
"""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo import CONTROLS, FAULTS
from benchmarks.zoo.families import Split
from benchmarks.zoo.jobs import BARE, ZooJob
from benchmarks.zoo.scenario import Scenario, ScenarioKind
from benchmarks.zoo.training import Protector, RunSettings, ZooRun, train, train_step

HARM_RATIO = 1.05
"""A bare run whose final loss is above this multiple of its twin's was harmed."""


def fingerprint(run: ZooRun) -> str:
    """A hash of weights, buffers and optimizer state."""
    digest = hashlib.sha256()
    for tensor in run.model.state_dict().values():
        digest.update(_bytes(tensor))
    for p in run.model.parameters():
        for _, value in sorted(run.optimizer.state.get(p, {}).items()):
            digest.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(torch.uint8).numpy() if tensor.dim() else repr(tensor.item()).encode()


def fingerprint_after(scenario: Scenario, steps: int) -> str:
    """The fingerprint of an unprotected run after this many steps; with several ranks that of the last one, where
    single-rank faults are planted."""
    run, protector = scenario.run(scenario.settings.ranks - 1), Protector()
    for step in range(steps):
        train_step(run, step, protector, run.model)
    return fingerprint(run)


@lru_cache(maxsize=256)
def twin_loss(settings: RunSettings) -> float:
    """Final loss of a fault-free run."""
    return train(ZooRun(settings), Protector()).loss


def loss_ratio(scenario: Scenario) -> float:
    """Final loss of the bare run relative to its twin's; infinite when the model broke."""
    if scenario.settings.ranks > 1:
        with tempfile.TemporaryDirectory() as folder:
            loss, twin = (ZooJob(run.id, BARE, folder).run().loss for run in (scenario, scenario.twin))
        return loss / twin
    return train(scenario.run(), Protector()).loss / twin_loss(scenario.settings)


def is_harmed(ratio: float) -> bool:
    return not ratio <= HARM_RATIO  # so that NaN counts as harmed


def verify_kind(kind: ScenarioKind) -> Iterable[tuple[Scenario, float, bool]]:
    """Each scenario of a kind with its loss ratio, and whether that is as stated."""
    for split in Split:
        for scenario in kind.scenarios(split):
            ratio = loss_ratio(scenario)
            yield scenario, ratio, scenario.healthy or is_harmed(ratio) == scenario.harmful


def has_learnt(scenario: Scenario) -> bool:
    """Whether a run ends with a lower eval loss than it started with, as a healthy one must."""
    run = scenario.run()
    start = run.eval_loss()
    end = train(run, Protector()).loss
    return math.isfinite(end) and end < start


def absent_before_onset(scenario: Scenario) -> bool:
    """Whether a run and its twin are bit-equal when the fault begins."""
    return fingerprint_after(scenario, scenario.onset) == fingerprint_after(scenario.twin, scenario.onset)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    kinds = FAULTS | CONTROLS
    unknown = [name for name in names if name not in kinds]
    if unknown:
        print(f"unknown: {', '.join(unknown)}. Use any of {', '.join(kinds)}.")
        return 2
    failures = 0
    for name in names or kinds:
        for scenario, ratio, as_stated in verify_kind(kinds[name]):
            absent = absent_before_onset(scenario)
            stated = "healthy" if scenario.healthy else "harmful" if scenario.harmful else "harmless"
            passed = as_stated and absent and (not scenario.healthy or has_learnt(scenario))
            remark = "" if passed else "   <-- NOT AS STATED" if absent else "   <-- PRESENT BEFORE ITS ONSET"
            print(f"{scenario.id:50s} {stated:9s} final loss {ratio:8.3f} of its twin's{remark}", flush=True)
            failures += not passed
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a scenario says of itself, put to the proof: absent before its onset, repeatable, and as harmful as stated.

python -m benchmarks.zoo.verify bad_batch drift      every family, strength and seed of these, with what they state
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
from benchmarks.zoo.jobs import BARE, Job
from benchmarks.zoo.scenario import Kind, Scenario
from benchmarks.zoo.training import Protector, Run, Settings, one_step, train

WORSE = 1.05
"""A bare run that ends above this many times its twin's loss was harmed."""


def fingerprint(run: Run) -> str:
    """One word for everything a run has learnt: weights, buffers and optimizer state, bit for bit."""
    digest = hashlib.sha256()
    for tensor in run.model.state_dict().values():
        digest.update(_bytes(tensor))
    for p in run.model.parameters():
        for _, value in sorted(run.optimizer.state.get(p, {}).items()):
            digest.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(torch.uint8).numpy() if tensor.dim() else repr(tensor.item()).encode()


def after(scenario: Scenario, steps: int) -> str:
    """The fingerprint of a run after so many steps, without anyone watching; of several processes the last one's, which
    is where faults of a single process are planted."""
    run, nobody = scenario.run(scenario.settings.ranks - 1), Protector()
    for step in range(steps):
        one_step(run, step, nobody, run.model)
    return fingerprint(run)


@lru_cache(maxsize=256)
def bare(settings: Settings) -> float:
    """Final loss of a fault-free run."""
    return train(Run(settings), Protector()).loss


def ratio(scenario: Scenario) -> float:
    """Final loss of the bare run against its twin's; infinite when it died."""
    if scenario.settings.ranks > 1:
        with tempfile.TemporaryDirectory() as folder:
            mine, twins = (Job(one.id, BARE, folder).do().loss for one in (scenario, scenario.twin))
        return mine / twins
    return train(scenario.run(), Protector()).loss / bare(scenario.settings)


def harmed(ratio: float) -> bool:
    return not ratio <= WORSE  # so that NaN counts as harmed


def prove(kind: Kind) -> Iterable[tuple[Scenario, float, bool]]:
    """Each scenario of a kind with the ratio to its twin, and whether that is as stated."""
    for split in Split:
        for scenario in kind.scenarios(split):
            found = ratio(scenario)
            yield scenario, found, scenario.healthy or harmed(found) == scenario.harmful


def learnt(scenario: Scenario) -> bool:
    """Whether a run ends better than it began, which a healthy one must."""
    run = scenario.run()
    start = run.examine()
    end = train(run, Protector()).loss
    return math.isfinite(end) and end < start


def absent_before_onset(scenario: Scenario) -> bool:
    """Whether a run and its twin are equal, bit for bit, when the fault begins."""
    return after(scenario, scenario.onset) == after(scenario.twin, scenario.onset)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    kinds = FAULTS | CONTROLS
    unknown = [name for name in names if name not in kinds]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(kinds)}")
        return 2
    wrong = 0
    for name in names or kinds:
        for scenario, found, stated in prove(kinds[name]):
            pure = absent_before_onset(scenario)
            says = "healthy" if scenario.healthy else "harmful" if scenario.harmful else "harmless"
            good = stated and pure and (not scenario.healthy or learnt(scenario))
            told = "" if good else "   <-- NOT AS STATED" if pure else "   <-- NOT ABSENT BEFORE ITS ONSET"
            print(f"{scenario.id:50s} {says:9s} ends at {found:8.3f} of its twin{told}", flush=True)
            wrong += not good
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One zoo run as a job for a worker process, with its result cached on disk until its sources change."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch

import surefoot
from benchmarks.zoo import CONTROLS, FAULTS, other_rules
from benchmarks.zoo.attached import SurefootProtector
from benchmarks.zoo.families import Split
from benchmarks.zoo.multi_rank import train_ranks
from benchmarks.zoo.scenario import Scenario
from benchmarks.zoo.training import Protector, train

BARE = "bare"
"""No intervention: surefoot observes and records, which changes no bit of the run."""
SUREFOOT = "surefoot"
RULES_ALONE = "surefoot without step_fn"
"""No trials can be run: the rules decide alone."""
INTERVENTION_RULES: dict[str, Callable[[], Protector]] = {make().name: make for make in other_rules.INTERVENTION_RULES}
"""The intervention rules of other projects, by name."""


@dataclass(frozen=True)
class JobResult:
    """The outcome of one run."""

    id: str
    judge: str
    loss: float
    stopped: int | None
    acted: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class ZooJob:
    """One run to train: which scenario, which protector, which folder."""

    id: str
    judge: str
    folder: str

    @property
    def scenario(self) -> Scenario:
        return all_scenarios()[self.id]

    @property
    def run_dir(self) -> Path:
        """Surefoot's run directory, whether it observes or protects."""
        return Path(self.folder, _slug(self.judge), self.id)

    @cached_property
    def _result_file(self) -> Path:
        return Path(self.folder, _slug(self.judge), f"{self.id}.json")

    @cached_property
    def source_hash(self) -> str:
        """Changes with whatever could change the result: the loop, the fault, the protector, torch."""
        names = ("families", "models", "training", "attached", "scenario")
        sources = [_SOURCES[f"benchmarks.zoo.{name}"] for name in names]
        sources.append(_SOURCES[self.scenario.module])
        sources.append(_SOURCES[other_rules.__name__] if self.judge in INTERVENTION_RULES else _PACKAGE)
        text = "\n".join([*sources, self.scenario.settings.label, self.scenario.strength, torch.__version__])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def cached(self) -> JobResult | None:
        """The stored result, unless its sources have changed since."""
        try:
            stored = json.loads(self._result_file.read_text())
        except (OSError, ValueError):
            return None
        if stored.pop("made_by", None) != self.source_hash or (self.judge == BARE and not self.run_dir.is_dir()):
            return None
        return JobResult(**stored | {"acted": tuple(stored["acted"])})

    def run(self) -> JobResult:
        """Train the run and store its result."""
        started = time.perf_counter()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        ranks = self.scenario.settings.ranks
        if ranks > 1:
            outcome = train_ranks(asdict(self), ranks)
        else:
            protector = protector_for(self)
            outcome = {**asdict(train(self.scenario.run(), protector)), "acted": list(protector.acted)}
        seconds = time.perf_counter() - started
        result = JobResult(self.id, self.judge, outcome["loss"], outcome["stopped"], tuple(outcome["acted"]), seconds)
        self._result_file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._result_file.with_suffix(".new")
        draft.write_text(json.dumps(asdict(result) | {"made_by": self.source_hash}))
        draft.replace(self._result_file)
        return result


def protector_for(job: ZooJob) -> Protector:
    """The protector that this job trains under."""
    if job.judge in (BARE, SUREFOOT, RULES_ALONE):
        return SurefootProtector(job.run_dir, observe=job.judge == BARE, trials=job.judge == SUREFOOT)
    return INTERVENTION_RULES[job.judge]()


@lru_cache(maxsize=1)
def all_scenarios() -> dict[str, Scenario]:
    """All scenarios of both splits and their fault-free twins, by id."""
    by_id: dict[str, Scenario] = {}
    for split in Split:
        for scenario in scenarios_of(split):
            by_id[scenario.id] = scenario
            by_id.setdefault(scenario.twin.id, scenario.twin)
    return by_id


def scenarios_of(split: Split) -> Iterator[Scenario]:
    """All faults and controls of one split."""
    for kind in (*FAULTS.values(), *CONTROLS.values()):
        yield from kind.scenarios(split)


def _package_source() -> str:
    """The source of surefoot without its command line."""
    folder = Path(surefoot.__file__).parent
    return "\n".join(p.read_text() for p in sorted(folder.rglob("*.py")) if p.parent.name != "cli")


# Read at import: someone may edit them while a benchmark runs.
_SOURCES = {
    name: inspect.getsource(module) for name, module in sys.modules.items() if name.startswith("benchmarks.zoo.")
}
_PACKAGE = _package_source()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())

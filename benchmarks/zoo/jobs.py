"""One run of the zoo as a piece of work that can be done anywhere, kept on disk, and known again when it is stale."""

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
from benchmarks.zoo.attached import Attached
from benchmarks.zoo.families import Split
from benchmarks.zoo.multi_rank import train_together
from benchmarks.zoo.scenario import Scenario
from benchmarks.zoo.training import Protector, train

BARE = "bare"
"""Nobody acts; surefoot observes and records, which changes no bit."""
OURS = "surefoot"
ACTING: dict[str, Callable[[], Protector]] = {make().name: make for make in other_rules.ACTING}
"""What others do to a run, by name."""


@dataclass(frozen=True)
class Result:
    """What came of one run."""

    id: str
    judge: str
    loss: float
    stopped: int | None
    acted: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Job:
    """One run to be made: which scenario, who protects it, where its files go."""

    id: str
    judge: str
    folder: str

    @property
    def scenario(self) -> Scenario:
        return everything()[self.id]

    @property
    def run_dir(self) -> Path:
        """Where surefoot writes, whether it only observes or protects."""
        return Path(self.folder, _slug(self.judge), self.id)

    @cached_property
    def _kept(self) -> Path:
        return Path(self.folder, _slug(self.judge), f"{self.id}.json")

    @cached_property
    def made_by(self) -> str:
        """Changes with whatever could change the result: the loop, the fault, who watches or acts, torch."""
        sources = [_SOURCES[f"benchmarks.zoo.{name}"] for name in ("families", "run", "recording", "scenario")]
        sources.append(_SOURCES[self.scenario.home])
        sources.append(_SOURCES[other_rules.__name__] if self.judge in ACTING else _PACKAGE)
        word = "\n".join([*sources, self.scenario.settings.label, self.scenario.strength, torch.__version__])
        return hashlib.sha256(word.encode()).hexdigest()[:16]

    def known(self) -> Result | None:
        """What came of it the last time, unless something has changed since."""
        try:
            held = json.loads(self._kept.read_text())
        except (OSError, ValueError):
            return None
        if held.pop("made_by", None) != self.made_by or (self.judge == BARE and not self.run_dir.is_dir()):
            return None
        return Result(**held | {"acted": tuple(held["acted"])})

    def do(self) -> Result:
        """Make the run and keep what came of it."""
        started = time.perf_counter()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        ranks = self.scenario.settings.ranks
        if ranks > 1:
            found = train_together(asdict(self), ranks)
        else:
            protector = protector_for(self)
            found = {**asdict(train(self.scenario.run(), protector)), "acted": list(protector.acted)}
        spent = time.perf_counter() - started
        result = Result(self.id, self.judge, found["loss"], found["stopped"], tuple(found["acted"]), spent)
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._kept.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(result) | {"made_by": self.made_by}))
        fresh.replace(self._kept)
        return result


def protector_for(job: Job) -> Protector:
    """Whoever stands by this run."""
    if job.judge in (BARE, OURS):
        return Attached(job.run_dir, observe=job.judge == BARE)
    return ACTING[job.judge]()


@lru_cache(maxsize=1)
def everything() -> dict[str, Scenario]:
    """All scenarios of both parts and their fault-free twins, by their names."""
    found: dict[str, Scenario] = {}
    for split in Split:
        for one in of_split(split):
            found[one.id] = one
            found.setdefault(one.twin.id, one.twin)
    return found


def of_split(split: Split) -> Iterator[Scenario]:
    """All faults and controls of one part."""
    for kind in (*FAULTS.values(), *CONTROLS.values()):
        yield from kind.scenarios(split)


def _package() -> str:
    """All that stands behind `attach`."""
    home = Path(surefoot.__file__).parent
    parts = sorted(p for p in home.rglob("*.py") if p.parent.name not in ("zoo", "faults", "bench", "cli"))
    return "\n".join(p.read_text() for p in parts)


# Read when they are loaded: someone may be editing them while a bench runs.
_SOURCES = {
    name: inspect.getsource(module) for name, module in sys.modules.items() if name.startswith("benchmarks.zoo.")
}
_PACKAGE = _package()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())

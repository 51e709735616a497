"""A scenario: a fault with its planted cause, or a healthy change that looks suspicious."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.scale.scale_run import ScaleRun
from benchmarks.scale.sizes import ScaleSize
from surefoot.records import Cause

Plant = Callable[[ScaleRun, int], None]
TWIN = "fault_free"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleScenario:
    """What is planted, when, and what is expected of a guard."""

    name: str
    plant: Plant
    causes: frozenset[Cause] = frozenset()
    """Causes that count as right; none in a healthy run."""
    curable: bool = False
    """Whether an intervention in the loop can undo the harm; otherwise somebody has to mend the code."""
    from_birth: bool = False
    """There from the first update on; otherwise from `ScaleSize.onset`."""
    seed: int = 0

    @property
    def healthy(self) -> bool:
        return not self.causes

    @property
    def about(self) -> str:
        return (self.plant.__doc__ or "").strip()

    def onset(self, size: ScaleSize) -> int:
        return 0 if self.from_birth else size.onset


SCENARIOS: dict[str, ScaleScenario] = {}


def fault(*causes: Cause, curable: bool = True, from_birth: bool = False) -> Callable[[Plant], Plant]:
    """Register a fault, `plant(run, onset)`, with the causes that count as right."""
    return lambda plant: _add(plant, causes, curable=curable, from_birth=from_birth)


def control(*, from_birth: bool = False, seed: int = 0) -> Callable[[Plant], Plant]:
    """Register a healthy change, `plant(run, onset)`."""
    return lambda plant: _add(plant, (), curable=False, from_birth=from_birth, seed=seed)


def _add(plant: Plant, causes: Iterable[Cause], *, curable: bool, from_birth: bool, seed: int = 0) -> Plant:
    name = plant.__name__
    SCENARIOS[name] = ScaleScenario(
        name=name, plant=plant, causes=frozenset(causes), curable=curable, from_birth=from_birth, seed=seed
    )
    return plant

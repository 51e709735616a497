"""Scenarios: a fault or a healthy control, planted in a model family from a known step on, with its stated harm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.zoo.families import FAMILIES, Split
from benchmarks.zoo.training import RunSettings, ZooRun
from surefoot.records import Cause

STRENGTHS = ("subtle", "clear", "brutal")
SEEDS = {Split.TUNING: (11, 12), Split.REPORT: (101, 102)}
"""Seeds of the two splits; families and seeds of tuning and reporting are disjoint."""
TWIN = "twin"
ONSET = 150
"""Default first step of a fault: by then rules with a window of 128 have filled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run to train: a fault, or a healthy change that looks suspicious, in one family with one seed."""

    name: str
    settings: RunSettings
    plant: Callable[[ZooRun], None]
    onset: int
    cause: Cause | None = None
    """None in a healthy control."""
    also_causes: frozenset[Cause] = frozenset()
    """Other causes that count as right, where their symptoms are the same."""
    strength: str = ""
    harmful: bool = False
    """Stated in advance: the bare run ends more than 5 % worse than its fault-free twin."""
    curable: bool = True
    """Whether an intervention can cure the run; otherwise the fault can only be detected."""
    about: str = ""
    module: str = __name__
    """The module that defines it."""

    @property
    def healthy(self) -> bool:
        return self.cause is None

    def is_right_cause(self, cause: Cause | None) -> bool:
        """Whether this diagnosis names what was planted."""
        return cause is not None and (cause is self.cause or cause in self.also_causes)

    @property
    def split(self) -> Split:
        return FAMILIES[self.settings.family].split

    @property
    def id(self) -> str:
        """Unique name of the run and of its files."""
        if self.name == TWIN:
            return f"{TWIN}-{self.settings.label}"
        parts = [self.name, self.settings.family, self.strength, str(self.settings.seed)]
        return "-".join(part for part in parts if part)

    @property
    def twin(self) -> Scenario:
        """The same run without its fault."""
        return replace(
            self,
            name=TWIN,
            plant=_no_fault,
            cause=None,
            also_causes=frozenset(),
            strength="",
            harmful=False,
            about="",
            module=__name__,
        )

    def run(self, rank: int = 0) -> ZooRun:
        """The run with its fault planted, ready to train."""
        run = ZooRun(self.settings, rank)
        self.plant(run)
        return run


def _no_fault(run: ZooRun) -> None:
    """Plants no fault."""


@dataclass(frozen=True, slots=True)
class ScenarioKind:
    """The definition of a fault or control, for all its families, strengths and seeds."""

    name: str
    plant: Callable[..., None]
    families: Mapping[str, str]
    onset: int
    cause: Cause | None
    strengths: Mapping[str, tuple[float, float, float]]
    curable: bool
    also_causes: frozenset[Cause] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The area of the fault: the name of the module that defines it."""
        return self.plant.__module__.rpartition(".")[2]

    @property
    def about(self) -> str:
        return (self.plant.__doc__ or "").strip()

    def scenarios(self, split: Split) -> Iterator[Scenario]:
        """All runs of this kind in one split."""
        for family, marks in self.families.items():
            if FAMILIES[family].split is split:
                for seed in SEEDS[split]:
                    yield from self._in(RunSettings(family=family, seed=seed, **self.settings), marks)

    def _in(self, settings: RunSettings, marks: str) -> Iterator[Scenario]:
        common = {"name": self.name, "settings": settings, "onset": self.onset, "about": self.about}
        common["module"] = self.plant.__module__
        if self.cause is None:
            yield Scenario(**common, plant=lambda run: self.plant(run, self.onset))
            return
        for strength, value, mark in zip(STRENGTHS, self.strengths[settings.family], marks, strict=True):
            yield Scenario(
                **common,
                plant=lambda run, value=value: self.plant(run, self.onset, value),
                cause=self.cause,
                also_causes=self.also_causes,
                strength=strength,
                harmful=mark == "!",
                curable=self.curable,
            )


FAULTS: dict[str, ScenarioKind] = {}
CONTROLS: dict[str, ScenarioKind] = {}
Plant = Callable[[ZooRun, int, float], None]
PlantControl = Callable[[ZooRun, int], None]


def fault(
    cause: Cause,
    *,
    on: Mapping[str, str],
    strengths: tuple[float, float, float] | Mapping[str, tuple[float, float, float]],
    onset: int = ONSET,
    curable: bool = True,
    also: Iterable[Cause] = (),
    **settings: Any,
) -> Callable[[Plant], Plant]:
    """Register a fault: `plant(run, onset, strength)`.

    `on` names its families, each with three marks for subtle, clear and brutal: "!" where the bare run ends more than
    5 % worse than its twin, "." where it does not. `strengths` are the values passed to `plant`, the same for all
    families or one triple per family. `also` lists other causes that count as right. `settings` are fields of
    `RunSettings`, shared with the twin.
    """
    for family, marks in on.items():
        if family not in FAMILIES or len(marks) != len(STRENGTHS) or set(marks) - set("!."):
            raise ValueError(f"zoo: {family!r}: {marks!r} must be a known family and three of '!' and '.'")
    by_family = dict.fromkeys(on, strengths) if isinstance(strengths, tuple) else dict(strengths)

    def add(plant: Plant) -> Plant:
        causes = frozenset(also)
        _add(FAULTS, ScenarioKind(plant.__name__, plant, on, onset, cause, by_family, curable, causes, settings))
        return plant

    return add


def control(*families: str, onset: int = ONSET, **settings: Any) -> Callable[[PlantControl], PlantControl]:
    """Register a healthy run that looks suspicious: `plant(run, onset)` makes a legitimate change."""

    def add(plant: PlantControl) -> PlantControl:
        on = dict.fromkeys(families, "")
        _add(CONTROLS, ScenarioKind(plant.__name__, plant, on, onset, None, {}, False, frozenset(), settings))
        return plant

    return add


def _add(kinds: dict[str, ScenarioKind], kind: ScenarioKind) -> None:
    if kind.name in FAULTS or kind.name in CONTROLS:
        raise ValueError(f"zoo: two scenarios are named {kind.name}")
    if not kind.about:
        raise ValueError(f"zoo: {kind.name} needs a docstring that says what it does")
    kinds[kind.name] = kind

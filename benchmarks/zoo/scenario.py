"""What a scenario says of itself: where the fault sits, from which step on, why, and whether it does harm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.zoo.families import FAMILIES, Split
from benchmarks.zoo.training import Run, Settings
from surefoot.records import Cause

STRENGTHS = ("subtle", "clear", "brutal")
SEEDS = {Split.TUNING: (11, 12), Split.REPORT: (101, 102)}
"""Seeds of the two parts; with the families they keep tuning and reporting apart."""
TWIN = "twin"
ONSET = 150
"""The step a fault begins at unless it says otherwise: by then rules with a window of 128 have filled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run to be made: a fault or a suspicious but healthy change, planted in one family with one seed."""

    name: str
    settings: Settings
    plant: Callable[[Run], None]
    onset: int
    cause: Cause | None = None
    """None in a healthy control."""
    also: frozenset[Cause] = frozenset()
    """Other names that are right too, where what was planted looks the same."""
    strength: str = ""
    harmful: bool = False
    """Stated beforehand: the bare run ends more than 5 % worse than its fault-free twin."""
    curable: bool = True
    """Whether acting on the run can cure it, or it is only to be seen."""
    about: str = ""
    home: str = __name__
    """The module it is written down in."""

    @property
    def healthy(self) -> bool:
        return self.cause is None

    def names(self, cause: Cause | None) -> bool:
        """Whether this is the right name for what was planted."""
        return cause is not None and (cause is self.cause or cause in self.also)

    @property
    def split(self) -> Split:
        return FAMILIES[self.settings.family].split

    @property
    def id(self) -> str:
        """Names the run among all runs, and its files."""
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
            plant=_nothing,
            cause=None,
            also=frozenset(),
            strength="",
            harmful=False,
            about="",
            home=__name__,
        )

    def run(self, rank: int = 0) -> Run:
        """The run, planted and ready to be trained."""
        run = Run(self.settings, rank)
        self.plant(run)
        return run


def _nothing(run: Run) -> None:
    """Plants no fault."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A fault or a control as it is written down once, for all its families, strengths and seeds."""

    name: str
    plant: Callable[..., None]
    on: Mapping[str, str]
    onset: int
    cause: Cause | None
    strengths: Mapping[str, tuple[float, float, float]]
    curable: bool
    also: frozenset[Cause] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """What it has to do with: the name of the file it stands in."""
        return self.plant.__module__.rpartition(".")[2]

    @property
    def about(self) -> str:
        return (self.plant.__doc__ or "").strip()

    def scenarios(self, split: Split) -> Iterator[Scenario]:
        """All runs of this kind in one part of the zoo."""
        for family, marks in self.on.items():
            if FAMILIES[family].split is split:
                for seed in SEEDS[split]:
                    yield from self._in(Settings(family=family, seed=seed, **self.settings), marks)

    def _in(self, settings: Settings, marks: str) -> Iterator[Scenario]:
        common = {"name": self.name, "settings": settings, "onset": self.onset, "about": self.about}
        common["home"] = self.plant.__module__
        if self.cause is None:
            yield Scenario(**common, plant=lambda run: self.plant(run, self.onset))
            return
        for strength, figure, mark in zip(STRENGTHS, self.strengths[settings.family], marks, strict=True):
            yield Scenario(
                **common,
                plant=lambda run, figure=figure: self.plant(run, self.onset, figure),
                cause=self.cause,
                also=self.also,
                strength=strength,
                harmful=mark == "!",
                curable=self.curable,
            )


FAULTS: dict[str, Kind] = {}
CONTROLS: dict[str, Kind] = {}
Plant = Callable[[Run, int, float], None]
PlantControl = Callable[[Run, int], None]


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
    """Add a fault to the zoo: `plant(run, onset, strength)`.

    `on` names the families it is planted in, each with three marks for subtle, clear and brutal: "!" where the bare
    run ends more than 5 % worse than its twin, "." where it does not. `strengths` are the figures handed to `plant`,
    for all families or for each. `also` are other causes that are right too. `settings` are those of `Settings`,
    shared with the twin.
    """
    for family, marks in on.items():
        if family not in FAMILIES or len(marks) != len(STRENGTHS) or set(marks) - set("!."):
            raise ValueError(f"zoo: {family!r}: {marks!r} must be a known family and three of '!' and '.'")
    each = dict.fromkeys(on, strengths) if isinstance(strengths, tuple) else dict(strengths)

    def add(plant: Plant) -> Plant:
        _add(FAULTS, Kind(plant.__name__, plant, on, onset, cause, each, curable, frozenset(also), settings))
        return plant

    return add


def control(*families: str, onset: int = ONSET, **settings: Any) -> Callable[[PlantControl], PlantControl]:
    """Add a healthy run that looks suspicious: `plant(run, onset)` makes the change that is meant to be."""

    def add(plant: PlantControl) -> PlantControl:
        on = dict.fromkeys(families, "")
        _add(CONTROLS, Kind(plant.__name__, plant, on, onset, None, {}, False, frozenset(), settings))
        return plant

    return add


def _add(kinds: dict[str, Kind], kind: Kind) -> None:
    if kind.name in FAULTS or kind.name in CONTROLS:
        raise ValueError(f"zoo: there are two of the name {kind.name}")
    if not kind.about:
        raise ValueError(f"zoo: {kind.name} needs a docstring that says what it does")
    kinds[kind.name] = kind

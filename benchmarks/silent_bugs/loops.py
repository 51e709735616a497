"""What a case of the suite is: a training loop with one bug, or a healthy one, and where the bug was described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.records import Cause


class Half(StrEnum):
    """Checks are tuned on one half of the suite and reported on the other."""

    TUNING = "tuning"
    REPORT = "report"


@dataclass(slots=True)
class Loop:
    """Everything preflight is given, and the loop's own code where the bug is there."""

    model: nn.Module
    optimizer: Optimizer
    batches: list[Any]
    step_fn: Callable[[nn.Module, Any], Tensor]
    scheduler: Any = None
    total_steps: int | None = None
    clip: float | None = None
    eval_batches: Sequence[Any] = ()
    update: Callable[[Loop, Tensor], None] | None = None
    """What the loop does with the loss, where that is not zero_grad, backward, step."""


@dataclass(frozen=True, slots=True)
class Case:
    """One loop of the suite."""

    name: str
    half: Half
    family: str
    build: Callable[[], Loop]
    about: str
    causes: frozenset[Cause]
    """Causes that count as right; none for a healthy twin."""
    source: str
    """Where bugs of this kind are described."""

    @property
    def healthy(self) -> bool:
        return not self.causes


CASES: dict[str, Case] = {}
Builder = Callable[[], Loop]


def bug(half: Half, family: str, *causes: Cause, source: str) -> Callable[[Builder], Builder]:
    """Register a function that builds a loop with a bug; its docstring says what is wrong."""

    def register(build: Builder) -> Builder:
        _add(Case(_name(build), half, family, build, _about(build), frozenset(causes), source))
        return build

    return register


def twin(half: Half, family: str) -> Callable[[Builder], Builder]:
    """Register a function that builds a healthy loop."""

    def register(build: Builder) -> Builder:
        _add(Case(_name(build), half, family, build, _about(build), frozenset(), ""))
        return build

    return register


def _name(build: Builder) -> str:
    return getattr(build, "__name__", "")


def _about(build: Builder) -> str:
    return (build.__doc__ or "").strip()


def _add(case: Case) -> None:
    assert case.name not in CASES, case.name
    CASES[case.name] = case

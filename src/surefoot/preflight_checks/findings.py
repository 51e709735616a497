"""What preflight says: typed findings, and the report that holds them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import nn

from surefoot.kinds import Cause


class Certainty(StrEnum):
    """Whether a finding is a fact, or may be intended."""

    SURE = "sure"
    DOUBTFUL = "doubtful"


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """One thing that is wrong with a training loop, or may be."""

    cause: Cause
    certainty: Certainty
    what: str
    """What is wrong, in one sentence."""
    how: str
    """How that is known: what was measured, with numbers."""
    fix: str
    """What to change."""
    where: str = ""
    """The module or parameter, and the file of its class, as far as known."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The numbers."""

    @property
    def sure(self) -> bool:
        return self.certainty is Certainty.SURE

    def as_json(self) -> dict[str, Any]:
        return {
            "cause": str(self.cause),
            "certainty": str(self.certainty),
            "what": self.what,
            "how": self.how,
            "where": self.where,
            "fix": self.fix,
            "values": {name: _json_value(value) for name, value in self.values.items()},
        }

    def lines(self) -> list[str]:
        place = f" ({self.where})" if self.where else ""
        return [
            f"{self.certainty}: {self.cause}: {self.what}{place}",
            f"    known by: {self.how}",
            f"    -> {self.fix}",
        ]


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """Everything preflight found, and what it could not find out."""

    findings: Sequence[PreflightFinding]
    """The sure ones first."""
    not_checked: Mapping[str, str]
    """Checks that could not be made, and why."""
    seconds: float
    proposed_lr: float | None = None
    """Of the rates tried, the one that lowered the loss most, where that is not the one asked for."""

    @property
    def sure(self) -> list[PreflightFinding]:
        return [finding for finding in self.findings if finding.sure]

    @property
    def doubtful(self) -> list[PreflightFinding]:
        return [finding for finding in self.findings if not finding.sure]

    @property
    def failed(self) -> bool:
        """Whether something is wrong for sure."""
        return bool(self.sure)

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": not self.failed,
            "findings": [finding.as_json() for finding in self.findings],
            "not_checked": dict(self.not_checked),
            "seconds": round(self.seconds, 3),
            "proposed_lr": self.proposed_lr,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PreflightReport:
        """The report that `as_json` described."""
        findings = [
            PreflightFinding(
                Cause(f["cause"]), Certainty(f["certainty"]), f["what"], f["how"], f["fix"], f["where"], f["values"]
            )
            for f in values["findings"]
        ]
        return cls(tuple(findings), values["not_checked"], values["seconds"], values["proposed_lr"])

    def __str__(self) -> str:
        lines = [line for finding in self.findings for line in finding.lines()]
        verdict = (
            f"{len(self.sure)} sure and {len(self.doubtful)} doubtful findings"
            if self.findings
            else "nothing found that is wrong"
        )
        lines.append(f"preflight: {verdict}, in {self.seconds:.1f} s")
        if self.proposed_lr is not None:
            lines.append(f"preflight: of the rates tried, lr {self.proposed_lr:.3g} lowered the loss most")
        return "\n".join(lines)


def sure(cause: Cause, what: str, how: str, fix: str, *, where: str = "", **values: Any) -> PreflightFinding:
    return PreflightFinding(cause, Certainty.SURE, what, how, fix, where, values)


def doubtful(cause: Cause, what: str, how: str, fix: str, *, where: str = "", **values: Any) -> PreflightFinding:
    return PreflightFinding(cause, Certainty.DOUBTFUL, what, how, fix, where, values)


def place_of(model: nn.Module, name: str) -> str:
    """A module or parameter by its name, with the file and line of the class that is not torch's, if there is one."""
    path = name
    while True:
        try:
            kind = type(model.get_submodule(path))
        except AttributeError:
            kind = None
        if kind is not None and not kind.__module__.startswith("torch."):
            source = _source_of(kind)
            label = name or kind.__name__
            return f"{label}, {source}" if source else label
        if not path:
            return name
        path = path.rpartition(".")[0]


def _source_of(kind: type) -> str:
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return ""
    return f"{Path(file).name}:{line}" if file else ""


def some_names(names: Sequence[str], limit: int = 4) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_json_value(part) for part in value]
    return value

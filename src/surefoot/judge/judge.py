"""One row in, events out: what was seen, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from surefoot.judge.detect.bottleneck import Bottleneck
from surefoot.judge.detect.nonfinite import NonFinite
from surefoot.judge.detect.outlandish import Outlandish
from surefoot.judge.policy import Policy
from surefoot.records import Action, Decision, Event, Finding, Row, Verdict

TALK = 50
"""Refusals in a row that are each told; after that only the 64th, 128th and so on."""


class Detector(Protocol):
    """Looks at one row at a time; can tell, and cannot act."""

    def update(self, row: Row) -> list[Finding]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Judge:
    """Runs the detectors over each row and decides within the policy's limits."""

    def __init__(self, policy: Policy, names: Sequence[str] = ()) -> None:
        self.policy = policy
        self.names = names
        """Of the tensors, in the order of the rows of `layers`."""
        self.proven = -1
        """States taken at this attempt or before it are known to be good by the steps that followed."""
        self.quiet = True
        """Nothing is amiss, so that a state may be taken now."""
        self.detectors: Sequence[Detector] = (NonFinite(), Outlandish(), Bottleneck())
        self._refused = 0
        self._overflows = 0
        self._attempt = -1

    def rewound(self, attempt: int, step: int) -> None:
        """The run went back to the state it had after this attempt."""

    def failed(self, decision: Decision, why: str) -> None:
        """What was decided could not be done; the next rung is tried with the next row."""

    def update(self, row: Row, layers: Any = None) -> list[Event]:
        """Findings first, then what is decided from them."""
        found: list[Event] = [f for d in self.detectors for f in d.update(row)]
        refused = row.verdict in (Verdict.NONFINITE, Verdict.OUTLANDISH)
        if row.verdict is Verdict.LANDED:
            self._refused = self._overflows = 0
        if row.attempt != self._attempt:  # an update counts once, however many optimizers took part in it
            self._refused += refused
            self._overflows += row.verdict is Verdict.OVERFLOW
            self._attempt = row.attempt
        if refused and self._refused > TALK and self._refused & (self._refused - 1):
            found.clear()  # a run that only observes may go on like this for ever
        elif refused:
            reason = "; ".join(f.detail for f in found if isinstance(f, Finding))
            found.append(self._decision(row, Action.REFUSE, reason))
        if self._refused == self.policy.limit or (self._refused > self.policy.limit and not self.policy.observe):
            found.append(self._decision(row, Action.STOP, self._why_refused(row, found)))
        elif self._overflows == self.policy.overflow_limit:
            found.append(self._decision(row, Action.STOP, self._why_overflows(row)))
        return found

    def _why_refused(self, row: Row, found: Sequence[Event]) -> str:
        last = next((e.reason for e in found if isinstance(e, Decision)), "")
        if row.bad_weights > 0:
            way_out = "The weights themselves are damaged: go back to a checkpoint from before."
        elif row.verdict is Verdict.OUTLANDISH:
            way_out = (
                "Look at the batches since then, lower the learning rate or clip. If this level is meant to be, allow "
                "it with policy=surefoot.Policy(outlandish=...)."
            )
        else:
            way_out = "Look at the batches since then; lower the learning rate, clip, or use bfloat16 or float32."
        return (
            f"{self._refused} updates in a row were refused, the last at step {row.step} "
            f"(attempt {row.attempt}): {last}. None of them touched weights or optimizer. {way_out}"
        )

    def _why_overflows(self, row: Row) -> str:
        return (
            f"the loss scale overflowed {self._overflows} times in a row (it is now {row.loss_scale:.3g}), so no "
            "update has landed: the gradients themselves are not finite. Use bfloat16 or float32, or look at the "
            "batches since then."
        )

    def _decision(self, row: Row, action: Action, reason: str) -> Decision:
        return Decision(
            step=row.step,
            attempt=row.attempt,
            time=row.time,
            action=action,
            reason=reason,
            applied=not self.policy.observe,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "refused": self._refused,
            "overflows": self._overflows,
            "attempt": self._attempt,
            "detectors": [d.state_dict() for d in self.detectors],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._refused, self._overflows, self._attempt = state["refused"], state["overflows"], state["attempt"]
        for detector, held in zip(self.detectors, state["detectors"], strict=True):
            detector.load_state_dict(held)

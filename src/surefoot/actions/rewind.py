"""Rewinds a run to its newest good snapshot."""

from __future__ import annotations

from surefoot.actions.action_context import ActionContext, CannotAct
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing
from surefoot.checkpoint.train_state import RestoreError


class RewindIncomplete(RuntimeError):
    """A rewind failed after it had restored a part of the state."""


def rewind(run: ActionContext, *, before: int = -1, onset_known: bool = False) -> Snapshot:
    """Restore the newest good snapshot taken before the attempt `before` (any when negative), and return it.

    When the trouble is known to have begun at that attempt, a snapshot that is not confirmed yet is good enough.
    """
    if run.ring is None:
        raise CannotAct("no snapshots are kept")
    state = _newest(run, run.ring, before, onset_known)
    try:
        run.ring.rewind(state)
    except RestoreError as error:
        raise CannotAct(str(error)) from error
    except Exception as error:
        raise RewindIncomplete(
            f"the rewind to step {state.step} failed half-way ({error}), so weights and optimizer state may not match: "
            "restart from a checkpoint"
        ) from error
    run.rewound(state)
    return state


def _newest(run: ActionContext, ring: SnapshotRing, before: int, onset_known: bool) -> Snapshot:
    """The newest snapshot that every rank holds: one rank alone may have run out of memory and skipped some."""
    ring.verify()  # offer only intact snapshots to the other ranks
    early = [s for s in ring.snapshots if before < 0 or s.attempt < before]
    good = {s.attempt: s for s in early if s.good or onset_known}
    common = run.common_attempts(sorted(good))
    if not common:
        raise CannotAct(f"there is no good snapshot to rewind to: {ring.describe()}")
    return good[max(common)]

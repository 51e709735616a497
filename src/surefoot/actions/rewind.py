"""Back to the last good state."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.actions.action_context import ActionContext, CannotAct
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing
from surefoot.checkpoint.train_state import RestoreError


class HalfWay(RuntimeError):
    """Some of a state was put back and some was not."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """Goes to the newest good state taken before an attempt; a negative one means any.

    Where it is known that the trouble began with that attempt, one that is not proven yet is as good.
    """

    before: int = -1
    dated: bool = False

    def apply(self, run: ActionContext) -> Snapshot:
        """The state the run is in now."""
        if run.ring is None:
            raise CannotAct("no states are kept")
        state = self._newest(run, run.ring)
        try:
            run.ring.rewind(state)
        except RestoreError as error:
            raise CannotAct(str(error)) from error
        except Exception as error:
            raise HalfWay(
                f"going back to step {state.step} broke off half-way ({error}), so weights and optimizer may not "
                "belong together any more: start again from a checkpoint"
            ) from error
        run.went_back(state)
        return state

    def _newest(self, run: ActionContext, ring: SnapshotRing) -> Snapshot:
        """Memory may have run out on one process only, so all of them look for a state that every one has."""
        ring.verify()  # what is offered to the others must be fit to go back to
        early = [s for s in ring.snapshots if self.before < 0 or s.attempt < self.before]
        good = {s.attempt: s for s in early if s.good or self.dated}
        shared = run.shared(sorted(good))
        if not shared:
            raise CannotAct(f"there is no good state to go back to: {ring.describe()}")
        return good[max(shared)]

"""Finds where an iteration of the training loop ends, from the order in which the optimizers step.

One optimizer ends an iteration with each step. Several may step together on one backward, alternate (critic,
generator), or alternate unevenly (five critic steps to one generator step): there an iteration is one cycle of that
order. A cycle is known once it has occurred twice; until then no step counts as the end of an iteration, so that
nothing is saved in the middle of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

REMEMBERED_CYCLES = 32
"""Iterations whose order is remembered: a step that occurs only now and then is expected for that long."""
SETTLED_AFTER = 3
"""Iterations after which an order that varies, and so has no period, is accepted."""
ALONE_AFTER = 32
"""Consecutive steps of one optimizer after which each of them is an iteration: the others do not take part for now."""
IRREGULAR_AFTER = 128
"""Steps without a recognised end after which every step counts as one: there is no order to recognise."""

Steps = tuple["int | None", ...]
"""Optimizers in the order in which they stepped; None for a step that loss scaling skipped."""


class IterationOrder:
    """Follows the steps of all optimizers of a run."""

    def __init__(self, optimizers: int) -> None:
        self.completed = 0
        """Iterations that have ended so far."""
        self.before = 0
        """The same, before the last step."""
        self.ended = True
        """The last step is known to have ended an iteration: no other optimizer's step is missing."""
        self.withdrawn: int | None = None
        """The attempt that was wrongly taken for the end of an iteration: the last step continued it."""
        self.irregular = False
        """No order was recognised, so every step counts."""
        self._all = frozenset(range(optimizers))
        self._open: list[int | None] = []
        """The steps of the current iteration; kept until the next one begins."""
        self._cycles: deque[Steps] = deque(maxlen=REMEMBERED_CYCLES)
        self._settled = False
        self._early: list[int | None] = []
        """All steps so far, until the order is settled."""
        self._first: int | None = None
        """The optimizer that begins an iteration."""
        self._counted = False
        """The current iteration is already among the completed ones."""
        self._run_length = self._since_end = 0
        """Consecutive steps of the same optimizer, and steps since an end was recognised."""
        self._solo: int | None = None
        """The optimizer that steps alone for now."""
        self._last_attempt = self._began = -1
        """The attempt of the last step, and of the first step of the current iteration."""
        self._completed_before = 0
        """Iterations that had ended before those that the order is being recognised from."""

    @property
    def expected(self) -> int:
        """The optimizer that steps next, as far as that is known."""
        if self.ended or not self._open:
            return self._first or 0
        candidates = {cycle[len(self._open)] for cycle in self._longer_cycles()}
        return next((k for k in candidates if k is not None), 0) if len(candidates) == 1 else 0

    @property
    def several(self) -> bool:
        """More than one optimizer has stepped in the current iteration, or is known to step in each."""
        return self._settled or len(set(self._open)) > 1

    def step(self, k: int | None, attempt: int) -> None:
        """Optimizer `k` has stepped at this attempt; None when loss scaling skipped a step."""
        self.withdrawn = None
        if len(self._all) == 1 or self.irregular:
            self.before, self.completed, self.ended = self.completed, self.completed + 1, True
            return
        self._run_length = self._run_length + 1 if self._open and self._open[-1] == k else 1
        if self._solo is not None and k in (self._solo, None):
            self.before, self.completed, self.ended = self.completed, self.completed + 1, True
        else:
            self._advance(k, attempt)
        self._last_attempt = attempt

    def _advance(self, k: int | None, attempt: int) -> None:
        if self._solo is not None:  # the others take part again, and the last step may have been part of that
            self._start_over([self._solo])
        begins = self._begins(k)
        if begins:
            self._close_iteration()
            self._open, self._counted, self._began = [], False, attempt
        elif self.ended:
            self.withdrawn = self._last_attempt
        self._open.append(k)
        if not self._settled:
            self._early.append(k)
            self._first = self._early[0]
        self.before, self._since_end = self.completed, self._since_end + 1
        self.ended = self._ends(attempt)
        if self.ended:
            self._since_end = 0
        if self.ended and not self._counted:
            self.completed, self._counted = self.completed + 1, True
        elif not self.ended:
            self._give_up()

    def _begins(self, k: int | None) -> bool:
        """Whether this step begins another iteration."""
        if not self._open:
            return True
        size = len(self._open) + 1
        if self._settled and any(_matches([*self._open, k], cycle[:size]) for cycle in self._longer_cycles()):
            return False
        if self.ended and k in (self._first, None):
            return True
        # A skipped step may have been that of any optimizer.
        seen = self._all if None in self._open else {*self._open}
        return k == self._first and self._open[-1] != k and self._all <= seen

    def _close_iteration(self) -> None:
        """The current iteration has ended, as is known by now at the latest."""
        steps = tuple(self._open)
        if not steps or None in steps:
            return
        if not self._settled:
            self.completed += not self._counted
            self._counted = True
        elif not self._counted and (self._all <= set(steps)):
            self.completed += 1
        self._cycles.append(steps)
        if not self._settled and len(self._cycles) >= SETTLED_AFTER:
            self._settle(self._cycles)

    def _ends(self, attempt: int) -> bool:
        """Whether the current iteration is over with its last step."""
        if attempt == self._began and self._all <= set(self._open):
            if not self._settled:  # all stepped on one backward: none is missing
                self._settle([tuple(self._open)])
            return not self._longer_cycles()
        if self._settled:
            return any(_matches(self._open, cycle) for cycle in self._cycles) and not self._longer_cycles()
        return self._repeats()

    def _repeats(self) -> bool:
        """Whether all steps so far are the same cycle twice, with each optimizer in it."""
        half, odd = divmod(len(self._early), 2)
        if odd or not _matches(self._early[:half], self._early[half:]):
            return False
        cycle = tuple(a if b is None else b for a, b in zip(self._early[:half], self._early[half:], strict=True))
        if not self._all <= set(cycle) or None in cycle:
            return False
        self.completed = max(self.completed, self._completed_before + 1)
        self._settle([cycle, cycle])
        self._open, self._counted = list(cycle), self.completed > self._completed_before + 1
        return True

    def _longer_cycles(self) -> list[Steps]:
        """The known cycles that begin like the current iteration and go on."""
        size = len(self._open)
        return [cycle for cycle in self._cycles if len(cycle) > size and _matches(self._open, cycle[:size])]

    def _settle(self, cycles: Iterable[Steps]) -> None:
        self._cycles = deque(cycles, maxlen=REMEMBERED_CYCLES)
        self._settled, self._first, self._early = True, self._cycles[0][0], []

    def _give_up(self) -> None:
        """Count every step where one optimizer steps alone for long, or where there is no order at all."""
        if self._run_length > ALONE_AFTER + 2 * max(map(_longest_run, self._cycles), default=0):
            self._solo = self._open[-1]
            self.completed += self._run_length - self._counted
            self.ended, self._since_end = True, 0
        elif self._since_end > IRREGULAR_AFTER + 2 * max(map(len, self._cycles), default=0):
            self.irregular = self.ended = True
            self.completed += 1

    def _start_over(self, steps: list[int]) -> None:
        """Recognise the order again from here on."""
        self._cycles.clear()
        self._open, self._early = [*steps], [*steps]
        self._solo, self._settled, self._counted, self._run_length, self._since_end = None, False, True, 1, 0
        self.ended, self._began, self._first = True, self._last_attempt, steps[0]
        self._completed_before = self.completed - 1

    def state_dict(self) -> dict[str, Any]:
        """What is known of the order; an iteration begins with the next step."""
        return {
            "known": [list(cycle) for cycle in self._cycles] if self._settled else [],
            "solo": self._solo,
            "irregular": self.irregular,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        cycles = [tuple(cycle) for cycle in state["known"] if set(cycle) <= self._all]
        if cycles:
            self._settle(cycles)
        self._solo = state["solo"] if state["solo"] in self._all else None
        self._open = [] if self._solo is None else [self._solo]
        self.irregular = bool(state["irregular"])


def _matches(steps: Sequence[int | None], cycle: Sequence[int | None]) -> bool:
    """Whether these are the steps of a cycle, where a skipped step matches any."""
    return len(steps) == len(cycle) and all(a == b or a is None or b is None for a, b in zip(steps, cycle, strict=True))


def _longest_run(cycle: Steps) -> int:
    longest = run = 0
    for i, k in enumerate(cycle):
        run = run + 1 if i and cycle[i - 1] == k else 1
        longest = max(longest, run)
    return longest

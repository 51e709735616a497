"""Where an iteration of the training loop ends, recognised from the order in which the optimizers step.

One optimizer ends an iteration with each step. Several may step together on one backward, in turn (critic, generator),
or unevenly (five critic steps to one generator step): there an iteration is one cycle of that order. A cycle is known
once it has come twice; until then no step is taken for the end of an iteration, so nothing is saved in the middle of
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

REMEMBERED = 32
"""Iterations whose order is remembered: a step that comes only now and then is expected for that long."""
SETTLED = 3
"""Iterations after which an order that varies, and so has no period, is believed."""
ALONE = 32
"""Steps of one optimizer in a row, beyond which each of them is an iteration: the others do not take part for now."""
LOST = 128
"""Steps without a recognised end, after which every step is taken for one: there is no order to recognise."""

Steps = tuple["int | None", ...]
"""Optimizers in the order in which they stepped; None for a step that loss scaling skipped."""


class IterationOrder:
    """Follows the steps of all optimizers of a run, each as it is made."""

    def __init__(self, optimizers: int) -> None:
        self.completed = 0
        """Iterations that have ended so far."""
        self.before = 0
        """The same, before the last step."""
        self.over = True
        """The last step is known to have ended an iteration: no other optimizer's step is missing."""
        self.withdrawn: int | None = None
        """The attempt that was taken for the end of an iteration, and was not: the last step went on with it."""
        self.irregular = False
        """No order was recognised, so every step counts."""
        self._all = frozenset(range(optimizers))
        self._open: list[int | None] = []
        """The steps of the iteration under way; it stays until the next one begins."""
        self._known: deque[Steps] = deque(maxlen=REMEMBERED)
        self._settled = False
        self._early: list[int | None] = []
        """All steps so far, until the order is settled."""
        self._first: int | None = None
        """The optimizer that begins an iteration."""
        self._counted = False
        """The iteration under way is among the completed ones already."""
        self._run = self._since = 0
        """Steps in a row of the same optimizer, and steps since an end was recognised."""
        self._solo: int | None = None
        """The optimizer that steps alone for now."""
        self._attempt = self._began = -1
        self._base = 0
        """Iterations that had ended before those that the order is being recognised from."""

    @property
    def expected(self) -> int:
        """The optimizer that steps next, as far as that is known."""
        if self.over or not self._open:
            return self._first or 0
        nexts = {cycle[len(self._open)] for cycle in self._longer()}
        return next((k for k in nexts if k is not None), 0) if len(nexts) == 1 else 0

    @property
    def several(self) -> bool:
        """More than one optimizer has stepped in the iteration under way, or is known to step in each."""
        return self._settled or len(set(self._open)) > 1

    def step(self, k: int | None, attempt: int) -> None:
        """An optimizer has stepped at an attempt; None when loss scaling skipped the step of one."""
        self.withdrawn = None
        if len(self._all) == 1 or self.irregular:
            self.before, self.completed, self.over = self.completed, self.completed + 1, True
            return
        self._run = self._run + 1 if self._open and self._open[-1] == k else 1
        if self._solo is not None and k in (self._solo, None):
            self.before, self.completed, self.over = self.completed, self.completed + 1, True
        else:
            self._advance(k, attempt)
        self._attempt = attempt

    def _advance(self, k: int | None, attempt: int) -> None:
        if self._solo is not None:  # the others take part again, and the last step may have been part of that
            self._start_over([self._solo])
        begins = self._begins(k)
        if begins:
            self._close()
            self._open, self._counted, self._began = [], False, attempt
        elif self.over:
            self.withdrawn = self._attempt
        self._open.append(k)
        if not self._settled:
            self._early.append(k)
            self._first = self._early[0]
        self.before, self._since = self.completed, self._since + 1
        self.over = self._ends(attempt)
        if self.over:
            self._since = 0
        if self.over and not self._counted:
            self.completed, self._counted = self.completed + 1, True
        elif not self.over:
            self._give_up()

    def _begins(self, k: int | None) -> bool:
        """Whether this step begins another iteration."""
        if not self._open:
            return True
        if self._settled and any(_fits([*self._open, k], cycle[: len(self._open) + 1]) for cycle in self._longer()):
            return False
        if self.over and k in (self._first, None):
            return True
        return k == self._first and self._open[-1] != k and self._all <= {*self._open, *self._guessed()}

    def _guessed(self) -> Iterable[int]:
        """The optimizers that may have been the ones whose steps were skipped."""
        return self._all if None in self._open else ()

    def _close(self) -> None:
        """The iteration under way has ended, as is known now at the latest."""
        steps = tuple(self._open)
        if not steps or None in steps:
            return
        if not self._settled:
            self.completed += not self._counted
            self._counted = True
        elif not self._counted and (self._all <= set(steps)):
            self.completed += 1
        self._known.append(steps)
        if not self._settled and len(self._known) >= SETTLED:
            self._settle(self._known)

    def _ends(self, attempt: int) -> bool:
        """Whether the iteration under way is over with its last step."""
        if attempt == self._began and self._all <= set(self._open):
            if not self._settled:  # all on one backward: nothing is missing
                self._settle([tuple(self._open)])
            return not self._longer()
        if self._settled:
            return any(_fits(self._open, cycle) for cycle in self._known) and not self._longer()
        return self._repeats()

    def _repeats(self) -> bool:
        """Whether all steps so far are one and the same cycle twice, with each optimizer in it."""
        half, odd = divmod(len(self._early), 2)
        if odd or not _fits(self._early[:half], self._early[half:]):
            return False
        cycle = tuple(a if b is None else b for a, b in zip(self._early[:half], self._early[half:], strict=True))
        if not self._all <= set(cycle) or None in cycle:
            return False
        self.completed = max(self.completed, self._base + 1)
        self._settle([cycle, cycle])
        self._open, self._counted = list(cycle), self.completed > self._base + 1
        return True

    def _longer(self) -> list[Steps]:
        """The known iterations that begin like the one under way and go on."""
        size = len(self._open)
        return [cycle for cycle in self._known if len(cycle) > size and _fits(self._open, cycle[:size])]

    def _settle(self, cycles: Iterable[Steps]) -> None:
        self._known = deque(cycles, maxlen=REMEMBERED)
        self._settled, self._first, self._early = True, self._known[0][0], []

    def _give_up(self) -> None:
        """Every step is an end where one optimizer steps alone for long, or where there is no order at all."""
        if self._run > ALONE + 2 * max(map(_longest_run, self._known), default=0):
            self._solo = self._open[-1]
            self.completed += self._run - self._counted
            self.over, self._since = True, 0
        elif self._since > LOST + 2 * max(map(len, self._known), default=0):
            self.irregular = self.over = True
            self.completed += 1

    def _start_over(self, steps: list[int]) -> None:
        """Recognise the order anew from here on."""
        self._known.clear()
        self._open, self._early = [*steps], [*steps]
        self._solo, self._settled, self._counted, self._run, self._since = None, False, True, 1, 0
        self.over, self._began, self._first, self._base = True, self._attempt, steps[0], self.completed - 1

    def state_dict(self) -> dict[str, Any]:
        """What is known of the order; an iteration begins with the next step."""
        return {
            "known": [list(cycle) for cycle in self._known] if self._settled else [],
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


def _fits(steps: Sequence[int | None], cycle: Sequence[int | None]) -> bool:
    """Whether these are the steps of a cycle, as far as none was skipped."""
    return len(steps) == len(cycle) and all(a == b or a is None or b is None for a, b in zip(steps, cycle, strict=True))


def _longest_run(cycle: Steps) -> int:
    longest = run = 0
    for i, k in enumerate(cycle):
        run = run + 1 if i and cycle[i - 1] == k else 1
        longest = max(longest, run)
    return longest

"""Optimizers that step in turn: which of them share a backward, and samples of the weights of each such group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.measure.grad_stats import GradStats
from surefoot.measure.layout import Layout
from surefoot.measure.weight_stats import UpdateSample

Group = frozenset[int]
"""Optimizers that step on the same backward."""


class AlternatingWeights:
    """Knows who steps together, and says when a group's weights are measured: its own, at its own steps. The block has
    room for one group's numbers at a time, and they wait there until the next row of that group is sent."""

    def __init__(self, layout: Layout, once: Tensor, device: torch.device, *, every: int) -> None:
        together = frozenset(range(len(layout.groups)))
        self.partners: list[Group] = [together for _ in layout.groups]
        """For each optimizer, those that stepped on the backward that it last used: they stand or fall together."""
        self._layout = layout
        self._once = once
        self._device = device
        self._every = every
        self._samples: dict[Group, tuple[UpdateSample, Tensor]] = {}
        self._steps: dict[Group, int] = {}
        """Steps of each group so far."""
        self._due: dict[Group, int] = {}
        self._taken: Group | None = None
        """Whose weights were sampled before the step that is under way."""
        self._held: Group | None = None
        """Whose numbers lie in the block."""
        self._waiting: set[Group] = set()

    def ended(self, stepped: Group) -> None:
        """These optimizers have stepped on one backward, and no others."""
        self.partners = [stepped if k in stepped else known - stepped for k, known in enumerate(self.partners)]

    def alternates(self, k: int) -> bool:
        """Whether this optimizer steps on another backward than some of the others."""
        return len(self.partners[k]) < len(self.partners)

    def before(self, k: int, *, curious: bool) -> Tensor | None:
        """A step of this optimizer begins; the share of the weights that did not move at its last one, where known."""
        group = self.partners[k]
        sample, _ = self._of(group)
        unmoved = sample.unmoved() if self._held == group else None
        step, due = self._steps.get(group, 0), self._due.get(group, 0)
        if step >= due or (curious and step > due - self._every + 4):
            if self._held not in (None, group):
                self._waiting.add(group)
            elif not self._waiting - {group}:
                self._waiting.discard(group)
                self._taken, self._due[group] = group, step + self._every
                sample.take()
        self._steps[group] = step + 1
        return unmoved

    def after(self, k: int, meter: GradStats, buffers: Sequence[Tensor]) -> bool:
        """The step is over: measure how far it moved the weights, if they were sampled; whether they were."""
        group = self.partners[k]
        if self._taken != group:
            return False
        self._taken = None
        sample, own = self._of(group)
        change = sample.compare()
        if change is not None:
            meter.measure_weights(*change, buffers, own=own)
            self._held = group
        return change is not None

    def holds(self, k: int) -> bool:
        """Whether the numbers in the block are those of this optimizer's own weights."""
        return self._held == self.partners[k]

    def sent(self, k: int) -> None:
        """A row of this optimizer is sent."""
        if self.holds(k):
            self._held = None

    def forget(self) -> None:
        """The weights are others now."""
        self._taken = self._held = None
        self._waiting.clear()
        for sample, _ in self._samples.values():
            sample.forget()

    def _of(self, group: Group) -> tuple[UpdateSample, Tensor]:
        if group not in self._samples:
            own = torch.zeros(len(self._layout.params), dtype=torch.bool)
            for k in group:
                own[self._layout.scopes[k]] = True
            own = own.to(self._device, non_blocking=True)
            self._samples[group] = UpdateSample(self._layout.params, self._once * own, self._device), own
        return self._samples[group]

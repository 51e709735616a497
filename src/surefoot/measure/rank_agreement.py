"""Numbers that each process knows on its host, made the same on all of them within the one gather of a step.

Every number that is judged must be the same on all ranks: they act on what they judge, and most actions need all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class SharedSlot(IntEnum):
    """Places of the agreed numbers; after them learning rate and momentum of each optimizer. NaN: not known.

    A number is the mean over the ranks that know it, so a flag is 1 only when it is set on all of them.
    """

    WEIGHED = 0
    """The numbers of the weights are new."""
    COMPARED = 1
    """So is the checksum of the replicas."""
    FED = 2
    """So are the numbers of the batch."""
    CHANGED = 3
    """The loop has changed the gradients after backward."""
    WATCHED = 4
    """There is a loss."""
    DROPPED = 5
    """The gradients were thrown away without a step."""
    LEFT_OVER = 6
    SAMPLES = 7
    """As in `Row`."""
    SCALE = 8
    """The loss scale."""
    UNSYNCED = 9
    """The gradients of the ranks differ after backward. This and the next are found by comparing what ranks sent."""
    UNEQUAL = 10
    """The gradients that the optimizers were handed differ, too: the loop has not averaged them."""


CHECKSUMS = 4
"""What each rank sends besides: checksums of its gradients after backward, of those its optimizer was handed, and of
its replicas, and the norm of the replicas."""


def setting(optimizer: int) -> int:
    """The place of an optimizer's learning rate; its momentum comes next."""
    return len(SharedSlot) + 2 * optimizer


class HostNumbers:
    """What this process knows, on its way to the others."""

    def __init__(self, optimizers: int, real: torch.dtype, device: torch.device) -> None:
        self.count = setting(optimizers)
        self.values = torch.full((self.count + CHECKSUMS,), torch.nan, dtype=real, device=device)
        """Own numbers, then own checksums."""
        self._pinned = device.type == "cuda"

    @property
    def gradients(self) -> Tensor:
        """After backward, and as the optimizer was handed them."""
        return self.values[self.count : self.count + 2]

    @property
    def replicas(self) -> Tensor:
        """Checksum and norm."""
        return self.values[self.count + 2 :]

    def write(self, numbers: Sequence[float | Tensor]) -> None:
        """Without a wait: numbers of the host go in one copy from memory that stays theirs until it is done."""
        plain = [float("nan") if isinstance(n, Tensor) else n for n in numbers]
        held = torch.tensor(plain, dtype=self.values.dtype, pin_memory=self._pinned)
        self.values[: self.count].copy_(held, non_blocking=True)
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                self.values[place] = number.detach().to(self.values.device, non_blocking=True)


def agree(told: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The agreed numbers, and checksum and norm of each rank's replicas, from what all ranks sent: one row each.

    Ranks that have lost their protection (`alive` false) send zeros, which do not count.
    """
    known = np.where(alive[:, None], told, np.nan)
    numbers, checksums = np.hsplit(known, [-CHECKSUMS])
    count = (~np.isnan(numbers)).sum(0)
    agreed = np.where(count > 0, np.nansum(numbers, axis=0) / np.maximum(count, 1), np.nan)
    gradients = checksums[alive, :2]
    agreed[SharedSlot.UNSYNCED : SharedSlot.UNEQUAL + 1] = (gradients != gradients[:1]).any(0)
    return agreed, checksums[:, 2:]

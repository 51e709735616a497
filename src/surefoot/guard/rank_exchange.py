"""What the ranks tell each other in the one gather of an attempt, besides what they measure, and when replicas are
compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from surefoot.judge.thresholds import WINDOW_ROWS
from surefoot.measure.grad_stats import GradStats
from surefoot.measure.rank_agreement import SharedSlot
from surefoot.records import NAN


class RankExchange:
    """Takes part in one gather for each attempt, whether it ends with a step or without."""

    def __init__(self, meter: GradStats, optimizers: Sequence[Optimizer]) -> None:
        self._meter = meter
        self._optimizers = optimizers
        self._settings: dict[int, tuple[float | Tensor, float]] = {}
        """Learning rate and momentum of an optimizer that is about to step, as the loop has set them."""
        self._compared = False
        """A checksum of the replicas has not been sent."""
        self._compare_at: set[int] | None = None
        """Attempts after which replicas are compared, besides those at which the weights are looked at."""

    def before(self, k: int, attempt: int) -> None:
        """A step of this optimizer begins; nobody has changed its learning rate for the time of the step yet."""
        self._settings[k] = settings_of(self._optimizers[k])
        if self._compare_at is None:  # early enough to know soon whether the loop keeps the replicas equal
            self._compare_at = {attempt + WINDOW_ROWS // 2, attempt + WINDOW_ROWS}

    def gather(self, known: Mapping[SharedSlot, float | Tensor], *, stepping: int | None) -> Tensor:
        """The totals over all ranks; `stepping` is the optimizer in whose step they are asked for."""
        host = self._meter.host
        if host is not None:
            told: Mapping[SharedSlot, float | Tensor] = {**known, SharedSlot.COMPARED: self._compared}
            pairs = [self._settings[k] if k == stepping else settings_of(o) for k, o in enumerate(self._optimizers)]
            host.write([told.get(place, NAN) for place in SharedSlot] + [number for pair in pairs for number in pair])
            self._compared = False
        return self._meter.totals()

    def after(self, attempt: int, *, looked: bool) -> None:
        """A step is over: the weights are compared where they were looked at, or where it is due."""
        if looked or (self._compare_at and attempt in self._compare_at):
            self._compared = self._meter.compare_replicas()

    def went_back(self, attempt: int) -> None:
        """All ranks have restored the same weights; a comparison after their next step, this attempt's, proves it."""
        self._compared = False
        self._compare_at = {attempt, *(a for a in self._compare_at or () if a > attempt)}


def settings_of(optimizer: Optimizer) -> tuple[float | Tensor, float]:
    """Learning rate of the first group; and momentum or first beta, where the host knows it."""
    group = optimizer.param_groups[0]
    held = group["betas"][0] if "betas" in group else group.get("momentum", NAN)
    return group.get("lr", NAN), NAN if isinstance(held, Tensor) else float(held)

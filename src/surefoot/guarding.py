"""The guard as a loop sees it, and the one that does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from surefoot.records import Event, Row


class Guard(ABC):
    """What `attach` returns; also a context manager that closes itself."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Updates known to have landed; two behind the loop, because that is when the numbers are read."""

    @property
    @abstractmethod
    def history(self) -> tuple[list[float], list[float]]:
        """The last 100 losses and gradient norms."""

    @property
    @abstractmethod
    def latest(self) -> Row | None:
        """The numbers that were read last, two updates behind the loop; None before the first."""

    @abstractmethod
    def on_event(self, listener: Callable[[Event], None]) -> None:
        """Hand every event to `listener` from here on, as it is written down; one that raises hears no more."""

    @abstractmethod
    def watch(self, loss: Tensor, batch: Any = None) -> Tensor:
        """Hand the loss through, unchanged, so that its backward is seen; `batch` tells the number of samples."""

    @abstractmethod
    def report(self, **values: float) -> None:
        """Tell the journal values of your own; `tokens` and `total_steps` also feed speed and time left, and
        `eval_loss`, the loss on held-out data, is judged."""

    @abstractmethod
    def close(self) -> None:
        """Read the last numbers, write everything down and let go of the model; may be called again."""

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()


class OffGuard(Guard):
    """The guard that does nothing, for SUREFOOT=off."""

    @property
    def step(self) -> int:
        return 0

    @property
    def history(self) -> tuple[list[float], list[float]]:
        return [], []

    @property
    def latest(self) -> Row | None:
        return None

    def on_event(self, listener: Callable[[Event], None]) -> None:
        pass

    def watch(self, loss: Tensor, batch: Any = None) -> Tensor:
        return loss

    def report(self, **values: float) -> None:
        pass

    def close(self) -> None:
        pass

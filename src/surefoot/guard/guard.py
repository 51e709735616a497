"""The guard as a loop sees it, and the one that does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar, overload

from torch import Tensor

from surefoot.guard.batches import Batches
from surefoot.records import Event, StepMetrics

T = TypeVar("T")


class JudgeTheLoss(Enum):
    """The default of `watch(progress=...)`: None has a meaning of its own."""

    LOSS = "the loss itself"


LOSS = JudgeTheLoss.LOSS
Progress = Tensor | float | JudgeTheLoss | None


class Guard(ABC):
    """What `attach` returns; also a context manager that closes itself."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Iterations known to have landed, which with one optimizer are updates; two updates behind the loop, because
        that is when the numbers are read. With `attach(..., steps_of=)` the updates of that optimizer."""

    @property
    @abstractmethod
    def history(self) -> tuple[list[float], list[float]]:
        """The last 100 losses and gradient norms, of the first optimizer where several step in turn."""

    @property
    @abstractmethod
    def latest(self) -> StepMetrics | None:
        """The numbers that were read last, two updates behind the loop; None before the first. Its `optimizer` says
        whose they are."""

    @abstractmethod
    def on_event(self, listener: Callable[[Event], None]) -> None:
        """Hand every event to `listener` from here on, as it is written down; one that raises hears no more."""

    @abstractmethod
    def watch(self, loss: Tensor, batch: Any = None, *, progress: Progress = LOSS) -> Tensor:
        """Hand the loss through, unchanged, so that its backward is seen; `batch` tells the number of samples.

        `progress` says what is judged where the loss does not tell whether the run learns, as in GRPO, PPO or a GAN: a
        number that falls as the run gets better, such as minus the mean reward, or None, when the loss is only checked
        for being finite.
        """

    @overload
    def batches(self, loader: Iterable[T]) -> Batches[T]: ...

    @overload
    def batches(self) -> Batches[int]: ...

    def batches(self, loader: Iterable[T] | None = None) -> Batches[Any]:
        """The batches of `loader`, for `for batch in guard.batches(loader):`; a resumed run then repeats an
        uninterrupted one exactly, wherever the loop and the data set draw random numbers.

        The run is saved right before a batch is fetched; after a resume random numbers are put back right before the
        first one is. Call it anew for each epoch. `loader` may be any iterable; pass the loader to `attach` as well
        (`loader=`), so that the place in the data is kept. Without one it counts steps from `guard.step` on, endlessly.
        """
        return Batches(loader, self.fetch, first=lambda: self.step)

    def fetch(self, get: Callable[[], T]) -> T:
        """Fetch one batch by `get`, for loops that `batches` does not suit."""
        return get()

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
    def latest(self) -> StepMetrics | None:
        return None

    def on_event(self, listener: Callable[[Event], None]) -> None:
        pass

    def watch(self, loss: Tensor, batch: Any = None, *, progress: Progress = LOSS) -> Tensor:
        return loss

    def report(self, **values: float) -> None:
        pass

    def close(self) -> None:
        pass

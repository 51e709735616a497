"""`Guard`, what `attach` returns, and `OffGuard`, which does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import Tensor

from surefoot.guard.batches import Batches
from surefoot.records import Event, StepMetrics

if TYPE_CHECKING:
    from surefoot.guard.update_restart import UpdateRestart

T = TypeVar("T")


class ProgressDefault(Enum):
    """The default of `watch(progress=...)`, where None already means something."""

    LOSS = "the loss itself"


LOSS = ProgressDefault.LOSS
Progress = Tensor | float | ProgressDefault | None


class Guard(ABC):
    """What `attach` returns; also a context manager that closes itself."""

    restarts: UpdateRestart | None = None
    """Begins an update again that ran out of memory, for loops of surefoot's own; None where nothing is protected."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Iterations with an applied update; with one optimizer that is the number of applied updates. It lags two
        updates behind the loop, because the numbers are read that late. With `attach(..., steps_of=)` it counts the
        applied updates of that optimizer."""

    @property
    @abstractmethod
    def history(self) -> tuple[list[float], list[float]]:
        """The last 100 losses and gradient norms; of the first optimizer where several alternate."""

    @property
    @abstractmethod
    def latest(self) -> StepMetrics | None:
        """The newest metrics, two updates behind the loop; None before the first. `latest.optimizer` says which
        optimizer they belong to."""

    @abstractmethod
    def on_event(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with every event from now on, as it is written; a listener that raises is removed."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Whether protection is on, no incident is open and no update was just refused. It lags two updates behind the
        loop; right after `state_dict()` it does not. With SUREFOOT=off it is True: nobody looks."""

    @abstractmethod
    def on_rewind(self, listener: Callable[[int, int], None]) -> None:
        """Call `listener(step, attempt)` whenever the run has gone back to its state at that step, after that attempt;
        updates that a trial took again are in the step. It is called inside `optimizer.step()`; a listener that raises
        is removed."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the guard has learnt about the run, for the checkpoint of another trainer: numbers, strings, lists and
        dicts, as JSON can hold them. It first reads and judges the numbers of all steps so far, which waits for the
        device. With `resume=True` it is in surefoot's own checkpoints."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what an earlier guard had learnt, before the first step; what another version saved is left
        out, with a warning."""

    @abstractmethod
    def watch(
        self, loss: Tensor, batch: Any = None, *, progress: Progress = LOSS, tokens: Tensor | float | None = None
    ) -> Tensor:
        """Return the loss unchanged, and follow its backward; `batch` gives the number of samples.

        `progress` says what to judge where the loss does not show whether the run learns, as in GRPO, PPO or a GAN: a
        number that falls as the run improves, such as minus the mean reward, or None to only check that the loss is
        finite.

        `tokens` says how many tokens the loss is a sum over, where the loop divides the gradients by all tokens of the
        update before its step: the loss is then recorded and judged per token.
        """

    @overload
    def batches(self, loader: Iterable[T]) -> Batches[T]: ...

    @overload
    def batches(self) -> Batches[int]: ...

    def batches(self, loader: Iterable[T] | None = None) -> Batches[Any]:
        """The batches of `loader`, for `for batch in guard.batches(loader):`. A resumed run then repeats an
        uninterrupted one exactly, wherever the loop and the data set draw random numbers.

        The run is saved right before a batch is fetched, and a resume restores the random number generators right
        before the first fetch. Call it again for each epoch. `loader` may be any iterable; also pass it to `attach`
        (`loader=`), so that the position in the data is saved. Without a loader it yields step numbers from
        `guard.step` on, without end.
        """
        return Batches(loader, self.fetch, first=lambda: self.step)

    def fetch(self, get: Callable[[], T]) -> T:
        """Fetch one batch with `get`, for loops that `batches` does not suit."""
        return get()

    @abstractmethod
    def report(self, **values: float) -> None:
        """Write your own values to the journal. `tokens` and `total_steps` also feed throughput and time left;
        `eval_loss`, the loss on held-out data, is judged."""

    @abstractmethod
    def close(self) -> None:
        """Read the last numbers, write everything to disk and remove all hooks; may be called again."""

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()


class OffGuard(Guard):
    """Does nothing, for SUREFOOT=off."""

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

    @property
    def healthy(self) -> bool:
        return True

    def on_rewind(self, listener: Callable[[int, int], None]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def watch(
        self, loss: Tensor, batch: Any = None, *, progress: Progress = LOSS, tokens: Tensor | float | None = None
    ) -> Tensor:
        return loss

    def report(self, **values: float) -> None:
        pass

    def close(self) -> None:
        pass

"""One zoo run: a plain PyTorch training loop with hooks for a fault and for a protector."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.zoo.families import FAMILIES, MicroBatch
from surefoot.actions.stop import TrainingStopped

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARMUP = 20
"""Steps of lr warmup in a healthy run; over the last fifth of the run the lr decays to a tenth."""
EVAL_SAMPLES = 512
"""Samples in the eval set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything about a run except its fault; the fault-free twin has the same settings."""

    family: str
    seed: int
    steps: int = 300
    precision: str = "float32"
    accumulate: int = 1
    samples: int = 0
    """Samples per micro-batch; 0 takes the family's default."""
    clip: float = math.inf
    """Global norm at which the loop itself clips."""
    ranks: int = 1
    """Data-parallel ranks."""
    optimizer: Callable[[Any, float], Optimizer] | None = None
    """Replaces the family's optimizer."""
    lr: float = 0.0
    """Replaces the family's lr."""

    @property
    def label(self) -> str:
        """All settings in one string that can be a file name."""
        parts = [self.family, str(self.seed)]
        for f in fields(self)[2:]:
            value = getattr(self, f.name)
            if value != f.default:
                parts.append(f"{f.name}={getattr(value, '__name__', value)}")
        return "-".join(parts)


class ZooRun:
    """A model in training, with hooks for planting faults; every hook gets the step number.

    All randomness derives from the seed and the step number, so that two runs that do not differ before a step are
    bit-equal up to it.
    """

    def __init__(self, settings: RunSettings, rank: int = 0) -> None:
        self.settings = settings
        self.rank = rank
        self.family = FAMILIES[settings.family]
        self.steps = settings.steps
        self.accumulate = settings.accumulate
        self.samples = settings.samples or self.family.samples
        self.clip = settings.clip
        torch.manual_seed(settings.seed)
        self.model = self.family.build()
        self.base_lr = settings.lr or self.family.lr
        build = settings.optimizer or self.family.optimizer
        self.optimizer: Optimizer = build(self.model.parameters(), self.base_lr)
        self.scaler: torch.amp.GradScaler | None = (
            torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=200)
            if settings.precision == "float16"
            else None
        )
        self.divide_loss = True
        """Divide the loss by the number of micro-batches."""
        self.lr_factor: Callable[[int], float] = self.schedule
        """The lr multiplier of a step."""
        self._batch_hooks: list[Callable[[int, MicroBatch], MicroBatch]] = []
        self._loss_hooks: list[Callable[[int, Tensor], Tensor]] = []
        self._before_hooks: list[Callable[[int], None]] = []
        self._gradient_hooks: list[Callable[[int], None]] = []
        self._after_hooks: list[Callable[[int], None]] = []
        self.step = 0
        self._evaluating = False

    # -- hooks for faults

    def on_batch(self, hook: Callable[[int, MicroBatch], MicroBatch]) -> None:
        """Change a micro-batch on its way into the model."""
        self._batch_hooks.append(hook)

    def on_loss(self, hook: Callable[[int, Tensor], Tensor]) -> None:
        """Change the loss before its backward."""
        self._loss_hooks.append(hook)

    def before_step(self, hook: Callable[[int], None]) -> None:
        """Run before the forward pass of a step, for example to damage a weight."""
        self._before_hooks.append(hook)

    def on_gradients(self, hook: Callable[[int], None]) -> None:
        """Run between backward and the optimizer's step, where loops clip."""
        self._gradient_hooks.append(hook)

    def after_step(self, hook: Callable[[int], None]) -> None:
        """Run at the end of a step."""
        self._after_hooks.append(hook)

    def on_gradient_of(self, param: Tensor, hook: Callable[[int, Tensor], Tensor]) -> None:
        """Change a parameter's gradient during backward, where a guard sees it."""
        param.register_hook(lambda g: hook(self.step, g))

    def on_forward(self, module: nn.Module, hook: Callable[[int, Tensor], Tensor]) -> None:
        """Change a module's output in training, but not in evaluation."""

        def changed(_module: nn.Module, _inputs: object, out: Tensor) -> Tensor:
            return out if self._evaluating else hook(self.step, out)

        module.register_forward_hook(changed)  # pyright: ignore[reportArgumentType]

    def scale_lr(self, factor: Callable[[int], float]) -> None:
        """Multiply the lr by a factor that depends on the step."""
        before = self.lr_factor
        self.lr_factor = lambda step: before(step) * factor(step)

    def schedule(self, step: int) -> float:
        """Warmup, constant, decay to a tenth over the last fifth."""
        warmup = min(1.0, (step + 1) / WARMUP)
        remaining = (self.steps - step) / (0.2 * self.steps)
        return warmup * (0.1 + 0.9 * min(1.0, remaining))

    # -- used by the loop

    def batch(self, step: int, micro: int) -> MicroBatch:
        """A micro-batch, determined by seed, step and rank."""
        batch = self._sample((step * 64 + micro) * 8 + self.rank, self.samples)
        for hook in self._batch_hooks:
            batch = hook(step, batch)
        return batch

    def _sample(self, number: int, samples: int) -> MicroBatch:
        rng = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)
        return self.family.sample(rng, samples)

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        precision = PRECISIONS[self.settings.precision]
        with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
            loss = self.family.loss(model, batch)
        for hook in self._loss_hooks:
            loss = hook(self.step, loss)
        return loss

    def loss_again(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a batch of an earlier step, faults of that step included: what the loop would call `step_fn`."""
        now, self.step = self.step, batch["step"]
        try:
            return self.loss(model, MicroBatch(batch["x"], batch["y"], batch["extra"]))
        finally:
            self.step = now

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode: no faults, no dropout, no gradients."""
        self._evaluating, training = True, self.model.training
        self.model.eval()
        with torch.no_grad():
            yield
        self._evaluating = False
        self.model.train(training)

    def eval_loss(self) -> float:
        """Loss on the eval set, without faults; infinite when the model is broken."""
        with self.evaluating():
            loss = float(self.family.loss(self.model, self._sample(-1 << 20, EVAL_SAMPLES)))
        return loss if math.isfinite(loss) else math.inf


class Protector:
    """Hooks between the loop and the optimizer; the base class does nothing, like most loops."""

    acted: Sequence[int] = ()
    """Steps whose update it changed or skipped."""

    def begin(self, run: ZooRun, model: nn.Module) -> None:
        """Called before the first step."""

    def watch(self, loss: Tensor, batch: MicroBatch) -> Tensor:
        """Called with each loss before its backward."""
        return loss

    def allow(self, run: ZooRun, loss: float) -> bool:
        """May change the gradients; False skips the update."""
        return True

    def evaluate(self, run: ZooRun) -> None:
        """Called every `EVAL_EVERY` steps, where loops evaluate."""

    def end(self) -> None:
        """Called after the last step."""


EVAL_EVERY = 25
"""Steps between evaluations, which a protector may use."""
FINAL_EVALS = (16, 11, 6, 1)
"""Steps before the end at which the model is evaluated; the mean is the final loss."""


@dataclass(frozen=True, slots=True)
class ZooResult:
    """How a run ended."""

    loss: float
    """Final eval loss; infinite when the model is broken."""
    stopped: int | None = None
    """The step at which the protector stopped the run."""


def train(run: ZooRun, protector: Protector, model: nn.Module | None = None) -> ZooResult:
    """Train to the end, or until the protector stops the run.

    `model` is called instead of `run.model`: for example its DistributedDataParallel wrapper.
    """
    called = run.model if model is None else model
    protector.begin(run, called)
    eval_losses: list[float] = []
    try:
        for step in range(run.steps):
            train_step(run, step, protector, called)
            if step % EVAL_EVERY == EVAL_EVERY - 1:
                protector.evaluate(run)
            if run.steps - step in FINAL_EVALS:
                eval_losses.append(run.eval_loss())
    except TrainingStopped:
        return ZooResult(run.eval_loss(), run.step)
    finally:
        protector.end()
    return ZooResult(sum(eval_losses) / len(eval_losses))


def train_step(run: ZooRun, step: int, protector: Protector, model: nn.Module) -> None:
    """One update, as in a plain training loop."""
    run.step = step
    torch.default_generator.manual_seed(run.settings.seed * 7919 + step)  # CPU only: cheap enough for every step
    for group in run.optimizer.param_groups:
        group["lr"] = run.base_lr * run.lr_factor(step)
    for hook in run._before_hooks:
        hook(step)
    total = 0.0
    for micro in range(run.accumulate):
        batch = run.batch(step, micro)
        loss = run.loss(model, batch)
        if run.divide_loss:
            loss = loss / run.accumulate
        total += float(loss.detach())
        scaled = loss if run.scaler is None else run.scaler.scale(loss)
        protector.watch(scaled, batch).backward()
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    if math.isfinite(run.clip):
        nn.utils.clip_grad_norm_(run.model.parameters(), run.clip)
    for hook in run._gradient_hooks:
        hook(step)
    if protector.allow(run, total):
        if run.scaler is None:
            run.optimizer.step()
        else:
            run.scaler.step(run.optimizer)
    if run.scaler is not None:
        run.scaler.update()
    run.optimizer.zero_grad()
    for hook in run._after_hooks:
        hook(step)

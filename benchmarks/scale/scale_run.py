"""One run of the decoder: a usual training loop with hooks for faults."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.scale.loops import Batch, Loop
from benchmarks.scale.sizes import ScaleSize
from benchmarks.scale.texts import Text, Texts
from surefoot.models.decoder import Decoder

CLIP = 1.0
MIN_LR_RATIO = 0.1
_EVAL_SEED = 1 << 20


class ScaleRun:
    """A decoder in training. Its batches depend on seed and step alone, so runs are equal up to their first difference.

    Faults are planted by adding to the lists of hooks or by replacing an attribute; every hook gets the step.
    """

    def __init__(self, size: ScaleSize, seed: int, model: Decoder, texts: Texts) -> None:
        self.size = size
        self.seed = seed
        self.model = model
        self.texts = texts
        self.device = model.embed.weight.device
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.step = 0
        self.rows = size.batch
        self.clip = CLIP
        self.zeroes_gradients = True
        self.text_of: Callable[[int], Tensor] = lambda step: texts.source.train
        self.eval_text: Text = texts.source
        self.schedule: Callable[[int], float] = self.cosine
        self.lr_hooks: list[Callable[[int], float]] = []
        """Factors of the lr."""
        self.before_hooks: list[Callable[[int], None]] = []
        """Run before the forward pass."""
        self.batch_hooks: list[Callable[[int, Batch], Batch]] = []
        self.loss_hooks: list[Callable[[int, Tensor], Tensor]] = []
        self.evaluating = False
        self.eval_losses: list[tuple[int, float]] = []
        offsets = torch.Generator().manual_seed(seed)
        shape = (size.updates, 2 * size.batch)  # twice as many, for a control that doubles the batch
        self._places = torch.rand(shape, generator=offsets, dtype=torch.float64).to(self.device)
        offsets.manual_seed(_EVAL_SEED)
        shape = (size.final_batches, size.batch)
        self._eval_places = torch.rand(shape, generator=offsets, dtype=torch.float64).to(self.device)
        self._window = torch.arange(size.context + 1, device=self.device)

    def cosine(self, step: int) -> float:
        """Warmup, then cosine down to a tenth."""
        warmup = min(1.0, (step + 1) / self.size.warmup)
        done = max(0.0, (step - self.size.warmup) / (self.size.updates - self.size.warmup))
        return warmup * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * 0.5 * (1 + math.cos(math.pi * done)))

    def generator(self) -> torch.Generator:
        """For a fault's own random numbers: depends on seed and step alone, and leaves the global generator alone."""
        return torch.Generator().manual_seed(self.seed * 65_537 + self.step)

    def on_gradient_of(self, param: Tensor, hook: Callable[[int, Tensor], Tensor]) -> None:
        """Change a parameter's gradient during backward, where a guard sees it."""
        param.register_hook(lambda grad: hook(self.step, grad))

    def on_forward(self, module: nn.Module, hook: Callable[[int, Tensor], Tensor]) -> None:
        """Change a module's output in training, but not in evaluation."""

        def changed(_module: nn.Module, _inputs: object, out: Tensor) -> Tensor:
            return out if self.evaluating else hook(self.step, out)

        module.register_forward_hook(changed)  # pyright: ignore[reportArgumentType]

    # -- the loop

    def train(self, loop: Loop, until: int) -> None:
        """Train up to this step."""
        while self.step < until:
            self._update(loop)
            self.step += 1
            if self.step % self.size.eval_every == 0:
                self.eval_losses.append((self.step, self.eval_loss(self.size.eval_batches)))
                loop.evaluated(self.eval_losses[-1][1])

    def _update(self, loop: Loop) -> None:
        factor = math.prod([self.schedule(self.step), *(hook(self.step) for hook in self.lr_hooks)])
        for group in self.optimizer.param_groups:
            group["lr"] = self.size.lr * factor
        for hook in self.before_hooks:
            hook(self.step)
        batch = self.batch(self.step)
        loss = self.loss(self.model, batch)
        loop.watch(loss, batch).backward()
        if loop.allows(self, loss):
            if math.isfinite(self.clip):
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        if self.zeroes_gradients:
            self.optimizer.zero_grad()

    def batch(self, step: int) -> Batch:
        batch = self.windows(self.text_of(step), self._places[step, : self.rows])
        for hook in self.batch_hooks:
            batch = hook(step, batch)
        return batch

    def windows(self, text: Tensor, places: Tensor) -> Batch:
        """The windows of a text that begin at these fractions of it."""
        starts = (places * (len(text) - self.size.context)).long()
        tokens = text[starts[:, None] + self._window].long()
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss per token; also the `step_fn` for surefoot."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = model(batch["inputs"], batch["targets"]) / batch["targets"].numel()
        for hook in () if self.evaluating else self.loss_hooks:
            loss = hook(self.step, loss)
        return loss

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Eval mode: no faults, no dropout, no gradients."""
        self.evaluating = True
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()
            self.evaluating = False

    def eval_loss(self, batches: int) -> float:
        """Mean loss on held-out text; infinite when the model is broken."""
        with self.evaluation():
            places = self._eval_places[:batches]
            losses = [self.loss(self.model, self.windows(self.eval_text.held_out, row)) for row in places]
            loss = float(torch.stack(losses).mean())
        return loss if math.isfinite(loss) else math.inf

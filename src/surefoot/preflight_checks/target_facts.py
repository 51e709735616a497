"""Facts about targets: shifted by one, out of the model's sight, without padding, and of influence on the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.checkpoint.tree import tensors_in
from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, sure
from surefoot.preflight_checks.loop_probe import CannotTell, PreflightContext
from surefoot.preflight_checks.observe import LossCall, Observation
from surefoot.preflight_checks.parameter_facts import gradients
from surefoot.trials.kept_steps import roll_tensor

SAME = 0.95
"""Fraction of targets that equal an input, above which they are taken from it."""
SHIFTS = (1, 0, 2, -1, 3, -2)
"""In the order in which they are believed where several fit."""
FEW_SAMPLES = 24
_REGRESSIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


@dataclass(frozen=True, slots=True)
class TokenTask:
    """A loss over every position of a sequence, aligned with the model's input."""

    tokens: Tensor
    """(batch, length): what the model was given."""
    targets: Tensor
    """(batch, positions)"""
    counts: Tensor
    """Which of the targets count."""
    offset: int
    """The position of the first target among the outputs."""
    index: int
    """Of the tokens among the tensors that the model is called with."""

    def share(self, shift: int) -> float:
        """How many of the targets that count equal the input this many positions later."""
        length, positions = self.tokens.shape[1], self.targets.shape[1]
        at = torch.arange(positions, device=self.targets.device) + self.offset + shift
        inside = (at >= 0) & (at < length)
        if int(inside.sum()) < 2:
            return 0.0
        same = self.tokens[:, at[inside]] == self.targets[:, inside]
        same = same.all(-1) if same.dim() == 3 else same
        counts = self.counts[:, inside]
        return float(same[counts].float().mean()) if bool(counts.any()) else 0.0


def token_task(seen: Observation) -> TokenTask | None:
    """The task, if the loss is a cross-entropy of all positions of the tokens the model was given."""
    call = seen.main_loss
    if call is None or call.name not in ("cross_entropy", "nll_loss") or call.target.is_floating_point():
        return None
    if len(seen.model_calls) != 1:
        return None
    for index, tokens in enumerate(seen.model_calls[0].inputs):
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            continue
        batch, length = tokens.shape
        if call.target.numel() % batch or length < 4 or batch < 2:
            continue
        positions = call.target.numel() // batch
        if not length - 3 <= positions <= length + 1 or call.target.shape not in (
            (batch, positions),
            (batch * positions,),
        ):
            continue
        if tokens.unique().numel() < 4:
            continue  # a mask
        targets = call.target.reshape(batch, positions)
        counts = counting(seen, call).reshape(batch, positions)
        return TokenTask(tokens, targets, counts, _offset(seen, call, batch, positions), index)
    return None


def series_task(seen: Observation) -> tuple[TokenTask, int] | None:
    """The same for a regression of every value of a series, and which dimension is time."""
    call = seen.main_loss
    if call is None or call.name not in _REGRESSIONS or call.target.dim() != 3 or len(seen.model_calls) != 1:
        return None
    for index, x in enumerate(seen.model_calls[0].inputs):
        for time, other in ((1, 2), (2, 1)):
            y = call.target
            if x.dim() != 3 or len(x) != len(y) or x.shape[other] != y.shape[other] or y.shape[time] < 4:
                continue
            if x.shape[time] - 3 <= y.shape[time] <= x.shape[time]:
                counts = torch.ones(len(y), y.shape[time], dtype=torch.bool, device=y.device)
                given, wanted = x.detach().transpose(1, time), y.detach().transpose(1, time)
                return TokenTask(given, wanted, counts, 0, index), time
    return None


def sees_next_values(c: PreflightContext) -> Iterator[PreflightFinding]:
    """The next value of a series is predicted by a model that is given it."""
    found = series_task(c.first)
    if found is None:
        return
    task, time = found
    shares = {shift: task.share(shift) for shift in SHIFTS}
    shift = max(shares, key=lambda s: shares[s])
    if shares[shift] < SAME or shift < 1:
        return
    sees = position_influence(c, task.index, time)
    if sees.later:
        yield sure(
            Cause.LEAK,
            "the model sees the values it should predict: it is not causal",
            f"the targets equal the input {_places(shift)}, and with later values changed, earlier outputs change by "
            f"{sees.change:.2g} of their size",
            "Use no bidirectional layer, pad convolutions on the left only, and mask attention.",
            change=sees.change,
        )


def counting(seen: Observation, call: LossCall) -> Tensor:
    """Which targets the loss depends on, by the gradient of the outputs."""
    ignored = call.target == (-100 if call.ignore_index is None else call.ignore_index)
    (grad,) = gradients(seen.loss, [call.input])
    if grad is None:
        return ~ignored
    class_dim = 1 if grad.dim() > call.target.dim() else None
    reached = (grad != 0).any(class_dim) if class_dim is not None else grad != 0
    return reached.reshape(call.target.shape) & ~ignored if bool(reached.any()) else ~ignored


def _offset(seen: Observation, call: LossCall, batch: int, positions: int) -> int:
    """Where in the outputs the first of the scored positions is."""
    x = call.input.detach()
    x = x.transpose(1, 2) if x.dim() == 3 else x.reshape(batch, positions, -1)
    for out in seen.outputs:
        if out.dim() == 3 and out.shape[0] == batch and out.shape[2] == x.shape[2] and out.shape[1] >= positions:
            for offset in range(out.shape[1] - positions + 1):
                if torch.equal(out[:, offset : offset + positions].detach().to(x.dtype), x):
                    return offset
    return 0


def shifted_labels(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Next-token targets, and whether the model sees them."""
    task = token_task(c.first)
    if task is None or not bool(task.counts.any()):
        return
    shares = {shift: task.share(shift) for shift in SHIFTS}
    shift = max(shares, key=lambda s: shares[s])
    if shares[shift] < SAME:
        return
    how = f"{shares[shift]:.0%} of the targets that count equal the input {_places(shift)}".replace("%", " %")
    sees = position_influence(c, task.index)
    if shift == 0:
        make = sure if not sees.later else doubtful
        yield make(
            Cause.LABELS,
            "labels are not shifted: the target of each position is the token it is given",
            how + ("" if sees.later else ", and outputs do not depend on later tokens"),
            "Predict the next token: outputs[:, :-1] against tokens[:, 1:].",
            share=shares[shift],
        )
    elif shift != 1:
        yield sure(
            Cause.LABELS,
            f"labels are shifted by {shift}, not by one",
            how,
            "Shift once: not in the data and in the model, or in the loss, too.",
            share=shares[shift],
        )
    if shift >= 1 and sees.later:
        yield sure(
            Cause.LEAK,
            "the model sees the tokens it should predict: it is not causal",
            f"{how}, and with later tokens changed, earlier outputs change by {sees.change:.2g} of their size",
            "Use a causal mask in every attention layer, and no bidirectional layer.",
            change=sees.change,
        )


def _places(shift: int) -> str:
    return "at their own position" if shift == 0 else f"{abs(shift)} {'later' if shift > 0 else 'earlier'}"


@dataclass(frozen=True, slots=True)
class Influence:
    """Whether outputs depend on later inputs."""

    later: bool
    change: float


def position_influence(c: PreflightContext, index: int, time: int = 1) -> Influence:
    """Change the later half of one input and compare the earlier outputs."""
    base = c.base
    length = base.model_calls[0].inputs[index].shape[time]
    half = length // 2

    def change(tensors: list[Tensor]) -> list[Tensor]:
        x = tensors[index].clone()
        later = x.narrow(time, half, length - half)
        later.copy_(later.roll(1, 0).flip(time))
        return [*tensors[:index], x, *tensors[index + 1 :]]

    changed = c.repeat(change)
    worst, compared = 0.0, False
    rows = len(base.model_calls[0].inputs[index])
    for a, b in zip(base.outputs, changed.outputs, strict=True):
        if a.dim() == 2 and len(a) == rows * length and time == 1:  # flattened
            a, b = a.reshape(rows, length, -1), b.reshape(rows, length, -1)
        if a.dim() >= 3 and a.shape[time] >= length - 1 and a.shape == b.shape:
            early = half + max(0, a.shape[time] - length)
            early_a, early_b = a.narrow(time, 0, early).float(), b.narrow(time, 0, early).float()
            worst, compared = max(worst, relative_change(early_a, early_b)), True
    if not compared:
        raise CannotTell("the model's outputs have no position for each token")
    return Influence(worst > 1e-4, worst)


def relative_change(a: Tensor, b: Tensor) -> float:
    size = float(a.square().mean().sqrt())
    return float((a - b).abs().max()) / max(size, 1e-12)


def all_ignored(c: PreflightContext) -> Iterator[PreflightFinding]:
    shares: list[float] = []
    for index in range(min(3, len(c.batches))):
        if shares and shares[-1] < 1:
            return
        call = c.quick(index).single_loss
        if call is None or call.ignore_index is None or call.target.is_floating_point():
            return
        shares.append(float((call.target == call.ignore_index).float().mean()))
    if min(shares) == 1.0:
        yield sure(
            Cause.LABELS,
            "all targets are ignored, so nothing is learned",
            f"every target of {len(shares)} batches is the ignore_index",
            "Look at how labels are masked.",
        )


def target_among_inputs(c: PreflightContext) -> Iterator[PreflightFinding]:
    """One input of each sample that is the target."""
    rows: list[Tensor] = []
    wanted: list[Tensor] = []
    is_class = False
    for index in range(min(len(c.batches), 8)):
        seen = c.quick(index)
        pair = _per_sample(seen)
        if pair is None or (rows and pair[0].shape[1] != rows[0].shape[1]):
            return
        rows.append(pair[0])
        wanted.append(pair[1])
        is_class = pair[2]
    x, y = torch.cat(rows).double(), torch.cat(wanted).double()
    if len(x) < FEW_SAMPLES or y.unique().numel() < 2:
        return
    candidates = [y] if not is_class else [y, *((y == k).double() for k in y.unique()[:20])]
    x = x - x.mean(0)
    scale = x.norm(dim=0)
    best, column = 0.0, -1
    for target in candidates[:1] if not is_class else candidates:
        t = target - target.mean()
        if float(t.norm()) == 0:
            continue
        corr = ((t @ x) / (scale * t.norm()).clamp_min(1e-12)).abs()
        corr = torch.where(scale > 1e-9, corr, 0.0)
        if float(corr.max()) > best:
            best, column = float(corr.max()), int(corr.argmax())
    if best > 0.9999:
        yield sure(
            Cause.LEAK,
            f"input {column} of each sample is the target",
            f"over {len(x)} samples their correlation is {best:.6f}",
            "Remove the target, and what is computed from it, from the inputs.",
            column=column,
            correlation=best,
        )


def _per_sample(seen: Observation) -> tuple[Tensor, Tensor, bool] | None:
    """Floating-point inputs, flattened, and one target for each sample."""
    calls = [call for call in seen.loss_calls if call.name != "kl_div"]
    if len(calls) != 1 or len(seen.model_calls) != 1:
        return None
    inputs = [t for t in seen.model_calls[0].inputs if t.is_floating_point() and t.dim() >= 2]
    target = calls[0].target.detach()
    n = target.shape[0] if target.dim() else 0
    if n == 0 or target.numel() != n or not inputs or any(t.shape[0] != n for t in inputs):
        return None
    x = torch.cat([t.detach().reshape(n, -1)[:, :8192].float() for t in inputs], 1)
    return (x, target.reshape(n), not target.is_floating_point()) if x.shape[1] > 1 else None


def without_influence(c: PreflightContext) -> Iterator[PreflightFinding]:
    """The loss of rolled targets is the same."""
    base = c.base
    tensors = list(tensors_in(c.batches[0]))
    names = _names(c.batches[0], len(tensors))
    known = {"y", "label", "labels", "target", "targets"}
    chosen = [i for i, name in enumerate(names) if name in known]
    if not chosen and len(tensors) == 2 and isinstance(c.batches[0], list | tuple) and not c.first.loss_calls:
        chosen = [1]
    for i in chosen:
        if tensors[i].dim() == 0 or tensors[i].shape[0] < 2 or bool((tensors[i] == tensors[i][:1]).all()):
            continue
        batches = list(c.batches)
        batches[0] = roll_tensor(batches[0], i, only=False)
        with torch.no_grad():
            loss = c.loss_of(batches[0])
        if float(loss) == float(base.loss):
            yield doubtful(
                Cause.LABELS,
                "the loss does not depend on the targets",
                f"it is the same number, {float(loss):.6g}, with the targets of other samples",
                "Pass the targets of the batch to the loss.",
            )


def _names(batch: object, count: int) -> list[str]:
    if isinstance(batch, dict) and all(isinstance(v, Tensor) for v in batch.values()):
        return [str(name).lower() for name in batch]
    return [""] * count


FACTS = (
    shifted_labels,
    sees_next_values,
    all_ignored,
    target_among_inputs,
    without_influence,
)

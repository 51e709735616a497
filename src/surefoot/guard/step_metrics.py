"""What the host adds to the numbers of an update, what ranks exchange about it, and the `StepMetrics` made of both."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from surefoot.checkpoint.buffers import BufferCheck
from surefoot.judge.history import History
from surefoot.judge.thresholds import NEGLIGIBLE_FRACTION, STRONG_RATIO, WINDOW_ROWS
from surefoot.measure.block_layout import (
    MAX_MICROBATCHES,
    HostBlock,
    SharedSlot,
    SummarySlot,
    VerdictSlot,
    settings_index,
)
from surefoot.measure.grad_stats import GradStats
from surefoot.measure.resources import SystemReading
from surefoot.records import NAN, JudgedBy, StepMetrics, Verdict


class StepContext(NamedTuple):
    """What the host knew of an update when its numbers were sent; travels with the block."""

    attempt: int
    time: float
    optimizer: int
    num_microbatches: int
    watched: bool
    lr: float | None
    """None where the learning rate is a tensor, which travels in the block."""
    momentum: float
    scaled: bool
    """Whether the loss is scaled by a GradScaler."""
    clips_by_norm: bool
    has_weight_stats: bool
    """Whether the block holds new numbers of the weights."""
    has_input_stats: bool
    """Whether it holds new numbers of the batch."""
    grads_changed: bool
    """Whether the loop has changed the gradients after backward."""
    stale_grads: float
    eval_loss: float
    seconds: float
    data_wait: float
    samples: float
    tokens: float
    system: SystemReading
    iterations_before: int
    """Iterations of the loop that had ended before this update."""
    ends_iteration: bool
    judged_by: JudgedBy = JudgedBy.LOSS
    agreed_scale: float | None = None
    """The loss scale that all ranks agreed on; None with a single rank."""
    buffers_checked: bool = False


class RankExchange:
    """With several ranks: what this one adds to the gather of each attempt, and when their weights are compared."""

    def __init__(self, grad_stats: GradStats, optimizers: Sequence[Optimizer]) -> None:
        self._grad_stats = grad_stats
        self._optimizers = optimizers
        self._settings: dict[int, tuple[float | Tensor, float]] = {}
        """Learning rate and momentum, as the loop has set them, of an optimizer that is about to step."""
        self._checksum_unsent = False
        """A checksum of the weights was computed, and goes out with the next gather."""
        self._compare_at: set[int] | None = None
        """Attempts after which weights are compared, besides those at which they are measured."""

    def before_step(self, k: int, attempt: int) -> None:
        """A step of optimizer `k` begins, before any override changes its learning rate."""
        self._settings[k] = lr_and_momentum(self._optimizers[k])
        if self._compare_at is None:  # early enough to know soon whether the loop keeps the weights equal
            self._compare_at = {attempt + WINDOW_ROWS // 2, attempt + WINDOW_ROWS}

    def gather(self, values: Mapping[SharedSlot, float | Tensor], *, stepping: int | None) -> Tensor:
        """The totals over all ranks; `stepping` is the optimizer that is stepping, if any."""
        shared = self._grad_stats.shared_values
        assert shared is not None
        values = {**values, SharedSlot.REPLICAS_MEASURED: self._checksum_unsent}
        pairs = [self._settings[k] if k == stepping else lr_and_momentum(o) for k, o in enumerate(self._optimizers)]
        shared.write([values.get(slot, NAN) for slot in SharedSlot] + [number for pair in pairs for number in pair])
        self._checksum_unsent = False
        return self._grad_stats.gather_totals()

    def after_step(self, attempt: int, *, weights_measured: bool) -> None:
        """Compute a checksum of the weights where they were measured, or where a comparison is due."""
        if weights_measured or (self._compare_at and attempt in self._compare_at):
            self._checksum_unsent = self._grad_stats.checksum_replicas()

    def rewound(self, attempt: int) -> None:
        """All ranks have restored the same weights; a comparison after their next step, this attempt's, proves it."""
        self._checksum_unsent = False
        self._compare_at = {attempt, *(a for a in self._compare_at or () if a > attempt)}


def lr_and_momentum(optimizer: Optimizer) -> tuple[float | Tensor, float]:
    """Learning rate of the first group; and momentum or first beta, NaN where it is a tensor."""
    group = optimizer.param_groups[0]
    momentum = group["betas"][0] if "betas" in group else group.get("momentum", NAN)
    return group.get("lr", NAN), NAN if isinstance(momentum, Tensor) else float(momentum)


_READ_VERDICT = itemgetter(
    VerdictSlot.VERDICT,
    VerdictSlot.NORM,
    VerdictSlot.NONFINITE,
    VerdictSlot.NORM_LIMIT,
    VerdictSlot.CLIP_THRESHOLD,
    VerdictSlot.CLIP_FACTOR,
    VerdictSlot.LOSS,
    VerdictSlot.LOSS_SCALE,
    VerdictSlot.LR,
    VerdictSlot.WEIGHT_NORM,
    VerdictSlot.NONFINITE_PARAMS,
    VerdictSlot.UPDATE_RATIO,
)
"""Reads the slots in one call; 12 lookups by enum member would take longer than the rest of the row."""
_NONFINITE_BUFFERS = int(SummarySlot.NONFINITE_BUFFERS)  # read in every row; enum member access is slow on Python 3.11
_VERDICTS = tuple(Verdict)
_VETOED = (Verdict.NONFINITE, Verdict.NORM_OUTLIER, Verdict.OVERFLOW)


def step_metrics_from(
    block: HostBlock,
    context: StepContext,
    *,
    step: int,
    history: History,
    run: History,
    seconds_left: float,
    repeated: bool,
) -> StepMetrics:
    """The row of one attempted update; `history` is that of the optimizer that stepped, `run` that of the first.

    `repeated` means that another optimizer has already made a row of this attempt.
    """
    summary, replicas, odd_rank = block.summary, NAN, -1
    discarded = False
    if len(block.rank_losses) > 1:
        agreed = block.shared
        discarded = agreed[SharedSlot.DISCARDED] > 0
        context = _agreed(context, agreed, repeated=repeated)
        if agreed[SharedSlot.REPLICAS_MEASURED] == 1.0 and not repeated:
            replicas, odd_rank = _compare_replicas(block.replica_checksums, run)
        if block.verdict[0] == Verdict.APPLIED:
            history.unequal.append(bool(agreed[SharedSlot.APPLIED_GRADS_DIFFER] > 0))
    values = _READ_VERDICT(block.verdict)
    code, norm, nonfinite, limit, clip, factor, loss, scale, lr, weight_norm, bad_params, ratio = values
    verdict = _VERDICTS[int(code)]
    if discarded and verdict is Verdict.APPLIED:
        verdict = Verdict.DISCARDED  # on some ranks; all of them must judge the same
    vetoed = verdict in _VETOED
    loss = loss if context.watched else NAN
    d1, d2 = history.add(loss, norm)
    system = context.system
    buffers: list[int] = np.flatnonzero(block.buffer_nonfinite).tolist() if summary[_NONFINITE_BUFFERS] > 0 else []
    # Where only a buffer went wrong, the gradients do not show which micro-batch did it.
    buffers_only = bool(buffers) and math.isfinite(loss) and math.isfinite(norm) and nonfinite == 0
    blames_microbatch = vetoed and context.watched and not buffers_only
    return StepMetrics(
        step=step,
        attempt=context.attempt,
        time=context.time,
        optimizer=context.optimizer,
        verdict=verdict,
        bad_microbatch=_bad_microbatch(block.microbatches[: min(context.num_microbatches, MAX_MICROBATCHES)])
        if blames_microbatch
        else -1,
        num_microbatches=context.num_microbatches,
        judged_by=context.judged_by,
        rank=_odd_loss(block.rank_losses) if vetoed else odd_rank,
        first_nonfinite_buffer=buffers[0] if buffers else -1,
        **_as_float32(
            loss=loss,
            loss_d1=d1,
            loss_d2=d2,
            norm=norm,
            nonfinite=nonfinite,
            norm_limit=limit if math.isfinite(limit) else NAN,
            clip=clip if context.clips_by_norm else NAN,
            clip_factor=factor if context.clips_by_norm else NAN,
            clip_fraction=history.clip_fraction(factor) if context.clips_by_norm else NAN,
            lr=lr if context.lr is None else context.lr,
            momentum=context.momentum,
            loss_scale=NAN if not context.scaled else scale if context.agreed_scale is None else context.agreed_scale,
            weight_norm=weight_norm if context.has_weight_stats else NAN,
            update_ratio=ratio if context.has_weight_stats else NAN,
            nonfinite_params=bad_params if context.has_weight_stats else NAN,
            nonfinite_buffers=float(len(buffers)) if context.buffers_checked else NAN,
            unchanged_fraction=summary[SummarySlot.UNCHANGED_FRACTION] if context.has_weight_stats else NAN,
            applied_norm=math.sqrt(summary[SummarySlot.APPLIED_SQUARES]) if context.grads_changed else NAN,
            stale_grads=context.stale_grads,
            input_mean=summary[SummarySlot.INPUT_MEAN] if context.has_input_stats else NAN,
            input_std=summary[SummarySlot.INPUT_STD] if context.has_input_stats else NAN,
            input_absmax=(absmax if math.isfinite(absmax := summary[SummarySlot.INPUT_ABSMAX]) else math.inf)
            if context.has_input_stats
            else NAN,
            eval_loss=context.eval_loss,
            seconds=context.seconds,
            data_wait=context.data_wait,
            samples=context.samples,
            tokens=context.tokens,
            memory=system.memory,
            memory_peak=system.memory_peak,
            memory_reserved=system.memory_reserved,
            utilisation=system.utilisation,
            memory_bandwidth=system.memory_bandwidth,
            saving=float(summary[SummarySlot.RANKS_SAVING] != 0),
            seconds_left=seconds_left,
            progress=summary[SummarySlot.PROGRESS] if context.judged_by is JudgedBy.PROGRESS else NAN,
            replicas=replicas,
        ),
    )


def _agreed(context: StepContext, agreed: np.ndarray, *, repeated: bool) -> StepContext:
    """Replace what this rank alone knew by what all ranks agreed on, so that they judge by the same numbers.

    Times and memory stay this rank's own: nothing is decided by them.
    """
    slot = settings_index(context.optimizer)
    # The first row of an attempt has these; the rows of other optimizers have not.
    once = {"stale_grads": NAN, "samples": NAN, "has_weight_stats": False, "has_input_stats": False}
    if not repeated:
        once = {
            "stale_grads": float(agreed[SharedSlot.STALE_GRADS]),
            "samples": float(agreed[SharedSlot.SAMPLES]),
            "has_weight_stats": agreed[SharedSlot.WEIGHTS_MEASURED] == 1.0,
            "has_input_stats": agreed[SharedSlot.INPUTS_MEASURED] == 1.0,
        }
    return context._replace(
        watched=agreed[SharedSlot.HAS_LOSS] > 0,
        grads_changed=agreed[SharedSlot.GRADS_CHANGED] == 1.0,
        scaled=bool(np.isfinite(agreed[SharedSlot.LOSS_SCALE])),
        agreed_scale=float(agreed[SharedSlot.LOSS_SCALE]),
        lr=float(agreed[slot]),
        momentum=float(agreed[slot + 1]),
        **once,
    )


def _compare_replicas(replicas: np.ndarray, history: History) -> tuple[float, int]:
    """How many ranks hold other weights than the majority, and which rank; -1 when that is undecided."""
    checksums, norms = replicas.T
    alive = np.flatnonzero(~np.isnan(checksums))
    distinct, counts = np.unique(checksums[alive], return_counts=True)
    if len(alive) < 2:
        return NAN, -1
    if len(distinct) == 1:
        history.replica_norm = float(norms[alive[0]])
        return 0.0, -1
    if history.ranks_unequal:
        return math.inf, -1
    majority = counts.max()
    differing = float(len(alive) - majority)
    if 2 * majority > len(alive):
        return differing, int(next(rank for rank in alive if checksums[rank] != distinct[counts.argmax()]))
    return differing, _furthest(norms, alive, history.replica_norm)


def _furthest(norms: np.ndarray, alive: np.ndarray, before: float) -> int:
    """The only rank whose weights are not finite, or have moved away from the norm all had; -1 for none or several."""
    bad = [int(rank) for rank in alive if not np.isfinite(norms[rank])]
    if bad or not before > 0:
        return bad[0] if len(bad) == 1 else -1
    moved = {int(rank): abs(math.log(max(norms[rank], 1e-300) / before)) for rank in alive}
    first, second = sorted(moved, key=lambda rank: -moved[rank])[:2]
    return first if moved[first] > max(STRONG_RATIO * moved[second], NEGLIGIBLE_FRACTION) else -1


def _as_float32(**values: float) -> dict[str, float]:
    """Round to single precision, as the journal stores them, so that a stored row is judged exactly as this one."""
    return dict(zip(values, array("f", values.values()), strict=True))


def _bad_microbatch(micros: np.ndarray) -> int:
    """The micro-batch after which the accumulated gradients went wrong: the first bad one, else the largest jump."""
    loss, squares, nonfinite = micros.T
    bad = ~np.isfinite(loss) | (nonfinite > 0) | ~np.isfinite(squares)
    if bad.any():
        return int(bad.argmax())
    return int(np.diff(np.sqrt(squares), prepend=0.0).argmax())


def _odd_loss(losses: np.ndarray) -> int:
    """The rank whose loss is not finite, or over 10 times that of every other; -1 when none stands out."""
    if len(losses) < 2:
        return -1
    bad = ~np.isfinite(losses)
    if bad.any():
        return int(bad.argmax()) if bad.sum() < len(losses) else -1
    largest = int(np.abs(losses).argmax())
    others = np.abs(np.delete(losses, largest))
    return largest if abs(losses[largest]) > 10 * others.max() else -1


def worst_tensors(names: Sequence[str], layers: np.ndarray, row: StepMetrics, limit: int = 5) -> list[dict[str, Any]]:
    """The tensors with non-finite gradients, else those with the largest norms."""
    nonfinite, norms = layers[:, 5], layers[:, 0]
    if row.verdict is Verdict.NONFINITE:
        order = np.argsort(-nonfinite, kind="stable")[:limit]
        chosen = [int(i) for i in order if nonfinite[i] > 0]
    else:
        chosen = [int(i) for i in np.argsort(-np.nan_to_num(norms), kind="stable")[:limit]]
    return [{"name": names[i], "norm": float(norms[i]), "nonfinite": float(nonfinite[i])} for i in chosen]


def bad_buffers(names: Sequence[str], counts: np.ndarray) -> list[dict[str, Any]]:
    """The buffers that became non-finite, each with its number of non-finite values."""
    return [
        {"name": names[i], "nonfinite": float(counts[i])} for i in np.flatnonzero(counts).tolist() if i < len(names)
    ]


def learn_exempt_buffers(check: BufferCheck, block: HostBlock, context: StepContext) -> None:
    """Let the check learn which buffers are non-finite on purpose: there loss and gradients are finite all the same."""
    loss, norm = block.verdict[VerdictSlot.LOSS], block.verdict[VerdictSlot.NORM]
    bad = np.flatnonzero(block.buffer_nonfinite).tolist() if block.summary[_NONFINITE_BUFFERS] > 0 else []
    alone = math.isfinite(loss) and math.isfinite(norm) and block.verdict[VerdictSlot.NONFINITE] == 0
    applied = block.verdict[VerdictSlot.VERDICT] == Verdict.APPLIED
    check.learn_exempt(context.attempt, bad, alone=alone, applied=applied)

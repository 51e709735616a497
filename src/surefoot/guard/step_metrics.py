"""From a block of numbers that arrived on the host to the row that is judged and written down."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from surefoot.judge.history import History
from surefoot.judge.thresholds import NEGLIGIBLE_FRACTION, STRONG_RATIO
from surefoot.measure.block_layout import MICROS, SummarySlot
from surefoot.measure.grad_stats import HostBlock
from surefoot.measure.rank_agreement import SharedSlot, setting
from surefoot.measure.system import Reading
from surefoot.records import NAN, JudgedBy, StepMetrics, Verdict


class StepContext(NamedTuple):
    """What the host knew of an update when its numbers were sent."""

    attempt: int
    time: float
    optimizer: int
    micros: int
    watched: bool
    lr: float | None
    momentum: float
    scaled: bool
    clips: bool
    weights: bool
    """Whether the numbers of the weights are new."""
    fed: bool
    """Whether those of the batch are."""
    changed: bool
    """The loop has changed the gradients after backward."""
    left_over: float
    eval_loss: float
    seconds: float
    data_wait: float
    samples: float
    tokens: float
    reading: Reading
    completed: int
    """Iterations of the loop that had ended before this update."""
    ends: bool
    """Whether this update ends one."""
    judged_by: JudgedBy = JudgedBy.LOSS
    scale: float | None = None
    """The loss scale that all processes agreed on; None in a single one."""
    buffers: bool = False
    """Whether buffers were checked for values that became non-finite."""


_VERDICTS = tuple(Verdict)
_TROUBLE = (Verdict.NONFINITE, Verdict.NORM_OUTLIER, Verdict.OVERFLOW)


def step_metrics_from(
    block: HostBlock, tag: StepContext, *, step: int, history: History, run: History, left: float, repeated: bool
) -> StepMetrics:
    """The row of one attempted update; `history` is that of the optimizer that stepped, `run` that of the first;
    `repeated` when another optimizer has brought a row for this attempt already."""
    more, replicas, odd = block.head, NAN, -1
    dropped = False
    if len(block.losses) > 1:
        agreed = block.agreed
        dropped = agreed[SharedSlot.DROPPED] > 0
        tag = _agreed(tag, agreed, repeated=repeated)
        if agreed[SharedSlot.COMPARED] == 1.0 and not repeated:
            replicas, odd = _compared(block.replicas, run)
        if block.verdict[0] == Verdict.APPLIED:
            history.unequal.append(bool(agreed[SharedSlot.UNEQUAL] > 0))
    # All at once, in the order of `Said`: to ask for each place by its name takes longer than the rest.
    said, norm, nonfinite, limit, clip, clipped, loss, scale, lr, weight_norm, bad_weights, ratio, _ = block.verdict
    verdict = _VERDICTS[int(said)]
    if dropped and verdict is Verdict.APPLIED:
        verdict = Verdict.DISCARDED  # on some ranks; all of them must judge the same
    trouble = verdict in _TROUBLE
    loss = loss if tag.watched else NAN
    d1, d2 = history.add(loss, norm)
    reading = tag.reading
    bad: list[int] = np.flatnonzero(block.buffers).tolist() if more[SummarySlot.BAD_BUFFERS] > 0 else []
    # Where only a buffer went wrong, the gradients do not tell which micro-batch it was.
    spared = bool(bad) and math.isfinite(loss) and math.isfinite(norm) and nonfinite == 0
    return StepMetrics(
        step=step,
        attempt=tag.attempt,
        time=tag.time,
        optimizer=tag.optimizer,
        verdict=verdict,
        bad_microbatch=_culprit(block.micros[: min(tag.micros, MICROS)])
        if trouble and tag.watched and not spared
        else -1,
        num_microbatches=tag.micros,
        judged_by=tag.judged_by,
        rank=_odd_one(block.losses) if trouble else odd,
        first_nonfinite_buffer=bad[0] if bad else -1,
        **_as_written(
            loss=loss,
            loss_d1=d1,
            loss_d2=d2,
            norm=norm,
            nonfinite=nonfinite,
            norm_limit=limit if math.isfinite(limit) else NAN,
            clip=clip if tag.clips else NAN,
            clip_factor=clipped if tag.clips else NAN,
            clip_fraction=history.clip_fraction(clipped) if tag.clips else NAN,
            lr=lr if tag.lr is None else tag.lr,
            momentum=tag.momentum,
            loss_scale=NAN if not tag.scaled else scale if tag.scale is None else tag.scale,
            weight_norm=weight_norm if tag.weights else NAN,
            update_ratio=ratio if tag.weights else NAN,
            nonfinite_params=bad_weights if tag.weights else NAN,
            nonfinite_buffers=float(len(bad)) if tag.buffers else NAN,
            unchanged_fraction=more[SummarySlot.UNMOVED] if tag.weights else NAN,
            applied_norm=math.sqrt(more[SummarySlot.APPLIED]) if tag.changed else NAN,
            stale_grads=tag.left_over,
            input_mean=more[SummarySlot.INPUT_MEAN] if tag.fed else NAN,
            input_std=more[SummarySlot.INPUT_SPREAD] if tag.fed else NAN,
            input_absmax=NAN if not tag.fed else top if math.isfinite(top := more[SummarySlot.INPUT_TOP]) else math.inf,
            eval_loss=tag.eval_loss,
            seconds=tag.seconds,
            data_wait=tag.data_wait,
            samples=tag.samples,
            tokens=tag.tokens,
            memory=reading.memory,
            memory_peak=reading.memory_peak,
            memory_reserved=reading.memory_reserved,
            utilisation=reading.utilisation,
            seconds_left=left,
            progress=more[SummarySlot.PROGRESS] if tag.judged_by is JudgedBy.PROGRESS else NAN,
            replicas=replicas,
        ),
    )


def _agreed(tag: StepContext, agreed: np.ndarray, *, repeated: bool) -> StepContext:
    """With what all processes agreed on in place of what this one alone knew: they judge by the same numbers.

    Times and memory stay this process's own; nothing is done because of them.
    """
    place = setting(tag.optimizer)
    once = {"left_over": NAN, "samples": NAN, "weights": False, "fed": False}  # told with the first optimizer's row
    if not repeated:
        once = {
            "left_over": float(agreed[SharedSlot.LEFT_OVER]),
            "samples": float(agreed[SharedSlot.SAMPLES]),
            "weights": agreed[SharedSlot.WEIGHED] == 1.0,
            "fed": agreed[SharedSlot.FED] == 1.0,
        }
    return tag._replace(
        watched=agreed[SharedSlot.WATCHED] > 0,
        changed=agreed[SharedSlot.CHANGED] == 1.0,
        scaled=bool(np.isfinite(agreed[SharedSlot.SCALE])),
        scale=float(agreed[SharedSlot.SCALE]),
        lr=float(agreed[place]),
        momentum=float(agreed[place + 1]),
        **once,
    )


def _compared(replicas: np.ndarray, history: History) -> tuple[float, int]:
    """How many ranks hold other weights than most do, and which one; -1 when that cannot be told."""
    checksums, norms = replicas.T
    alive = np.flatnonzero(~np.isnan(checksums))
    kinds, counts = np.unique(checksums[alive], return_counts=True)
    if len(alive) < 2:
        return NAN, -1
    if len(kinds) == 1:
        history.replica_norm = float(norms[alive[0]])
        return 0.0, -1
    if history.ranks_unequal:
        return math.inf, -1
    most = counts.max()
    apart = float(len(alive) - most)
    if 2 * most > len(alive):
        return apart, int(next(rank for rank in alive if checksums[rank] != kinds[counts.argmax()]))
    return apart, _furthest(norms, alive, history.replica_norm)


def _furthest(norms: np.ndarray, alive: np.ndarray, before: float) -> int:
    """The rank whose weights are not finite, or alone have left the norm that all had; -1 when none stands out."""
    bad = [int(rank) for rank in alive if not np.isfinite(norms[rank])]
    if bad or not before > 0:
        return bad[0] if len(bad) == 1 else -1
    moved = {int(rank): abs(math.log(max(norms[rank], 1e-300) / before)) for rank in alive}
    first, second = sorted(moved, key=lambda rank: -moved[rank])[:2]
    return first if moved[first] > max(STRONG_RATIO * moved[second], NEGLIGIBLE_FRACTION) else -1


def _as_written(**figures: float) -> dict[str, float]:
    """In single precision, as they will be read back: a row that is judged like this can be judged again."""
    return dict(zip(figures, array("f", figures.values()), strict=True))


def _culprit(micros: np.ndarray) -> int:
    """The micro-batch after which the accumulated gradients went wrong: the first bad one, else the largest leap."""
    loss, squares, nonfinite = micros.T
    bad = ~np.isfinite(loss) | (nonfinite > 0) | ~np.isfinite(squares)
    if bad.any():
        return int(bad.argmax())
    return int(np.diff(np.sqrt(squares), prepend=0.0).argmax())


def _odd_one(losses: np.ndarray) -> int:
    """The process whose loss is not finite, or far above all others; -1 when none stands out."""
    if len(losses) < 2:
        return -1
    bad = ~np.isfinite(losses)
    if bad.any():
        return int(bad.argmax()) if bad.sum() < len(losses) else -1
    top = int(np.abs(losses).argmax())
    others = np.abs(np.delete(losses, top))
    return top if abs(losses[top]) > 10 * others.max() else -1


def worst_tensors(names: Sequence[str], layers: np.ndarray, row: StepMetrics, most: int = 5) -> list[dict[str, Any]]:
    """The tensors with non-finite gradients, else those with the largest norms."""
    nonfinite, norms = layers[:, 5], layers[:, 0]
    if row.verdict is Verdict.NONFINITE:
        order = np.argsort(-nonfinite, kind="stable")[:most]
        chosen = [int(i) for i in order if nonfinite[i] > 0]
    else:
        chosen = [int(i) for i in np.argsort(-np.nan_to_num(norms), kind="stable")[:most]]
    return [{"name": names[i], "norm": float(norms[i]), "nonfinite": float(nonfinite[i])} for i in chosen]


def bad_buffers(names: Sequence[str], counts: np.ndarray) -> list[dict[str, Any]]:
    """The buffers that became non-finite, each with how many of its values did."""
    return [
        {"name": names[i], "nonfinite": float(counts[i])} for i in np.flatnonzero(counts).tolist() if i < len(names)
    ]

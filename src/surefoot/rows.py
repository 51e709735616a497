"""From a block of numbers that arrived on the host to the row that is judged and written down."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from surefoot.judge.history import History
from surefoot.measure.meter import Arrived
from surefoot.measure.resources import Reading
from surefoot.measure.summary import MICROS, Head
from surefoot.records import NAN, Row, Verdict


class Tag(NamedTuple):
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


_VERDICTS = tuple(Verdict)
_TROUBLE = (Verdict.NONFINITE, Verdict.OUTLANDISH, Verdict.OVERFLOW)


def row_from(block: Arrived, tag: Tag, *, step: int, history: History, left: float, repeated: bool) -> Row:
    """The row of one attempted update; `repeated` when another optimizer has brought one for it already."""
    more = block.head
    # All at once, in the order of `Said`: to ask for each place by its name takes longer than the rest.
    said, norm, nonfinite, limit, clip, clipped, loss, scale, lr, weight_norm, bad_weights, ratio, _ = block.verdict
    verdict = _VERDICTS[int(said)]
    trouble = verdict in _TROUBLE
    loss = loss if tag.watched else NAN
    d1, d2 = history.differences if repeated else history.add(loss, norm)
    reading = tag.reading
    return Row(
        step=step,
        attempt=tag.attempt,
        time=tag.time,
        optimizer=tag.optimizer,
        verdict=verdict,
        micro=_culprit(block.micros[: min(tag.micros, MICROS)]) if trouble and tag.watched else -1,
        micros=tag.micros,
        rank=_odd_one(block.losses) if trouble else -1,
        **_as_written(
            loss=loss,
            loss_d1=d1,
            loss_d2=d2,
            norm=norm,
            nonfinite=nonfinite,
            limit=limit if math.isfinite(limit) else NAN,
            clip=clip if tag.clips else NAN,
            clipped=clipped if tag.clips else NAN,
            clip_share=history.clip_share(clipped) if tag.clips else NAN,
            lr=lr if tag.lr is None else tag.lr,
            momentum=tag.momentum,
            loss_scale=scale if tag.scaled else NAN,
            weight_norm=weight_norm if tag.weights else NAN,
            update_ratio=ratio if tag.weights else NAN,
            bad_weights=bad_weights if tag.weights else NAN,
            unmoved=more[Head.UNMOVED] if tag.weights else NAN,
            applied_norm=math.sqrt(more[Head.APPLIED]) if tag.changed else NAN,
            left_over=tag.left_over,
            input_mean=more[Head.INPUT_MEAN] if tag.fed else NAN,
            input_spread=more[Head.INPUT_SPREAD] if tag.fed else NAN,
            input_top=NAN if not tag.fed else top if math.isfinite(top := more[Head.INPUT_TOP]) else math.inf,
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
        ),
    )


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


def worst_tensors(names: Sequence[str], layers: np.ndarray, row: Row, most: int = 5) -> list[dict[str, Any]]:
    """The tensors with non-finite gradients, else those with the largest norms."""
    nonfinite, norms = layers[:, 5], layers[:, 0]
    if row.verdict is Verdict.NONFINITE:
        order = np.argsort(-nonfinite, kind="stable")[:most]
        chosen = [int(i) for i in order if nonfinite[i] > 0]
    else:
        chosen = [int(i) for i in np.argsort(-np.nan_to_num(norms), kind="stable")[:most]]
    return [{"name": names[i], "norm": float(norms[i]), "nonfinite": float(nonfinite[i])} for i in chosen]

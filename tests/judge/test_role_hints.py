"""What the role of a layer says about a fault reaches the user: on the console, and in `surefoot diagnose RUN`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_rows import Source, judged, layers

from surefoot.journal.writer import Journal
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.logs.diagnose_log import diagnose
from surefoot.origin_record import Origin, OriginKind
from surefoot.records import LAYER_STATS, Event, StepMetrics
from surefoot.sinks.narrator import EventNarrator

NAMES = (
    "vision.conv1.weight",
    "vision.conv2.weight",
    "projector.weight",
    "language.embed.weight",
    "language.mlp.weight",
    "language.head.weight",
)
KINDS = ("Conv2d", "Conv2d", "Linear", "Embedding", "Linear", "Linear")
BEFORE = 150
Run = tuple[list[StepMetrics], list[Event]]


def begun() -> tuple[Judge, Source, list[StepMetrics], list[Event]]:
    """A healthy run of a vision-language model."""
    judge, source = Judge(Policy(observe=True), NAMES, kinds=KINDS), Source(1)
    rows = source.rows(BEFORE)
    return judge, source, rows, judged(judge, rows, [layers(k, len(NAMES)) for k in range(BEFORE)])


def swelling(which: list[int], factor: float) -> Run:
    judge, source, rows, events = begun()
    more = source.rows(40)
    tensors = [layers(900 + k, len(NAMES), swells=factor, which=which) for k in range(40)]
    return rows + more, events + judged(judge, more, tensors)


def language_swings() -> Run:
    judge, source, rows, events = begun()
    for k in range(14):
        wide = 0.1 * 1.45**k
        row = source.row(times=1 + wide if k % 2 else 1 / (1 + wide / 2))
        now = layers(900 + k, len(NAMES))
        now[3:, LAYER_STATS.index("norm")] *= np.float32(40.0)
        rows.append(row)
        events += judged(judge, [row], [now])
    return rows, events


def nonfinite(module: str, kind: str, origin: Origin | None = None) -> Run:
    judge, source, rows, events = begun()
    row = source.nan()
    events += judged(judge, [row]) + judge.located(row, module, kind, origin=origin)
    more = source.rows(20)
    return [*rows, row, *more], events + judged(judge, more, [layers(900 + k, len(NAMES)) for k in range(20)])


def masked() -> Run:
    kind, name = "Attention", "language.blocks.0.attention"
    origin = Origin(kind=OriginKind.SOFTMAX_MASKED, operation="softmax", module=name, module_type=kind)
    return nonfinite(name, kind, origin)


HINTS: dict[str, tuple[Callable[[], Run], tuple[str, ...]]] = {
    "vision": (lambda: swelling([0, 1], 2000.0), ("vision encoder explodes", "[-1, 1] or [0, 1]", "black or white")),
    "projection": (lambda: swelling([2], 1e-6), ("projection layer vanishes", "dimensions do not match")),
    "language": (language_swings, ("language model oscillates", "sequence lengths vary", "padding or mask is wrong")),
    "attention": (lambda: nonfinite("language.attn", "Attention"), ("the sequence is too long", "mask leaves a row")),
    "norm": (lambda: nonfinite("language.norm", "LayerNorm"), ("zero variance",)),
    "softmax module": (lambda: nonfinite("language.softmax", "Softmax"), ("a row of its input is -inf",)),
    "softmax operation": (masked, ("softmax over a row that is -inf throughout", "all is masked")),
    "head": (lambda: nonfinite("lm_head", "Head"), ("log of zero", "divided by zero")),
    "loss": (lambda: nonfinite("", ""), ("the loss was not", "log of zero", "divided by zero")),
}


@pytest.mark.parametrize("name", HINTS)
def test_the_hint_reaches_console_and_diagnosis(tmp_path: Path, name: str) -> None:
    make, words = HINTS[name]
    rows, events = make()
    lines: list[str] = []
    narrator = EventNarrator(lambda step, label, text, style: lines.append(text))
    journal = Journal(tmp_path, rank=0, info={"config": {}}, on_failure=pytest.fail)
    journal.layout(list(NAMES), [1] * len(NAMES))
    for row in rows:
        journal.row(row, None)
    for event in events:
        journal.event(event)
        narrator.on_event(event)
    journal.close()
    assert any(all(word in line for word in words) for line in lines), lines
    shown = diagnose(tmp_path).as_json()
    sentences = [*shown["notes"], *(text for cause in shown["causes"] for text in cause["evidence"])]
    assert any(all(word in text for word in words) for text in sentences), json.dumps(shown, indent=1)


def test_a_healthy_run_gets_no_hint() -> None:
    judge, source, _, events = begun()
    more = source.rows(60)
    events += judged(judge, more, [layers(500 + k, len(NAMES)) for k in range(60)])
    assert events == []
    assert all(math.isfinite(row.loss) for row in more)

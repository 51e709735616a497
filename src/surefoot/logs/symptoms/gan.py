"""An adversarial pair in which the discriminator wins for good."""

from __future__ import annotations

import numpy as np

from surefoot.logs.formats.metric_names import split_words
from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import Series
from surefoot.logs.symptoms.loss_curve import LossCurve, loss_curve
from surefoot.logs.symptoms.symptom import LOG_2, RunView, Symptom, format_number
from surefoot.records import Cause, Pattern

DISCRIMINATOR_WORDS = frozenset({"d", "disc", "discriminator"})
GENERATOR_WORDS = frozenset({"g", "gen", "generator"})


def find_gan_imbalance(view: RunView) -> Symptom | None:
    rivals = [series for role, series in view.curves.others.items() if role.startswith("rival:")]
    judge = _series_named(rivals, DISCRIMINATOR_WORDS)
    maker = _series_named(rivals, GENERATOR_WORDS)
    if judge is None or maker is None:
        return None
    low, high = loss_curve(judge), loss_curve(maker)
    if low is None or high is None or min(len(low), len(high)) < 10:
        return None
    if low.fall < LOG_2 or high.last - high.start < LOG_2:
        return None
    middle = (low.start + low.last) / 2
    onset = float(low.steps[int(np.flatnonzero(low.level < middle)[0])])
    return Symptom(
        verdict=RunHealth.WARNING,
        pattern=Pattern.NONE,
        sentence=f"The discriminator is winning since {view.at_step(onset)}: the generator can learn little.",
        onset=onset,
        causes=((Cause.LEARNING_RATE, 0.4),),
        evidence=(_from_to(judge.name, low), _from_to(maker.name, high)),
        advice=(
            "Lower the discriminator's learning rate, or train it less often than the generator.",
            "Smooth its labels, or add noise to what it sees.",
        ),
    )


def _from_to(name: str, loss: LossCurve) -> str:
    last = format_number(float(np.median(loss.raw[-5:])))
    return f"{name}: {format_number(float(loss.raw[0]))} at the start, {last} at the end"


def _series_named(rivals: list[Series], words: frozenset[str]) -> Series | None:
    return next((series for series in rivals if words & set(split_words(series.name))), None)

"""Long made-up loss curves, healthy and broken, with the row at which each trouble begins.

Every curve is a clean level times realistic noise, so that it is known at every row how far the run is above its best.
Half of the curves, by a hash of their names, are held back: thresholds are tuned on the others only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import RunCurves, Series, empty_series

Floats = NDArray[np.float64]
Random = np.random.Generator

HEALTHY = frozenset({RunHealth.HEALTHY})
PASSED = frozenset({RunHealth.HEALTHY, RunHealth.WARNING})
"""Something happened and is over: a word about it is fine, a failure is not."""
TROUBLE = frozenset({RunHealth.WARNING, RunHealth.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCurve:
    """One curve with what is true about it."""

    name: str
    level: Floats
    """The loss without noise: what the run really is at."""
    loss: Floats
    verdicts: frozenset[RunHealth]
    """Right verdicts of the whole curve."""
    onset: int | None = None
    """First row of the trouble; None for a healthy run."""
    sudden: bool = False
    """It begins from one row to the next, so its row can be known."""
    events: tuple[int, ...] = ()
    """Rows of a healthy run at which its loss rises for a while."""
    above: float = 0.1
    """From this rise of the level over its best (a logarithm) on, no prefix is healthy."""
    eval_every: int = 0
    eval_loss: Floats = field(default_factory=lambda: np.empty(0))
    lr: Floats = field(default_factory=lambda: np.empty(0))

    @property
    def healthy(self) -> bool:
        return self.onset is None

    @property
    def held_back(self) -> bool:
        return zlib.crc32(self.name.encode()) % 2 == 1

    def __len__(self) -> int:
        return len(self.loss)

    def curves(self, rows: int) -> RunCurves:
        """What a log holds after so many rows."""
        steps = np.arange(rows, dtype=np.float64)
        evals = len(self.eval_loss[: rows // self.eval_every]) if self.eval_every else 0
        at = np.arange(1, evals + 1, dtype=np.float64) * self.eval_every - 1
        return RunCurves(
            loss=Series("loss", steps, self.loss[:rows]),
            eval_loss=Series("eval_loss", at, self.eval_loss[:evals]) if evals else empty_series(),
            lr=Series("lr", steps, self.lr[:rows]) if len(self.lr) else empty_series(),
        )

    def harmed_at(self, rows: int) -> bool:
        """Whether a log of so many rows must not be called healthy."""
        if self.onset is None or rows <= self.onset:
            return False
        if self.eval_every or not np.isfinite(self.level[:rows]).all():
            return True
        best = float(np.log(self.level[: self.onset + 1].min())) if self.onset else float(np.log(self.level[0]))
        return float(np.log(self.level[rows - 1])) - best > self.above


def power_law(rows: int, start: float, end: float, power: float = 0.5) -> Floats:
    """A loss that falls as a power of the step from one level to about another."""
    steps = np.arange(rows) / max(rows, 1)
    knee = 0.002 + 20 / rows
    return end + (start - end) * (1 + steps / knee) ** -power


def make_noise(random: Random, rows: int, size: float, *, tails: float = 4.0, memory: float = 0.0) -> Floats:
    """Noise of a logarithm: heavy tails, larger at the start, and correlated from batch to batch by `memory`."""
    raw = random.standard_t(tails, rows) * np.sqrt((tails - 2) / tails)
    slow = _autoregressive(random, rows, 0.98) if memory else np.zeros(rows)
    fading = 1 + 1.5 * np.exp(-np.arange(rows) / (0.05 * rows + 50))
    return size * fading * (np.sqrt(1 - memory) * raw + np.sqrt(memory) * slow)


def _autoregressive(random: Random, rows: int, keep: float) -> Floats:
    """Noise with a memory of 1 / (1 - keep) rows and a deviation of 1, as the sum of its recent pushes."""
    span = int(6 / (1 - keep))
    kernel = keep ** np.arange(span)
    pushes = random.standard_normal(rows + span)
    size = 1 << (len(pushes) + span).bit_length()
    whole = np.fft.irfft(np.fft.rfft(pushes, size) * np.fft.rfft(kernel, size), size)[span : span + rows]
    return whole * np.sqrt(1 - keep**2)


def _cosine(rows: int, warmup: float = 0.02) -> Floats:
    steps = np.arange(rows) / rows
    return np.where(steps < warmup, steps / warmup, 0.55 + 0.45 * np.cos(np.pi * steps))


@dataclass(frozen=True, slots=True)
class _Base:
    """A healthy run that the kinds build on."""

    random: Random
    name: str
    rows: int
    level: Floats
    noise: Floats

    def make(self, level: Floats, **facts: object) -> MadeCurve:
        loss = level * np.exp(self.noise)
        if facts["verdicts"] == HEALTHY and self.noise.max() > np.log(2):
            facts["verdicts"] = PASSED  # a loss of twice the level is a spike, though it came from heavy tails
        return MadeCurve(name=self.name, level=level, loss=loss, **facts)  # pyright: ignore[reportArgumentType]

    def share(self, low: float = 0.3, high: float = 0.7) -> int:
        """A row somewhere in the run."""
        return int(self.random.uniform(low, high) * self.rows)


def _steady(base: _Base) -> MadeCurve:
    return base.make(base.level, verdicts=HEALTHY)


def _schedule(base: _Base) -> MadeCurve:
    return base.make(base.level * (1 + 0.08 * _cosine(base.rows)), verdicts=HEALTHY, lr=1e-3 * _cosine(base.rows))


def _restarts(base: _Base) -> MadeCurve:
    phase = np.arange(base.rows) / base.rows * 4 % 1
    lr = 0.5 + 0.5 * np.cos(np.pi * phase)
    at = tuple(base.rows * part // 4 for part in (1, 2, 3))
    return base.make(base.level * (1 + 0.12 * lr), verdicts=PASSED, events=at, lr=1e-3 * lr)


def _curriculum(base: _Base, height: float = 0.6) -> MadeCurve:
    """Twice the data change, and are learnt."""
    level = base.level.copy()
    at = (base.rows // 4, base.rows // 2)
    for row in at:
        after = np.arange(base.rows - row) / base.rows
        level[row:] *= 1 + height * np.exp(-after / 0.04)
        level[row:] *= 1 - 0.1 * (1 - np.exp(-after / 0.04))
    return base.make(level, verdicts=PASSED, events=at)


def _hard_curriculum(base: _Base) -> MadeCurve:
    """The new data cost twice to four times what the old did, yet less than guessing, and are learnt as well."""
    room = 0.85 * base.level[0] / base.level[base.rows // 4]
    return _curriculum(base, min(base.random.uniform(1.0, 3.0), room - 1))


def _two_sources(base: _Base) -> MadeCurve:
    """Batches of two kinds of text, one of which is harder: the noise has two humps."""
    hard = base.random.random(base.rows) < 0.25
    base.noise[hard] += 0.25
    return base.make(base.level, verdicts=HEALTHY)


def _wandering(base: _Base) -> MadeCurve:
    """The data are hardly shuffled: the level wanders by a few percent for thousands of rows."""
    return base.make(base.level * np.exp(0.012 * _autoregressive(base.random, base.rows, 0.999)), verdicts=PASSED)


def _plateau_at_end(base: _Base) -> MadeCurve:
    return base.make(np.maximum(base.level, base.level[base.rows // 3]), verdicts=HEALTHY)


def _reinforcement(base: _Base) -> MadeCurve:
    """Policy losses: tiny, noisy, and without a trend."""
    wander = _autoregressive(base.random, base.rows, 0.999)
    return base.make(np.full(base.rows, 0.04) * np.exp(0.3 * wander + 8 * base.noise), verdicts=PASSED)


def _warmup_spikes(base: _Base) -> MadeCurve:
    level = base.level.copy()
    rows = tuple(int(row) for row in base.random.integers(30, max(60, min(base.rows // 10, 2000)), 3))
    for at in rows:
        level[at : at + 12] *= 1 + base.random.uniform(0.3, 1.5) * np.exp(-np.arange(len(level[at : at + 12])) / 4)
    return base.make(level, verdicts=PASSED, events=rows)


def _epoch_teeth(base: _Base) -> MadeCurve:
    """The loss drops a little at each epoch, and creeps up within it."""
    epochs = np.arange(base.rows) / base.rows * 6
    teeth = np.exp(-0.05 * np.floor(epochs) + 0.012 * (epochs % 1))
    return base.make(base.level * teeth, verdicts=HEALTHY)


def _evals(base: _Base) -> MadeCurve:
    every = max(base.rows // 40, 20)
    at = np.arange(every - 1, base.rows, every)
    noise = base.random.normal(0, 0.01, len(at))
    return base.make(base.level, verdicts=HEALTHY, eval_every=every, eval_loss=1.05 * base.level[at] * np.exp(noise))


def _jump_stays(base: _Base) -> MadeCurve:
    at = base.share()
    level = base.level.copy()
    level[at:] = base.level[0] * base.random.uniform(0.9, 1.02)
    return base.make(level, verdicts=TROUBLE, onset=at, sudden=True)


def _jump_falls_halfway(base: _Base) -> MadeCurve:
    """Leaps at a restart, learns again, and does not get back to where it was."""
    at = base.share(0.4, 0.8)
    level = base.level.copy()
    after = np.arange(base.rows - at)
    top, rest = level[0], level[at] * base.random.uniform(1.4, 2.2)
    level[at:] = rest + (top - rest) * (1 + after / 60) ** -0.6
    return base.make(level, verdicts=TROUBLE, onset=at, sudden=True)


def _small_jump(base: _Base) -> MadeCurve:
    at = base.share()
    level = base.level.copy()
    level[at:] *= 1 + base.random.uniform(0.25, 0.5)
    return base.make(level, verdicts=TROUBLE, onset=at, sudden=True)


def _late_jump(base: _Base) -> MadeCurve:
    at = base.rows - int(base.random.integers(40, 200))
    level = base.level.copy()
    level[at:] *= base.random.uniform(2, 4)
    return base.make(level, verdicts=TROUBLE, onset=at, sudden=True)


def _two_jumps(base: _Base) -> MadeCurve:
    """The first comes back, the second does not."""
    first, second = base.share(0.2, 0.3), base.share(0.6, 0.8)
    level = base.level.copy()
    back = np.arange(base.rows - first) / (0.02 * base.rows)
    level[first:] *= 1 + 1.5 * np.exp(-back)
    level[second:] *= 2.0
    return base.make(level, verdicts=TROUBLE, onset=second, sudden=True, above=0.3)


def _ramp(base: _Base) -> MadeCurve:
    """Diverges over a few hundred rows and stays there."""
    at, length = base.share(), int(base.random.integers(150, 500))
    level = base.level.copy()
    rise = np.clip(np.arange(base.rows - at) / length, 0, 1)
    level[at:] = level[at:] ** (1 - rise) * level[0] ** rise
    return base.make(level, verdicts=TROUBLE, onset=at, above=0.25)


def _slow_rise(base: _Base) -> MadeCurve:
    """Ends 4 to 20 % above its best: 0.12 to 0.6 for a loss of 3."""
    at = base.share(0.3, 0.5)
    level = base.level.copy()
    rise = np.arange(base.rows - at) / (base.rows - at)
    level[at:] = level[at] * (1 + base.random.uniform(0.04, 0.2) * rise)
    return base.make(level, verdicts=TROUBLE, onset=at, above=0.045)


def _log_linear(base: _Base) -> MadeCurve:
    at = base.share(0.1, 0.3)
    level = base.level.copy()
    level[at:] = level[at] * np.exp(base.random.uniform(0.5, 1.5) * np.arange(base.rows - at) / (base.rows - at))
    return base.make(level, verdicts=TROUBLE, onset=at, above=0.1)


def _stuck_above_start(base: _Base) -> MadeCurve:
    at = int(base.random.integers(4, 30))
    level = base.level.copy()
    level[at:] = level[0] * base.random.uniform(3, 40)
    return base.make(level, verdicts=TROUBLE, onset=at)


def _exponential_to_nan(base: _Base) -> MadeCurve:
    at = base.share()
    level = base.level.copy()
    with np.errstate(over="ignore"):
        level[at:] *= np.exp(np.arange(base.rows - at) / 40)
    level[level > 1e30] = np.nan
    return base.make(level, verdicts=TROUBLE, onset=at, above=0.5)


def _nan_stays(base: _Base) -> MadeCurve:
    at = base.share()
    level = base.level.copy()
    level[at:] = np.nan
    return base.make(level, verdicts=frozenset({RunHealth.FAILED}), onset=at, sudden=True)


def _swings(base: _Base) -> MadeCurve:
    at = base.share()
    level = base.level.copy()
    after = np.arange(base.rows - at)
    height = 1.8 * np.clip(after / (0.2 * base.rows), 0, 1)
    level[at:] *= np.exp(height * (0.5 + 0.5 * np.sin(after / 25)))
    return base.make(level, verdicts=TROUBLE, onset=at, above=9.0)


def _never_learns(base: _Base) -> MadeCurve:
    return base.make(np.full(base.rows, np.log(50257)), verdicts=TROUBLE, onset=0, above=9.0)


def _eval_nan(base: _Base) -> MadeCurve:
    whole = _evals(base)
    evals = whole.eval_loss.copy()
    since = len(evals) // 2
    evals[since:] = np.nan
    onset = (since + 1) * whole.eval_every
    return base.make(base.level, verdicts=TROUBLE, onset=onset, eval_every=whole.eval_every, eval_loss=evals)


def _overfits(base: _Base) -> MadeCurve:
    whole = _evals(base)
    rise = np.exp(np.clip(np.arange(len(whole.eval_loss)) / len(whole.eval_loss) - 0.4, 0, 1))
    onset = int(0.8 * base.rows)
    facts = {"eval_every": whole.eval_every, "eval_loss": whole.eval_loss * rise}
    return base.make(base.level, verdicts=TROUBLE, onset=onset, **facts)


KINDS: dict[str, Callable[[_Base], MadeCurve]] = {
    "steady": _steady,
    "schedule": _schedule,
    "lr-restarts": _restarts,
    "curriculum": _curriculum,
    "hard-curriculum": _hard_curriculum,
    "two-sources": _two_sources,
    "wandering": _wandering,
    "plateau-at-end": _plateau_at_end,
    "reinforcement": _reinforcement,
    "warmup-spikes": _warmup_spikes,
    "epoch-teeth": _epoch_teeth,
    "evals": _evals,
    "jump-stays": _jump_stays,
    "jump-falls-halfway": _jump_falls_halfway,
    "small-jump": _small_jump,
    "late-jump": _late_jump,
    "two-jumps": _two_jumps,
    "ramp": _ramp,
    "slow-rise": _slow_rise,
    "log-linear": _log_linear,
    "stuck-above-start": _stuck_above_start,
    "exponential-to-nan": _exponential_to_nan,
    "nan-stays": _nan_stays,
    "swings": _swings,
    "never-learns": _never_learns,
    "eval-nan": _eval_nan,
    "overfits": _overfits,
}
"""Kinds by name; a kind, its length and a number make one curve."""

LENGTHS = (3_000, 20_000, 60_000, 300_000)
LONG = {"steady": 1_000_000, "plateau-at-end": 1_000_000, "jump-falls-halfway": 1_000_000, "slow-rise": 1_000_000}


def make_curve(kind: str, rows: int, number: int = 0) -> MadeCurve:
    """One curve; the same name always gives the same numbers."""
    name = f"{kind}-{rows}-{number}"
    random = np.random.default_rng(zlib.crc32(name.encode()) // 2)
    start, end = random.choice([10.8, 4.6, 2.4]), random.uniform(0.2, 0.4)
    level = power_law(rows, start, start * end, random.uniform(0.4, 0.8))
    memory = random.choice([0.0, 0.0, 0.1, 0.3])
    noise = make_noise(random, rows, random.uniform(0.008, 0.06), tails=random.choice([3.0, 5.0, 30.0]), memory=memory)
    return KINDS[kind](_Base(random, name, rows, level, noise))


def make_curves(*, held_back: bool) -> Iterator[MadeCurve]:
    """The curves of one half, generated one at a time."""
    for kind in KINDS:
        for rows in (*LENGTHS, *((LONG[kind],) if kind in LONG else ())):
            for number in range(2 if rows <= LENGTHS[1] else 1):
                curve = make_curve(kind, rows, number)
                if curve.held_back is held_back:
                    yield curve

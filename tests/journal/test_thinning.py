from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from surefoot.journal import thinning
from surefoot.journal.reader import read
from surefoot.journal.row_file import SCALARS_HEADER, layers_header
from surefoot.journal.row_writer import LayerWriter
from surefoot.journal.segments import make_segment
from surefoot.journal.thinning import ClosedSegment, HistoryLimits, ThinningJob, keep_one_in, next_job, thin_rows
from surefoot.journal.writer import JournalLimits
from surefoot.records import LAYER_STATS, Verdict


class SimulatedRun:
    """A run whose layer rows have only attempts and verdicts: thinned in memory, never written to disk."""

    def __init__(self, tensors: int, *, refused_every: int = 0) -> None:
        self.header = layers_header([f"model.layers.{at:05d}.self_attn.weight" for at in range(tensors)], [1] * tensors)
        self.head, self.row = len(self.header.encode()), self.header.dtype.itemsize
        self.limits = HistoryLimits.for_row_size(self.row, window=JournalLimits().window, budget=JournalLimits().budget)
        self.refused_every = refused_every
        self.parts: list[tuple[ClosedSegment, np.ndarray]] = []
        self.peak = 0

    def run(self, steps: int) -> None:
        for number, first in enumerate(range(0, steps, self.limits.segment_rows)):
            rows = np.zeros(self.limits.segment_rows, [("attempt", "<i8"), ("verdict", "<i4")])
            rows["attempt"] = range(first, first + self.limits.segment_rows)
            if self.refused_every:
                rows["verdict"] = rows["attempt"] % self.refused_every == 0
            self.parts.append(self.part(rows, self.header, make_segment(Path(), "layers", number)))
            self.peak = max(self.peak, self.size() + self.limits.segment_rows * self.row)  # plus one draft file
            while (
                job := next_job([part for part, _ in self.parts], self.limits, newer_rows=0, open_bytes=0)
            ) is not None:
                self.run_job(job)

    def run_job(self, job: ThinningJob) -> None:
        at = next(at for at, (part, _) in enumerate(self.parts) if part is job.segments[0])
        old = self.parts[at : at + len(job.segments)]
        rows, landed, refused = thin_rows(np.concatenate([rows for _, rows in old]), job)
        header = thinning.replace(
            self.header, landed_stride=landed, refused_stride=refused, covers=sum(part.covers for part, _ in old)
        )
        thinned = [self.part(rows, header, job.segments[0].segment)] if len(rows) else []
        self.parts[at : at + len(job.segments)] = thinned

    def part(
        self, rows: np.ndarray, header: thinning.RowHeader, where: thinning.Segment
    ) -> tuple[ClosedSegment, np.ndarray]:
        return ClosedSegment(where, header, len(rows), self.head + len(rows) * self.row), rows

    def size(self) -> int:
        return sum(part.size for part, _ in self.parts)

    def attempts(self) -> np.ndarray:
        return np.concatenate([rows["attempt"] for _, rows in self.parts])


@pytest.mark.parametrize(  # all but the first are over budget
    ("steps", "tensors", "refused_every"),
    [(1_000_000, 300, 0), (200_000, 300, 1), (200_000, 5000, 100), (3000, 100_000, 7)],
)
def test_a_million_steps_stay_under_a_gigabyte(steps: int, tensors: int, refused_every: int) -> None:
    run = SimulatedRun(tensors, refused_every=refused_every)
    run.run(steps)
    assert run.peak + SCALARS_HEADER.dtype.itemsize * 1_000_000 < 1_000_000_000
    attempts = run.attempts()
    assert (np.diff(attempts) > 0).all()
    window = run.limits.window
    assert window == 10_000 or tensors > 1000
    assert attempts[-1] >= steps - 1
    assert attempts[-window] == attempts[-1] - window + 1
    assert len(run.parts) < 200


def test_thinned_rows_of_a_million_steps_cover_all_of_them() -> None:
    run = SimulatedRun(300, refused_every=1000)
    run.run(1_000_000)
    attempts = run.attempts()
    assert set(range(0, 1_000_000, 1000)) <= set(attempts.tolist())
    for first, last in pairwise(np.geomspace(20_000, 1_000_000, 8).astype(int)):
        aged = attempts[(attempts > 1_000_000 - last) & (attempts <= 1_000_000 - first)]
        assert np.diff(aged).max() < 3 * 2 * last / 10_000 * 2


def test_thinned_rows_are_even_nested_and_fair_to_alternating_optimizers() -> None:
    attempts = np.arange(20_000)
    before = attempts
    for stride in (2, 4, 8, 64):
        kept_attempts = attempts[keep_one_in(attempts, stride)]
        assert kept_attempts[0] == 0
        assert set(kept_attempts) <= set(before)
        assert math.isclose(len(kept_attempts), 20_000 / stride, rel_tol=0.05)
        assert np.diff(kept_attempts).max() <= 4 * stride
        for optimizers in (2, 3):
            shares = np.bincount(kept_attempts % optimizers) / len(kept_attempts)
            assert shares.min() > 0.8 / optimizers
        before = kept_attempts


def fill(log: LayerWriter, attempts: range, tensors: int = 2) -> None:
    marks = np.zeros(len(attempts), SCALARS_HEADER.dtype)
    marks["step"] = marks["attempt"] = attempts
    marks["verdict"] = np.where(np.array(attempts) % 50 == 7, Verdict.NORM_OUTLIER, Verdict.APPLIED)
    log.append(marks, [np.full((tensors, len(LAYER_STATS)), attempt, np.float32) for attempt in attempts])


def check(run_dir: Path, *, newest: int, window: int) -> None:
    layers = read(run_dir).layers
    attempts = layers.attempts
    assert (np.diff(attempts) > 0).all()
    assert attempts[-1] == newest
    assert attempts[-window:].tolist() == list(range(newest - window + 1, newest + 1))
    assert set(range(7, newest, 50)) <= set(attempts.tolist())
    assert layers["w0"]["norm"].tolist() == attempts.tolist()


def test_files_keep_the_window_refused_updates_and_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand calls; power loss is not tested here
    folder = tmp_path / "signals"
    folder.mkdir()
    log = LayerWriter(folder, window=200, budget=90_000)
    log.set_layout(["w0", "w1"], [1, 1])
    for first in range(0, 2500, 25):
        fill(log, range(first, first + 25))
        while log.thin_once():
            pass
        if first % 500 == 0:  # a new attach in between changes nothing
            log.close()
            log = LayerWriter(folder, window=200, budget=90_000)
            log.set_layout(["w0", "w1"], [1, 1])
    log.close()
    check(tmp_path, newest=2499, window=200)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 90_000 + 4000
    assert len(list(folder.iterdir())) < 100


@pytest.mark.parametrize("moment", ["replace", "unlink", "fsync"])
def test_thinning_cut_short_at_any_point_leaves_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folder = tmp_path / "signals"
    folder.mkdir()
    log = LayerWriter(folder, window=100, budget=80_000)
    log.set_layout(["w0", "w1"], [1, 1])

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    kills = 0
    for first in range(0, 600, 25):
        fill(log, range(first, first + 25))
        with monkeypatch.context() as patch:
            if first % 75 == 0:
                patch.setattr(*((Path, "unlink") if moment == "unlink" else (os, moment)), die)
            try:
                while log.thin_once():
                    pass
            except Killed:
                kills += 1
                check(tmp_path, newest=first + 24, window=min(100, first + 25))
                log.close()
                log = LayerWriter(folder, window=100, budget=80_000)
                log.set_layout(["w0", "w1"], [1, 1])
    check(tmp_path, newest=599, window=100)
    log.close()
    assert kills > 3

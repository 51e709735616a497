from __future__ import annotations

import os

import pytest

from surefoot.data.worker_count import resolve_workers, workers_needed


def test_auto_leaves_a_core_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, expected in ((1, 1, 0), (2, 1, 1), (16, 1, 4), (16, 8, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert resolve_workers("auto", cheap=False) == expected
        assert resolve_workers("auto", cheap=True) == 0
        assert resolve_workers(3, cheap=True) == 3


def test_enough_workers_keep_up_with_training() -> None:
    """A step that computes for 1 s; reading one batch takes a worker 3.5 s."""
    assert workers_needed(0, compute=1.0, wait=3.5) == 4
    assert workers_needed(2, compute=1.0, wait=3.5 / 2 - 1.0) == 4
    assert workers_needed(0, compute=1.0, wait=0.1) == 1

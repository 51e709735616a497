from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.store import CheckpointStore, Health, Problem, Retention, StoredCheckpoint
from surefoot.checkpoint.store.retention import removable

from .conftest import Saver

HOUR = 3600.0
YEAR = 365 * 24 * HOUR
ORDERED = Retention(apart=0)


def checkpoint_at(step: int, health: Health = "unproven", *, wrong: str = "", **about: Any) -> StoredCheckpoint:
    problems = (Problem("weights", wrong),) if wrong else ()
    return StoredCheckpoint(
        folder=Path(f"step-{step:08d}"),
        step=step,
        attempt=step,
        about=about,
        health=health,
        seal="x",
        problems=problems,
    )


def steps_kept(candidates: Iterable[StoredCheckpoint], keep: Retention = ORDERED) -> list[int]:
    candidates = list(candidates)
    removed = {checkpoint.name for checkpoint in removable(candidates, keep)}
    return sorted(checkpoint.step for checkpoint in candidates if checkpoint.name not in removed)


def test_last_three_are_kept() -> None:
    assert steps_kept(checkpoint_at(step) for step in range(1, 8)) == [5, 6, 7]


def test_best_by_metric_is_kept_in_both_modes() -> None:
    losses = {1: 3.0, 2: 1.0, 3: 1.0, 4: float("nan"), 5: 2.0, 6: 4.0, 7: 3.0}
    checkpoints = [checkpoint_at(step, metrics={"loss": loss}) for step, loss in losses.items()]
    assert steps_kept(checkpoints, Retention(best="loss", apart=0)) == [2, 5, 6, 7]
    assert steps_kept(checkpoints, Retention(best="loss", mode="max", apart=0)) == [5, 6, 7]
    assert steps_kept(checkpoints, Retention(best="accuracy", apart=0)) == [5, 6, 7]
    odd = [checkpoint_at(1, metrics="none"), checkpoint_at(2, metrics={"loss": "nan"}), *checkpoints[2:]]
    assert steps_kept(odd, Retention(best="loss", apart=0)) == [3, 5, 6, 7]


def test_newest_best_checkpoint_is_kept_without_a_metric() -> None:
    kinds = {1: "best", 2: "best", 3: "regular", 4: "regular", 5: "regular", 6: "regular"}
    assert steps_kept(checkpoint_at(step, kind=kind) for step, kind in kinds.items()) == [2, 4, 5, 6]


def test_last_two_emergency_checkpoints_are_kept() -> None:
    kinds = {step: "emergency" if step in (1, 2, 3) else "regular" for step in range(1, 9)}
    assert steps_kept(checkpoint_at(step, kind=kind) for step, kind in kinds.items()) == [2, 3, 6, 7, 8]


def test_one_checkpoint_per_hour_is_kept() -> None:
    checkpoints = [checkpoint_at(step, seconds=step * HOUR / 3) for step in range(12)]
    assert steps_kept(checkpoints, Retention()) == [0, 3, 6, 9, 10, 11]
    assert steps_kept(checkpoints, Retention(spaced=2)) == [6, 9, 10, 11]
    stamped = [checkpoint_at(step, time=1.7e9 + step * HOUR / 3) for step in range(12)]
    assert steps_kept(stamped, Retention()) == [0, 3, 6, 9, 10, 11]


def test_pruning_at_every_save_equals_pruning_once() -> None:
    checkpoints: list[StoredCheckpoint] = []
    for step in range(40):
        checkpoints.append(checkpoint_at(step, seconds=step * HOUR / 4))
        removed = {checkpoint.name for checkpoint in removable(checkpoints, Retention(spaced=5))}
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.name not in removed]
    assert [checkpoint.step for checkpoint in checkpoints] == [20, 24, 28, 32, 36, 37, 38, 39]


def test_suspect_is_removed_once_a_newer_one_is_healthy() -> None:
    assert steps_kept(
        [checkpoint_at(1), checkpoint_at(2), checkpoint_at(3, "suspect"), checkpoint_at(4, "suspect")]
    ) == [1, 2, 3, 4]
    assert steps_kept([checkpoint_at(1), checkpoint_at(2), checkpoint_at(3, "suspect"), checkpoint_at(4)]) == [
        1,
        2,
        3,
        4,
    ]
    assert steps_kept(
        [checkpoint_at(1), checkpoint_at(2), checkpoint_at(3, "suspect"), checkpoint_at(4, "healthy")]
    ) == [1, 2, 4]
    first = removable(
        [
            checkpoint_at(1),
            checkpoint_at(2),
            checkpoint_at(3),
            checkpoint_at(4, "suspect"),
            checkpoint_at(5),
            checkpoint_at(6, "healthy"),
        ],
        ORDERED,
    )
    assert [checkpoints.step for checkpoints in first] == [4, 1, 2]


def test_suspect_checkpoints_do_not_displace_good_ones() -> None:
    checkpoints = [
        checkpoint_at(1),
        checkpoint_at(2),
        checkpoint_at(3),
        *(checkpoint_at(step, "suspect") for step in range(4, 12)),
    ]
    assert steps_kept(checkpoints) == [1, 2, 3, 9, 10, 11]


def test_newest_healthy_checkpoint_is_always_kept() -> None:
    assert steps_kept(
        [checkpoint_at(1, "healthy"), checkpoint_at(2, "healthy"), *(checkpoint_at(step) for step in range(3, 9))]
    ) == [2, 6, 7, 8]


def test_damaged_checkpoints_do_not_count_and_are_removed() -> None:
    assert steps_kept([checkpoint_at(1), checkpoint_at(2), checkpoint_at(3), checkpoint_at(4, wrong="missing")]) == [
        1,
        2,
        3,
        4,
    ]
    checkpoints = [
        checkpoint_at(1, wrong="missing"),
        checkpoint_at(2),
        checkpoint_at(3, wrong="missing"),
        checkpoint_at(4),
        checkpoint_at(5),
    ]
    assert steps_kept(checkpoints) == [2, 3, 4, 5]


def test_never_fewer_than_two_are_kept() -> None:
    assert steps_kept([checkpoint_at(1), checkpoint_at(2), checkpoint_at(3)], Retention(last=1, apart=0)) == [2, 3]
    with pytest.raises(ValueError, match="last >= 1"):
        Retention(last=0)


checkpoint_strategy = st.lists(
    st.tuples(
        st.sampled_from(get_args(Health)),
        st.sampled_from(["regular", "emergency", "best"]),
        st.sampled_from([0.0, 600.0, HOUR, YEAR, -YEAR, float("nan")]),
    ),
    min_size=2,
    max_size=30,
)


@given(checkpoint_strategy, st.integers(1, 4))
def test_clock_jumps_never_remove_more(drawn: list[tuple[Health, str, float]], last: int) -> None:
    clock = 1.7e9
    checkpoints = []
    for step, (health, kind, jump) in enumerate(drawn):
        clock += 0.0 if jump != jump else jump
        checkpoints.append(checkpoint_at(step, health, kind=kind, time=clock if jump == jump else jump))
    with_clock, without = (
        steps_kept(checkpoints, Retention(last=last)),
        steps_kept(checkpoints, Retention(last=last, apart=0)),
    )
    assert set(without) <= set(with_clock)
    assert len(without) >= 2
    healthy = [checkpoint.step for checkpoint in checkpoints if checkpoint.health == "healthy"]
    assert not healthy or healthy[-1] in without
    regular = [
        checkpoint.step
        for checkpoint in checkpoints
        if checkpoint.health != "suspect" and checkpoint.kind != "emergency"
    ]
    assert set(regular[-last:]) <= set(without)


def test_store_removes_only_when_two_others_are_intact(tmp_path: Path, save: Saver) -> None:
    keep = Retention(last=1, apart=0)
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path), step)
    damaged = tmp_path / "step-00000003" / "weights.safetensors"
    data = bytearray(damaged.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1
    damaged.write_bytes(data)  # the size is unchanged: only reading finds it
    save(CheckpointStore(tmp_path, keep=keep), 4)
    store = CheckpointStore(tmp_path)
    assert [checkpoint.step for checkpoint in store.all() if not store.verify(checkpoint).problems] == [4, 2]


def test_checkpoint_just_saved_is_never_removed(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    for step in (100, 110, 120):
        save(store, step)
    name = save(store, 50, attempt=130)  # after a rewind
    assert (tmp_path / name).exists()

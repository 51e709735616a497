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


def made(step: int, health: Health = "unproven", *, wrong: str = "", **about: Any) -> StoredCheckpoint:
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


def left(kept: Iterable[StoredCheckpoint], keep: Retention = ORDERED) -> list[int]:
    kept = list(kept)
    gone = {one.name for one in removable(kept, keep)}
    return sorted(one.step for one in kept if one.name not in gone)


def test_the_last_three_stay() -> None:
    assert left(made(step) for step in range(1, 8)) == [5, 6, 7]


def test_the_best_by_a_metric_stays_whichever_way_is_better() -> None:
    losses = {1: 3.0, 2: 1.0, 3: 1.0, 4: float("nan"), 5: 2.0, 6: 4.0, 7: 3.0}
    kept = [made(step, metrics={"loss": loss}) for step, loss in losses.items()]
    assert left(kept, Retention(best="loss", apart=0)) == [2, 5, 6, 7]
    assert left(kept, Retention(best="loss", mode="max", apart=0)) == [5, 6, 7]
    assert left(kept, Retention(best="accuracy", apart=0)) == [5, 6, 7]
    odd = [made(1, metrics="none"), made(2, metrics={"loss": "nan"}), *kept[2:]]
    assert left(odd, Retention(best="loss", apart=0)) == [3, 5, 6, 7]


def test_without_a_metric_the_newest_that_was_saved_as_the_best_stays() -> None:
    kinds = {1: "best", 2: "best", 3: "regular", 4: "regular", 5: "regular", 6: "regular"}
    assert left(made(step, kind=kind) for step, kind in kinds.items()) == [2, 4, 5, 6]


def test_the_last_two_emergency_ones_stay_beside_the_regular_ones() -> None:
    kinds = {step: "emergency" if step in (1, 2, 3) else "regular" for step in range(1, 9)}
    assert left(made(step, kind=kind) for step, kind in kinds.items()) == [2, 3, 6, 7, 8]


def test_one_an_hour_stays() -> None:
    kept = [made(step, seconds=step * HOUR / 3) for step in range(12)]
    assert left(kept, Retention()) == [0, 3, 6, 9, 10, 11]
    assert left(kept, Retention(spaced=2)) == [6, 9, 10, 11]
    stamped = [made(step, time=1.7e9 + step * HOUR / 3) for step in range(12)]
    assert left(stamped, Retention()) == [0, 3, 6, 9, 10, 11]


def test_deciding_anew_at_every_save_keeps_the_same_ones_as_deciding_once() -> None:
    kept: list[StoredCheckpoint] = []
    for step in range(40):
        kept.append(made(step, seconds=step * HOUR / 4))
        gone = {one.name for one in removable(kept, Retention(spaced=5))}
        kept = [one for one in kept if one.name not in gone]
    assert [one.step for one in kept] == [20, 24, 28, 32, 36, 37, 38, 39]


def test_a_suspect_one_goes_as_soon_as_a_newer_one_proved_healthy() -> None:
    assert left([made(1), made(2), made(3, "suspect"), made(4, "suspect")]) == [1, 2, 3, 4]
    assert left([made(1), made(2), made(3, "suspect"), made(4)]) == [1, 2, 3, 4]
    assert left([made(1), made(2), made(3, "suspect"), made(4, "healthy")]) == [1, 2, 4]
    first = removable([made(1), made(2), made(3), made(4, "suspect"), made(5), made(6, "healthy")], ORDERED)
    assert [kept.step for kept in first] == [4, 1, 2]


def test_suspect_ones_push_no_good_one_out() -> None:
    kept = [made(1), made(2), made(3), *(made(step, "suspect") for step in range(4, 12))]
    assert left(kept) == [1, 2, 3, 9, 10, 11]


def test_the_newest_healthy_one_stays_however_old_it_is() -> None:
    assert left([made(1, "healthy"), made(2, "healthy"), *(made(step) for step in range(3, 9))]) == [2, 6, 7, 8]


def test_damaged_ones_do_not_count_and_go_when_enough_newer_ones_stand() -> None:
    assert left([made(1), made(2), made(3), made(4, wrong="missing")]) == [1, 2, 3, 4]
    kept = [made(1, wrong="missing"), made(2), made(3, wrong="missing"), made(4), made(5)]
    assert left(kept) == [2, 3, 4, 5]


def test_never_fewer_than_two() -> None:
    assert left([made(1), made(2), made(3)], Retention(last=1, apart=0)) == [2, 3]
    with pytest.raises(ValueError, match="last >= 1"):
        Retention(last=0)


checkpoints = st.lists(
    st.tuples(
        st.sampled_from(get_args(Health)),
        st.sampled_from(["regular", "emergency", "best"]),
        st.sampled_from([0.0, 600.0, HOUR, YEAR, -YEAR, float("nan")]),
    ),
    min_size=2,
    max_size=30,
)


@given(checkpoints, st.integers(1, 4))
def test_whatever_the_clock_does_only_more_is_kept(drawn: list[tuple[Health, str, float]], last: int) -> None:
    clock = 1.7e9
    kept = []
    for step, (health, kind, jump) in enumerate(drawn):
        clock += 0.0 if jump != jump else jump
        kept.append(made(step, health, kind=kind, time=clock if jump == jump else jump))
    with_clock, without = left(kept, Retention(last=last)), left(kept, Retention(last=last, apart=0))
    assert set(without) <= set(with_clock)
    assert len(without) >= 2
    healthy = [one.step for one in kept if one.health == "healthy"]
    assert not healthy or healthy[-1] in without
    regular = [one.step for one in kept if one.health != "suspect" and one.kind != "emergency"]
    assert set(regular[-last:]) <= set(without)


def test_the_store_lets_go_only_when_two_others_are_whole(tmp_path: Path, save: Saver) -> None:
    keep = Retention(last=1, apart=0)
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path), step)
    damaged = tmp_path / "step-00000003" / "weights.safetensors"
    data = bytearray(damaged.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1
    damaged.write_bytes(data)  # the size is right: only who reads it knows
    save(CheckpointStore(tmp_path, keep=keep), 4)
    store = CheckpointStore(tmp_path)
    assert [kept.step for kept in store.all() if not store.verify(kept).problems] == [4, 2]


def test_what_was_just_saved_is_never_what_goes(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    for step in (100, 110, 120):
        save(store, step)
    name = save(store, 50, attempt=130)  # after a rewind
    assert (tmp_path / name).exists()

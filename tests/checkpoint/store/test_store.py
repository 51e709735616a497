from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from surefoot.checkpoint.store import (
    CheckpointStore,
    CheckpointWarning,
    Files,
    Health,
    Retention,
    StoredCheckpoint,
    folders,
)
from surefoot.checkpoint.store.folders import FOREIGN_DRAFT_SECONDS

from .conftest import Saver

T = TypeVar("T")
YEAR = 365 * 24 * 3600


def newest(store: CheckpointStore, trust: Health = "unproven") -> StoredCheckpoint:
    kept = store.newest(trust=trust)
    assert kept is not None
    return kept


def test_what_is_saved_is_found_again(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.newest() is None
    save(store, 5)
    save(store, 10, metrics={"loss": 0.5})
    kept = newest(CheckpointStore(store.root))
    assert (kept.name, kept.step, kept.kind, kept.health) == ("step-00000010", 10, "regular", "unproven")
    assert kept.about["metrics"] == {"loss": 0.5}
    assert sorted(kept.files) == ["rank1/rest.json", "weights.safetensors"]
    assert (kept.folder / "rank1" / "rest.json").read_text() == '{"step": 10}'
    assert json.loads((kept.folder / "manifest.json").read_text())["step"] == 10


def test_the_same_step_may_be_saved_again_and_the_later_attempt_counts(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    made = [save(store, 10, attempt) for attempt in (10, 15, 12, 15, 15)]
    assert made == [
        "step-00000010",
        "step-00000010-attempt-00000015",
        "step-00000010-attempt-00000012",
        "step-00000010-attempt-00000015-2",
        "step-00000010-attempt-00000015-3",
    ]
    assert newest(store).name == made[-1]
    save(store, 11, 11)
    assert newest(store).step == 11


@pytest.mark.parametrize("shift", [YEAR, -YEAR])
def test_no_clock_has_a_say_in_which_is_the_newest(tmp_path: Path, save: Saver, shift: int) -> None:
    store = CheckpointStore(tmp_path, keep=Retention(last=2))
    for step in (1, 2, 3, 4):
        name = save(store, step, time=time.time() + shift * (step % 2), seconds=step * 10)
        for path in (tmp_path / name, *(tmp_path / name).iterdir()):
            os.utime(path, (time.time() - shift * step,) * 2)
    assert newest(store).step == 4
    assert {kept.step for kept in store.all()} >= {3, 4}


def test_a_damaged_one_is_named_and_the_one_before_it_taken(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    (tmp_path / save(store, 10) / "rank1" / "rest.json").write_text('{"step": 11}')
    with pytest.warns(CheckpointWarning, match=r"step-00000010: rank1/rest.json: content has changed"):
        kept = store.newest()
    assert kept is not None
    assert kept.step == 5
    assert kept.skipped == (
        "step-00000010: rank1/rest.json: content has changed: its hash does not match the manifest",
    )


# -- health


def test_a_suspect_one_is_passed_over_while_there_is_a_better_one(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        save(store, step)
    store.mark("step-00000001", "healthy")
    store.mark("step-00000004", "suspect", "the loss jumped 3 steps later")
    with pytest.warns(CheckpointWarning, match=r"step-00000004: suspect \(the loss jumped 3 steps later\)"):
        assert newest(store).step == 3
    with pytest.warns(CheckpointWarning, match="step-00000003: unproven"):
        assert newest(store, "healthy").step == 1
    assert newest(store, "suspect").step == 4
    assert store.mark_suspect_after(1, "rewound") == ["step-00000003", "step-00000002"]
    with pytest.warns(CheckpointWarning, match="step-00000002: suspect"):
        assert newest(store).step == 1
    store.mark("step-00000001", "suspect")
    assert newest(store).step == 4  # nothing better is left


def test_a_suspect_one_is_taken_when_the_better_one_is_damaged(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    store.mark("step-00000002", "suspect")
    (tmp_path / "step-00000001" / "weights.safetensors").unlink()
    assert newest(store).step == 2


def test_a_mark_can_change_and_the_manifest_never_does(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    name = save(store, 1)
    before = (tmp_path / name / "manifest.json").read_bytes()
    store.mark(name, "suspect", "an alarm")
    store.mark(name, "healthy", "100 good steps")
    kept = newest(store)
    assert (kept.health, kept.reason, kept.extra) == ("healthy", "100 good steps", ())
    assert (tmp_path / name / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x80\x04.", b"[" * 100_000])
def test_a_damaged_mark_leaves_the_checkpoint_unproven(tmp_path: Path, save: Saver, damage: bytes) -> None:
    store = CheckpointStore(tmp_path)
    name = save(store, 1)
    store.mark(name, "healthy")
    (tmp_path / name / "health.json").write_bytes(damage)
    kept = newest(store)
    assert (kept.health, kept.reason) == ("unproven", "its health mark is damaged and was ignored")


def test_a_mark_counts_for_its_own_checkpoint_only(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    first, second = save(store, 1), save(store, 2)
    store.mark(first, "healthy")
    (tmp_path / first / "health.json").rename(tmp_path / second / "health.json")
    assert newest(store).health == "unproven"


def test_only_what_is_there_can_be_marked(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    for name in ("step-00000002", "../elsewhere", ""):
        with pytest.raises(LookupError):
            store.mark(name, "healthy")
    with pytest.raises(ValueError, match="healthy or suspect"):
        store.mark("step-00000001", "unproven")


# -- what others left


def test_a_draft_of_a_dead_process_goes_and_one_of_a_live_process_stays(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    code = (
        "import sys; from pathlib import Path; from surefoot.checkpoint.store import CheckpointStore\n"
        "CheckpointStore(Path(sys.argv[1])).draft(2, 2); print('ready', flush=True); sys.stdin.read()"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        mine = store.draft(3, 3)
        assert store.clean() == []
        writer.kill()
    assert [name[:8] for name in store.clean()] == [".writing"]
    assert mine.folder.exists()
    store.drop(mine)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_draft_of_another_host_goes_only_after_a_long_time_or_under_the_lock(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    elsewhere = tmp_path / ".writing-step-00000002-otherhost-0123456789ab-17-4711-0123456789abcdef"

    def put(age: float) -> None:
        elsewhere.mkdir()
        (elsewhere / "weights").write_bytes(b"w")
        for path in (elsewhere / "weights", elsewhere):
            os.utime(path, (time.time() - age,) * 2)

    put(FOREIGN_DRAFT_SECONDS / 2)
    assert store.clean() == []
    assert store.clean(alone=True) == [elsewhere.name]
    put(FOREIGN_DRAFT_SECONDS * 2)
    (tmp_path / ".writing-mine").mkdir()  # no name of ours
    assert store.clean() == [elsewhere.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-mine", "step-00000001"]


def test_a_rename_whose_answer_was_lost_on_the_way_counts(tmp_path: Path, save: Saver) -> None:
    class Network(Files):
        def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
            result = act()
            if what == "rename":
                raise FileNotFoundError(2, "No such file or directory")
            return result

    assert save(CheckpointStore(tmp_path, files=Network()), 1) == "step-00000001"
    assert newest(CheckpointStore(tmp_path)).step == 1


def test_names_of_drafts_never_meet(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    drafts = [store.draft(1, 1) for _ in range(20)]
    assert len({draft.folder for draft in drafts}) == 20
    assert all(folders.is_mine(draft.folder.name) for draft in drafts)
    for draft in drafts:
        store.drop(draft)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_asked_of_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import surefoot.checkpoint.store"
    subprocess.run([sys.executable, "-c", code], check=True)

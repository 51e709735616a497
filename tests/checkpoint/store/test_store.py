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
)
from surefoot.checkpoint.store.retention import FOREIGN_DRAFT_SECONDS
from surefoot.checkpoint.store.stored_checkpoint import is_mine

from .conftest import Saver

T = TypeVar("T")
YEAR = 365 * 24 * 3600


def newest(store: CheckpointStore, trust: Health = "unproven") -> StoredCheckpoint:
    checkpoint = store.newest(trust=trust)
    assert checkpoint is not None
    return checkpoint


def test_saved_checkpoint_is_found(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.newest() is None
    save(store, 5)
    save(store, 10, metrics={"loss": 0.5})
    checkpoint = newest(CheckpointStore(store.root))
    assert (checkpoint.name, checkpoint.step, checkpoint.kind, checkpoint.health) == (
        "step-00000010",
        10,
        "regular",
        "unproven",
    )
    assert checkpoint.about["metrics"] == {"loss": 0.5}
    assert sorted(checkpoint.files) == ["rank1/rest.json", "weights.safetensors"]
    assert (checkpoint.folder / "rank1" / "rest.json").read_text() == '{"step": 10}'
    assert json.loads((checkpoint.folder / "manifest.json").read_text())["step"] == 10


def test_same_step_saved_again_uses_the_later_attempt(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    names = [save(store, 10, attempt) for attempt in (10, 15, 12, 15, 15)]
    assert names == [
        "step-00000010",
        "step-00000010-attempt-00000015",
        "step-00000010-attempt-00000012",
        "step-00000010-attempt-00000015-2",
        "step-00000010-attempt-00000015-3",
    ]
    assert newest(store).name == names[-1]
    save(store, 11, 11)
    assert newest(store).step == 11


@pytest.mark.parametrize("shift", [YEAR, -YEAR])
def test_newest_does_not_depend_on_the_clock(tmp_path: Path, save: Saver, shift: int) -> None:
    store = CheckpointStore(tmp_path, keep=Retention(last=2))
    for step in (1, 2, 3, 4):
        name = save(store, step, time=time.time() + shift * (step % 2), seconds=step * 10)
        for path in (tmp_path / name, *(tmp_path / name).iterdir()):
            os.utime(path, (time.time() - shift * step,) * 2)
    assert newest(store).step == 4
    assert {checkpoint.step for checkpoint in store.all()} >= {3, 4}


def test_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    (tmp_path / save(store, 10) / "rank1" / "rest.json").write_text('{"step": 11}')
    with pytest.warns(CheckpointWarning, match=r"step-00000010: rank1/rest.json: content has changed"):
        checkpoint = store.newest()
    assert checkpoint is not None
    assert checkpoint.step == 5
    assert checkpoint.skipped == (
        "step-00000010: rank1/rest.json: content has changed: its hash does not match the manifest",
    )


# -- health


def test_suspect_checkpoint_is_skipped_while_there_is_a_better_one(tmp_path: Path, save: Saver) -> None:
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
    assert newest(store).step == 4  # there is no better one


def test_suspect_checkpoint_is_used_when_the_better_one_is_damaged(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    store.mark("step-00000002", "suspect")
    (tmp_path / "step-00000001" / "weights.safetensors").unlink()
    assert newest(store).step == 2


def test_health_mark_can_change_and_the_manifest_does_not(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    name = save(store, 1)
    before = (tmp_path / name / "manifest.json").read_bytes()
    store.mark(name, "suspect", "an alarm")
    store.mark(name, "healthy", "100 good steps")
    checkpoint = newest(store)
    assert (checkpoint.health, checkpoint.reason, checkpoint.extra) == ("healthy", "100 good steps", ())
    assert (tmp_path / name / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x80\x04.", b"[" * 100_000])
def test_damaged_health_mark_means_unproven(tmp_path: Path, save: Saver, damage: bytes) -> None:
    store = CheckpointStore(tmp_path)
    name = save(store, 1)
    store.mark(name, "healthy")
    (tmp_path / name / "health.json").write_bytes(damage)
    checkpoint = newest(store)
    assert (checkpoint.health, checkpoint.reason) == ("unproven", "its health mark is damaged and was ignored")


def test_health_mark_is_valid_for_its_own_checkpoint_only(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    first, second = save(store, 1), save(store, 2)
    store.mark(first, "healthy")
    (tmp_path / first / "health.json").rename(tmp_path / second / "health.json")
    assert newest(store).health == "unproven"


def test_missing_checkpoint_cannot_be_marked(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    for name in ("step-00000002", "../elsewhere", ""):
        with pytest.raises(LookupError):
            store.mark(name, "healthy")
    with pytest.raises(ValueError, match="healthy or suspect"):
        store.mark("step-00000001", "unproven")


# -- drafts of other processes


def test_draft_of_a_dead_process_is_removed_and_of_a_live_one_kept(tmp_path: Path, save: Saver) -> None:
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
        own_draft = store.draft(3, 3)
        assert store.clean() == []
        writer.kill()
    assert [name[:8] for name in store.clean()] == [".writing"]
    assert own_draft.folder.exists()
    store.drop(own_draft)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_draft_of_another_host_is_removed_after_a_timeout_or_under_the_lock(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    foreign_draft = tmp_path / ".writing-step-00000002-otherhost-0123456789ab-17-4711-0123456789abcdef"

    def make_draft(age: float) -> None:
        foreign_draft.mkdir()
        (foreign_draft / "weights").write_bytes(b"w")
        for path in (foreign_draft / "weights", foreign_draft):
            os.utime(path, (time.time() - age,) * 2)

    make_draft(FOREIGN_DRAFT_SECONDS / 2)
    assert store.clean() == []
    assert store.clean(alone=True) == [foreign_draft.name]
    make_draft(FOREIGN_DRAFT_SECONDS * 2)
    (tmp_path / ".writing-mine").mkdir()  # no name of ours
    assert store.clean() == [foreign_draft.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-mine", "step-00000001"]


def test_rename_that_succeeds_but_reports_an_error_counts(tmp_path: Path, save: Saver) -> None:
    class Network(Files):
        def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
            result = act()
            if what == "rename":
                raise FileNotFoundError(2, "No such file or directory")
            return result

    assert save(CheckpointStore(tmp_path, files=Network()), 1) == "step-00000001"
    assert newest(CheckpointStore(tmp_path)).step == 1


def test_draft_names_are_unique(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    drafts = [store.draft(1, 1) for _ in range(20)]
    assert len({draft.folder for draft in drafts}) == 20
    assert all(is_mine(draft.folder.name) for draft in drafts)
    for draft in drafts:
        store.drop(draft)
    assert list(tmp_path.iterdir()) == []


def test_store_works_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import surefoot.checkpoint.store"
    subprocess.run([sys.executable, "-c", code], check=True)

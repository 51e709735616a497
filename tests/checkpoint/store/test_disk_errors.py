"""A disk that is full, read-only, broken or stalled raises SaveFailed, and earlier checkpoints stay complete."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from surefoot.checkpoint.store import CheckpointStore, Files, Retention, SaveFailed, flush_and_hash, hash_file
from surefoot.checkpoint.store.files import FileEntry

from .conftest import Saver

T = TypeVar("T")
FEW = Retention(last=1, apart=0)


class Failing(Files):
    """Fails at call number `at`, and at every later call with `stays`."""

    def __init__(self, at: int, number: int, *, stays: bool) -> None:
        self._left = at
        self._number = number
        self._stays = stays

    @property
    def untouched(self) -> bool:
        return self._left >= 0

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        self._left -= 1
        if self._left == -1 or (self._left < 0 and self._stays):
            raise OSError(self._number, os.strerror(self._number), str(path))
        return act()


DISK_ERRORS = [
    pytest.param(errno.ENOSPC, "full", False, id="full once"),
    pytest.param(errno.ENOSPC, "full", True, id="full"),
    pytest.param(errno.EROFS, "read-only", True, id="read-only"),
    pytest.param(errno.EACCES, "permission", False, id="permission once"),
    pytest.param(errno.EIO, "i/o", False, id="broken once"),
    pytest.param(errno.EIO, "i/o", True, id="broken"),
]


@pytest.mark.parametrize(("number", "kind", "stays"), DISK_ERRORS)
def test_disk_error_at_any_call_fails_only_the_save(
    quick: Path, save: Saver, number: int, kind: str, stays: bool
) -> None:
    failures: list[SaveFailed] = []
    for step in (10, 20, 30):
        save(CheckpointStore(quick / "made"), step)
    for at in range(100):
        root = quick / str(at)
        shutil.copytree(quick / "made", root)
        disk = Failing(at, number, stays=stays)
        before = len(failures)
        try:
            save(CheckpointStore(root, files=disk, keep=FEW), 40)
        except SaveFailed as failure:
            failures.append(failure)
        saved = len(failures) == before
        store = CheckpointStore(root)
        steps = [checkpoint.step for checkpoint in store.all() if not store.verify(checkpoint).problems]
        assert len(steps) >= 2
        assert steps[0] == 40 or not saved
        assert stays or saved or steps[-3:] == [30, 20, 10]
        store.clean()
        assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
        if saved and disk.untouched:
            break
    assert len(failures) > 8
    assert {failure.kind for failure in failures} <= {
        kind,
        "damaged",
    }  # a file that cannot be read back counts as damaged
    assert all("step 40 was not saved" in failure.reason for failure in failures)


def test_failed_prune_is_reported_and_the_save_succeeds(tmp_path: Path, save: Saver) -> None:
    class Stuck(Files):
        def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
            if ".removing-" in path.name:
                raise OSError(errno.EACCES, "Permission denied")
            return act()

    save(CheckpointStore(tmp_path), 1)
    save(CheckpointStore(tmp_path), 2)
    store = CheckpointStore(tmp_path, files=Stuck(), keep=FEW)
    with store.writing(3, 3) as draft:
        (draft.folder / "weights").write_bytes(b"w")
        saved = store.commit(draft)
    assert saved.checkpoint.step == 3
    assert not saved.removed
    assert saved.prune_error.startswith("older checkpoints were not removed: no permission to write")


class Hanging(Files):
    def __init__(self, what: str) -> None:
        self._what = what
        self.resume_disk = threading.Event()

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        if what == self._what:
            self.resume_disk.wait(60)
        return act()


@pytest.mark.parametrize("what", ["mkdir", "flush", "write", "flush folder", "rename", "read"])
def test_stalled_save_times_out_and_is_cleaned_up_later(tmp_path: Path, save: Saver, what: str) -> None:
    save(CheckpointStore(tmp_path), 1)
    disk = Hanging(what)
    with pytest.raises(SaveFailed, match=r"checkpoint write has stalled for 0\.2 s") as raised:
        save(CheckpointStore(tmp_path, files=disk, stall_timeout=0.2), 2)
    assert raised.value.kind == "hangs"
    checkpoint = CheckpointStore(tmp_path).newest()
    assert checkpoint is not None
    disk.resume_disk.set()
    end = time.monotonic() + 30
    while any(thread.name == "surefoot-save" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    checkpoints = [CheckpointStore(tmp_path).verify(checkpoint) for checkpoint in CheckpointStore(tmp_path).all()]
    assert not [checkpoint.problems for checkpoint in checkpoints if checkpoint.problems]
    assert checkpoints[-1].step == 1


def test_too_little_disk_space_is_reported_before_writing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(SaveFailed, match=r"needs 1000000000\.00 GB, and the disk of .* GB left") as raised:
        store.draft(7, 7, needs=10**18)
    assert raised.value.kind == "full"
    assert list(store.root.iterdir()) == []


def test_error_while_writing_files_drops_the_draft(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(SaveFailed, match="the disk is full"), store.writing(1, 1):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_files_reported_by_ranks_must_match_the_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def attempt(reported: dict[str, FileEntry]) -> None:
        with store.writing(1, 1) as draft:
            (draft.folder / "rank0").write_bytes(b"zero")
            (draft.folder / "rank1").write_bytes(b"one")
            store.commit(draft, flush_and_hash(draft.folder, ["rank1"]) | reported)

    with pytest.raises(SaveFailed, match="rank2 was reported but does not exist"):
        attempt({"rank2": FileEntry(1, "0" * 32)})
    with pytest.raises(SaveFailed, match="rank1 has 3 bytes, but 4 were reported"):
        attempt({"rank1": FileEntry(4, "0" * 32)})
    with pytest.raises(SaveFailed, match="the disk returned different data"):
        attempt({"rank1": FileEntry(3, "0" * 32)})
    assert list(tmp_path.iterdir()) == []
    attempt({})
    checkpoint = store.newest()
    assert checkpoint is not None
    assert checkpoint.files["rank0"] == hash_file(checkpoint.folder / "rank0")


SMALL = """
import os, sys
from pathlib import Path
from surefoot.checkpoint.store import CheckpointStore, SaveFailed
root = Path(sys.argv[1]) / "checkpoints"
store = CheckpointStore(root)
kinds = []
for step in range(1, 8):
    try:
        with store.writing(step, step, needs=1000) as draft:
            (draft.folder / "weights").write_bytes(os.urandom(150_000))
            store.commit(draft)
    except SaveFailed as failure:
        kinds.append(failure.kind)
print("full" in kinds, len(store.all()) >= 2, not any(store.verify(c).problems for c in store.all()))
os.system(f"mount -o remount,ro {sys.argv[1]}")
try:
    store.draft(9, 9)
except SaveFailed as failure:
    print(failure.kind, store.newest().step == store.all()[0].step)
"""


def test_real_disk_that_is_full_and_then_read_only(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=600k none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, SMALL]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("mounting a tmpfs is not allowed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True", "read-only", "True"]

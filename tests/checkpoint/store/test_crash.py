"""The process dies, or power is lost, at any point of a save, a prune, a mark or a resume."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from surefoot.checkpoint.store import CheckpointStore, Files, Retention
from surefoot.checkpoint.store.files import READS

from .conftest import MEMORY, Saver

T = TypeVar("T")
HERE = Path(__file__).parent
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@forks
def test_crash_at_any_disk_change_leaves_intact_checkpoints_only(quick: Path) -> None:
    program = HERE / "crash_store.py"
    done = subprocess.run(
        [sys.executable, str(program), str(quick)], env=ENV, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    crashes_by_operation = json.loads(done.stdout)
    assert set(crashes_by_operation) == {
        "the first save",
        "a save",
        "the same step again",
        "a prune",
        "a mark",
        "a resume",
    }
    assert all(count > 4 for count in crashes_by_operation.values()), crashes_by_operation
    assert sum(crashes_by_operation.values()) > 80


class PowerLoss(BaseException):
    pass


class Durable(Files):
    """Tracks what would survive a power loss: flushed file contents, and names in flushed folders."""

    chunk = 96

    def __init__(self, root: Path, at: int) -> None:
        self._root = root
        self._left = at
        self._contents: dict[int, bytes] = {}
        self._folders: dict[int, list[tuple[str, int]]] = {}
        for where, _, inside in os.walk(root):
            self._flushed_folder(Path(where))
            for name in inside:
                self._flushed(Path(where, name))

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        if what in READS:
            return act()
        if self._left <= 0:
            raise PowerLoss
        self._left -= 1
        result = act()
        if what == "flush":
            self._flushed(path)
        elif what == "flush folder":
            self._flushed_folder(path)
        return result

    def _flushed(self, path: Path) -> None:
        self._contents[path.stat().st_ino] = path.read_bytes()

    def _flushed_folder(self, path: Path) -> None:
        self._folders[path.stat().st_ino] = [(inside.name, inside.stat().st_ino) for inside in path.iterdir()]

    def flushed_only(self, target: Path) -> Path:
        """The disk after a power loss that keeps only what was flushed."""
        self._rebuild(self._root.stat().st_ino, target)
        return target

    def _rebuild(self, number: int, target: Path) -> None:
        target.mkdir()
        for name, inside in self._folders.get(number, []):
            if inside in self._folders:
                self._rebuild(inside, target / name)
            else:
                (target / name).write_bytes(self._contents.get(inside, b""))

    def names_at_once(self, target: Path) -> Path:
        """The disk after a power loss when names are written at once and contents only on a flush."""
        for where, _, inside in os.walk(self._root):
            target_folder = target / Path(where).relative_to(self._root)
            target_folder.mkdir()
            for name in inside:
                (target_folder / name).write_bytes(self._contents.get(Path(where, name).stat().st_ino, b""))
        return target


@pytest.mark.skipif(not MEMORY.is_dir(), reason="needs a disk that never gives a file's number to another one")
@pytest.mark.parametrize("keep", [Retention(), Retention(last=1, apart=0)], ids=["save", "prune"])
def test_power_loss_never_damages_a_checkpoint(quick: Path, save: Saver, keep: Retention) -> None:
    for step in (10, 20, 30):
        save(CheckpointStore(quick / "made"), step)
    saved = False
    at = 0
    while not saved:
        root = quick / f"run-{at}"
        shutil.copytree(quick / "made", root)
        disk = Durable(root, at)
        try:
            save(CheckpointStore(root, files=disk, keep=keep), 40)
            saved = True
        except PowerLoss:
            pass
        for disk_after_loss in (disk.flushed_only(quick / f"late-{at}"), disk.names_at_once(quick / f"early-{at}")):
            store = CheckpointStore(disk_after_loss)
            checkpoints = [store.verify(checkpoint) for checkpoint in store.all()]
            assert len([checkpoint for checkpoint in checkpoints if not checkpoint.problems]) >= 2
            newest = store.newest()  # a warning would be an error here: there is no damaged checkpoint
            assert newest is not None
            assert newest.step == 40 or (newest.step == 30 and not saved)
        at += 1
    assert at > 15


SAVING = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from crash_store import CheckpointStore, save
store = CheckpointStore(Path({root!r}))
store.clean()
newest = store.newest()
step = newest.step if newest else 0
print("ready", flush=True)
while True:
    step += 1
    save(store, step, step)
"""


def test_process_killed_while_saving_keeps_earlier_checkpoints(quick: Path) -> None:
    rng = random.Random(0)
    root = quick / "checkpoints"
    code = SAVING.format(here=str(HERE), root=str(root))
    reached = 0
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", code], env=ENV, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(0.1 + rng.random() * 0.2)
            child.kill()
        newest = CheckpointStore(root).newest()
        if newest is not None:
            assert newest.step >= reached
            reached = newest.step
    assert reached > 5

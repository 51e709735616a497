"""Crashes a store before each single change of the disk, in processes that end there and then.

Told a folder to work in, it prints for each kind of work how many crashes a fresh store came through. It runs as a
program of its own, because a process that has loaded torch should not be forked a few hundred times.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from surefoot.checkpoint.store import CheckpointStore, Files, Retention
from surefoot.checkpoint.store.files import READS

T = TypeVar("T")
CRASHED = 9
FEW = Retention(last=1, emergency=1, apart=0)


class Crashing(Files):
    """Ends the process before the change with this number, counted from 0; of one kind, if that is told."""

    chunk = 96  # the manifest takes several writes, so that it can be cut off in the middle

    def __init__(self, at: int, only: str = "") -> None:
        self._left = at
        self._only = only

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        if what not in READS and self._only in ("", what):
            if self._left == 0:
                os._exit(CRASHED)
            self._left -= 1
        return act()


def save(store: CheckpointStore, step: int, attempt: int, **about: object) -> None:
    with store.writing(step, attempt) as draft:
        for name in ("weights.safetensors", "rank1/rest.json"):
            path = draft.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"step {step} attempt {attempt} " * 20)
        store.commit(draft, None, about)


def nothing(root: Path) -> None:
    root.mkdir()


def two(root: Path) -> None:
    store = CheckpointStore(root)
    save(store, 10, 10)
    save(store, 20, 20)


def many(root: Path) -> None:
    store = CheckpointStore(root)
    for step in (10, 20, 30, 40):
        save(store, step, step, kind="emergency" if step == 20 else "regular")
    save(store, 50, 50, kind="best")
    store.mark("step-00000040", "healthy")
    store.mark("step-00000030", "suspect", "the loss rose")


def littered(root: Path) -> None:
    """As `many`, and with what two crashes left: half a save, and half a removal."""
    many(root)
    crash(lambda files: save(CheckpointStore(root, files=files), 60, 60), 0, "rename")
    crash(lambda files: save(CheckpointStore(root, files=files, keep=FEW), 60, 60), 0, "rmdir")
    crash(lambda files: CheckpointStore(root, files=files).mark("step-00000060", "healthy"), 0, "rename")
    assert {path.name.split("-")[0] for path in root.iterdir()} == {"step", ".writing", ".removing"}
    assert list(root.glob("*/.marking-*"))


def resume(files: Files, root: Path) -> None:
    store = CheckpointStore(root, files=files)
    store.clean()
    kept = store.newest()
    assert kept is not None
    store.mark(kept.name, "suspect", "the run crashed soon after it")


WORK: dict[str, tuple[Callable[[Path], None], Callable[[Files, Path], None]]] = {
    "the first save": (nothing, lambda files, root: save(CheckpointStore(root, files=files), 60, 60)),
    "a save": (two, lambda files, root: save(CheckpointStore(root, files=files), 60, 60)),
    "the same step again": (two, lambda files, root: save(CheckpointStore(root, files=files), 20, 60)),
    "a prune": (many, lambda files, root: save(CheckpointStore(root, files=files, keep=FEW), 60, 60)),
    "a mark": (two, lambda files, root: CheckpointStore(root, files=files).mark("step-00000020", "healthy")),
    "a resume": (littered, resume),
}


def crash(work: Callable[[Files], None], at: int, only: str = "") -> bool:
    """Whether the work was cut off."""
    child = os.fork()
    if child == 0:
        try:
            work(Crashing(at, only))
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, CRASHED), code
    return code == CRASHED


def whole(store: CheckpointStore) -> set[str]:
    """Names of those that verify; none that is not may be seen, and none may be of two saves."""
    found = [store.verify(kept) for kept in store.all()]
    assert not [kept.problems for kept in found if kept.problems or kept.extra]
    for kept in found:
        texts = {(kept.folder / name).read_text() for name in kept.files}
        assert texts == {f"step {kept.step} attempt {kept.attempt} " * 20}
    return {kept.name for kept in found}


def check(root: Path, before: set[str]) -> None:
    """A fresh store finds whole checkpoints only, the old ones or the new one, and goes on."""
    store = CheckpointStore(root)
    there = whole(store)
    assert len(there - before) <= 1
    assert len(there) >= min(2, len(before))
    newest = store.newest(trust="suspect")
    assert (newest.name if newest else None) == max(there, default=None)
    store.clean()
    assert {path.name for path in root.iterdir()} == there
    assert not list(root.glob("*/.marking-*"))
    save(store, 70, 70)
    assert "step-00000070" in whole(store)


def main(folder: Path) -> None:
    told: dict[str, int] = {}
    for name, (prepare, work) in WORK.items():
        template = folder / name
        prepare(template)
        before = whole(CheckpointStore(template))
        for at in range(1000):
            root = folder / f"{name} {at}"
            shutil.copytree(template, root, symlinks=True)
            cut_off = crash(lambda files, root=root, work=work: work(files, root), at)
            check(root, before)
            shutil.rmtree(root)
            if not cut_off:
                told[name] = at
                break
    print(json.dumps(told))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]))

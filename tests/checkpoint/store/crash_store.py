"""Crash a store before each single change of the disk, in forked processes.

For each operation it prints how many crashes a new store recovered from. It runs as a separate program, because a
process that has loaded torch should not be forked a few hundred times.
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
    """Ends the process before change number `at`, counted from 0; with `only`, counts changes of that kind."""

    chunk = 96  # the manifest takes several writes, so that a crash can truncate it

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


def empty_store(root: Path) -> None:
    root.mkdir()


def two_checkpoints(root: Path) -> None:
    store = CheckpointStore(root)
    save(store, 10, 10)
    save(store, 20, 20)


def many_checkpoints(root: Path) -> None:
    store = CheckpointStore(root)
    for step in (10, 20, 30, 40):
        save(store, step, step, kind="emergency" if step == 20 else "regular")
    save(store, 50, 50, kind="best")
    store.mark("step-00000040", "healthy")
    store.mark("step-00000030", "suspect", "the loss rose")


def store_with_leftovers(root: Path) -> None:
    """Like `many_checkpoints`, with the leftovers of crashes in a save, a removal and a mark."""
    many_checkpoints(root)
    crash(lambda files: save(CheckpointStore(root, files=files), 60, 60), 0, "rename")
    crash(lambda files: save(CheckpointStore(root, files=files, keep=FEW), 60, 60), 0, "rmdir")
    crash(lambda files: CheckpointStore(root, files=files).mark("step-00000060", "healthy"), 0, "rename")
    assert {path.name.split("-")[0] for path in root.iterdir()} == {"step", ".writing", ".removing"}
    assert list(root.glob("*/.marking-*"))


def resume(files: Files, root: Path) -> None:
    store = CheckpointStore(root, files=files)
    store.clean()
    checkpoint = store.newest()
    assert checkpoint is not None
    store.mark(checkpoint.name, "suspect", "the run crashed soon after it")


WORK: dict[str, tuple[Callable[[Path], None], Callable[[Files, Path], None]]] = {
    "the first save": (empty_store, lambda files, root: save(CheckpointStore(root, files=files), 60, 60)),
    "a save": (two_checkpoints, lambda files, root: save(CheckpointStore(root, files=files), 60, 60)),
    "the same step again": (two_checkpoints, lambda files, root: save(CheckpointStore(root, files=files), 20, 60)),
    "a prune": (many_checkpoints, lambda files, root: save(CheckpointStore(root, files=files, keep=FEW), 60, 60)),
    "a mark": (
        two_checkpoints,
        lambda files, root: CheckpointStore(root, files=files).mark("step-00000020", "healthy"),
    ),
    "a resume": (store_with_leftovers, resume),
}


def crash(work: Callable[[Files], None], at: int, only: str = "") -> bool:
    """Whether the work was interrupted by the crash."""
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


def intact_names(store: CheckpointStore) -> set[str]:
    """Names of all checkpoints; each must verify and contain the files of one save only."""
    checkpoints = [store.verify(checkpoint) for checkpoint in store.all()]
    assert not [checkpoint.problems for checkpoint in checkpoints if checkpoint.problems or checkpoint.extra]
    for checkpoint in checkpoints:
        texts = {(checkpoint.folder / name).read_text() for name in checkpoint.files}
        assert texts == {f"step {checkpoint.step} attempt {checkpoint.attempt} " * 20}
    return {checkpoint.name for checkpoint in checkpoints}


def check(root: Path, before: set[str]) -> None:
    """A new store finds intact checkpoints only, the old ones or the new one, and can save again."""
    store = CheckpointStore(root)
    names = intact_names(store)
    assert len(names - before) <= 1
    assert len(names) >= min(2, len(before))
    newest = store.newest(trust="suspect")
    assert (newest.name if newest else None) == max(names, default=None)
    store.clean()
    assert {path.name for path in root.iterdir()} == names
    assert not list(root.glob("*/.marking-*"))
    save(store, 70, 70)
    assert "step-00000070" in intact_names(store)


def main(folder: Path) -> None:
    crashes: dict[str, int] = {}
    for name, (prepare, work) in WORK.items():
        template = folder / name
        prepare(template)
        before = intact_names(CheckpointStore(template))
        for at in range(1000):
            root = folder / f"{name} {at}"
            shutil.copytree(template, root, symlinks=True)
            crashed = crash(lambda files, root=root, work=work: work(files, root), at)
            check(root, before)
            shutil.rmtree(root)
            if not crashed:
                crashes[name] = at
                break
    print(json.dumps(crashes))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]))

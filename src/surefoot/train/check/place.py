"""Where a trial is kept: beside the run's own folder, on the same disk, seen by all processes; nothing of it stays."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import uuid4

from surefoot import parallel
from surefoot.parallel import World
from surefoot.train.build import run_dir_of
from surefoot.train.recipe import Recipe, RecipeError


class Place:
    """A folder for as long as a check takes; folders above it that had to be made go with it."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        home = run_dir_of(recipe).absolute().parent
        self._first = world.is_main
        self._made = [each for each in (home, *home.parents) if not each.exists()]
        self.path = parallel.broadcast(world, home / f".check-{uuid4().hex[:8]}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"run_dir: nothing can be written to {home}: {error.strerror}. Choose another") from error

    def remove(self) -> None:
        """By the first process, once all are done with it."""
        if not self._first:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for each in self._made:
            if each.exists() and not any(each.iterdir()):
                each.rmdir()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

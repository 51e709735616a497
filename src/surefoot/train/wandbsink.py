"""Weights & Biases as a place that a run's numbers are sent to, now or later."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import AuthenticationError, CommError, UsageError

from surefoot.train.recipe.mistakes import RecipeError

log = logging.getLogger("surefoot")
ID = "wandb-id"
"""The file in a run's directory that holds the id of its run there."""
_MEANWHILE = "eval/step"
_WELL_FORMED = re.compile(r"[A-Za-z0-9_-]{4,64}")


class WeightsAndBiases:
    """One run there for one run directory, however often it is resumed.

    Its own count of steps must not go back, so that is the count of attempts; charts are drawn over `step`, which may.
    """

    def __init__(self, run_dir: Path, *, mode: str, project: str, name: str, config: Mapping[str, Any]) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        about = {"project": project, "name": name, "config": dict(config)}
        self._run = _begin(run_dir, mode, about)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric(_MEANWHILE, hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric=_MEANWHILE)
        self._at: int | None = None
        self._said: list[str] = []
        """What was said since the last figures: it goes into one entry, in which a later one would replace it."""

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        if attempt is None:  # of the loop's own step, which is a little ahead of the figures
            self._run.log({**values, _MEANWHILE: step}, step=self._at)
            return
        self._at = attempt if self._at is None else max(self._at, attempt)
        self._said = []
        self._run.log({**values, "step": step}, step=self._at)

    def text(self, step: int, words: str) -> None:
        self._said.append(f"step {step} {words}")
        self._run.log({"surefoot": "\n".join(self._said)}, step=self._at)

    def went_back(self, step: int) -> None:
        """Nothing to do: what was is kept, and `step` goes back in the charts."""

    def close(self, code: int = 0) -> None:
        self._run.finish(exit_code=code)


def _begin(run_dir: Path, mode: str, about: Mapping[str, Any]) -> Any:
    known: dict[str, Any] = {"dir": str(run_dir), "id": _id(run_dir), "resume": "allow"} | dict(about)
    settings = wandb.Settings(silent=True, console="off", init_timeout=60)
    try:
        return wandb.init(mode="online" if mode == "online" else "offline", settings=settings, **known)
    except (UsageError, AuthenticationError) as error:
        raise RecipeError(
            f"log.wandb={mode} was refused: {error}. Run `wandb login` once, or set WANDB_API_KEY, or "
            "log.wandb=offline to send it later."
        ) from None
    except CommError as error:
        log.warning(
            "surefoot: Weights & Biases cannot be reached, so the run is kept offline; send it later with "
            "`wandb sync %s`: %s",
            run_dir / "wandb",
            error,
        )
        return wandb.init(mode="offline", settings=settings, **known)


def _id(run_dir: Path) -> str:
    """The id that this directory's run has there; a new one where there is none, or none that could be one."""
    file = run_dir / ID
    try:
        found = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if _WELL_FORMED.fullmatch(found):
        return found
    new, draft = secrets.token_hex(4), file.with_name(f"{ID}.new")
    draft.write_text(new + "\n", "ascii")
    os.replace(draft, file)
    return new

"""Sends a run's metrics to Weights & Biases, online or to be synced later."""

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

from surefoot.sinks.sink import SinkError

log = logging.getLogger("surefoot")
ID_FILE = "wandb-id"
"""The file in the run directory that holds the id of its W&B run."""
_EVAL_STEP = "eval/step"
_VALID_ID = re.compile(r"[A-Za-z0-9_-]{4,64}")


class WandbSink:
    """One W&B run for one run directory, however often it is resumed.

    W&B's own step must not decrease, so it is fed the attempt; charts use the metric `step`, which may go back.
    """

    def __init__(self, run_dir: Path, *, mode: str, project: str, name: str, config: Mapping[str, Any]) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run = _init(run_dir, mode, {"project": project, "name": name, "config": dict(config)})
        self._run.define_metric("step", hidden=True)
        self._run.define_metric(_EVAL_STEP, hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric=_EVAL_STEP)
        self._attempt: int | None = None
        self._messages: list[str] = []
        """Texts since the last metrics: all go into one entry, because a later text would replace an earlier one."""

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        if attempt is None:  # an evaluation at the loop's step, which is slightly ahead of the metrics
            self._run.log({**values, _EVAL_STEP: step}, step=self._attempt)
            return
        self._attempt = attempt if self._attempt is None else max(self._attempt, attempt)
        self._messages = []
        self._run.log({**values, "step": step}, step=self._attempt)

    def text(self, step: int, message: str) -> None:
        self._messages.append(f"step {step} {message}")
        self._run.log({"surefoot": "\n".join(self._messages)}, step=self._attempt)

    def rewound(self, step: int) -> None:
        """Nothing to do: undone points stay, and `step` goes back in the charts."""

    def close(self, code: int = 0) -> None:
        self._run.finish(exit_code=code)


def _init(run_dir: Path, mode: str, options: Mapping[str, Any]) -> Any:
    arguments: dict[str, Any] = {"dir": str(run_dir), "id": _run_id(run_dir), "resume": "allow"} | dict(options)
    settings = wandb.Settings(silent=True, console="off", init_timeout=60)
    try:
        return wandb.init(mode="online" if mode == "online" else "offline", settings=settings, **arguments)
    except (UsageError, AuthenticationError) as error:
        raise SinkError(
            f"log.wandb={mode} was refused: {error}. Run `wandb login` once, set WANDB_API_KEY, or set "
            "log.wandb=offline to send the run later."
        ) from None
    except CommError as error:
        log.warning(
            "surefoot: Weights & Biases cannot be reached, so the run is kept offline; send it later with "
            "`wandb sync %s`: %s",
            run_dir / "wandb",
            error,
        )
        return wandb.init(mode="offline", settings=settings, **arguments)


def _run_id(run_dir: Path) -> str:
    """The W&B id stored in this run directory; a new one where there is none, or an invalid one."""
    file = run_dir / ID_FILE
    try:
        stored = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        stored = ""
    if _VALID_ID.fullmatch(stored):
        return stored
    new, draft = secrets.token_hex(4), file.with_name(f"{ID_FILE}.new")
    draft.write_text(new + "\n", "ascii")
    os.replace(draft, file)
    return new

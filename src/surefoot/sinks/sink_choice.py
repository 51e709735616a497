"""Which sinks `attach(sinks=...)` and `log.sinks` of a recipe name: checked at once, opened when the run begins."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from surefoot.sinks.run_sink import RunSink, UserSink
from surefoot.sinks.sink import TENSORBOARD_DIR, MetricSink, SinkError

_TITLES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow", "trackio": "trackio"}
_OPTIONS = {"every": 1, "layers": False, "project": "surefoot", "name": None, "mode": "online", "config": None}
_EXAMPLE = 'Give "tensorboard", {"to": "wandb", "every": 10, "layers": true}, or an object with scalars, text and close'


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkChoice:
    """One sink, as the user chose it."""

    to: str = ""
    """One of the names in `_TITLES`; empty for the user's own."""
    own: RunSink | None = None
    every: int = 1
    """Updates between two writes."""
    layers: bool = False
    """The gradient norm of every tensor is written too."""
    project: str = "surefoot"
    name: str | None = None
    mode: str = "online"
    """Of Weights & Biases: online or offline."""
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return _TITLES.get(self.to) or type(self.own).__name__

    def open(self, run_dir: Path) -> MetricSink:
        """Open it; SinkError says what to change."""
        name = self.name or run_dir.name
        if self.own is not None:
            return UserSink(self.own)
        if self.to == "tensorboard":
            from surefoot.sinks.tensorboard import TensorBoardSink

            return TensorBoardSink(run_dir / TENSORBOARD_DIR)
        if self.to == "wandb":
            from surefoot.sinks.wandb import WandbSink

            return WandbSink(run_dir, mode=self.mode, project=self.project, name=name, config=self.config)
        if self.to == "mlflow":
            from surefoot.sinks.mlflow_sink import MlflowSink

            return MlflowSink(self.project, name, self.config)
        from surefoot.sinks.trackio_sink import TrackioSink

        return TrackioSink(self.project, name, self.config)


def sink_choices(given: object) -> tuple[SinkChoice, ...]:
    """What `sinks=` names: one or a list of names, mappings with `to`, or the user's own; raises SinkError."""
    if given is None or given is False:
        return ()
    return tuple(_choice(item) for item in (given if isinstance(given, list | tuple) else (given,)))


def _choice(given: object) -> SinkChoice:
    if isinstance(given, str):
        return SinkChoice(to=_installed(given))
    if isinstance(given, Mapping):
        options = dict(given)
        to, own = options.pop("to", None), None
        unknown = sorted(options.keys() - _OPTIONS.keys())
        if unknown:
            raise SinkError(f"there is no option {unknown[0]!r} of a sink. The options are to, {', '.join(_OPTIONS)}.")
        if isinstance(to, str):
            to = _installed(to)
        else:
            to, own = "", _own(to)
        return SinkChoice(to=to, own=own, **{name: _checked(name, value) for name, value in options.items()})
    return SinkChoice(own=_own(given))


def _own(given: object) -> RunSink:
    if isinstance(given, RunSink) and not isinstance(given, type):
        return given
    if isinstance(given, type):
        raise SinkError(f"{given.__name__} is a class. Pass an object of it: {given.__name__}().")
    missing = [name for name in ("scalars", "text", "close") if not callable(getattr(given, name, None))]
    raise SinkError(f"an object of type {type(given).__name__} without {', '.join(missing)} is no sink. {_EXAMPLE}.")


def _installed(name: str) -> str:
    if name not in _TITLES:
        near = difflib.get_close_matches(name, _TITLES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise SinkError(f"there is no sink {name!r}.{hint} There are {', '.join(_TITLES)}, and any object of your own.")
    if find_spec(name) is None:
        raise SinkError(
            f"{_TITLES[name]} is not installed: pip install 'surefoot[{name}]', or leave it out of the sinks."
        )
    return name


def _checked(name: str, value: object) -> Any:
    fits = {
        "every": isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        "layers": isinstance(value, bool),
        "mode": value in ("online", "offline"),
        "config": isinstance(value, Mapping),
    }.get(name, isinstance(value, str) and bool(value))
    if not fits:
        wanted = {
            "every": "a whole number of updates, 1 or more",
            "layers": "true or false",
            "mode": "online or offline",
            "config": "a mapping of names to values",
        }.get(name, "text")
        raise SinkError(f"{name}={value!r} of a sink is not understood. It is {wanted}.")
    return value

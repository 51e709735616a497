"""surefoot keeps PyTorch training runs alive: `surefoot.attach` guards a training loop, `surefoot.diagnose` explains a
failed run. Names are imported on first use, so that `import surefoot` does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot import checkpoint

if TYPE_CHECKING:
    from surefoot.actions.stop import TrainingStopped
    from surefoot.guard.attach import Guard, attach
    from surefoot.incidents.replay_bundle import replay
    from surefoot.journal.reader import Run, read
    from surefoot.judge.policy import Policy
    from surefoot.logs.diagnose_log import diagnose
    from surefoot.logs.log_diagnosis import LogDiagnosis
    from surefoot.origin.locate import locate
    from surefoot.origin_record import Origin
    from surefoot.preflight_checks.findings import PreflightFinding, PreflightReport
    from surefoot.preflight_checks.preflight import preflight

__version__ = "0.1.0"
__all__ = [
    "Guard",
    "LogDiagnosis",
    "Origin",
    "Policy",
    "PreflightFinding",
    "PreflightReport",
    "Run",
    "TrainingStopped",
    "__version__",
    "attach",
    "checkpoint",
    "diagnose",
    "locate",
    "preflight",
    "read",
    "replay",
]

_MODULES = {
    "Guard": "surefoot.guard.attach",
    "attach": "surefoot.guard.attach",
    "Policy": "surefoot.judge.policy",
    "TrainingStopped": "surefoot.actions.stop",
    "Run": "surefoot.journal.reader",
    "read": "surefoot.journal.reader",
    "replay": "surefoot.incidents.replay_bundle",
    "LogDiagnosis": "surefoot.logs.log_diagnosis",
    "diagnose": "surefoot.logs.diagnose_log",
    "PreflightFinding": "surefoot.preflight_checks.findings",
    "PreflightReport": "surefoot.preflight_checks.findings",
    "preflight": "surefoot.preflight_checks.preflight",
    "locate": "surefoot.origin.locate",
    "Origin": "surefoot.origin_record",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value

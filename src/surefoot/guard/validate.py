"""Checks what a user passes to `attach`, `watch` and `report`; each error says in a sentence what to change."""

from __future__ import annotations

import difflib
import gc
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.alarms.alarm_target import AlarmError, AlarmTarget, alarm_targets, targets_from_environment
from surefoot.checkpoint.train_state import RandomGenerator
from surefoot.checkpoint.tree import Stateful
from surefoot.gate.veto import unwrap_optimizer
from surefoot.guard.guard import LOSS
from surefoot.judge.policy import Policy
from surefoot.sinks.sink import SinkError
from surefoot.sinks.sink_choice import SinkChoice, sink_choices

OPTIONS = (
    "run_dir",
    "clip",
    "policy",
    "scheduler",
    "scaler",
    "extra",
    "snapshot_memory",
    "loader",
    "resume",
    "step_fn",
    "steps_of",
    "run_info",
    "incident_data",
    "cases",
    "preflight",
    "alarms",
    "sinks",
    "verbosity",
    "step",
    "on_stop",
)
_RENAMED = {"ring": "snapshot_memory"}


class Misuse(ValueError):
    """The guard was called in a way that cannot work; raised before anything is trained where that is possible."""


def switched_off() -> bool:
    """Whether the environment says SUREFOOT=off."""
    return os.environ.get("SUREFOOT", "").lower() in ("off", "0", "false")


# -- attach


def check_options(unknown: Iterable[str]) -> None:
    for name in unknown:
        near = [_RENAMED[name]] if name in _RENAMED else difflib.get_close_matches(name, OPTIONS, n=1)
        hint = f" Did you mean {near[0]}=?" if near else ""
        raise Misuse(f"attach: there is no option {name}=.{hint} The options are {', '.join(OPTIONS)}.")


def check_model(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise Misuse(f"attach: the model must be a torch.nn.Module, not {type(model).__name__}.")
    if not any(p.requires_grad for p in model.parameters()):
        problem = "has only frozen parameters" if any(True for _ in model.parameters()) else "has no parameters"
        raise Misuse(
            f"attach: the model {problem}, so there is nothing to train or to guard. Pass the module you train."
        )
    return model


def check_optimizers(given: object, model: nn.Module) -> tuple[Optimizer, ...]:
    items = given if isinstance(given, list | tuple) else [given]
    if not items:
        raise Misuse("attach: no optimizer was given. Pass the optimizer, or a list of all that train this model.")
    optimizers = tuple(unwrap_optimizer(o) for o in items)
    for i, o in enumerate(optimizers):
        if any(o is other for other in optimizers[:i]):
            raise Misuse(f"attach: the same {type(o).__name__} was given twice. Name each optimizer once.")
    params = {id(p) for p in model.parameters()}
    for o in optimizers:
        if not any(id(p) in params for group in o.param_groups for p in group["params"]):
            raise Misuse(
                f"attach: {type(o).__name__} holds none of the model's parameters. Was it made from another model, or "
                "before the model was wrapped or moved? Make it from the model you attach, after wrapping."
            )
    return optimizers


def check_free(optimizers: Iterable[Optimizer], guarded: Collection[Optimizer]) -> None:
    for o in optimizers:
        if o in guarded:
            raise Misuse(
                f"attach: this {type(o).__name__} is guarded already. Close the earlier guard first: guard.close()."
            )


def check_resume(resume: object, run_dir: object, policy: object = "protect") -> bool:
    if not isinstance(resume, bool):
        raise Misuse(f"attach: resume= is True or False, not {resume!r}. The run to resume is the one in run_dir=.")
    if resume and run_dir is None:
        raise Misuse("attach: resume=True needs run_dir=, the folder in which the run's checkpoints are kept.")
    if resume and check_policy(policy).observe:
        raise Misuse(
            "attach: policy='observe' changes nothing, so it can neither resume from a checkpoint nor save one. Use "
            "policy='protect', or leave resume= out."
        )
    return resume


def check_step_fn(step_fn: object) -> Any:
    if step_fn is not None and not callable(step_fn):
        raise Misuse(
            f"attach: step_fn={step_fn!r} cannot be called. It is a function of the model and a batch that returns "
            "the loss: step_fn=lambda model, batch: loss_fn(model, batch)."
        )
    return step_fn


def check_first_step(step: object, *, resume: object) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise Misuse(f"attach: step={step!r} is no step count. Pass the number of updates done so far, such as step=0.")
    if step and resume:
        raise Misuse(
            "attach: step= and resume=True contradict each other: with resume=True the step comes from surefoot's "
            "checkpoint. Pass step= only where another trainer resumes the run."
        )
    return step


def check_on_stop(on_stop: object) -> Any:
    if on_stop is not None and not callable(on_stop):
        raise Misuse(
            f"attach: on_stop={on_stop!r} cannot be called. It is a function that is given the TrainingStopped "
            "exception and makes the loop end."
        )
    return on_stop


def check_steps_of(given: object, optimizers: Sequence[Optimizer]) -> int | None:
    """The index of the optimizer whose updates `guard.step` counts; None for iterations of the loop."""
    if given is None:
        return None
    try:
        inner = unwrap_optimizer(given)
    except ValueError:
        inner = None
    for index, optimizer in enumerate(optimizers):
        if optimizer is inner:
            return index
    raise Misuse(
        f"attach: steps_of={type(given).__name__} is none of the {len(optimizers)} attached optimizers. Pass one of "
        "those given as the second argument, such as attach(model, [opt_d, opt_g], steps_of=opt_d): guard.step then "
        "counts its updates."
    )


def check_policy(policy: object) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if policy == "protect":
        return Policy()
    if policy == "observe":
        return Policy(observe=True)
    raise Misuse(f"attach: policy={policy!r} is unknown. Use 'protect', 'observe' or a surefoot.Policy(...).")


def check_scheduler(given: object) -> list[Stateful]:
    items = given if isinstance(given, list | tuple) else [] if given is None else [given]
    schedulers: list[Stateful] = []
    for item in items:
        if isinstance(item, type) or not isinstance(item, Stateful):
            raise Misuse(
                f"attach: scheduler={item!r} has no state_dict and load_state_dict, so it cannot be rewound with the "
                "run. Pass the scheduler itself, or a list of them."
            )
        schedulers.append(item)
    return schedulers


def check_extra(given: object) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Misuse(f"attach: extra= must be a mapping of names to objects, not {type(given).__name__}.")
    for name, value in given.items():
        if not isinstance(value, Stateful | RandomGenerator) or isinstance(value, type):
            raise Misuse(
                f"attach: extra[{name!r}] is a {type(value).__name__}, which cannot be rewound with the run. It needs "
                "state_dict and load_state_dict, or get_state and set_state."
            )
    return {str(name): value for name, value in given.items()}


def check_alarms(given: object) -> tuple[AlarmTarget, ...]:
    """Who hears of what happens: None for those in the environment, False for nobody."""
    try:
        return targets_from_environment() if given is None else alarm_targets(given)
    except AlarmError as error:
        raise Misuse(f"attach: alarms: {error}" if given is not None else f"attach: {error}") from None


def check_sinks(given: object) -> tuple[SinkChoice, ...]:
    try:
        return sink_choices(given)
    except SinkError as error:
        raise SinkError(f"attach: sinks: {error}") from None


def check_run_info(given: object) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Misuse(f"attach: run_info= must be a mapping of names to values, not {type(given).__name__}.")
    return {str(name): value for name, value in given.items()}


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def check_snapshot_memory(given: object) -> int | None:
    """Bytes that snapshots may take: 0 for no snapshots, None for what there is room for."""
    if given is None or given is True:
        return None
    if isinstance(given, int | float) and given >= 0 and math.isfinite(given):
        return int(given)
    size = _SIZE.fullmatch(given) if isinstance(given, str) else None
    if size is None:
        raise Misuse(
            f"attach: snapshot_memory={given!r} is not understood. Use None (snapshots take what room there is), False "
            "(keep none), or the memory they may take, in bytes or such as '8GB'."
        )
    number, unit, binary = size.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def check_cases(cases: object) -> Path | None:
    """A folder or file that does not exist is a warning later, not an error: it may be on a disk that is away."""
    if cases is None:
        return None
    if not isinstance(cases, str | os.PathLike):
        raise Misuse(f"attach: cases= takes a folder with runs or a case library, not {type(cases).__name__}.")
    return Path(os.fspath(cases))  # pyright: ignore[reportArgumentType]


def check_run_dir(run_dir: object) -> Any:
    if run_dir is None or (isinstance(run_dir, str) and not run_dir.strip()):
        raise Misuse("attach: run_dir= is missing. Name a directory for this run's records, such as run_dir='runs/a'.")
    if not isinstance(run_dir, str | os.PathLike):
        raise Misuse(f"attach: run_dir={run_dir!r} is no path. Name a directory, such as run_dir='runs/a'.")
    return run_dir


# -- watch and report


def check_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise Misuse(f"watch: the loss must be a tensor, not {type(loss).__name__}. Pass it before calling .item().")
    if loss.numel() != 1:
        raise Misuse(f"watch: the loss must be one number, not of shape {tuple(loss.shape)}. Reduce it: loss.mean().")
    if not loss.requires_grad and torch.is_grad_enabled():  # without gradients this is an evaluation
        raise Misuse(
            "watch: this loss has no graph, so backward cannot run from it. Was it detached, or made under "
            "torch.no_grad()? Watch training losses only, before .detach() or .item()."
        )
    return loss


def check_judged(progress: object, tokens: object) -> None:
    """Check what is to be judged instead of the loss."""
    if progress is not LOSS and progress is not None:
        _check_progress(progress)
    if tokens is not None:
        _check_tokens(tokens, progress)


def _check_progress(progress: object) -> None:
    is_number = isinstance(progress, int | float) or (isinstance(progress, Tensor) and progress.numel() == 1)
    if not is_number:
        actual = f"of shape {tuple(progress.shape)}" if isinstance(progress, Tensor) else type(progress).__name__
        raise Misuse(
            f"watch: progress= must be one number, not {actual}. Pass a number that falls as the run improves, such as "
            "-rewards.mean(), or None to only check that the loss is finite."
        )


def _check_tokens(tokens: object, progress: object) -> None:
    if not (tokens.numel() == 1 if isinstance(tokens, Tensor) else isinstance(tokens, int | float) and tokens > 0):
        actual = f"of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else repr(tokens)
        raise Misuse(f"watch: tokens= is the number of tokens that the loss is a sum over, not {actual}.")
    if progress is not LOSS:
        raise Misuse("watch: tokens= and progress= both say what to judge. Pass one of them.")


def check_report(values: Mapping[str, Any]) -> dict[str, float]:
    """The reported values as plain numbers."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise Misuse(f"report: {name}={value!r} is not a number. Report numbers only.") from None
    return numbers


STEPS_WITHOUT_BACKWARD = 3
INTERNAL_ERROR = (
    "surefoot: protection is OFF for the rest of this run, training goes on: %s in %s. This is a fault in surefoot; "
    "please report it with the traceback below."
)
NO_BACKWARD = (
    f"backward() did not run from the watched loss in {STEPS_WITHOUT_BACKWARD} steps in a row, so losses are recorded "
    "as NaN. Pass guard.watch the loss that you call backward() on, or that it is computed from."
)
NEVER_WATCHED = (
    "the optimizer stepped, but guard.watch was never called. Write `loss = guard.watch(loss, batch)` before "
    "`loss.backward()`."
)

# -- the GradScaler

MIN_LOSS_SCALE = 64.0
"""A loss multiplied by this much or more before backward is taken to be scaled by a GradScaler."""
_SCALER_FOUND = "found a GradScaler in use; pass it as scaler= to be sure that it is the right one"
_NO_SCALER = (
    "the loss is scaled by {:g} before backward, but no GradScaler was found, so gradient norms are those of the "
    "scaled loss. Pass your GradScaler as scaler=."
)


def find_scaler(factor: float) -> tuple[Any | None, str]:
    """The only GradScaler that can have scaled a loss by this factor, and a message; its scale may be divided by the
    number of micro-batches."""
    enabled = [s for s in gc.get_objects() if issubclass(type(s), torch.amp.GradScaler) and s.is_enabled()]
    matching = [s for s in enabled if s._scale is not None and (s.get_scale() / factor).is_integer()]
    return (matching[0], _SCALER_FOUND) if len(matching) == 1 else (None, _NO_SCALER.format(factor))

"""`surefoot.preflight`: looks at a training loop before its first step and says what is wrong with it."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.checkpoint.rng import get_rng_states, set_rng_states
from surefoot.checkpoint.train_state import TrainState
from surefoot.checkpoint.tree import Stateful
from surefoot.kinds import Cause
from surefoot.preflight_checks import (
    activation_facts,
    data_facts,
    loss_facts,
    padding_facts,
    parameter_facts,
    rate_facts,
    sample_facts,
    schedule_facts,
    target_facts,
    training_facts,
)
from surefoot.preflight_checks.findings import PreflightFinding, PreflightReport
from surefoot.preflight_checks.loop_probe import CannotTell, PreflightContext, Settings, seed_all
from surefoot.preflight_checks.observe import Observation, observe, spread_of
from surefoot.preflight_checks.short_training import Trainer
from surefoot.trials.kept_steps import copied
from surefoot.trials.sandbox import Sandbox

MAX_BATCHES = 24
Fact = Callable[[PreflightContext], Iterator[PreflightFinding]]

FORWARD_FACTS: tuple[Fact, ...] = (
    *parameter_facts.FACTS,
    *loss_facts.FACTS,
    *data_facts.FACTS,
    *activation_facts.FACTS,
    *target_facts.FACTS,
    *padding_facts.FACTS,
    *sample_facts.FACTS,
)
"""Those that need no other forward pass come first."""
FORWARD_SHARE = 0.5
"""Share of the time after which no further one of them begins, so that some updates can be tried too."""
FACTS_OF_THE_LOSS: tuple[Fact, ...] = (
    parameter_facts.loss_without_gradient,
    parameter_facts.nonfinite_values,
    parameter_facts.not_in_optimizer,
    parameter_facts.not_registered,
    parameter_facts.held_twice,
)
"""What can be told from the graph of one loss."""
TRAINING_FACTS: tuple[Fact, ...] = (*schedule_facts.FACTS, *rate_facts.FACTS, *training_facts.FACTS)


def preflight(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    batches: Iterable[Any],
    step_fn: Callable[[nn.Module, Any], Tensor],
    *,
    scheduler: Any = None,
    total_steps: int | None = None,
    clip: float | None = None,
    eval_batches: Iterable[Any] = (),
    seconds: float = 25.0,
    train: bool = True,
) -> PreflightReport:
    """Check a training loop before its first step; afterwards everything is as it was.

    Args:
        model: The module that is trained, on its device.
        optimizer: Its optimizer, or a list of all optimizers that train it.
        batches: A list of batches, or a loader that can be iterated again; the first 24 are looked at.
        step_fn: (model, batch) -> loss, as for `surefoot.attach`.
        scheduler: The scheduler; with `total_steps` its learning rate over the whole run is looked at.
        total_steps: Updates of the whole run.
        clip: The global norm the loop clips gradients at.
        eval_batches: Batches of held-out data, to look for samples that are trained on too.
        seconds: No further check begins after this time.
        train: Also make some updates on the model and take them back, to see what they do.

    Model, optimizer, scheduler, gradients, modes, random numbers and the loader's own state are restored. Findings are
    sure (facts) or doubtful (may be intended); a report without any is no proof that all is well.
    """
    start = time.monotonic()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _check(model, optimizers, batches, step_fn)
    settings = Settings(scheduler, total_steps, clip, (), start + seconds)
    state = TrainState(model, optimizers, scheduler=scheduler, extra=_loader_state(batches))
    with _restored(state):
        first_batches, settings.eval_batches = _first(batches), _first(eval_batches)
    if not first_batches:
        raise ValueError("preflight: `batches` is empty; pass a list of batches, or a loader that yields some")
    return check_loop(model, optimizers, first_batches, step_fn, settings, state, train=train)


def check_loop(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batches: Sequence[Any],
    step_fn: Callable[[nn.Module, Any], Tensor],
    settings: Settings,
    state: TrainState,
    *,
    train: bool = True,
) -> PreflightReport:
    """Ask for all facts about a loop, in a sandbox; `state` restores everything the loop holds."""
    start = time.monotonic()
    sandbox = Sandbox(model, optimizers, step_fn, state, loss_scale=lambda: None)
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with _other_grads_kept(model), sandbox.opened() as before, eager:
        trainer = Trainer(
            model,
            optimizers,
            step_fn,
            restore=lambda: sandbox.restore(before),
            deadline=settings.deadline,
            clip=settings.clip,
            seeded=seed_all,
            spread=lambda batch: spread_of(observe(step_fn, model, batch)),
        )
        context = PreflightContext(model, optimizers, batches, step_fn, settings, trainer)
        return run_facts(context, start, train=train)


def quick_facts(model: nn.Module, optimizers: Sequence[Optimizer], seen: Observation) -> list[PreflightFinding]:
    """What the graph of one loss says, without step_fn."""
    nothing: Any = None
    context = PreflightContext(model, optimizers, [None], nothing, Settings(), nothing)
    context.keep(0, seen)
    return [finding for fact in FACTS_OF_THE_LOSS for finding in fact(context)]


def merged(report: PreflightReport, findings: Sequence[PreflightFinding]) -> PreflightReport:
    """The report with more findings."""
    return replace(report, findings=_sorted([*findings, *report.findings]))


def run_facts(context: PreflightContext, start: float, *, train: bool) -> PreflightReport:
    """Ask for each fact; one that fails says nothing and is listed."""
    findings: list[PreflightFinding] = []
    not_checked: dict[str, str] = {}
    context.first  # noqa: B018 - an error of step_fn itself is the caller's to see
    left_for_updates = (1 - FORWARD_SHARE) * context.settings.time_left
    for fact in FORWARD_FACTS:
        _ask(fact, context, findings, not_checked, reserve=left_for_updates)
    context.forget()  # the graphs: their memory is needed for the updates
    proposed = None
    if train and len(context.optimizers) > 1:
        not_checked["updates"] = "which optimizer steps when is not known"
    elif train:
        for fact in TRAINING_FACTS:
            _ask(fact, context, findings, not_checked)
        proposed = rate_facts.proposed_lr(context)
    return PreflightReport(_sorted(findings), not_checked, time.monotonic() - start, proposed)


def _ask(
    fact: Fact,
    context: PreflightContext,
    findings: list[PreflightFinding],
    not_checked: dict[str, str],
    *,
    reserve: float = 0.0,
) -> None:
    if context.settings.time_left < reserve:
        not_checked[fact.__name__] = "time was up"
        return
    try:
        findings += fact(context)
    except CannotTell as why:
        not_checked[fact.__name__] = str(why)
    except Exception as error:  # a changed batch may not suit the model; nothing is known then
        not_checked[fact.__name__] = f"{type(error).__name__}: {error}"


def _sorted(findings: Sequence[PreflightFinding]) -> tuple[PreflightFinding, ...]:
    """Each once, the sure ones first; a plateau only where nothing explains it."""
    once = list({(f.cause, f.what, f.where): f for f in findings}.values())
    if any(f.cause is not Cause.PLATEAU for f in once):
        once = [f for f in once if f.cause is not Cause.PLATEAU]  # that nothing is learned follows from the others
    return tuple(sorted(once, key=lambda finding: not finding.sure))


def _check(model: Any, optimizers: Sequence[Any], batches: Any, step_fn: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"preflight: model must be a torch.nn.Module, not {type(model).__name__}")
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise TypeError("preflight: optimizer must be a torch.optim.Optimizer, or a list of them")
    if several_ranks():
        raise ValueError("preflight: it works on a single rank so far; call it in a run without torchrun, once")
    if not callable(step_fn):
        raise TypeError("preflight: step_fn must be a function (model, batch) -> loss")
    if isinstance(batches, Iterator):
        raise TypeError(
            "preflight: batches is an iterator, so the batches it gives would be lost to training; "
            "pass the loader itself, or a list of batches"
        )


def several_ranks() -> bool:
    """Ranks would have to take every step of the checks together."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _first(batches: Iterable[Any]) -> list[Any]:
    return [copied(batch) for batch in itertools.islice(batches, MAX_BATCHES)]


def _loader_state(batches: Any) -> dict[str, Any]:
    """What a loader changes when it is iterated, by the names it has there."""
    parts = {"loader": batches, "sampler": getattr(batches, "sampler", None)}
    found: dict[str, Any] = {
        name: part for name, part in parts.items() if isinstance(part, Stateful) and not isinstance(part, nn.Module)
    }
    generators = {"generator": getattr(batches, "generator", None)}
    generators["sampler_generator"] = getattr(parts["sampler"], "generator", None)
    seen: set[int] = set()
    for name, generator in generators.items():
        if isinstance(generator, torch.Generator) and id(generator) not in seen:
            seen.add(id(generator))
            found[name] = generator
    return found


@contextmanager
def _restored(state: TrainState) -> Iterator[None]:
    """Random numbers and the loader's own state are what they were, whatever is fetched inside."""
    before = get_rng_states(set())
    kept = {name: copy.deepcopy(_state_of(item)) for name, item in state.extra.items()}
    try:
        yield
    finally:
        for name, item in state.extra.items():
            anything: Any = item
            put_back = anything.set_state if isinstance(item, torch.Generator) else anything.load_state_dict
            put_back(kept[name])
        set_rng_states(before)


def _state_of(item: Any) -> Any:
    return item.get_state() if isinstance(item, torch.Generator) else item.state_dict()


@contextmanager
def _other_grads_kept(model: nn.Module) -> Iterator[None]:
    """Gradients of parameters that no optimizer holds."""
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in grads:
            p.grad = grad

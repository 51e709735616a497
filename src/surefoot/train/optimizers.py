"""From a section of the recipe to optimizers of torch, made so that the guard can refuse their updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from surefoot.gate.veto import FUSED_CLASSES, unwrap_optimizer, veto_method_of
from surefoot.train.naming import optimizer_class
from surefoot.train.recipe.schema import OPTIMIZER_DEFAULTS
from surefoot.train.recipe.schema import Optimizer as Spec
from surefoot.train.weights import hidden_matrices, sharded, trained, undecayed

WHOLE_ONLY = ("Lamb", "Adafactor", "Rprop")
"""Classes whose arithmetic torch cannot do on shards of weights."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An optimizer before it is made, for those who make it themselves: `kind(groups, **arguments)`."""

    kind: Callable[..., Any]
    groups: list[dict[str, Any]]
    arguments: dict[str, Any]

    def make(self) -> Optimizer:
        """Make it, if it is one that the guard can refuse."""
        try:
            made = self.kind(self.groups, **self.arguments)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise ValueError(f"optimizer: {_called(self.kind)} cannot be made like this: {problem}") from problem
        made = unwrap_optimizer(made)
        veto_method_of(made)
        return made


def make_optimizers(model: nn.Module, spec: Spec, *, lr: float | None = None) -> list[Optimizer]:
    """The optimizers that train this model together: one, or two where Muon leaves some weights to AdamW."""
    return [plan.make() for plan in plan_optimizers(model, spec, lr=lr)]


def plan_optimizers(model: nn.Module, spec: Spec, *, lr: float | None = None) -> list[Plan]:
    """What `make_optimizers` makes, before it is made; `lr` stands in for the recipe's rate."""
    params = trained(model)
    kind = optimizer_class(spec.name)
    rate = spec.lr if lr is None else lr
    if kind is torch.optim.Muon:
        return _muon(model, params, spec, rate)
    return [_plan(kind, params, spec, rate, undecayed(model))]


def _muon(model: nn.Module, params: list[nn.Parameter], spec: Spec, lr: float) -> list[Plan]:
    """Muon for what lies between embedding and output, AdamW for the rest, both at one rate."""
    plain, hidden = undecayed(model), hidden_matrices(model)
    # The rate of one fits the other when Muon's updates are made as large as AdamW's.
    options = {"adjust_lr_fn": "match_rms_adamw"} | spec.options
    muon = spec.model_copy(update={"betas": None, "eps": None, "fused": None, "options": options})
    adamw = spec.model_copy(update={"momentum": None, "options": {}})
    plans = [
        _plan(torch.optim.Muon, [p for p in params if id(p) in hidden], muon, lr, plain),
        _plan(torch.optim.AdamW, [p for p in params if id(p) not in hidden], adamw, lr, plain),
    ]
    return [plan for plan in plans if plan.groups]


def scaled_rate(spec: Spec, effective_batch: int) -> float:
    """The rate for this many samples an update: by the linear rule, by the square root, or as it stands."""
    if spec.scale_with_batch == "no" or spec.base_batch is None:
        return spec.lr
    times = effective_batch / spec.base_batch
    return spec.lr * (times if spec.scale_with_batch == "linear" else times**0.5)


def _plan(kind: Callable[..., Any], params: list[nn.Parameter], spec: Spec, lr: float, plain: set[int]) -> Plan:
    known = _known(kind)
    arguments = {"lr": lr} | _for_shards(kind, params) | _said(spec, kind, known)
    if _fusable(kind, params, spec):
        arguments["fused"] = True
    decay = arguments.pop("weight_decay", known.get("weight_decay"))
    if decay is None:
        return Plan(kind, [{"params": params}] if params else [], arguments)
    halves = [
        {"params": [p for p in params if id(p) not in plain], "weight_decay": decay},
        {"params": [p for p in params if id(p) in plain], "weight_decay": 0.0},
    ]
    return Plan(kind, [half for half in halves if half["params"]], arguments)


def _for_shards(kind: Callable[..., Any], params: list[nn.Parameter]) -> dict[str, Any]:
    """What it takes to step on shards of weights, where that is possible."""
    if not sharded(params):
        return {}
    if _called(kind) in WHOLE_ONLY:
        raise ValueError(
            f"optimizer.name: {_called(kind)} cannot step on shards of weights. Use parallel.how=data, or another "
            "optimizer, such as adamw"
        )
    return {"foreach": False} if _called(kind) == "LARS" else {}  # one by one, torch knows how


def _said(spec: Spec, kind: Callable[..., Any], known: Collection[str]) -> dict[str, Any]:
    """What the recipe says, in the words of the class; what it does not know is refused unless it says nothing."""
    fields = {name: getattr(spec, name) for name in ("weight_decay", "betas", "momentum", "eps", "fused")}
    said = {name: value for name, value in fields.items() if value is not None and value is not False}
    for name in [name for name in said if name not in known]:
        if not _says_nothing(name, said[name]):
            raise ValueError(
                f"optimizer.{name}: {_called(kind)} has no {name}. Leave it out, or choose another optimizer"
            )
        del said[name]
    for name in spec.options:
        if name not in known:
            raise ValueError(
                f"optimizer.options.{name}: {_called(kind)} has no such argument. It has {', '.join(sorted(known))}"
            )
    return said | spec.options


def _says_nothing(name: str, value: Any) -> bool:
    return value == 0 or any(value == defaults.get(name) for defaults in OPTIMIZER_DEFAULTS.values())


def _known(kind: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a class, with what they are by default."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except ValueError:
        raise ValueError(f"optimizer.name: {_called(kind)} is no optimizer. Name a class as module:Class") from None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        p.name: None if p.default is p.empty else p.default
        for p in parameters
        if p.kind in named and p.name not in ("params", "lr")
    }


def _fusable(kind: Callable[..., Any], params: list[nn.Parameter], spec: Spec) -> bool:
    """Whether one kernel can make all updates, which also lets the guard refuse one without waiting."""
    if spec.fused is False or kind not in FUSED_CLASSES:
        return False
    if any(spec.options.get(other) for other in ("foreach", "differentiable")):
        return False
    if kind in (torch.optim.SGD, torch.optim.Adagrad) and sharded(params):
        return False
    # Adagrad's fused kernel is for the CPU only.
    devices = ("cpu",) if kind is torch.optim.Adagrad else ("cpu", "cuda", "xpu", "mps")
    return all(p.is_floating_point() and p.device.type in devices for p in params)


def _called(kind: Callable[..., Any]) -> str:
    return getattr(kind, "__name__", type(kind).__name__)

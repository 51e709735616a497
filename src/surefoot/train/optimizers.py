"""Makes the recipe's optimizers, so that the guard can refuse their updates."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from surefoot.gate.veto import FUSED_CLASSES, unwrap_optimizer, veto_method_of
from surefoot.train.factories import find_factory
from surefoot.train.recipe.schema import OPTIMIZER_DEFAULTS, OptimizerSection

NOT_SHARDABLE = ("Lamb", "Adafactor", "Rprop")
"""Classes whose arithmetic torch cannot do on sharded weights."""
_PYTORCH_OPTIMIZER = {"lamb": "Lamb", "lars": "LARS"}
"""Names that pytorch_optimizer provides and torch does not."""
_UNSUPPORTED = {
    "lbfgs": "it needs the loss several times per update, and this loop computes it once",
    "sparseadam": "it takes only sparse gradients, which the guard cannot measure",
}


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """An optimizer before it is made: `cls(groups, **arguments)`."""

    cls: Callable[..., Any]
    groups: list[dict[str, Any]]
    arguments: dict[str, Any]

    def make(self) -> Optimizer:
        """Make the optimizer; raises if the guard could not refuse its updates."""
        try:
            optimizer = self.cls(self.groups, **self.arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"optimizer: {_name(self.cls)} refused its arguments: {error}") from error
        optimizer = unwrap_optimizer(optimizer)
        veto_method_of(optimizer)
        return optimizer


def make_optimizers(model: nn.Module, spec: OptimizerSection, *, lr: float | None = None) -> list[Optimizer]:
    """The optimizers of this model: one, or two where Muon leaves some weights to AdamW."""
    return [plan.make() for plan in plan_optimizers(model, spec, lr=lr)]


def plan_optimizers(model: nn.Module, spec: OptimizerSection, *, lr: float | None = None) -> list[OptimizerPlan]:
    """What `make_optimizers` will make; `lr` replaces the recipe's."""
    params = trainable(model)
    cls = optimizer_class(spec.name)
    lr = spec.lr if lr is None else lr
    if cls is torch.optim.Muon:
        return _plan_muon(model, params, spec, lr)
    return [_plan(cls, params, spec, lr, undecayed(model))]


def _plan_muon(model: nn.Module, params: list[nn.Parameter], spec: OptimizerSection, lr: float) -> list[OptimizerPlan]:
    """Muon for hidden matrices, AdamW for the rest, both with the same lr."""
    no_decay, hidden = undecayed(model), hidden_matrices(model)
    # One lr fits both when Muon's updates are scaled to the RMS of AdamW's.
    options = {"adjust_lr_fn": "match_rms_adamw"} | spec.options
    muon = spec.model_copy(update={"betas": None, "eps": None, "fused": None, "options": options})
    adamw = spec.model_copy(update={"momentum": None, "options": {}})
    plans = [
        _plan(torch.optim.Muon, [p for p in params if id(p) in hidden], muon, lr, no_decay),
        _plan(torch.optim.AdamW, [p for p in params if id(p) not in hidden], adamw, lr, no_decay),
    ]
    return [plan for plan in plans if plan.groups]


def scaled_lr(spec: OptimizerSection, effective_batch: int) -> float:
    """The lr for this many samples per update: scaled linearly, by the square root, or not at all."""
    if spec.scale_with_batch == "no" or spec.base_batch is None:
        return spec.lr
    factor = effective_batch / spec.base_batch
    return spec.lr * (factor if spec.scale_with_batch == "linear" else factor**0.5)


def optimizer_class(name: str) -> Callable[..., Any]:
    """The class of this name: any of torch.optim (case-insensitive), lamb, lars, or `module:Class`."""
    if ":" in name:
        return find_factory("optimizer.name", name)
    wanted = name.lower().replace("_", "").replace("-", "")
    known = _torch_classes()
    if wanted in _UNSUPPORTED:
        raise ValueError(
            f"optimizer.name: {name} is not supported: {_UNSUPPORTED[wanted]}. Use adamw, sgd or another one"
        )
    if wanted in known:
        return known[wanted]
    if wanted in _PYTORCH_OPTIMIZER:
        return _from_pytorch_optimizer(name, _PYTORCH_OPTIMIZER[wanted])
    names = sorted({*known, *_PYTORCH_OPTIMIZER})
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
    raise ValueError(f"optimizer.name: there is no optimizer {name!r}; {hint} Name one of your own as module:Class")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that require gradients, tied ones once; half-precision ones are refused."""
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not params:
        raise ValueError("model: it has no parameters, or all are frozen. Pass a model with parameters to train")
    for name, p in params:
        if p.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"model: {name} is {str(p.dtype).removeprefix('torch.')}, so the optimizer's moments would be too. "
                "Keep weights in float32, and set precision.compute to compute in another type"
            )
    return [p for _, p in params]


def undecayed(model: nn.Module) -> set[int]:
    """Ids of parameters without weight decay: vectors, scalars, biases, and everything in a norm layer."""
    ids = {id(p) for name, p in model.named_parameters() if p.ndim < 2 or name.rpartition(".")[2].endswith("bias")}
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            ids |= {id(p) for p in module.parameters(recurse=False)}
    return ids


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of matrices that are neither embeddings nor the output layer, which has one row per token as well."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    vocab_sizes = {weight.shape[0] for weight in embeddings}
    others = undecayed(model) | {id(weight) for weight in embeddings}
    return {id(p) for p in model.parameters() if p.ndim == 2 and id(p) not in others and p.shape[0] not in vocab_sizes}


def is_sharded(params: Iterable[Tensor]) -> bool:
    """Whether the weights are shards, of which each rank holds a part."""
    return any(isinstance(p, DTensor) for p in params)


def _plan(
    cls: Callable[..., Any], params: list[nn.Parameter], spec: OptimizerSection, lr: float, no_decay: set[int]
) -> OptimizerPlan:
    defaults = _parameters_of(cls)
    arguments = {"lr": lr} | _shard_arguments(cls, params) | _recipe_arguments(spec, cls, defaults)
    if _can_fuse(cls, params, spec):
        arguments["fused"] = True
    weight_decay = arguments.pop("weight_decay", defaults.get("weight_decay"))
    if weight_decay is None:
        return OptimizerPlan(cls, [{"params": params}] if params else [], arguments)
    groups = [
        {"params": [p for p in params if id(p) not in no_decay], "weight_decay": weight_decay},
        {"params": [p for p in params if id(p) in no_decay], "weight_decay": 0.0},
    ]
    return OptimizerPlan(cls, [group for group in groups if group["params"]], arguments)


def _shard_arguments(cls: Callable[..., Any], params: list[nn.Parameter]) -> dict[str, Any]:
    """Arguments that let it step on sharded weights, where that is possible."""
    if not is_sharded(params):
        return {}
    if _name(cls) in NOT_SHARDABLE:
        raise ValueError(
            f"optimizer.name: {_name(cls)} cannot step on sharded weights. Use parallel.strategy=data, or another "
            "optimizer, such as adamw"
        )
    return {"foreach": False} if _name(cls) == "LARS" else {}  # its foreach code does not work on DTensors


def _recipe_arguments(spec: OptimizerSection, cls: Callable[..., Any], known: Collection[str]) -> dict[str, Any]:
    """The recipe's keys as arguments of the class; one it does not have is refused, unless it has no effect."""
    fields = {name: getattr(spec, name) for name in ("weight_decay", "betas", "momentum", "eps", "fused")}
    arguments = {name: value for name, value in fields.items() if value is not None and value is not False}
    for name in [name for name in arguments if name not in known]:
        if not _is_default(name, arguments[name]):
            raise ValueError(f"optimizer.{name}: {_name(cls)} has no {name}. Leave it out, or choose another optimizer")
        del arguments[name]
    for name in spec.options:
        if name not in known:
            raise ValueError(
                f"optimizer.options.{name}: {_name(cls)} has no such argument. It has {', '.join(sorted(known))}"
            )
    return arguments | spec.options


def _is_default(name: str, value: Any) -> bool:
    return value == 0 or any(value == defaults.get(name) for defaults in OPTIMIZER_DEFAULTS.values())


def _parameters_of(cls: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a class, with their defaults."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except ValueError:
        raise ValueError(f"optimizer.name: {_name(cls)} is not an optimizer. Name a class as module:Class") from None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        p.name: None if p.default is p.empty else p.default
        for p in parameters
        if p.kind in by_name and p.name not in ("params", "lr")
    }


def _can_fuse(cls: Callable[..., Any], params: list[nn.Parameter], spec: OptimizerSection) -> bool:
    """Whether one fused kernel can make all updates; the guard can then refuse one without a device sync."""
    if spec.fused is False or cls not in FUSED_CLASSES:
        return False
    if any(spec.options.get(other) for other in ("foreach", "differentiable")):
        return False
    if cls in (torch.optim.SGD, torch.optim.Adagrad) and is_sharded(params):
        return False
    # Adagrad's fused kernel is for the CPU only.
    devices = ("cpu",) if cls is torch.optim.Adagrad else ("cpu", "cuda", "xpu", "mps")
    return all(p.is_floating_point() and p.device.type in devices for p in params)


def _torch_classes() -> dict[str, type[Optimizer]]:
    values = vars(torch.optim).values()
    classes = [value for value in values if isinstance(value, type) and issubclass(value, Optimizer)]
    return {cls.__name__.lower(): cls for cls in classes if cls is not Optimizer}


def _from_pytorch_optimizer(name: str, class_name: str) -> Callable[..., Any]:
    try:
        return getattr(importlib.import_module("pytorch_optimizer"), class_name)
    except ImportError:
        raise ValueError(
            f"optimizer.name: {name} comes from pytorch_optimizer, which is not installed: "
            "pip install 'surefoot[train]'"
        ) from None


def _name(cls: Callable[..., Any]) -> str:
    return getattr(cls, "__name__", type(cls).__name__)

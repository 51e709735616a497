"""One call of step_fn, seen from outside: what went into the model, what came out, and which losses were computed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from surefoot.checkpoint.tree import tensors_in

Changes = Callable[[list[Tensor]], list[Tensor]]
"""Given the tensors of a call of the model, in the order of `tensors_in`, returns the ones to use instead."""

_LOSSES: Mapping[Any, str] = {
    getattr(F, name): name
    for name in (
        "cross_entropy",
        "nll_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "poisson_nll_loss",
        "soft_margin_loss",
        "multilabel_soft_margin_loss",
        "hinge_embedding_loss",
        "margin_ranking_loss",
        "cosine_embedding_loss",
        "triplet_margin_loss",
        "ctc_loss",
        "gaussian_nll_loss",
        "multi_margin_loss",
    )
}
_SOFTMAX: Mapping[Any, str] = {
    f: name
    for name, functions in {
        "softmax": (F.softmax, torch.softmax, Tensor.softmax),
        "log_softmax": (F.log_softmax, torch.log_softmax, Tensor.log_softmax),
        "sigmoid": (torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit),
    }.items()
    for f in functions
}
_RELU = {F.relu, torch.relu, Tensor.relu, F.relu_, torch.relu_, Tensor.relu_}
_SQUASH = {F.sigmoid, torch.sigmoid, Tensor.sigmoid, F.tanh, torch.tanh, Tensor.tanh}
_DROPOUT = {F.dropout, torch.dropout}
_DIFFERENCES = {Tensor.sub, torch.sub, Tensor.__sub__, Tensor.__rsub__, torch.subtract, Tensor.subtract}


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of one of torch's loss functions."""

    name: str
    input: Tensor
    target: Tensor
    output: Tensor
    ignore_index: int | None
    inside_model: bool
    weighted: bool
    """Whether classes have weights."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of the model itself."""

    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of another operation that matters, with the module it was made in."""

    name: str
    module: str
    inside_model: bool
    shape: tuple[int, ...]
    dim: int | None = None
    output: Tensor | None = None
    detail: str = ""


@dataclass(slots=True)
class Observation:
    """What one call of step_fn did."""

    loss: Tensor
    model_calls: list[ModelCall] = field(default_factory=list)
    loss_calls: list[LossCall] = field(default_factory=list)
    softmax_calls: list[OpCall] = field(default_factory=list)
    activations: list[OpCall] = field(default_factory=list)
    dropouts: list[OpCall] = field(default_factory=list)
    broadcasts: list[OpCall] = field(default_factory=list)
    """Differences of (n, 1) and (n,) outside of the model."""
    called: set[str] = field(default_factory=set)
    """Names of the modules whose forward ran."""
    training: bool = True
    """The mode of the model in its forward."""
    modes: dict[str, bool] = field(default_factory=dict)
    """The mode of each module at its call."""
    first_nonfinite: str | None = None
    """The first module whose output is not finite; '' is the model itself."""

    @property
    def outputs(self) -> list[Tensor]:
        """Floating-point outputs of all calls of the model, in order; of a model that returns the loss, what its loss
        functions are given."""
        tensors = [t for call in self.model_calls for t in call.outputs if t.is_floating_point() and t.dim()]
        return tensors or [call.input for call in self.loss_calls if call.inside_model and call.input.dim()]

    @property
    def inputs(self) -> list[Tensor]:
        return [t for call in self.model_calls for t in call.inputs]

    @property
    def main_loss(self) -> LossCall | None:
        """The loss function's call, where there is exactly one that leads to a gradient."""
        calls = [call for call in self.loss_calls if call.output.requires_grad]
        return calls[0] if len(calls) == 1 else None

    @property
    def single_loss(self) -> LossCall | None:
        """The same for a call without a graph."""
        return self.loss_calls[0] if len(self.loss_calls) == 1 else None


class _Recorder(TorchFunctionMode):
    """Notes calls of functions of torch."""

    def __init__(self, seen: Observation, stack: list[str]) -> None:
        super().__init__()
        self._seen, self._stack = seen, stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        with contextlib.suppress(TypeError, AttributeError, IndexError):  # called in a way that is not expected
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        seen, module, inside = self._seen, self._stack[-1] if self._stack else "", bool(self._stack)
        if func in _LOSSES:
            seen.loss_calls.append(_loss_call(func, args, kwargs, result, inside=inside))
        if func in _SOFTMAX:
            name = _SOFTMAX[func]
            x = args[0] if args else kwargs["input"]
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None) if name != "sigmoid" else None
            if name != "sigmoid" and dim is None:
                dim = 0 if x.dim() in (0, 1, 3) else 1  # what torch does without a dim
            dim = None if dim is None else dim % max(x.dim(), 1)
            seen.softmax_calls.append(OpCall(name, module, inside, tuple(x.shape), dim, result))
        if inside and (func in _RELU or func in _SQUASH):
            name = "relu" if func in _RELU else func.__name__
            seen.activations.append(OpCall(name, module, inside, tuple(result.shape), output=result.detach()))
        if func in _DROPOUT:
            bound = inspect.signature(F.dropout).bind(*args, **kwargs)
            bound.apply_defaults()
            p, training = bound.arguments["p"], bound.arguments.get("training", True)
            seen.dropouts.append(OpCall("dropout", module, inside, tuple(result.shape), output=result, detail=f"{p}"))
            if not training:
                seen.dropouts.pop()
        if not inside and func in _DIFFERENCES and isinstance(args[1], Tensor):
            shapes = {tuple(args[0].shape), tuple(args[1].shape)}
            n = args[0].shape[0] if args[0].dim() else 0
            if n > 1 and shapes == {(n,), (n, 1)}:
                seen.broadcasts.append(OpCall("difference", module, inside, tuple(result.shape), output=result))


def _loss_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, inside: bool) -> LossCall:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    values = list(bound.arguments.values())
    ignore = bound.arguments.get("ignore_index")
    weighted = bound.arguments.get("weight") is not None
    return LossCall(_LOSSES[func], values[0], values[1], result, ignore, inside, weighted)


class _Hooks:
    """Forward hooks on every module of a model, that note what goes in and out."""

    def __init__(self, model: nn.Module, seen: Observation, stack: list[str], changes: Changes | None) -> None:
        self._model, self._seen, self._stack, self._changes = model, seen, stack, changes
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen = self._seen
        if not self._stack:
            seen.training = self._model.training
        self._stack.append(name)
        seen.called.add(name)
        seen.modes[name] = module.training
        if name:
            return None
        inputs = list(tensors_in([args, kwargs]))
        if self._changes is not None:
            inputs = self._changes(inputs)
            args, kwargs = replace_tensors([args, kwargs], iter(inputs))
        seen.model_calls.append(ModelCall([t.detach() for t in inputs], []))
        return (tuple(args), kwargs) if self._changes is not None else None

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() != name:
            pass
        seen, tensors = self._seen, list(tensors_in(output))
        if seen.first_nonfinite is None and any(map(_is_broken, tensors)):
            seen.first_nonfinite = name
        if name == "" and seen.model_calls:
            seen.model_calls[-1].outputs.extend(tensors)


def observe(
    step_fn: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any, changes: Changes | None = None
) -> Observation:
    """Call step_fn once and note what it does; `changes` alters the tensors the model is called with."""
    seen, stack = Observation(torch.empty(())), []
    with _Hooks(model, seen, stack, changes), _Recorder(seen, stack):
        loss = step_fn(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"step_fn must return the loss, a tensor with one element, not {type(loss).__name__}")
    seen.loss = loss.reshape(())
    return seen


def replace_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same containers with other tensors, taken in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        parts = {name: replace_tensors(part, tensors) for name, part in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # pyright: ignore[reportCallIssue]
    if isinstance(value, list | tuple):
        items = [replace_tensors(part, tensors) for part in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "__dataclass_fields__"):
        for _ in tensors_in(value):
            next(tensors)  # dataclasses are kept as they are
    return value


def _is_broken(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor.detach()).all())


def spread_of(seen: Observation) -> float:
    """The standard deviation between samples over the size of the outputs; the smallest of all outputs."""
    spreads: list[float] = []
    for out in seen.outputs:
        if out.dim() >= 2 and out.shape[0] > 2:
            rows = out.detach().float().reshape(len(out), -1)
            size = float(rows.square().mean().sqrt())
            spreads.append(float((rows - rows.mean(0)).square().mean().sqrt()) / size if size > 0 else math.nan)
    return min(spreads, default=math.nan)

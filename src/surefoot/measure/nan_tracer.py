"""Finds the module that first produced a NaN, with hooks that are registered only after one was seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.measure.layout import to_local

KEPT_ATTEMPTS = 4
"""Attempts whose forward passes are kept: their numbers are read two steps later."""
ARMED_ATTEMPTS = 256
"""Attempts without another NaN after which the hooks are removed."""
MAX_TRACES = 3
"""Traces after which the hooks are removed for good."""


@dataclass(frozen=True, slots=True)
class NanOrigin:
    """Where a non-finite value came from."""

    module: str
    """The module's name in the model; empty for the model itself, or for code after it."""
    module_type: str
    """The module's class; empty when all module outputs were finite and the loss was not."""
    inputs: bool
    """The model's inputs contained it."""
    weights: bool
    """The module's own weights contain it."""


@dataclass(slots=True)
class _Call:
    """One call of a module, with flags on the device: whether inputs, outputs or weights held a NaN."""

    module: nn.Module
    inputs: Tensor | None
    outputs: Tensor | None
    weights: Tensor | None


class NanTracer:
    """Checks inputs and outputs of every module, once armed; the results stay on the device until `trace`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.armed = False
        """Forward passes are recorded, so `end_attempt` is to be called."""
        self._hooks: list[Any] = []
        self._calls: list[_Call] = []
        self._attempts: dict[int, list[_Call]] = {}
        self._attempts_left = 0
        self._traces = 0

    def arm(self) -> None:
        """Register the hooks, from the next forward pass on."""
        if self._hooks or self._traces >= MAX_TRACES:
            self._attempts_left = ARMED_ATTEMPTS
            return
        self._attempts_left = ARMED_ATTEMPTS
        self.armed = True
        hook = _TraceHook(self)
        for module in self._model.modules():
            self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def disarm(self) -> None:
        """Remove the hooks and all results."""
        self.armed = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._calls.clear()
        self._attempts.clear()

    def record_call(self, module: nn.Module, inputs: Iterable[Any], outputs: Any) -> None:
        """Check one call of a module."""
        with torch.no_grad():
            weights = [p for p in module._parameters.values() if p is not None]
            self._calls.append(_Call(module, _any_nonfinite(inputs), _any_nonfinite(outputs), _any_nonfinite(weights)))

    def end_attempt(self, attempt: int) -> None:
        """Assign the forward passes so far to this attempt."""
        self._attempts[attempt], self._calls = self._calls, []
        while len(self._attempts) > KEPT_ATTEMPTS:
            del self._attempts[next(iter(self._attempts))]
        self._attempts_left -= 1
        if self._attempts_left <= 0:
            self.disarm()

    def trace(self, attempt: int) -> NanOrigin | None:
        """Where the NaN of this attempt came from, if it was recorded; waits for the device, but only after a NaN."""
        calls = self._attempts.get(attempt)
        if not calls:
            return None
        names = {id(module): name for name, module in self._model.named_modules()}
        self._traces += 1
        if self._traces >= MAX_TRACES:
            self.disarm()
        outermost = next((c for c in reversed(calls) if c.module is self._model), calls[-1])
        if _is_set(outermost.inputs):
            return NanOrigin("", type(outermost.module).__name__, inputs=True, weights=False)
        for call in calls:  # a module is recorded after the modules inside it
            if _is_set(call.outputs) and not _is_set(call.inputs):
                name = names.get(id(call.module), "")
                return NanOrigin(name, type(call.module).__name__, inputs=False, weights=_is_set(call.weights))
        return NanOrigin("", "", inputs=False, weights=False)


class _TraceHook:
    """The forward hook; a pickled or deep copy of the model gets one that does nothing."""

    of_guard = True

    def __init__(self, tracer: NanTracer | None = None) -> None:
        self._tracer = tracer

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self._tracer is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._tracer.record_call(module, [*args, *kwargs.values()], out)

    def __reduce__(self) -> tuple[type[_TraceHook], tuple[()]]:
        return _TraceHook, ()


def _is_set(flag: Tensor | None) -> bool:
    return flag is not None and bool(flag)


def _any_nonfinite(values: Any) -> Tensor | None:
    """Whether any value is NaN or +inf; -inf may be a mask."""
    flags = [(t.isnan() | t.isposinf()).any() for t in _float_tensors(values)]
    return torch.stack([f.to(flags[0].device) for f in flags]).any() if flags else None


def _float_tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.is_floating_point() and values.layout is torch.strided:
            yield to_local(values.detach())
    elif isinstance(values, dict):
        for value in values.values():
            yield from _float_tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _float_tensors(value)

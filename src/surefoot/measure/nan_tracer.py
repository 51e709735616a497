"""Which module first made a value that is not a number: found by hooks that are there only after one has been seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.measure.layout import local

KEPT = 4
"""Updates whose forward passes are remembered: their numbers come two steps later."""
LONG = 256
"""Updates without a further one after which nobody waits for it any more."""
FOUND = 3
"""Times the same question is answered before the hooks come off."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value that is not finite came from."""

    module: str
    """Its name in the model; empty for the model itself, or for what comes after it."""
    kind: str
    """The module's class; empty when every module was sound and the loss was not."""
    inputs: bool
    """It came in from outside."""
    weights: bool
    """The module's own weights hold it."""


@dataclass(slots=True)
class _Call:
    module: nn.Module
    came: Tensor | None
    went: Tensor | None
    held: Tensor | None


class NanTracer:
    """Looks at what goes into and out of every module, once it is armed; answers stay on the device till asked."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._calls: list[_Call] = []
        self._rounds: dict[int, list[_Call]] = {}
        self._left = 0
        self._answers = 0

    def arm(self) -> None:
        """Look from the next forward pass on."""
        if self._hooks or self._answers >= FOUND:
            self._left = LONG
            return
        self._left = LONG
        hook = _Look(self)
        for module in self._model.modules():
            self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._calls.clear()
        self._rounds.clear()

    def saw(self, module: nn.Module, inputs: Iterable[Any], outputs: Any) -> None:
        """A module was called."""
        with torch.no_grad():
            weights = [p for p in module._parameters.values() if p is not None]
            self._calls.append(_Call(module, _bad(inputs), _bad(outputs), _bad(weights)))

    def settle(self, attempt: int) -> None:
        """The forward passes so far belong to this update."""
        if not self._hooks:
            return
        self._rounds[attempt], self._calls = self._calls, []
        while len(self._rounds) > KEPT:
            del self._rounds[next(iter(self._rounds))]
        self._left -= 1
        if self._left <= 0:
            self.disarm()

    def ask(self, attempt: int) -> Origin | None:
        """Where it came from in this update, if that was looked at; waits for the device, in trouble only."""
        calls = self._rounds.get(attempt)
        if not calls:
            return None
        names = {id(module): name for name, module in self._model.named_modules()}
        self._answers += 1
        if self._answers >= FOUND:
            self.disarm()
        whole = next((c for c in reversed(calls) if c.module is self._model), calls[-1])
        if _is(whole.came):
            return Origin("", type(whole.module).__name__, inputs=True, weights=False)
        for call in calls:  # a module comes after those inside it
            if _is(call.went) and not _is(call.came):
                name = names.get(id(call.module), "")
                return Origin(name, type(call.module).__name__, inputs=False, weights=_is(call.held))
        return Origin("", "", inputs=False, weights=False)


class _Look:
    """The hook; a copy of the model, saved or deep, carries an idle one."""

    def __init__(self, tracer: NanTracer | None = None) -> None:
        self._tracer = tracer

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self._tracer is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._tracer.saw(module, [*args, *kwargs.values()], out)

    def __reduce__(self) -> tuple[type[_Look], tuple[()]]:
        return _Look, ()


def _is(flag: Tensor | None) -> bool:
    return flag is not None and bool(flag)


def _bad(values: Any) -> Tensor | None:
    """Whether any of these is NaN or above all bounds; what is minus infinity may be masked on purpose."""
    found = [(t.isnan() | t.isposinf()).any() for t in _tensors(values)]
    return torch.stack([f.to(found[0].device) for f in found]).any() if found else None


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.is_floating_point() and values.layout is torch.strided:
            yield local(values.detach())
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)

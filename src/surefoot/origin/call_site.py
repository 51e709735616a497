"""Where an operation was called: the module, the torch function, and the line of the model's code."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
OWN_DIR = os.path.dirname(__file__) + os.sep
STDLIB_FILES = tuple(os.sep + name for name in ("contextlib.py", "functools.py"))
DUNDER_NAMES = {"truediv": "div", "rtruediv": "div", "rmul": "mul", "radd": "add", "rsub": "sub", "rpow": "pow"}
INPLACE = {"itruediv": "div", "imul": "mul", "iadd": "add", "isub": "sub", "ipow": "pow", "imatmul": "matmul"}


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where an operation was called."""

    file: str = ""
    line: int = 0
    module: str = ""
    module_type: str = ""
    function: str = ""
    """The torch function that the model called; empty where it is the operation itself."""

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside torch and this package, up to the caller of `locate`."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OWN_DIR) and frame.f_code.co_name == "run_passes":
            return None
        if not name.startswith((TORCH_DIR, OWN_DIR, "<")) and not name.endswith(STDLIB_FILES):
            return frame
        frame = frame.f_back
    return None


class FunctionNames(TorchFunctionMode):
    """Knows the outermost torch function that is running: `cross_entropy` rather than what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.current = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.current = self.current, self.current or _plain_name(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.current = before


def _plain_name(func: Any) -> str:
    name = getattr(func, "__name__", "") or (resolve_name(func) or "").rpartition(".")[2]
    if name in ("__get__", "__set__", "default", "grad", "backward"):
        return ""
    if name.startswith("__"):
        name = name.strip("_")
        name = DUNDER_NAMES.get(name) or INPLACE.get(name) or name
    return name.strip("_")


class CallSites:
    """Tells where the operation that is running was called, while it is open."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [*model.modules()]
        self._names = {id(module): (name, type(module).__name__) for name, module in named_modules(model)}
        self._stack: list[nn.Module] = []
        self._functions = FunctionNames()
        self._hooks: list[Any] = []

    def __enter__(self) -> CallSites:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._entered))
            self._hooks.append(module.register_forward_hook(self._left, always_call=True))
        self._functions.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _entered(self, module: nn.Module, _: Any) -> None:
        self._stack.append(module)

    def _left(self, module: nn.Module, *_: Any) -> None:
        if module in self._stack:
            while self._stack.pop() is not module:
                pass

    def here(self) -> CallSite | None:
        """The place in the model's code that is running; None where it is not the model's code."""
        frame = user_frame(sys._getframe(1))
        if frame is None:
            return None
        name, kind = "", ""
        for module in reversed(self._stack):
            if id(module) in self._names:
                name, kind = self._names[id(module)]
                break
        return CallSite(frame.f_code.co_filename, frame.f_lineno, name, kind, self._functions.current)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with names as the user knows them: without what wrappers add."""
    return [(plain_name(name), module) for name, module in model.named_modules()]


def plain_name(name: str) -> str:
    """The name of a module or tensor without the pieces that DDP, FSDP, checkpointing and torch.compile add."""
    wrappers = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    pieces = name.split(".")
    while pieces and pieces[0] in wrappers:
        pieces = pieces[1:]
    return ".".join(piece for piece in pieces if piece not in wrappers[2:] and piece != "_orig_mod")

"""Names for everything a run holds that stay the same however its model is wrapped."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from surefoot.checkpoint.format.state_files import root_of
from surefoot.checkpoint.train_state import TrainState, has_own_state

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What compiling, sharding and recomputation put between a model and its parts."""


@dataclass(frozen=True, slots=True)
class Held:
    """What an optimizer holds, by names."""

    kind: str
    """Its class; of one that wraps another, the other's."""
    groups: list[list[str]]
    number: int
    """Of the optimizer that keeps the state, in `Whole.optimizers`."""
    sole: bool
    """Whether each state is kept by one process alone, as ZeroRedundancyOptimizer does."""


@dataclass(slots=True)
class Names:
    """The names of a run's parameters and buffers, each tensor by its first one."""

    of: dict[int, str] = field(default_factory=dict)
    """By the identity of a tensor."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    passing: set[str] = field(default_factory=set)
    """Buffers that a module does not count as its state."""
    alike: set[str] = field(default_factory=set)
    """Parameters that are the same in all processes."""
    shared: frozenset[str] = frozenset()
    """What beside the model is the same in all processes, such as extra.ema."""
    modules: dict[tuple[int, str], str] = field(default_factory=dict)
    """Names of modules with a state of their own making, by the number of the root and the path in it."""
    makers: dict[str, nn.Module] = field(default_factory=dict)
    """The same by their names."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tensors that have one already."""
    places: dict[tuple[int, str, str], str] = field(default_factory=dict)
    """By the number of the root, the path of the module and the name within it."""
    homes: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """Where buffers live, also those that are not there yet."""
    unready: list[str] = field(default_factory=list)
    """Parameters that wait for a first forward pass to get their shape."""
    optimizers: list[Held] = field(default_factory=list)
    """One for each that was handed in."""

    def add(self, name: str, tensor: Tensor) -> str:
        """Name a tensor; hands back the name that it has from now on."""
        known = self.of.get(id(tensor))
        if known is not None:
            self.aliases[name] = known
            return known
        name = free(name, self.tensors)
        self.of[id(tensor)] = name
        self.tensors[name] = tensor
        return name


def free(name: str, taken: Collection[str]) -> str:
    """The name, or one like it that nothing has yet: two paths may read the same."""
    if name not in taken:
        return name
    return next(one for i in itertools.count(2) if (one := f"{name}#{i}") not in taken)


def names_in(whole: TrainState, *, alike: Collection[str] = ()) -> Names:
    """Names for a run; `alike` tells which of its models (`model`, `extra.ema`) are the same in all processes.

    A parameter under DistributedDataParallel is known to be. One that is spread over processes is written in parts.
    Any other is written by every process, which is never wrong, and costs room.
    """
    return names_of(zip(whole.root_names, whole.roots, strict=True), whole.optimizers, alike=alike)


def names_of(
    roots: Iterable[tuple[str, nn.Module]], optimizers: Sequence[Optimizer], *, alike: Collection[str] = ()
) -> Names:
    """Every parameter and buffer of the roots, and the parameters that only an optimizer holds."""
    names = Names()
    for number, (root, model) in enumerate(roots):
        synced = _synced(model)
        for path, clean, module in _walk(model, "", "", ()):
            _add_maker(names, (number, path), _joined(root, clean), module)
            for name, p in list(module._parameters.items()):
                if p is None:
                    continue
                whole = _joined(root, clean, name)
                if is_lazy(p):
                    names.unready.append(whole)
                    continue
                known = names.places[number, path, name] = names.add(whole, p)
                if id(p) in synced or root in alike:
                    names.alike.add(known)
            for name, b in list(module._buffers.items()):
                _add_buffer(names, (number, path, name), _joined(root, clean, name), module, b)
    for k, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in names.of and not is_lazy(p):
                    names.add(f"loose{k}.{g}.{i}", p)
    names.optimizers = list(_held(optimizers, names))
    return names


def with_alike(names: Names, shared: frozenset[str]) -> Names:
    """The same names, where it is known now what beside the model is the same in all processes, and written once."""
    params = {n for n in names.tensors.keys() - names.buffers if n.startswith("extra.") and root_of(n) in shared}
    return replace(names, alike=names.alike | params, shared=shared)


def _add_maker(names: Names, place: tuple[int, str], whole: str, module: nn.Module) -> None:
    if has_own_state(module):
        names.modules[place] = whole
        names.makers.setdefault(whole, module)


def _add_buffer(
    names: Names, place: tuple[int, str, str], whole: str, module: nn.Module, buffer: Tensor | None
) -> None:
    passing = place[2] in module._non_persistent_buffers_set
    if buffer is None or is_lazy(buffer):
        names.homes.setdefault(whole, (module, place[2]))
        return
    known = names.places[place] = names.add(whole, buffer)
    names.homes.setdefault(known, (module, place[2]))
    names.buffers.add(known)
    if passing:
        names.passing.add(known)


def _walk(
    model: nn.Module, path: str, clean: str, above: tuple[nn.Module, ...]
) -> Iterator[tuple[str, str, nn.Module]]:
    """All modules with their paths, as they are and without what was put between; shared ones each time they occur."""
    yield path, clean, model
    for name, child in list(model._modules.items()):
        if child is None or any(child is one for one in above):
            continue
        between = name in _WRAPPERS or (name == "module" and isinstance(model, DistributedDataParallel | DataParallel))
        yield from _walk(child, _joined(path, name), clean if between else _joined(clean, name), (*above, model))


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _synced(model: nn.Module) -> set[int]:
    """Parameters that DistributedDataParallel keeps the same everywhere."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            named = module.module.named_parameters()
            found |= {id(p) for n, p in named if n not in module.parameters_to_ignore and not isinstance(p, DTensor)}
    return found


def _held(optimizers: Sequence[Optimizer], names: Names) -> Iterator[Held]:
    inner = [getattr(o, "optim", None) for o in optimizers]
    for k, (outer, within) in enumerate(zip(optimizers, inner, strict=True)):
        if any(outer is one for one in inner):
            continue
        groups = [[names.of[id(p)] for p in g["params"] if id(p) in names.of] for g in outer.param_groups]
        if isinstance(within, Optimizer):
            number = next(i for i, o in enumerate(optimizers) if o is within)
            yield Held(type(within).__name__, groups, number, sole=True)
        else:
            yield Held(type(outer).__name__, groups, k, sole=False)

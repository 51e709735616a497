"""Names for all tensors of a run that do not depend on how its model is wrapped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from surefoot.checkpoint.format.rank_files import root_of, unused_name
from surefoot.checkpoint.train_state import TrainState, has_extra_state

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes that compilation, sharding and activation checkpointing put between a model and its parts."""


@dataclass(frozen=True, slots=True)
class OptimizerParams:
    """The parameters of one optimizer, by name."""

    cls: str
    """Its class; for an optimizer that wraps another, the class of the inner one."""
    groups: list[list[str]]
    index: int
    """Index in `TrainState.optimizers` of the optimizer that has the state."""
    single_owner: bool
    """Whether each state is held by one rank alone, as ZeroRedundancyOptimizer does."""


@dataclass(slots=True)
class StateNames:
    """Names of a run's parameters and buffers; a tensor with several names has the first."""

    by_id: dict[int, str] = field(default_factory=dict)
    """By the `id` of a tensor."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    non_persistent: set[str] = field(default_factory=set)
    """Buffers that are not part of their module's `state_dict`."""
    replicated: set[str] = field(default_factory=set)
    """Parameters that are the same on all ranks."""
    replicated_extra: frozenset[str] = frozenset()
    """Items of `extra` that are the same on all ranks, such as extra.ema."""
    modules: dict[tuple[int, str], str] = field(default_factory=dict)
    """Names of modules with an extra state, by the index of the root and the path in it."""
    stateful_modules: dict[str, nn.Module] = field(default_factory=dict)
    """These modules by name."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of named tensors."""
    places: dict[tuple[int, str, str], str] = field(default_factory=dict)
    """By the index of the root, the path of the module and the name in it."""
    buffer_owners: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """Module and attribute of each buffer, including buffers that are None."""
    uninitialized: list[str] = field(default_factory=list)
    """Lazy parameters that get their shape from the first forward pass."""
    optimizers: list[OptimizerParams] = field(default_factory=list)
    """One for each optimizer that the user passed."""

    def add(self, name: str, tensor: Tensor) -> str:
        """Name a tensor; returns its name, which is the old one if it has one."""
        known = self.by_id.get(id(tensor))
        if known is not None:
            self.aliases[name] = known
            return known
        name = unused_name(name, self.tensors)
        self.by_id[id(tensor)] = name
        self.tensors[name] = tensor
        return name


def name_state(train_state: TrainState, *, replicated: Collection[str] = ()) -> StateNames:
    """Names for a run; `replicated` lists the models (`model`, `extra.ema`) that are the same on all ranks.

    Parameters under DistributedDataParallel are known to be. A sharded parameter is written in parts. Any other is
    written by every rank, which is always correct but takes more space.
    """
    roots = zip(train_state.root_names, train_state.roots, strict=True)
    return name_tensors(roots, train_state.optimizers, replicated=replicated)


def name_tensors(
    roots: Iterable[tuple[str, nn.Module]], optimizers: Sequence[Optimizer], *, replicated: Collection[str] = ()
) -> StateNames:
    """Name every parameter and buffer of the roots, and the parameters that only an optimizer holds."""
    names = StateNames()
    for index, (root, model) in enumerate(roots):
        ddp_params = _ddp_params(model)
        for path, clean_path, module in _walk(model, "", "", ()):
            _add_stateful_module(names, (index, path), _join(root, clean_path), module)
            for attr, p in list(module._parameters.items()):
                if p is None:
                    continue
                name = _join(root, clean_path, attr)
                if is_lazy(p):
                    names.uninitialized.append(name)
                    continue
                known = names.places[index, path, attr] = names.add(name, p)
                if id(p) in ddp_params or root in replicated:
                    names.replicated.add(known)
            for attr, b in list(module._buffers.items()):
                _add_buffer(names, (index, path, attr), _join(root, clean_path, attr), module, b)
    for k, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in names.by_id and not is_lazy(p):
                    names.add(f"loose{k}.{g}.{i}", p)
    names.optimizers = list(_optimizer_params(optimizers, names))
    return names


def with_replicated(names: StateNames, extra: frozenset[str]) -> StateNames:
    """The same names, now that items of `extra` are known to be the same on all ranks and can be written once."""
    params = {n for n in names.tensors.keys() - names.buffers if n.startswith("extra.") and root_of(n) in extra}
    return replace(names, replicated=names.replicated | params, replicated_extra=extra)


def _add_stateful_module(names: StateNames, place: tuple[int, str], name: str, module: nn.Module) -> None:
    if has_extra_state(module):
        names.modules[place] = name
        names.stateful_modules.setdefault(name, module)


def _add_buffer(
    names: StateNames, place: tuple[int, str, str], name: str, module: nn.Module, buffer: Tensor | None
) -> None:
    attr = place[2]
    if buffer is None or is_lazy(buffer):
        names.buffer_owners.setdefault(name, (module, attr))
        return
    known = names.places[place] = names.add(name, buffer)
    names.buffer_owners.setdefault(known, (module, attr))
    names.buffers.add(known)
    if attr in module._non_persistent_buffers_set:
        names.non_persistent.add(known)


def _walk(
    model: nn.Module, path: str, clean_path: str, ancestors: tuple[nn.Module, ...]
) -> Iterator[tuple[str, str, nn.Module]]:
    """All modules with their paths, with and without wrappers; a shared module once for each occurrence."""
    yield path, clean_path, model
    for name, child in list(model._modules.items()):
        if child is None or any(child is ancestor for ancestor in ancestors):
            continue
        wrapper = name in _WRAPPERS or (name == "module" and isinstance(model, DistributedDataParallel | DataParallel))
        child_path = clean_path if wrapper else _join(clean_path, name)
        yield from _walk(child, _join(path, name), child_path, (*ancestors, model))


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _ddp_params(model: nn.Module) -> set[int]:
    """Ids of the parameters that DistributedDataParallel keeps the same on all ranks."""
    ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            named = module.module.named_parameters()
            ids |= {id(p) for n, p in named if n not in module.parameters_to_ignore and not isinstance(p, DTensor)}
    return ids


def _optimizer_params(optimizers: Sequence[Optimizer], names: StateNames) -> Iterator[OptimizerParams]:
    inner_optimizers = [getattr(o, "optim", None) for o in optimizers]
    for k, (outer, inner) in enumerate(zip(optimizers, inner_optimizers, strict=True)):
        if any(outer is other for other in inner_optimizers):
            continue
        groups = [[names.by_id[id(p)] for p in g["params"] if id(p) in names.by_id] for g in outer.param_groups]
        if isinstance(inner, Optimizer):
            index = next(i for i, o in enumerate(optimizers) if o is inner)
            yield OptimizerParams(type(inner).__name__, groups, index, single_owner=True)
        else:
            yield OptimizerParams(type(outer).__name__, groups, k, single_owner=False)

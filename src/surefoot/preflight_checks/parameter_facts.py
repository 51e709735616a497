"""Facts about parameters, modules and buffers: who holds them, what reaches them, and in which mode they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, place_of, some_names, sure
from surefoot.preflight_checks.loop_probe import PreflightContext

MANY_BATCHES = 3
"""Batches after which a weight without a gradient is taken to have none at all."""


def loss_without_gradient(c: PreflightContext) -> Iterator[PreflightFinding]:
    if c.first.loss.requires_grad:
        return
    trainable = [name for name, p in c.model.named_parameters() if p.requires_grad]
    if not trainable:
        yield sure(
            Cause.FROZEN,
            "no parameter of the model is trainable",
            "requires_grad is False for all of them, and so for the loss",
            "Set requires_grad_(True) on what should be trained.",
        )
        return
    yield sure(
        Cause.DETACHED,
        "the loss has no gradient",
        f"loss.requires_grad is False, although {len(trainable)} parameters are trainable",
        "Look for torch.no_grad, .detach(), .item(), .numpy() or torch.tensor(...) between the model and the loss.",
    )


def nonfinite_values(c: PreflightContext) -> Iterator[PreflightFinding]:
    named = [*c.model.named_parameters(), *c.model.named_buffers()]
    bad = [n for n, t in named if t.is_floating_point() and not _masks(n, t) and not bool(torch.isfinite(t).all())]
    if bad:
        yield sure(
            Cause.WEIGHTS_DAMAGED,
            f"{some_names(bad)} {'has' if len(bad) == 1 else 'have'} values that are not finite",
            "torch.isfinite of every parameter and buffer",
            "Look at how they are initialised or loaded.",
            where=place_of(c.model, bad[0]),
        )


def _masks(name: str, tensor: Tensor) -> bool:
    """A buffer of -inf and 0 that is added to attention scores."""
    return bool((torch.isfinite(tensor) | (tensor == float("-inf"))).all()) and bool(torch.isfinite(tensor).any())


def not_in_optimizer(c: PreflightContext) -> Iterator[PreflightFinding]:
    held = {id(p) for p in c.held}
    missing = {n: p for n, p in c.model.named_parameters() if p.requires_grad and id(p) not in held}
    foreign = [p for p in c.held if id(p) not in c.param_names and p.requires_grad]
    reached = {id(leaf) for leaf in leaves_of(c.first.loss)}
    shapes = Counter(tuple(p.shape) for p in missing.values())
    copies = sum((shapes & Counter(tuple(p.shape) for p in foreign if id(p) not in reached)).values())
    fix = "Create the optimizer after the model is complete and on its device, from model.parameters()."
    if missing and copies >= max(1, len(missing) // 2):
        yield sure(
            Cause.UNREGISTERED,
            "the optimizer holds the parameters of another copy of the model",
            f"{copies} of its tensors are not the model's, but have the shapes of {some_names(list(missing))}",
            fix,
            where=place_of(c.model, next(iter(missing))),
        )
        return
    used = [n for n, p in missing.items() if id(p) in reached]
    if used:
        yield doubtful(
            Cause.UNREGISTERED,
            f"the optimizer does not hold {len(used)} trainable parameters: {some_names(used)}",
            "they get a gradient, and are in no parameter group",
            "Pass them to the optimizer; if they should stay as they are, set requires_grad_(False) on them.",
            where=place_of(c.model, used[0]),
            missing=len(used),
        )


def not_registered(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Weights in plain lists, and leaves of the graph that belong to nobody."""
    known = {id(p) for p in c.model.parameters()} | {id(p) for p in c.held}
    found = [(path, p) for path, p in _hidden_parameters(c.model) if id(p) not in known]
    reached = {id(leaf) for leaf in leaves_of(c.first.loss)}
    used = [path for path, p in found if id(p) in reached]
    if used:
        yield sure(
            Cause.UNREGISTERED,
            f"{some_names(used)}: weights that the model uses, but that are not its parameters",
            "the gradient reaches them, model.parameters() and the optimizer do not hold them",
            "Keep layers in nn.ModuleList or nn.ModuleDict, and weights in nn.Parameter.",
            where=place_of(c.model, used[0].rpartition(".")[0]),
        )
        return
    given = {id(t) for t in c.first.inputs}
    strangers = [leaf for leaf in leaves_of(c.first.loss) if id(leaf) not in known and id(leaf) not in given]
    strangers = [leaf for leaf in strangers if isinstance(leaf, nn.Parameter)]
    if strangers:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in strangers[:4])
        yield sure(
            Cause.UNREGISTERED,
            f"the loss depends on {len(strangers)} parameters that neither model nor optimizer hold",
            f"the gradient reaches nn.Parameters of shape {shapes}",
            "Register them in the model and pass them to the optimizer; create modules once, not in forward.",
        )


def _hidden_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and modules in plain attributes, lists and dicts of modules."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_modules", "_buffers") or name.startswith("_forward"):
                continue
            for inner, p in _parameters_in(value, 0):
                yield f"{path}.{name}{inner}".lstrip("."), p


def _parameters_in(value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        yield from ((f".{n}", p) for n, p in value.named_parameters())
    elif isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield "", value
    elif isinstance(value, dict) and depth < 2:
        for key, part in value.items():
            yield from ((f"[{key!r}]{n}", p) for n, p in _parameters_in(part, depth + 1))
    elif isinstance(value, list | tuple) and depth < 2:
        for i, part in enumerate(value):
            yield from ((f"[{i}]{n}", p) for n, p in _parameters_in(part, depth + 1))


def without_gradient(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Trainable weights in the optimizer that no gradient reaches in any of some batches."""
    if not c.first.loss.requires_grad:
        return
    held = {id(p) for p in c.held}
    params = {n: p for n, p in c.model.named_parameters() if p.requires_grad and id(p) in held}
    called: set[str] = set()
    for index in range(min(MANY_BATCHES, len(c.batches))):
        seen = c.observed(index)
        called |= seen.called
        grads = gradients(seen.loss, list(params.values()))
        params = {n: p for (n, p), g in zip(params.items(), grads, strict=True) if g is None}
        if not params:
            return
    called_names = [n for n in params if n.rpartition(".")[0] in called]
    used = called_names if called_names and _matter(c, [params[n] for n in called_names]) else []
    count = min(MANY_BATCHES, len(c.batches))
    if used:
        make = doubtful if all(_AVERAGED.search(n) for n in used) else sure
        yield make(
            Cause.DETACHED,
            f"no gradient reaches {some_names(used)}, though the loss depends on them",
            f"the gradient of {len(used)} trainable parameters is None in {count} batches; with other values of them, "
            "the loss is another",
            "Look for .detach(), .data, torch.no_grad() or a new torch.tensor(...) after this module.",
            where=place_of(c.model, used[0]),
        )
    unused = [n for n in params if n not in used]
    if unused:
        yield doubtful(
            Cause.DETACHED,
            f"{some_names(unused)} have no influence on the loss",
            f"their gradient is None in {count} batches, and other values of them do not change the loss",
            "Add what they compute to the loss, or remove them.",
            where=place_of(c.model, unused[0]),
        )


_AVERAGED = re.compile(r"(?i)teacher|target|ema|momentum")
"""Copies of a model that follow it without a gradient are named like this."""


@torch.no_grad()
def _matter(c: PreflightContext, params: list[nn.Parameter]) -> bool:
    """Whether other values of these parameters change the loss."""
    before = float(c.repeat().loss)
    values = [p.detach().clone() for p in params]
    try:
        for p in params:
            p.copy_(p * 1.5 + 0.1)
        return float(c.repeat().loss) != before
    finally:
        for p, value in zip(params, values, strict=True):
            p.copy_(value)


def held_twice(c: PreflightContext) -> Iterator[PreflightFinding]:
    counts = Counter(id(p) for p in c.held)
    twice = [c.param_names.get(i, "a tensor") for i, count in counts.items() if count > 1]
    if twice:
        yield doubtful(
            Cause.OPTIMIZER_SETTINGS,
            f"{some_names(twice)} are updated by more than one optimizer or parameter group",
            "the same tensor is in several parameter groups",
            "Put each parameter into one group.",
            where=place_of(c.model, twice[0]),
        )


def frozen_among_trainable(c: PreflightContext) -> Iterator[PreflightFinding]:
    """A frozen output layer below trainable ones; frozen blocks in the middle of trainable ones."""
    layers = [
        (name, m)
        for name, m in c.model.named_modules()
        if name in c.first.called and _is_matrix(getattr(m, "weight", None))
    ]
    frozen = [not _trains(m) for _, m in layers]
    if len(layers) < 2 or not any(frozen) or all(frozen):
        return
    first_trainable = frozen.index(False)
    after = list(zip(layers, frozen, strict=True))[first_trainable:]
    late = [name for (name, _), is_frozen in after if is_frozen and not _has_adapter(c.model, name)]
    if late and sum(frozen) <= len(frozen) // 2:
        yield doubtful(
            Cause.FROZEN,
            f"{some_names(late)} {'is' if len(late) == 1 else 'are'} frozen, though layers before are trained",
            f"requires_grad is False for {sum(frozen)} of {len(frozen)} layers",
            "Set requires_grad_(True), unless this is intended: usually the first layers are frozen, not later ones.",
            where=place_of(c.model, late[0]),
        )


def _is_matrix(value: object) -> bool:
    return isinstance(value, nn.Parameter) and value.dim() >= 2


def _has_adapter(model: nn.Module, name: str) -> bool:
    """Whether the module that holds this layer has trainable weights beside it."""
    parent = name.rpartition(".")[0]
    module = model.get_submodule(parent)
    return bool(parent) and not isinstance(module, nn.Sequential | nn.ModuleList) and _trains(module)


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def wrong_mode(c: PreflightContext) -> Iterator[PreflightFinding]:
    modes = c.first.modes
    acting = {n: m for n, m in c.model.named_modules() if n in modes and _depends_on_mode(m)}
    if not acting:
        return
    resting = [n for n in acting if not modes[n]]
    if not c.first.training:
        if resting:
            yield doubtful(
                Cause.MODE,
                "the model is in evaluation mode",
                f"model.training is False in the forward pass, and {some_names(resting)} act otherwise in training",
                "Call model.train() before training, and again after each evaluation.",
            )
        return
    asleep = [n for n in resting if isinstance(acting[n], _DropoutNd) or _has_trained_affine(acting[n])]
    if asleep:
        yield doubtful(
            Cause.MODE,
            f"{some_names(asleep)} in evaluation mode, the model in training mode",
            f"{len(asleep)} of {len(acting)} modules that depend on the mode have training=False",
            "Call model.train(), unless this part should rest; then freeze its weights too.",
            where=place_of(c.model, asleep[0]),
        )


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def _has_trained_affine(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def dropout_in_evaluation(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Functional dropout that does not know the mode."""
    modes = [(m, m.training) for m in c.model.modules()]
    try:
        c.model.eval()
        seen = c.repeat()
    finally:
        for m, training in modes:
            m.training = training
    if seen.training:
        return  # step_fn sets the mode itself
    active = [call for call in seen.dropouts if call.inside_model and float(call.detail) > 0]
    if active:
        yield doubtful(
            Cause.MODE,
            "dropout stays on in evaluation mode",
            f"after model.eval(), F.dropout with training=True was called {len(active)} times",
            "Use nn.Dropout, or F.dropout(x, p, training=self.training).",
            where=place_of(c.model, active[0].module),
        )


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors that a gradient of this loss reaches."""
    found: list[Tensor] = []
    nodes, visited = [loss.grad_fn] if loss.grad_fn is not None else [], set()
    while nodes:
        node: Any = nodes.pop()
        if node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes.extend(parent for parent, _ in node.next_functions if parent is not None)
    return found


def gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor | None]:
    """Gradients of the loss; None where it does not depend on a tensor."""
    if not tensors or not loss.requires_grad:
        return [None] * len(tensors)
    return list(torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True))


FACTS = (
    loss_without_gradient,
    nonfinite_values,
    not_in_optimizer,
    not_registered,
    without_gradient,
    held_twice,
    frozen_among_trainable,
    wrong_mode,
    dropout_in_evaluation,
)

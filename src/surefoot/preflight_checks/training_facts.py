"""Facts from some real updates: lost updates, gradients of zero, dead and identical units, collapse."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, place_of, some_names, sure
from surefoot.preflight_checks.loop_probe import PreflightContext
from surefoot.preflight_checks.rate_facts import FEW_STEPS, LOST, clipped_away, dtype_of, falls, is_below, lost_share
from surefoot.preflight_checks.short_training import ParamHistory, median

MOSTLY_LOST = 0.9
VANISHING = 1e-4
EXPLODING = 1e3
COLLAPSED = 0.5
"""Factor of the spread between samples."""


def weights_overwritten(c: PreflightContext) -> Iterator[PreflightFinding]:
    changed = c.training.overwritten
    if not changed:
        return
    names, undone = list(changed), any(changed.values())
    make = sure if undone else doubtful
    yield make(
        Cause.WEIGHTS_OVERWRITTEN,
        f"the forward pass changes {some_names(names)}" + (", and undoes the update before" if undone else ""),
        f"{len(names)} parameters have other values after step_fn than before it",
        "Only the optimizer should change weights: look for copies, load_state_dict and initialisation in forward.",
        where=place_of(c.model, names[0]),
    )


def lost_updates(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Updates that the precision of the weights rounds away."""
    if c.trainer.lr == 0:
        return
    lost = lost_share(c)
    bad = [name for name, share in lost.items() if share > LOST]
    if bad:
        share = median([lost[name] for name in bad])
        make = sure if share > MOSTLY_LOST else doubtful
        kind = str(dtype_of(c, bad[0])).removeprefix("torch.")
        yield make(
            Cause.PRECISION_UNDERFLOW,
            f"updates are rounded away: the weights are {kind}",
            f"{share:.0%} of the weights with a gradient keep their value in an update".replace("%", " %"),
            "Keep weights and optimizer in float32, and compute in bfloat16 with torch.autocast.",
            where=place_of(c.model, bad[0]),
            share=share,
        )


def zero_gradients(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Gradients of exactly zero in every step: adapters have them in the first only."""
    run = c.training
    if len(run.losses) < FEW_STEPS or run.diverged or c.trainer.lr == 0:
        return
    zero = [h.name for h in run.params if h.always_zero]
    reached = [h for h in run.params if not h.never_reached]
    if zero and len(zero) >= max(1, 0.2 * len(reached)):
        yield sure(
            Cause.DEAD_UNITS,
            f"the gradient of {some_names(zero)} is exactly zero",
            f"in {len(run.losses)} updates with different batches, for {len(zero)} of {len(reached)} tensors",
            "Look for dead or saturated units after them, for products with zero, and for operations such as round, "
            "argmax and clamp.",
            where=place_of(c.model, zero[0]),
        )


def gradient_over_depth(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Gradients of the first layers against those of the last, by the size of the weights."""
    run = c.training
    order = {name: i for i, name in enumerate(n for n, _ in c.model.named_parameters())}
    layers = sorted((h for h in run.params if h.ndim >= 2 and h.name in order), key=lambda h: order[h.name])
    layers = [h for h in layers if not _is_embedding(c.model, h.name)]
    sizes = [(h.name, median([g for g in h.grad_rms if g > 0])) for h in layers]
    sizes = [(name, s) for name, s in sizes if not math.isnan(s)]
    if len(sizes) < 4 or run.diverged:
        return
    part = max(1, len(sizes) // 4)
    early, late = median([s for _, s in sizes[:part]]), median([s for _, s in sizes[-part:]])
    if early < VANISHING * late:
        yield doubtful(
            Cause.VANISHING_GRADIENT,
            "the gradient vanishes on the way to the first layers",
            f"its size there is {early:.2g}, in the last layers {late:.2g}",
            "Use ReLU or GELU, normalisation, residual connections, and a matching initialisation.",
            where=place_of(c.model, sizes[0][0]),
            first=early,
            last=late,
        )
    elif early > EXPLODING * late:
        yield doubtful(
            Cause.EXPLODING_GRADIENT,
            "the gradient grows on the way to the first layers",
            f"its size there is {early:.2g}, in the last layers {late:.2g}",
            "Lower the scale of the initial weights; use normalisation and residual connections.",
            where=place_of(c.model, sizes[0][0]),
            first=early,
            last=late,
        )


def _is_embedding(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
    except AttributeError:
        return True


def identical_units(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Units that are equal after some updates: they get the same gradient and stay equal."""
    run = c.training
    if len(run.losses) < FEW_STEPS or run.diverged or c.trainer.lr == 0:
        return
    same = [name for name in c.trainer.identical if name not in {h.name for h in run.params if h.always_zero}]
    if same:
        yield sure(
            Cause.SYMMETRY,
            f"the units of {some_names(same)} are identical",
            f"after {len(run.losses)} updates all rows of the weight are still equal",
            "Initialise at random: nn.init.kaiming_uniform_ or xavier_uniform_.",
            where=place_of(c.model, same[0]),
        )


def collapse(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Outputs that become the same for all samples while the loss falls."""
    before, after = c.training.spread
    if math.isnan(before) or math.isnan(after) or before < 1e-6:
        return
    labelled = any(call.target.dim() and not call.target.requires_grad for call in c.first.loss_calls)
    if after < COLLAPSED * before and falls(c.training) and not labelled:
        yield doubtful(
            Cause.COLLAPSE,
            "the outputs become the same for all samples",
            f"their spread between samples falls from {before:.2g} to {after:.2g} of their size "
            f"in {len(c.training.losses)} updates, and the loss falls with it",
            "Check the negatives, the stop-gradient and the temperature: constant outputs must not be best.",
            before=before,
            after=after,
        )


def optimizer_settings(c: PreflightContext) -> Iterator[PreflightFinding]:
    for group in (group for o in c.optimizers for group in o.param_groups):
        names = {c.param_names.get(id(p), "") for p in group["params"]}
        runs = [h for h in c.training.params if h.name in names]
        rms = median([g for h in runs for g in h.grad_rms if g > 0])
        eps, betas = float(group.get("eps", 0.0)), group.get("betas")
        if betas is not None and eps > 10 * rms and eps > 1e-7:
            yield doubtful(
                Cause.OPTIMIZER_SETTINGS,
                f"eps {eps:.2g} is larger than the gradients",
                f"the median size of a gradient is {rms:.2g}",
                "Lower eps; 1e-8 is usual.",
                eps=eps,
                gradient=rms,
            )
        momentum = float(betas[0]) if betas is not None else float(group.get("momentum", 0.0))
        if momentum > 0.99:
            yield doubtful(Cause.MOMENTUM, f"momentum is {momentum:g}", "0.9 is usual", "Lower it.", momentum=momentum)
        yield from _decay(c, group, runs)


def _decay(c: PreflightContext, group: dict[str, object], runs: list[ParamHistory]) -> Iterator[PreflightFinding]:
    decay = float(group.get("weight_decay", 0.0) or 0.0)  # pyright: ignore[reportArgumentType]
    if not decay:
        return
    decoupled = bool(group.get("decoupled_weight_decay")) or any("AdamW" in type(o).__name__ for o in c.optimizers)
    ratios = []
    for h in runs:
        if h.ndim < 2 or not h.weight_norms or not median(h.grad_norms) > 0:
            continue
        pulled = decay * median(h.weight_norms)
        if decoupled:
            moved = median(h.update_norms) / c.trainer.lr if c.trainer.lr else math.nan
        else:
            moved = median(h.grad_norms)
        ratios.append(pulled / moved if moved > 0 else math.nan)
    ratio = median(ratios)
    strong = ratio > (0.5 if decoupled else 3.0)
    if strong or decay >= 1.0:
        yield doubtful(
            Cause.REGULARISATION,
            f"weight decay {decay:g} outweighs the gradient",
            f"it pulls at the weights {ratio:.2g} times as strongly as "
            + ("an update" if decoupled else "the gradient"),
            "Lower it: 0.01 to 0.1 is usual for AdamW, 1e-4 for SGD.",
            decay=decay,
            ratio=ratio,
        )


def strong_clipping(c: PreflightContext) -> Iterator[PreflightFinding]:
    clip, norm = c.settings.clip, median(c.training.norms)
    if clip is not None and clipped_away(c):
        yield doubtful(
            Cause.CLIPPING,
            f"gradients are clipped at {clip:g}, far below their norm",
            f"the median norm is {norm:.3g}, so that {clip / norm:.1%} of them is left".replace("%", " %"),
            f"Clip at 2-3x the normal norm: {2.5 * norm:.2g}.",
            clip=clip,
            norm=norm,
        )


def one_batch(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Whether one batch can be learned by heart, at the rate asked for or at another."""
    run = c.training
    if run.diverged or falls(run) or len(run.losses) < FEW_STEPS or c.trainer.lr == 0:
        return
    best = c.trainer.overfit(c.batches[0])
    if best is not None and not is_below(best.probe_after, best.probe_before) and not best.diverged:
        yield doubtful(
            Cause.PLATEAU,
            "one batch cannot be learned by heart",
            f"{len(best.losses)} updates on it take its loss from {best.probe_before:.4g} to {best.probe_after:.4g}",
            "Look at the loss function, the targets and the path of the gradient first.",
        )


FACTS = (
    weights_overwritten,
    lost_updates,
    zero_gradients,
    gradient_over_depth,
    identical_units,
    collapse,
    optimizer_settings,
    strong_clipping,
    one_batch,
)

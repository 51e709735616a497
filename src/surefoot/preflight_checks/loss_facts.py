"""Facts about the loss function: what it is given, its sign, its dimensions and its first value."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, place_of, sure
from surefoot.preflight_checks.loop_probe import PreflightContext
from surefoot.preflight_checks.observe import LossCall
from surefoot.preflight_checks.parameter_facts import gradients

ROW_SUM = 1e-3
"""How far the probabilities of a row may be from a sum of 1."""
FAR_ABOVE_IGNORANCE = 3.0
_SHAPES = (
    "ReshapeAliasBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "SliceBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "CloneBackward0",
    "SelectBackward0",
    "ToCopyBackward0",
    "TBackward0",
    "UnsafeSplitBackward0",
)
"""Operations that leave values as they are."""


def given_probabilities(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Softmax or sigmoid before a loss that applies it itself; none before one that does not."""
    for call in c.first.loss_calls:
        if not call.output.requires_grad or not call.input.numel():
            continue
        x = call.input.detach().float()
        if call.name == "cross_entropy" and x.dim() > 1 and x.shape[1] > 1:
            if bool((x >= 0).all()) and bool(((x.sum(1) - 1).abs() < ROW_SUM).all()):
                yield _twice("softmax", "cross_entropy", "every row is positive and has a sum of 1", c, call)
        elif call.name == "binary_cross_entropy_with_logits":
            if _made_by(call.input, "SigmoidBackward0"):
                yield _twice("sigmoid", call.name, "they come from a sigmoid", c, call)
        elif call.name == "nll_loss" and x.dim() > 1:
            sums = torch.logsumexp(x, 1)
            if not bool((sums.abs() < 0.01 + ROW_SUM * x.shape[1]).all()):
                what = "probabilities" if bool((x >= 0).all()) and bool((x <= 1).all()) else "raw outputs"
                yield sure(
                    Cause.LOSS_FUNCTION,
                    f"nll_loss is given {what}, not log-probabilities",
                    f"the probabilities of a row have sums from {float(sums.exp().min()):.3g} to "
                    f"{float(sums.exp().max()):.3g}",
                    "Use log_softmax over the classes before nll_loss, or cross_entropy without it.",
                    where=_producer(c, call),
                )
        elif call.name == "kl_div" and bool((x > 1e-6).any()):
            yield sure(
                Cause.LOSS_FUNCTION,
                "kl_div is given values above 0 as its input, which cannot be log-probabilities",
                f"the largest is {float(x.max()):.3g}",
                "Pass log_softmax(outputs) as the input of kl_div.",
                where=_producer(c, call),
            )


def _twice(name: str, loss: str, how: str, c: PreflightContext, call: LossCall) -> PreflightFinding:
    return sure(
        Cause.LOSS_FUNCTION,
        f"{name} is applied twice: {loss} is given the outputs of a {name}",
        f"{how}; {loss} applies {name} itself",
        f"Give {loss} the outputs before the {name}.",
        where=_producer(c, call),
    )


def _producer(c: PreflightContext, call: LossCall) -> str:
    """The module of the last softmax or sigmoid call with this shape."""
    for op in reversed(c.first.softmax_calls):
        if op.inside_model and math.prod(op.shape) == call.input.numel():
            return place_of(c.model, op.module)
    return ""


def _made_by(tensor: Tensor, name: str) -> bool:
    node = tensor.grad_fn
    while node is not None and node.name() in _SHAPES:
        node = node.next_functions[0][0]
    return node is not None and node.name() == name


def over_the_batch(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Softmax over dimension 0, which mixes the samples."""
    n = c.batch_size
    for op in c.first.softmax_calls:
        if op.dim == 0 and len(op.shape) > 1 and n > 1 and op.shape[0] == n and op.shape[1] != n:
            yield sure(
                Cause.LOSS_FUNCTION,
                f"{op.name} is computed over the batch, not over the classes",
                f"its input has the shape {op.shape}, and dim is 0",
                "Give the dimension of the classes: softmax(x, dim=-1).",
                where=place_of(c.model, op.module) if op.inside_model else "the loss function",
            )


def wrong_shapes(c: PreflightContext) -> Iterator[PreflightFinding]:
    for call in c.first.loss_calls:
        if call.name not in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
            if call.name == "cross_entropy":
                yield from _reshaped(c, call)
            continue
        a, b = tuple(call.input.shape), tuple(call.target.shape)
        if a != b and math.prod(torch.broadcast_shapes(a, b)) > max(math.prod(a), math.prod(b)):
            yield sure(
                Cause.LOSS_FUNCTION,
                f"{call.name} compares every output with every target",
                f"outputs of shape {a} and targets of shape {b} broadcast to {tuple(torch.broadcast_shapes(a, b))}",
                "Give both the same shape: outputs.squeeze(-1), or targets[:, None].",
            )
    for op in c.first.broadcasts:
        if op.output is not None and op.output.requires_grad:
            n = op.shape[0]
            yield sure(
                Cause.LOSS_FUNCTION,
                "the loss compares every output with every target",
                f"the difference of shapes ({n}, 1) and ({n},) has the shape ({n}, {n})",
                "Give both the same shape: outputs.squeeze(-1), or targets[:, None].",
            )


def _reshaped(c: PreflightContext, call: LossCall) -> Iterator[PreflightFinding]:
    """view(n, classes, length) where transpose(1, 2) is meant."""
    x = call.input
    for out in c.first.outputs:
        if x.dim() < 3 or out.dim() != x.dim() or out.shape == x.shape or x.data_ptr() != out.data_ptr():
            continue
        if x.is_contiguous() and out.is_contiguous() and sorted(x.shape) == sorted(out.shape):
            yield sure(
                Cause.LOSS_FUNCTION,
                "outputs are reshaped where dimensions should be exchanged, so that classes and positions are mixed",
                f"outputs of shape {tuple(out.shape)} reach cross_entropy as a view of shape {tuple(x.shape)}",
                "Use outputs.transpose(1, 2), not view or reshape.",
            )


def wrong_sign(c: PreflightContext) -> Iterator[PreflightFinding]:
    """The loss falls where a loss function rises."""
    calls = [call for call in c.first.loss_calls if call.output.requires_grad]
    grads = gradients(c.first.loss, [call.output for call in calls])
    signs = [float(g.sum()) for g in grads if g is not None]
    maximized = any(group.get("maximize") for o in c.optimizers for group in o.param_groups)
    if signs and all(s < 0 for s in signs) and not maximized:
        # Losses of single samples may have weights, such as the advantages of a policy gradient.
        simple = len(signs) == 1 and calls[0].output.dim() == 0 and calls[0].name not in _ADVERSARIAL
        make = sure if simple else doubtful
        yield make(
            Cause.LOSS_FUNCTION,
            f"{calls[0].name} is made larger by training: the loss has the wrong sign",
            f"the derivative of the loss by {calls[0].name} is {signs[0]:.3g}",
            "Remove the minus.",
            derivative=signs[0],
        )
    if signs and all(s > 0 for s in signs) and maximized:
        yield sure(
            Cause.OPTIMIZER_SETTINGS,
            f"{calls[0].name} is made larger by training: the optimizer maximizes",
            f"maximize is True, and the derivative of the loss by {calls[0].name} is {signs[0]:.3g}",
            "Create the optimizer without maximize=True.",
        )


_ADVERSARIAL = ("binary_cross_entropy_with_logits", "binary_cross_entropy")


def unused_loss(c: PreflightContext) -> Iterator[PreflightFinding]:
    """A loss that is computed and then not part of what is returned."""
    calls = [call for call in c.first.loss_calls if call.output.requires_grad]
    grads = gradients(c.first.loss, [call.output for call in calls])
    unused = [call for call, g in zip(calls, grads, strict=True) if g is None or not bool((g != 0).any())]
    if unused and c.first.loss.requires_grad:
        yield doubtful(
            Cause.LOSS_FUNCTION,
            f"{unused[0].name} is computed, but the loss does not depend on it",
            f"{len(unused)} of {len(calls)} loss terms have no gradient",
            "Add it to the loss, or compute it under torch.no_grad().",
        )


def above_ignorance(c: PreflightContext) -> Iterator[PreflightFinding]:
    """The first cross-entropy against ln(classes): more than that is sure of wrong answers."""
    call = c.first.main_loss
    if call is None or call.name != "cross_entropy" or call.input.dim() < 2 or call.target.is_floating_point():
        return
    classes = call.input.shape[1]
    ignore = -100 if call.ignore_index is None else call.ignore_index
    with torch.no_grad():
        value = float(F.cross_entropy(call.input.float(), call.target, ignore_index=ignore))
    ignorance = math.log(classes)
    if classes > 1 and value > FAR_ABOVE_IGNORANCE * ignorance + 1:
        scale = float(call.input.detach().float().std())
        yield doubtful(
            Cause.INITIALISATION,
            "the first loss is far above that of guessing: outputs are too large at the start",
            f"{value:.3g}, where ln({classes}) = {ignorance:.3g}; the outputs have a standard deviation of {scale:.3g}",
            "Initialise the last layer with smaller weights, and look at the scale of inputs and residual branches.",
            first=value,
            ignorance=ignorance,
        )


def not_finite(c: PreflightContext) -> Iterator[PreflightFinding]:
    for index in range(min(3, len(c.batches))):
        seen = c.quick(index)
        if bool(torch.isfinite(seen.loss)):
            continue
        bad_inputs = any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in seen.inputs)
        if bad_inputs:
            yield sure(
                Cause.BAD_BATCH,
                "the inputs of the model are not finite",
                f"batch {index} has NaN or infinite values, and so has the loss",
                "Clean or drop these samples.",
            )
        elif seen.first_nonfinite is not None:
            yield sure(
                Cause.INITIALISATION,
                "the forward pass is not finite at the start",
                f"the first module with values that are not finite is {seen.first_nonfinite or 'the model itself'}",
                "Look at the initialisation and the precision of this module.",
                where=place_of(c.model, seen.first_nonfinite),
            )
        elif not _all_ignored(seen.single_loss):
            yield sure(
                Cause.LOG_OF_ZERO,
                "the loss is not finite, though the outputs are",
                f"batch {index} gives {float(seen.loss.detach())}",
                "Look for a logarithm, a root or a division of 0 in the loss.",
            )
        return


def _all_ignored(call: LossCall | None) -> bool:
    return call is not None and call.ignore_index is not None and bool((call.target == call.ignore_index).all())


FACTS = (
    not_finite,
    given_probabilities,
    over_the_batch,
    wrong_shapes,
    wrong_sign,
    unused_loss,
    above_ignorance,
)

"""Facts about activations in the first forward pass: dead and saturated units, dropout."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, place_of, sure
from surefoot.preflight_checks.loop_probe import PreflightContext

DEAD, MANY_DEAD = 0.9, 0.7
"""Share of units that are zero for all samples: for sure too many, and many."""
SATURATED = 0.9


def dead_units(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Units that are zero, or at their limit, for all samples, before the first update."""
    zeros: dict[str, list[float]] = {}
    limits: dict[str, list[float]] = {}
    for op in c.first.activations:
        out = op.output
        if out is None or out.dim() < 2 or out.shape[0] < 4:
            continue
        if op.name == "relu":
            dim = 1 if out.dim() == 4 else out.dim() - 1
            alive = (out != 0).movedim(dim, -1).reshape(-1, out.shape[dim]).any(0)
            zeros.setdefault(op.module, []).append(1 - float(alive.float().mean()))
        elif op.name in ("sigmoid", "tanh"):
            ends = (out.abs() > 0.99) | ((out < 0.01) & (op.name == "sigmoid"))
            limits.setdefault(op.module, []).append(float(ends.float().mean()))
    for name, shares in zeros.items():
        share = max(shares)
        if share > MANY_DEAD:
            make = sure if share > DEAD else doubtful
            yield make(
                Cause.DEAD_UNITS,
                f"{share:.0%} of the units are dead".replace("%", " %"),
                "their output is zero for every sample of the first batch",
                "Look at the biases, the initialisation and the scale of the inputs; lower the learning rate.",
                where=place_of(c.model, name),
                share=share,
            )
            return
    for name, shares in limits.items():
        if max(shares) > SATURATED:
            yield doubtful(
                Cause.INITIALISATION,
                f"{max(shares):.0%} of the values are saturated".replace("%", " %"),
                "the outputs of a sigmoid or tanh are within 1 % of their limits",
                "Scale down the inputs and the initial weights.",
                where=place_of(c.model, name),
                share=max(shares),
            )
            return


def strong_dropout(c: PreflightContext) -> Iterator[PreflightFinding]:
    last = c.first.outputs[-1] if c.first.outputs else None
    for op in c.first.dropouts:
        p = float(op.detail)
        at_the_end = op.inside_model and op.output is last and p > 0
        if p >= 0.75 or at_the_end:
            yield doubtful(
                Cause.REGULARISATION,
                f"dropout of {p:g}" + (" on the outputs of the model" if at_the_end else ""),
                "it is called in the forward pass in training mode",
                "Use 0.1 to 0.5, and none after the last layer.",
                where=place_of(c.model, op.module),
                p=p,
            )
            return


FACTS = (dead_units, strong_dropout)

"""The architecture family of a model, from the names and classes of its tensors, and the phase of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from surefoot.judge.param_roles import Role, part_of, role_of

START_STEPS, EARLY_STEPS = 100, 1000
"""Steps below which a run is at its start, and early."""
WRAPPERS = ("DistributedDataParallel", "OptimizedModule", "DataParallel")
"""Classes that say nothing about the model inside."""
_PLAIN = frozenset({Role.OTHER, Role.NORM, Role.HEAD})


def family_of(names: Sequence[str], kinds: Sequence[str]) -> str:
    """vision-language, vision transformer, transformer, recurrent, convolutional, mlp or other.

    >>> family_of(["0.weight", "2.weight"], ["Linear", "Linear"])
    'mlp'
    """
    roles = {role_of(name, kind) for name, kind in zip_longest(names, kinds, fillvalue="")}
    parts = {part_of(name) for name in names}
    images = any(kind.startswith(("Conv2d", "Conv3d", "ConvTranspose2d")) for kind in kinds)
    if Role.VISION in parts and Role.LANGUAGE in parts:
        return "vision-language"
    if Role.ATTENTION in roles or any("Attention" in kind for kind in kinds):
        return "vision transformer" if images or Role.VISION in parts else "transformer"
    if Role.RECURRENT in roles:
        return "recurrent"
    if images or Role.CONVOLUTION in roles:
        return "convolutional"
    linear = bool(kinds) and all(kind == "Linear" or "Norm" in kind for kind in kinds)
    return "mlp" if linear and roles <= _PLAIN | {Role.PROJECTION} else "other"


def phase_of(step: int) -> str:
    """The phase of a run at this step.

    >>> [phase_of(step) for step in (10, 500, 5000)]
    ['start', 'early', 'late']
    """
    return "start" if step < START_STEPS else "early" if step < EARLY_STEPS else "late"

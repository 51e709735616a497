"""A state that is kept in memory, as it goes to the disk: with what does not go back in it as it is now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from torch import Tensor

from surefoot.checkpoint.copies import Copy, local_storage
from surefoot.checkpoint.train_state import Frozen, TrainState
from surefoot.checkpoint.tree import Slot, freeze


def lent(copy: Copy, whole: TrainState, now: Mapping[str, Any], renamed: Mapping[str, str]) -> Copy:
    """What a checkpoint of `whole` holds, on the memory of `copy`, which must stay as it is until that is written.

    A run that goes back goes on with its next batch, not with one it has seen. So the place in the data, and options
    that no scheduler of ours sets, are those of now: to resume from here is to go back. `now` has states by name, and
    `renamed` says what a checkpoint calls those in the copy.
    """
    made = Copy(copy.home)
    made.tensors, made.kinds, made.spreads = list(copy.tensors), list(copy.kinds), dict(copy.spreads)
    kept: Frozen = copy.frozen

    def slot(tensor: Tensor) -> Slot:
        part = local_storage(tensor).clone()
        made.tensors.append(part)
        made.kinds.append((part.shape, part.stride(), part.dtype, part.device, False))
        return Slot(len(made.tensors) - 1)

    groups = [
        was if own is None else [_merged(freeze(_options(g), slot), was, n, own) for n, g in enumerate(o.param_groups)]
        for o, was, own in zip(whole.optimizers, kept.groups, kept.own, strict=True)
    ]
    states = {renamed.get(name, name): state for name, state in kept.extra.items()}
    states |= {name: freeze(state, slot) for name, state in now.items()}
    made.frozen = replace(kept, groups=groups, extra={name: states[name] for name in whole.extra if name in states})
    return made


def _merged(now: dict[str, Any], was: Sequence[dict[str, Any]], number: int, own: AbstractSet[str]) -> dict[str, Any]:
    """Options as they are now, but for those that the optimizer's own step changes."""
    then = was[number] if number < len(was) else {}
    return now | {name: value for name, value in then.items() if name in own}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}

"""The loss scale goes back without a host read, also while an update of it is still to come.

A GradScaler steps the optimizer and only later updates its scale by what that step found. A state taken or put back
between the two has such an update ahead of it, and what the bad step found must not reach the scale that was restored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from surefoot.checkpoint.tree import Slot, freeze, thaw

_OPTIONS = ("_growth_factor", "_backoff_factor", "_growth_interval")
_TENSORS = ("_scale", "_growth_tracker")


def freeze_scaler(scaler: Any, slot: Callable[[Tensor], Slot]) -> dict[str, Any]:
    """Nothing where there is no scaler, or none at work."""
    if scaler is None or not scaler.is_enabled():
        return {}
    kept = {name: getattr(scaler, name) for name in (*_OPTIONS, *_TENSORS)} | {"found": _found(scaler)}
    return freeze(kept, slot)


def thaw_scaler(scaler: Any, kept: dict[str, Any], tensor: Callable[[Slot, Any], Tensor]) -> Callable[[], None]:
    """Hands back what is left to do once the tensors are written."""
    if not kept:
        return _nothing
    for name in _OPTIONS:
        setattr(scaler, name, kept[name])
    first = kept["_scale"] is None  # not used yet when the state was taken
    if not first:
        for name in _TENSORS:
            setattr(scaler, name, thaw(kept[name], getattr(scaler, name), tensor))
    now, then = _found(scaler), kept["found"]
    for key, found in now.items():
        if key in then:
            tensor(then[key], found)

    def rest() -> None:
        if first and scaler._scale is not None:
            scaler._scale.fill_(scaler._init_scale)
            scaler._growth_tracker.fill_(scaler._init_growth_tracker)
        for key, found in now.items():
            if key not in then:
                found.zero_()
        if now and not then:  # the update ahead was none of that state's: it will count one good step too many
            scaler._growth_tracker.sub_(1)

    return rest


def _found(scaler: Any) -> dict[tuple[int, Any], Tensor]:
    """What the steps since the last update have found, by optimizer and device."""
    states = scaler._per_optimizer_states
    return {(k, device): found for k, s in states.items() for device, found in s["found_inf_per_device"].items()}


def _nothing() -> None:
    pass

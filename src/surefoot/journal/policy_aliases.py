"""Fields of `Policy` and `Thresholds` under their earlier names, and those that can no longer be set."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from surefoot.journal.aliases import renamed

Fields = TypeVar("Fields")

POLICY = {
    "outlandish": "max_norm_ratio",
    "fade": "norm_max_decay",
    "limit": "max_consecutive_vetoes",
    "hold": "max_vetoes_waiting",
    "overflow_limit": "max_consecutive_overflows",
    "failures": "max_failed_actions",
    "actions": "max_actions",
    "probation": "healthy_steps_to_confirm",
    "loosen_after": "relax_after",
    "ceiling": "norm_ceiling",
    "strict": "tight_ceiling",
    "proof": "healthy_steps_to_trust",
    "sight": "thresholds",
    "machine_every": "system_every",
    "ring_every": "snapshot_every",
    "ring_size": "max_snapshots",
    "ring_reach": "snapshot_reach",
    "careful": "cautious_after_crash",
}
"""Fields of `Policy`, in `run.json` and in recipes."""
THRESHOLDS = {
    "window": "baseline_rows",
    "least": "min_baseline_rows",
    "jump": "norm_jump_ratio",
    "leap": "large_norm_jump_ratio",
    "huge": "huge_norm_jump_ratio",
    "far": "loss_jump_sigmas",
    "above": "loss_jump_ratio",
    "lasting": "lasting_steps",
    "usual": "max_spikes",
    "raised": "level_sigmas",
    "creeping": "mean_level_sigmas",
    "lost": "lost_level_ratio",
    "growing": "growth_ratio",
    "faster": "lr_jump_ratio",
    "beside": "input_shift_sigmas",
    "wider": "input_std_ratio",
    "moved": "input_drift_sigmas",
    "unclipped": "clip_lost_ratio",
    "worse": "eval_rise_fraction",
    "astray": "eval_harm_fraction",
    "slow_rise": "slow_rise_fraction",
    "slower": "lr_drop_ratio",
    "explodes": "exploding_norm",
    "vanishes": "vanishing_norm",
    "fades": "vanishing_ratio",
    "dead": "dead_zeros_rise",
    "hushed": "silent_zeros_rise",
    "rounded": "unchanged_rise",
    "still": "frozen_update_ratio",
    "scale_falls": "loss_scale_drop_ratio",
    "streak": "overflow_streak",
    "repeats": "repeated_loss_fraction",
    "rhythm": "periodic_spike_count",
    "clipped_often": "clipped_often_fraction",
    "slowdown": "slow_step_ratio",
    "waits": "data_wait_fraction",
    "idle": "idle_utilisation",
    "leak": "memory_growth_ratio",
}
"""Fields of `Thresholds`."""
DERIVED_THRESHOLDS: Mapping[str, tuple[float, str]] = {
    "min_baseline_rows": (16, "baseline_rows"),
    "large_norm_jump_ratio": (10.0, "norm_jump_ratio"),
    "huge_norm_jump_ratio": (60.0, "norm_jump_ratio"),
    "loss_jump_sigmas": (8.0, "false_alarms"),
    "loss_jump_ratio": (1.5, ""),
    "lasting_steps": (5, ""),
    "max_spikes": (3, ""),
    "level_sigmas": (4.0, "false_alarms"),
    "mean_level_sigmas": (1.5, "false_alarms"),
    "lost_level_ratio": (2.0, ""),
    "growth_ratio": (3.0, ""),
    "input_std_ratio": (1.5, "input_shift_sigmas"),
    "input_drift_sigmas": (0.2, ""),
    "clip_lost_ratio": (2.0, ""),
    "eval_harm_fraction": (0.2, "eval_rise_fraction"),
    "slow_rise_fraction": (0.1, "eval_rise_fraction"),
    "lr_drop_ratio": (20.0, "lr_jump_ratio"),
    "vanishing_norm": (1e-8, ""),
    "vanishing_ratio": (30.0, ""),
    "dead_zeros_rise": (0.4, ""),
    "silent_zeros_rise": (0.1, ""),
    "unchanged_rise": (0.4, ""),
    "frozen_update_ratio": (16.0, ""),
    "loss_scale_drop_ratio": (64.0, ""),
    "overflow_streak": (8, ""),
    "repeated_loss_fraction": (0.2, ""),
    "periodic_spike_count": (3, ""),
    "clipped_often_fraction": (0.9, ""),
    "slow_step_ratio": (3.0, ""),
    "data_wait_fraction": (0.25, ""),
    "memory_growth_ratio": (1.05, ""),
}
"""Fields that `Thresholds` had: their value then, and the field they follow from now, if not from a constant."""
DERIVED_POLICY: Mapping[str, tuple[float, str]] = {
    "norm_max_decay": (0.999, ""),
    "max_vetoes_waiting": (200, "max_consecutive_vetoes"),
    "max_consecutive_overflows": (60, "max_consecutive_vetoes"),
    "norm_ceiling": (3.0, ""),
    "tight_ceiling": (1.5, ""),
}
"""Fields that `Policy` had, in the same way."""


def upgraded_policy(held: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a policy, those of its thresholds included, under the names of today."""
    policy = _without(renamed(held, POLICY), DERIVED_POLICY)
    if isinstance(policy.get("thresholds"), dict):
        policy["thresholds"] = _without(renamed(policy["thresholds"], THRESHOLDS), DERIVED_THRESHOLDS)
    return policy


def derived_figures(held: Mapping[str, Any]) -> dict[str, tuple[Any, float, str]]:
    """The figures of a policy that can no longer be set: the value held, the value then, and why it is not used."""
    policy = renamed(held, POLICY)
    thresholds = policy.get("thresholds")
    figures = _derived(policy, DERIVED_POLICY, "")
    if isinstance(thresholds, dict):
        figures |= _derived(renamed(thresholds, THRESHOLDS), DERIVED_THRESHOLDS, "thresholds.")
    return figures


def _without(values: dict[str, Any], derived: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in derived}


def _derived(
    values: Mapping[str, Any], derived: Mapping[str, tuple[float, str]], prefix: str
) -> dict[str, tuple[Any, float, str]]:
    return {
        prefix + name: (value, derived[name][0], why_derived(derived[name][1]))
        for name, value in values.items()
        if name in derived
    }


def why_derived(source: str) -> str:
    """Why a figure can no longer be set."""
    return f"can no longer be set, it follows from {source}" if source else "can no longer be set"


def ignore_derived(derived: Mapping[str, tuple[float, str]]) -> Callable[[type[Fields]], type[Fields]]:
    """A dataclass whose former fields are still accepted by name, with a warning that they are not used."""

    def decorate(cls: type[Fields]) -> type[Fields]:
        init = cls.__init__

        @functools.wraps(init)
        def accept(self: Fields, **values: Any) -> None:
            for name in derived.keys() & values.keys():
                message = f"{cls.__name__}({name}={values.pop(name)}) is not used: it {why_derived(derived[name][1])}."
                warnings.warn(message, FutureWarning, stacklevel=2)
            init(self, **values)

        cls.__init__ = accept
        return cls

    return decorate

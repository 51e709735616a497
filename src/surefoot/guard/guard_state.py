"""What a guard has learnt about a run: judge, history, gates. It travels in checkpoints, surefoot's own or another
trainer's, as numbers, strings, lists and dicts only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.recovery import Recovery
from surefoot.records import StepOverrides

OTHER_VERSION = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What loading the state of another version may raise."""


def guard_state(reader: MetricsReader, recovery: Recovery) -> dict[str, Any]:
    """All of it, for another trainer's checkpoint; surefoot's own hold step and gates elsewhere."""
    gates = {k: {name: t.tolist() for name, t in memory.items()} for k, memory in recovery.state_dict().items()}
    return {"step": reader.step, "attempt": reader.last_attempt, **reader.state_dict(), "gates": gates}


def load_guard_state(state: Mapping[str, Any], reader: MetricsReader, recovery: Recovery) -> list[str]:
    """Load what `guard_state` returned; returns why some of it could not be used."""
    notes: list[str] = []
    try:
        reader.step = int(state["step"])
        # Attempts only grow, also in another run directory: what the judge knows is dated by them.
        reader.last_attempt = max(reader.last_attempt, int(state["attempt"]))
        recovery.pipeline.attempt = max(recovery.pipeline.attempt, reader.last_attempt + 1)
        memories = recovery.state_dict()
        loaded = {
            k: {name: torch.tensor(state["gates"][k][name], dtype=t.dtype) for name, t in memory.items()}
            for k, memory in memories.items()
        }
        recovery.load_state_dict(loaded)
    except OTHER_VERSION as error:
        notes.append(f"the gates start over, since their saved state is of another version: {error!r}")
    return notes + load_judge_state(state, reader, recovery)


def load_judge_state(state: Mapping[str, Any], reader: MetricsReader, recovery: Recovery) -> list[str]:
    """Load judge, history, order of the optimizers and overrides; returns why that was not possible."""
    try:
        reader.judge.load_state_dict(state["judge"])
        reader.history.load_state_dict(state["history"])
        if "rewound" in state:  # saved during an incident, from a snapshot taken before it
            reader.judge.rewound(*state["rewound"])
        if "order" in state:
            reader.order.load_state_dict(state["order"])
        applier = recovery.overrides
        for optimizers, overrides in reader.judge.overrides_by_optimizer:
            if overrides != StepOverrides() and applier.unsupported_reason(overrides) is None:
                applier.set(overrides, optimizers)
    except OTHER_VERSION as error:
        return [f"the judge starts over, since its saved state is of another version: {error!r}"]
    return []

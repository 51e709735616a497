"""TRL's trainers that learn from rewards (GRPO, RLOO): the reward is judged, and rollouts end with a rewind."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_BY_REWARD = frozenset({"GRPOTrainer", "RLOOTrainer"})


class Rewards:
    """Their loss is about zero by construction, so the mean reward has to show whether the run learns."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._latest: float | None = None
        """The mean reward of the rollouts in use; the trainer empties its lists when it logs."""

    @classmethod
    def of(cls, trainer: Any) -> Rewards | None:
        """None for a trainer that does not learn from rewards."""
        names = {base.__name__ for base in type(trainer).__mro__}
        return cls(trainer) if names & _BY_REWARD else None

    def progress(self, loss: Tensor) -> dict[str, Any]:
        """The `progress` to watch this loss with."""
        rewards = self._trainer._metrics["train"].get("reward")
        if rewards:
            self._latest = rewards[-1]
        return {"progress": None if self._latest is None else loss.detach() - self._latest}

    def rewound(self) -> None:
        """Drop the rollouts of the policy that is undone, and have a generation engine load the weights again."""
        self._trainer._buffered_inputs = None
        if "_last_loaded_step" in vars(self._trainer):
            self._trainer._last_loaded_step = -1

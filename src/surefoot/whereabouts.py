"""Where data and random numbers stand before a loop fetches its next batch: a run is saved after that."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

from surefoot.rounds import Rounds
from surefoot.state.chance import random_states
from surefoot.state.loader import position_of
from surefoot.state.taken import Earlier
from surefoot.state.tree import Stateful

log = logging.getLogger("surefoot")
NAME = "surefoot.loader"
"""What a checkpoint calls the place in the data."""
_FEW = 64
"""Values in which the place in the data is told, up to which it is asked for after every step."""


class Whereabouts:
    """Follows one loop."""

    def __init__(self, loader: Any) -> None:
        self.keeper = _position(loader)
        self.unseen = False
        """Forward passes go unseen, and have drawn random numbers and changed buffers when a loss is there."""
        self.quick = True
        """Where the data stands is told in so few words that it can be asked after every step."""

        self._chance: tuple[int, Any] = (-1, None)
        """Random numbers as an evaluation found them, and the attempt after which that began."""

    def evaluates(self, rounds: Rounds) -> None:
        """The model is used without gradients; what the first such use after an attempt finds is kept."""
        if self._chance[0] != rounds.attempt:
            self._chance = rounds.attempt, random_states({p.device for p in rounds.layout.params if p.is_cuda})

    def before_evaluation(self, earlier: Earlier) -> Earlier:
        """The same with random numbers as they were before the evaluation, which a resumed run may do again."""
        return earlier if earlier.chance is not None else replace(earlier, chance=self._chance[1])

    def data(self) -> dict[str, Any]:
        """Where the data stands, by its name in a checkpoint."""
        return {} if self.keeper is None else {NAME: copy.deepcopy(self.keeper.state_dict())}

    def now(self, rounds: Rounds) -> Earlier:
        """A loop that draws its batches itself draws them again; a loader draws nothing that is not its own."""
        data = self.data()
        self.quick = _few(data)
        if self.keeper is not None and not self.unseen:
            return Earlier(data)
        devices = {p.device for p in rounds.layout.params if p.is_cuda} if self.unseen else set()
        return Earlier(data, random_states(devices))


def _few(state: Any) -> bool:
    """Whether a state consists of a few plain values."""
    heap, count = [state], 0
    while heap and count <= _FEW:
        one = heap.pop()
        count += 1
        heap.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ())
    return count <= _FEW


def _position(loader: Any) -> Stateful | None:
    """What can be saved of where the data stands."""
    if loader is None:
        return None
    position = position_of(loader)
    if position.warning:
        log.warning("surefoot: %s", position.warning)
    return position.keeper

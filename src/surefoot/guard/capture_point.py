"""The point of a loop at which its state is captured for a checkpoint: right before it fetches its next batch.

A resumed process begins by fetching a batch, after everything that follows an update (scheduler, averaged weights).
Where fetches are announced, by `guard.batches` or by a loader of `surefoot.data`, everything that a fetch changes is
read right before one. Elsewhere it is read after the optimizer's step, and it is noticed if random numbers are drawn
between that and the next forward pass.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.checkpoint.dataloader import LoaderPosition, RngNeutralLoader, position_of
from surefoot.checkpoint.rng import (
    EarlierState,
    RngStates,
    changed_generators,
    changed_host_generators,
    get_rng_states,
    get_torch_rng_states,
    replace_torch_states,
    set_rng_states,
    torch_rng_changed,
)
from surefoot.checkpoint.tree import Stateful
from surefoot.guard.step_pipeline import StepPipeline

MAX_UPDATES_PER_BATCH = 32
"""Updates for which a save waits for a fetch, as a loop may use a batch several times."""
EVAL_WAIT = 5.0
"""Seconds that a signal waits for the end of an evaluation, after which the run can be saved exactly."""
_RNG_CHECKS = 3
"""Iterations at the start of a run in which draws of random numbers outside the model are looked for."""
LOADER_KEY = "surefoot.loader"
"""What a checkpoint calls the position in the data."""
_CHEAP_VALUES = 64
"""Values in a loader's state up to which it is read after every step."""
_SMALL_BYTES = 1 << 20
"""Size up to which tensors in a state are copied before a fetch; a fetch does not change larger ones, such as averaged
weights."""

# -- why a resume may not repeat an uninterrupted run

_FIX = (
    "Write `for batch in guard.batches(loader):` (without a loader: `for step in guard.batches():`) to make this exact."
)
EXACT_IF = (
    "a resume repeats an uninterrupted run bit for bit if batches are fetched by `for batch in guard.batches(loader):` "
    "(without a loader: `for step in guard.batches():`). In any other loop it does so only if no batch is fetched or "
    "drawn before optimizer.step() for the step after it, and no random numbers are drawn between optimizer.step() and "
    "the next fetch; a warning follows if they are."
)
RNG_USED = (
    "random numbers ({}) are drawn between optimizer.step() and the next forward pass. Those drawn before the next "
    "batch is fetched will be missing after a resume, and losses will then differ from those of an uninterrupted run. "
    f"{_FIX}"
)
FETCHES_AHEAD = (
    "the loop fetches its next batch before optimizer.step(). A resume repeats an uninterrupted run only if it fetches "
    "exactly one batch ahead and draws no random numbers between that fetch and the next forward pass."
)
RNG_USED_BEFORE_STEP = (
    "random numbers ({}) are drawn between the forward pass and optimizer.step(). If the loop draws its next batch "
    f"there, that batch will be left out after a resume, and losses will differ. {_FIX}"
)
OTHER_THREAD = (
    "batches are fetched in another thread than the one that trains. Those that wait there when the run is saved will "
    "be left out after a resume. Fetch them with `for batch in guard.batches(loader):` in the loop itself."
)
SAME_BATCH = (
    f"no batch was fetched for {MAX_UPDATES_PER_BATCH} updates, so the run was saved between two updates on the same "
    "batch: a resume continues with the next batch."
)
DURING_EVAL = (
    "the run was saved in the middle of an evaluation. If that draws random numbers and is not done again after the "
    "resume, losses will differ from an uninterrupted run."
)
HOST_RNG_USED = (
    "the run was saved after its next batch was fetched, and random numbers of {} may have been drawn for that batch: "
    "a resume would continue after those."
)
POSITION_READ_LATE = (
    "the position in the data was only read after the next batch may have been fetched, which would be left out."
)
RNG_USED_AT_END = (
    "random numbers were drawn between the last update and the end of the run; a run that is resumed to train on "
    "repeats an uninterrupted one only if the loop draws them after each update."
)


class CapturePoint:
    """Follows the fetches, forward passes and updates of one loop."""

    def __init__(self, position: DataPosition) -> None:
        self._position = position
        self.fetches_announced = False
        self.fetches_ahead = False
        """Batches are fetched before the update that precedes them."""
        self.between_updates = False
        """The last iteration has ended, and no forward pass in training has begun since."""
        self._awaits_forward = True
        """No forward pass in training has begun since the last iteration, or since the start."""
        self._fetched_first = self._fetched = False
        """Since the last iteration a batch was fetched: before any forward pass; at any time."""
        self._earlier: EarlierState | None = None
        self._earlier_ahead: EarlierState | None = None
        """The state before a batch was fetched ahead."""
        self._torch_rng: RngStates = []
        """At the end of the last iteration, or at the fetch after it."""
        self._last_rng: RngStates | None = None
        """The last complete reading of the random states."""
        self._rng_at_eval: RngStates | None = None
        """Random states when the first evaluation after the last iteration began."""
        self._eval_began = 0.0
        self._rng_after_forward: RngStates | None = None
        """Random states after the last forward pass of an iteration, in the first iterations."""
        self._restore: tuple[RngStates, dict[str, object]] | None = None
        """Random states to restore before the first fetch of a resumed run."""
        self._iterations = 0
        self._forwards_waited = 0

    def start(self, pipeline: StepPipeline, *, resumed: bool) -> None:
        """The loop is about to begin; in a resumed run, random states are restored before its first fetch."""
        self._last_rng = self._position.rng_states(pipeline)
        if resumed:
            self._restore = self._last_rng, self._position.generator_states()
            self._earlier = EarlierState({}, self._last_rng)

    # -- following the loop

    def before_fetch(self, pipeline: StepPipeline, *, due: bool) -> None:
        """The loop asks for a batch."""
        self.fetches_announced = self._fetched = True
        if self._restore is not None:
            set_rng_states(self._restore[0])
            self._position.restore_generators(self._restore[1])
            self._restore = None
        if self._awaits_forward and not self._fetched_first:
            self._fetched_first = True
            self._earlier = self._read(pipeline, due=due, fetching=True)
        elif self.fetches_ahead and not self._awaits_forward:
            self._earlier_ahead = self._read(pipeline, due=True, fetching=True)

    def forward_began(self) -> None:
        """A forward pass in training begins."""
        self.between_updates = self._awaits_forward = False
        self._restore = None

    def forward_ended(self, pipeline: StepPipeline) -> None:
        """A forward pass in training is over, or a loss was watched whose forward pass was not seen."""
        if not self.fetches_announced and self._iterations < _RNG_CHECKS:
            self._rng_after_forward = self._position.rng_states(pipeline)

    def iteration_ended(self, pipeline: StepPipeline, *, due: bool) -> bool:
        """All optimizers have stepped; returns True when it is first noticed that batches are fetched ahead."""
        noticed = self._fetched and not self._fetched_first and not self.fetches_ahead
        self.fetches_ahead |= noticed
        self.between_updates = self._awaits_forward = True
        self._fetched_first = self._fetched = False
        self._rng_at_eval = None
        self._iterations += 1
        self._earlier, self._earlier_ahead = self._earlier_ahead, None
        if self.fetches_announced:
            self._torch_rng = self._position.torch_rng_states(pipeline)
        else:
            self._earlier = self._read(pipeline, due=due or self._iterations <= _RNG_CHECKS)
        return noticed

    def eval_began(self, pipeline: StepPipeline) -> None:
        """The model is used without gradients between two iterations."""
        if self._rng_at_eval is None:
            self._rng_at_eval, self._eval_began = self._position.rng_states(pipeline), time.monotonic()

    # -- random numbers drawn by the loop

    @property
    def checks_rng(self) -> bool:
        """Whether to look now for draws since the last iteration, though nothing is saved."""
        return self._awaits_forward and not self.fetches_announced and self._iterations <= _RNG_CHECKS

    def generators_used(self, pipeline: StepPipeline) -> list[str]:
        """The generators drawn from since the last iteration; where fetches are announced that does not matter."""
        if self.fetches_announced or self._earlier is None or self._earlier.rng_states is None:
            return []
        return changed_generators(self._earlier.rng_states, self._position.rng_states(pipeline))

    def generators_used_before_step(self, pipeline: StepPipeline) -> list[str]:
        """The generators drawn from between the last forward pass and the end of its iteration, just now."""
        before, self._rng_after_forward = self._rng_after_forward, None
        if before is None or self.fetches_announced:
            return []
        return changed_generators(before, self._position.rng_states(pipeline))

    # -- the state to save

    @property
    def exact(self) -> bool:
        """Right after the first fetch since the last iteration, before anything was done with the batch."""
        return self.between_updates and self._fetched_first

    def at_fetch(self) -> EarlierState | None:
        self._forwards_waited = 0
        return self._earlier

    def at_forward(self, pipeline: StepPipeline) -> EarlierState | None:
        """None where the save should wait for a fetch."""
        earlier = self._earlier
        if not self.fetches_announced:
            used = self.generators_used(pipeline)
            reasons = (RNG_USED.format(", ".join(used)),) if used else ()
            return earlier if earlier is None else replace(earlier, inexact=reasons)
        if self.fetches_ahead and earlier is not None:
            return replace(earlier, inexact=(FETCHES_AHEAD,))
        self._forwards_waited += 1
        if self._forwards_waited <= MAX_UPDATES_PER_BATCH:
            return None
        self._forwards_waited = 0
        return replace(self._read(pipeline, due=True, fetching=True), inexact=(SAME_BATCH,))

    @property
    def worth_waiting(self) -> bool:
        """In an evaluation that will not be repeated after a resume and began a short while ago."""
        waited = time.monotonic() - self._eval_began
        return self.fetches_announced and not self._fetched_first and waited < EVAL_WAIT

    def at_eval(self, pipeline: StepPipeline) -> EarlierState:
        """In the middle of an evaluation, which may take longer than the signal leaves time for."""
        assert self._rng_at_eval is not None
        if self._fetched_first and self._earlier is not None:  # it will be repeated, after the same fetch
            return self._with_host_rng(self._earlier, self._rng_at_eval)
        if self.fetches_announced:
            now = self._read(pipeline, due=True, fetching=True)
            return replace(now, rng_states=self._rng_at_eval, inexact=(DURING_EVAL,))
        earlier = self._earlier or self._read(pipeline, due=True)
        rng = earlier.rng_states or replace_torch_states(self._rng_at_eval, self._torch_rng)
        return replace(earlier, rng_states=rng, inexact=(DURING_EVAL, *self._late(earlier)))

    def at_close(self, pipeline: StepPipeline) -> EarlierState | None:
        """At the end of the run, which may be resumed to train on; None for the state as it is now."""
        if not self.between_updates:
            return None
        now = self._position.rng_states(pipeline)
        if self._fetched_first and self._earlier is not None:
            return self._with_host_rng(self._earlier, now)
        if self.fetches_announced or self._earlier is None:
            used = torch_rng_changed(self._torch_rng, self._position.torch_rng_states(pipeline))
            return EarlierState({}, inexact=(RNG_USED_AT_END,)) if used else None
        rng = self._earlier.rng_states or replace_torch_states(now, self._torch_rng)
        return replace(self._earlier, rng_states=rng, inexact=self._late(self._earlier))

    def at_failed_update(self, pipeline: StepPipeline) -> EarlierState | None:
        """In an update that cannot be made: as it was before its batch was fetched; None where that is not known."""
        if self._earlier is None:
            return None
        return self._with_host_rng(self._earlier, self._position.rng_states(pipeline))

    def _late(self, earlier: EarlierState) -> tuple[str, ...]:
        """A loader whose state is slow to read was not read in time."""
        return (POSITION_READ_LATE,) if self._position.loader is not None and LOADER_KEY not in earlier.extra else ()

    def _with_host_rng(self, earlier: EarlierState, now: RngStates) -> EarlierState:
        """Complete a reading of torch's states alone with those of `random` and NumPy as they are now."""
        late = self._late(earlier)
        if earlier.rng_states is not None:
            return replace(earlier, inexact=late)
        used = [] if self._last_rng is None else changed_host_generators(self._last_rng, now)
        reasons = (HOST_RNG_USED.format(" and ".join(used)),) if used else ()
        return replace(earlier, rng_states=replace_torch_states(now, self._torch_rng), inexact=(*reasons, *late))

    def _read(self, pipeline: StepPipeline, *, due: bool, fetching: bool = False) -> EarlierState:
        """Read the position in the data and the random states; only what is cheap to read unless a save is `due`."""
        states = self._position.generator_states()
        if due or self._position.cheap:
            states |= self._position.loader_state()
        self._torch_rng = self._position.torch_rng_states(pipeline)
        if not due:
            return EarlierState(states)
        states |= self._position.extra_states(fetching=fetching)
        self._last_rng = self._position.rng_states(pipeline)
        return EarlierState(states, self._last_rng)


class DataPosition:
    """Reads the loader, the random number generators and the extras of one loop."""

    def __init__(self, loader: Any, extra: Mapping[str, Any]) -> None:
        self.position = LoaderPosition(None) if loader is None else position_of(loader)
        keeper = self.position.stateful
        self.loader: Stateful | None = None if keeper is None else RngNeutralLoader(keeper)
        self.cheap = True
        """The loader's state is so small that it can be read after every step."""
        self._devices: tuple[StepPipeline, set[torch.device]] | None = None
        self._extra = {name: value for name, value in extra.items() if not isinstance(value, nn.Module)}
        self._generators = {name: value for name, value in self._extra.items() if not isinstance(value, Stateful)}
        self._data_sources = {name: value for name, value in self._extra.items() if isinstance(value, Iterable)}
        """Extras that yield data themselves, such as a loader or a sampler."""

    def loader_state(self) -> dict[str, Any]:
        """The position in the data, by its name in a checkpoint."""
        if self.loader is None:
            return {}
        state = {LOADER_KEY: copy.deepcopy(self.loader.state_dict())}
        self.cheap = _is_cheap(state)
        return state

    def generator_states(self) -> dict[str, Any]:
        """The generators in `extra`, such as torch.Generator: a few bytes, which can be read at every step."""
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self._generators[name].set_state(state)

    def extra_states(self, *, fetching: bool) -> dict[str, Any]:
        """What a fetch may change in `extra`: all of it if read right before a fetch, else only what yields data."""
        chosen = self._extra if fetching else self._data_sources
        return {name: _copy_small(value.state_dict()) for name, value in chosen.items() if isinstance(value, Stateful)}

    def rng_states(self, pipeline: StepPipeline) -> RngStates:
        """All random states: of `random`, NumPy and torch."""
        return get_rng_states(self._devices_of(pipeline))

    def torch_rng_states(self, pipeline: StepPipeline) -> RngStates:
        return get_torch_rng_states(self._devices_of(pipeline))

    def _devices_of(self, pipeline: StepPipeline) -> set[torch.device]:
        """The accelerators that hold parameters; cached, as a model may have thousands of tensors."""
        if self._devices is None or self._devices[0] is not pipeline:
            self._devices = pipeline, {p.device for p in pipeline.layout.params if p.is_cuda}
        return self._devices[1]


def _is_cheap(state: Any) -> bool:
    """Whether a state consists of a few plain values."""
    stack, count = [state], 0
    while stack and count <= _CHEAP_VALUES:
        value = stack.pop()
        count += 1
        stack.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ())
    return count <= _CHEAP_VALUES


def _copy_small(state: Any) -> Any:
    """Copy a state's containers and its small tensors."""
    if isinstance(state, Tensor):
        return state.clone() if state.device.type == "cpu" and state.nbytes <= _SMALL_BYTES else state
    if type(state) is dict:
        return {key: _copy_small(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copy_small(value) for value in state)
    return copy.copy(state)

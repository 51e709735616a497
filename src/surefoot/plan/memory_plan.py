"""The memory of one GPU during a training step, split by what it holds, for each way to distribute the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.plan.extrapolate import ModelMemory, StackLayers, measure_model
from surefoot.plan.fake_step import FakeStepOptions, StepMemory, fake_copy, language_batch
from surefoot.plan.model_size import ModelSize
from surefoot.plan.phase_tracker import Bytes, Phase
from surefoot.plan.plan_recipe import replaced
from surefoot.plan.sharded_memory import sharded_phases
from surefoot.train.recipe import Recipe

FRAGMENTATION = 0.05
"""Assumed: what the allocator loses, as a fraction of what comes and goes within a step."""
CONTEXT, NCCL, WORKSPACE = 0.6e9, 0.5e9, 34e6
"""Assumed bytes of the CUDA context, of NCCL's buffers, and of cuBLAS's workspace."""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Bytes on one GPU at the moment of the peak; they sum up to `total`."""

    weights: int
    copies: int
    """Weights in the type that is computed in: autocast's copies, or what FSDP has gathered."""
    gradients: int
    optimizer: int
    optimizer_transients: int
    activations: int
    temporary: int
    """Gradients of activations and other short-lived tensors of backward."""
    communication: int
    """Gradients and buffers that a reduce-scatter works on."""
    workspace: int
    fragmentation: int
    context: int
    phase: str
    """When the peak is reached."""
    peaks: dict[str, int]
    """The peak of each part of the step: forward, backward, optimizer."""
    max_transients: int
    """The most that the optimizer's step needs beyond its state, whenever that is."""
    layers: list[StackLayers]
    measured_blocks: int

    @property
    def allocated(self) -> int:
        """What torch's allocator has handed out: `torch.cuda.max_memory_allocated`."""
        return self.total - self.fragmentation - self.context

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PARTS)

    @property
    def within_step(self) -> int:
        """What is allocated and freed within a step."""
        return self.copies + self.optimizer_transients + self.activations + self.temporary + self.communication

    def as_json(self) -> dict[str, Any]:
        return {"total": self.total, "allocated": self.allocated} | asdict(self)


PARTS = (
    "weights",
    "copies",
    "gradients",
    "optimizer",
    "optimizer_transients",
    "activations",
    "temporary",
    "communication",
    "workspace",
    "fragmentation",
    "context",
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How a measured peak differs from the planned one; both factors apply to what comes and goes within a step."""

    within_step: float = 1.0
    fragmentation: float = FRAGMENTATION
    source: str = ""


class MemoryPlanner:
    """Plans the memory of variants of one recipe; steps that were measured are kept."""

    def __init__(self, facts: ModelSize, *, batch: Any = None, batch_size: int = 1, on_gpu: bool = True) -> None:
        """`batch` is one of the recipe's, of `batch_size` samples, for data that is not tokens."""
        self.facts = facts
        self.calibration = Calibration()
        """Set it once a measured peak is known; plans made later follow it."""
        self._batch, self._batch_size, self._on_gpu = batch, batch_size, on_gpu
        self._measured: dict[Any, ModelMemory] = {}

    def plan(self, recipe: Recipe, ranks: int) -> MemorySplit:
        """The split of one GPU of `ranks`, with the recipe's own strategy."""
        strategy = recipe.parallel.strategy if ranks > 1 else "single"
        if strategy in ("zero2", "zero3"):
            return self._sharded(recipe, ranks)
        keep = recipe.batch.accumulate > 1 or strategy != "single"
        measured = self._measure(recipe, FakeStepOptions(keep_gradients=keep))
        shards = ranks if strategy == "zero1" else 1
        split = {phase: _replicated(peak, measured.step.states, shards) for phase, peak in measured.step.peaks.items()}
        return self._split(split, measured, ranks)

    def _sharded(self, recipe: Recipe, ranks: int) -> MemorySplit:
        """FSDP: the activations are measured with weights in the type that is computed in, the rest is arithmetic."""
        states = self._optimizer_step(recipe)
        measured = self._measure(recipe, FakeStepOptions(low_precision_weights=True))
        return self._split(sharded_phases(self.facts, recipe, ranks, measured.step, states), measured, ranks)

    def _split(self, phases: dict[Phase, dict[str, int]], measured: ModelMemory, ranks: int) -> MemorySplit:
        calibration = self.calibration
        for parts in phases.values():
            for name in ("activations", "temporary", "copies"):
                parts[name] = round(parts[name] * calibration.within_step)
        phase, parts = max(phases.items(), key=lambda item: sum(item[1].values()))
        peaks: dict[str, int] = {}
        for other, values in phases.items():
            peaks[other[0]] = max(peaks.get(other[0], 0), sum(values.values()))
        split = MemorySplit(
            **parts,
            workspace=int(WORKSPACE) if self._on_gpu else 0,
            fragmentation=0,
            context=int(CONTEXT + NCCL * (ranks > 1)) if self._on_gpu else 0,
            phase=_name(phase),
            peaks=peaks,
            max_transients=phases[("optimizer",)]["optimizer_transients"],
            layers=measured.layers,
            measured_blocks=measured.measured_blocks,
        )
        return replace(split, fragmentation=round(split.within_step * calibration.fragmentation))

    def floor(self, recipe: Recipe, ranks: int) -> float:
        """Bytes below which no batch size can go: weights, gradients and optimizer state."""
        strategy = recipe.parallel.strategy if ranks > 1 else "single"
        state, gradients, weights = (
            self._optimizer_step(recipe).states["optimizer"],
            self.facts.trained,
            self.facts.parameters,
        )
        if strategy in ("zero2", "zero3"):
            return (4 * weights + state + 4 * gradients) / ranks
        return 4 * weights + 4 * gradients + state / (ranks if strategy == "zero1" else 1)

    def make_batch(self, recipe: Recipe) -> Callable[[], Any]:
        """What makes a batch of this recipe on fake tensors."""
        if self._batch is None:
            return language_batch(recipe)
        return fake_copy(self._batch, self._batch_size, recipe.batch.size)

    def _optimizer_step(self, recipe: Recipe) -> StepMemory:
        """A step whose activations do not matter: the optimizer's state and what its step needs."""
        smallest = replaced(recipe, batch_size=1, speed_checkpoint_activations=0)
        return self._measure(smallest, FakeStepOptions()).step

    def _measure(self, recipe: Recipe, options: FakeStepOptions) -> ModelMemory:
        optimizer = "" if options.low_precision_weights else recipe.optimizer
        compute = "float32" if recipe.precision.compute == "tf32" else recipe.precision.compute
        speed = (recipe.speed.checkpoint_activations, recipe.speed.attention)
        key = repr((recipe.batch.size, compute, recipe.precision.keep_float32, speed, optimizer, options))
        if key not in self._measured:
            self._measured[key] = measure_model(
                recipe, self.make_batch(recipe), self.facts.stack_blocks, self.facts.stack_names, options
            )
        return self._measured[key]


def _replicated(peak: Bytes, states: Bytes, shards: int) -> dict[str, int]:
    state = states["optimizer"]
    return {
        "weights": peak["weights"] + peak["buffers"],
        "copies": peak["weight_copies"],
        "gradients": peak["gradients"],
        "optimizer": state // shards,
        "optimizer_transients": (peak["optimizer"] - state) // shards,
        "activations": peak["activations"],
        "temporary": peak["temporary"],
        "communication": 0,
    }


def _name(phase: Phase) -> str:
    """In words: backward of the last block."""
    if "block" not in phase:
        where = {"head": " of the output and loss", "start": " before the first block", "rest": " between blocks"}
        return "optimizer step" if phase[0] == "optimizer" else f"{phase[0]}{where[phase[1]]}"
    side, index = phase[3], int(phase[4])
    which, sign = ("last", "-") if side == "end" else ("first", "+")
    return f"{phase[0]} of the {which} block{f' {sign} {index}' if index else ''}"

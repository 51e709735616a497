"""The memory of a GPU when FSDP shards the model: what a rank holds, gathers and reduces, by phase of a step."""

from __future__ import annotations

from surefoot.plan.fake_step import StepMemory
from surefoot.plan.model_size import ModelSize
from surefoot.plan.phase_tracker import Phase
from surefoot.train.recipe import Recipe


def low_width(recipe: Recipe) -> int:
    """Bytes of a weight in the type that is computed in."""
    return 2 if recipe.precision.compute in ("bfloat16", "float16") else 4


def sharded_phases(
    facts: ModelSize, recipe: Recipe, ranks: int, step: StepMemory, optimizer_step: StepMemory
) -> dict[Phase, dict[str, int]]:
    """Bytes of each part in each phase; `step` was measured with weights in the computing type.

    Weights, gradients and optimizer state are in float32, an equal part on every rank. zero3 holds the gathered weights
    outside the blocks, those of one block and the buffer of the next; zero2 keeps all that it gathers until backward is
    over. In backward come the gradients of a block and of what is outside, and their copy in float32 to reduce. With
    accumulation FSDP keeps the whole gradients in float32 between the passes.
    """
    width = low_width(recipe)
    block, root = (facts.largest_block, facts.root) if facts.blocks else (facts.parameters, 0)
    gathered = width * (facts.parameters + block if recipe.parallel.strategy == "zero2" else root + 2 * block)
    keeps_all = recipe.batch.accumulate > 1
    shard, state = 4 * facts.trained // ranks, optimizer_step.states["optimizer"]
    transients = optimizer_step.peaks[("optimizer",)]["optimizer"] - state
    phases: dict[Phase, dict[str, int]] = {}
    for phase, peak in step.peaks.items():
        in_optimizer, in_backward = phase[0] == "optimizer", phase[0] == "backward"
        gradients = shard if in_optimizer or in_backward else 0
        reduced = width * root + (0 if "head" in phase else width * block + 4 * max(block, root))
        phases[phase] = {
            "weights": 4 * facts.parameters // ranks + peak["buffers"],
            "copies": 0 if in_optimizer else gathered,
            "gradients": 4 * facts.trained if keeps_all and not in_optimizer else gradients,
            "optimizer": state // ranks,
            "optimizer_transients": transients // ranks if in_optimizer else 0,
            "activations": peak["activations"],
            "temporary": peak["temporary"],
            "communication": reduced if in_backward else 0,
        }
    return phases

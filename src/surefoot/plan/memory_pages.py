"""The memory of a plan as rows: its parts, and what each cheaper change would save."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.plan.memory_plan import CONTEXT, NCCL, MemoryPlanner, MemorySplit
from surefoot.plan.model_size import ModelSize
from surefoot.plan.page import PageSection, format_bytes, format_count
from surefoot.plan.plan_recipe import replaced
from surefoot.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """A change of the recipe that may need less memory."""

    lines: str
    """As key=value."""
    words: str
    price: str
    """What it costs in speed or otherwise."""
    memory: MemorySplit
    saved: int

    def fits(self, capacity: float) -> bool:
        return self.memory.total <= capacity


def changes(recipe: Recipe, planner: MemoryPlanner, ranks: int, now: MemorySplit) -> list[MemoryChange]:
    """What needs less memory, most saved first."""
    found = []
    for lines, words, price, variant in _variants(recipe, planner.facts, ranks):
        memory = planner.plan(variant, ranks)
        if (saved := now.total - memory.total) > 0.005 * now.total:
            found.append(MemoryChange(lines, words, price, memory, saved))
    return sorted(found, key=lambda change: -change.saved)


def _variants(recipe: Recipe, facts: ModelSize, ranks: int) -> list[tuple[str, str, str, Recipe]]:
    variants = []
    strategy, batch = recipe.parallel.strategy, recipe.batch
    order = ("data", "zero1", "zero2", "zero3")
    prices = {
        "zero1": "half as much again to send",
        "zero2": "weights sent each pass",
        "zero3": "weights sent twice a pass",
    }
    for other in order[order.index(strategy) + 1 :] if ranks > 1 else ():
        variants.append((f"parallel.strategy={other}", other, prices[other], replaced(recipe, parallel_strategy=other)))
    if recipe.speed.checkpoint_activations != 1 and facts.can_recompute:
        variant = replaced(recipe, speed_checkpoint_activations=1)
        variants.append(("speed.checkpoint_activations=1", "recompute", "a third more time", variant))
    if ranks > 1 and strategy in ("zero2", "zero3") and batch.accumulate > 1:
        price = f"{batch.accumulate} times fewer samples per update"
        variants.append(("batch.accumulate=1", "no accumulation", price, replaced(recipe, batch_accumulate=1)))
    if batch.size > 1:
        half, twice = batch.size // 2, -(-batch.size * batch.accumulate // (batch.size // 2))
        lines = f"batch.size={half} batch.accumulate={twice}"
        variant = replaced(recipe, batch_size=half, batch_accumulate=twice)
        variants.append((lines, "half the batch", "the same updates, smaller products", variant))
    if recipe.precision.compute in ("float32", "tf32"):
        variant = replaced(recipe, precision_compute="bfloat16")
        variants.append(("precision.compute=bfloat16", "bfloat16", "faster", variant))
    if recipe.speed.attention == "math":
        variants.append(("speed.attention=auto", "fused attention", "faster", replaced(recipe, speed_attention="auto")))
    return variants


def verdict(memory: MemorySplit, capacity: float | None, found: list[MemoryChange]) -> str:
    """In one sentence: whether it fits, by how much, and what would help."""
    if capacity is None:
        return f"needs {format_bytes(memory.total)} on each GPU; name the GPUs (--gpus 8x80GB) to see whether it fits"
    spare = capacity - memory.total
    if spare >= 0:
        return f"fits with {format_bytes(spare)} to spare"
    savings = ", ".join(f"{change.words} saves {format_bytes(change.saved)}" for change in found)
    return f"does not fit: {format_bytes(-spare)} too much; {savings or 'use more or larger GPUs, or a smaller model'}"


def memory_section(
    memory: MemorySplit, recipe: Recipe, facts: ModelSize, ranks: int, capacity: float | None, source: str = ""
) -> PageSection:
    """The parts as rows, which sum up to the total, then the peaks and the layers; `source` calibrated them."""
    strategy = recipe.parallel.strategy if ranks > 1 else "single"
    section = PageSection(
        "memory", f"Memory of one {'GPU' if memory.context else 'process'}, {strategy}, peak in {memory.phase}"
    )
    for key, label, how in _hows(memory, recipe, facts, ranks, source):
        size = getattr(memory, key)
        if size or key in ("weights", "gradients", "optimizer", "activations"):
            section.add(key, label, size, format_bytes(size), how)
    section.add("total", "total", memory.total, format_bytes(memory.total), "sum of the rows above")
    if capacity is not None:
        section.add("capacity", "there is", capacity, format_bytes(capacity), "memory of one GPU, or of this machine")
    others = {f"peak_{name}": size for name, size in memory.peaks.items()}
    for key, size in others.items():
        name = key.removeprefix("peak_")
        section.add(key, f"peak in {name}", size, format_bytes(size), "allocated in this part of the step")
    section.add(
        "max_transients",
        "transients, at most",
        memory.max_transients,
        format_bytes(memory.max_transients),
        f"most that {recipe.optimizer.name}'s step needs beyond its state, measured",
    )
    for layer in memory.layers:
        _layer_rows(section, layer.name, layer.blocks, layer.kept, layer.kept_by_attention)
    return section


def _layer_rows(section: PageSection, name: str, blocks: int, kept: int, attention: int) -> None:
    how = f"kept by {blocks} blocks for backward, {format_bytes(kept / max(blocks, 1))} each, measured"
    section.add(f"layers_{name}", f"{name}, kept", kept, format_bytes(kept), how)
    if attention:
        share = f"{attention / max(kept, 1):.0%} of it, measured"
        section.add(f"attention_{name}", f"{name}, attention", attention, format_bytes(attention), share)


def _hows(memory: MemorySplit, recipe: Recipe, facts: ModelSize, ranks: int, source: str) -> list[tuple[str, str, str]]:
    """Key, label and explanation of each part."""
    strategy = recipe.parallel.strategy if ranks > 1 else "single"
    count, sharded = format_count(facts.parameters), strategy in ("zero2", "zero3")
    over = f" / {ranks} GPUs"
    by_weights, by_state = over if sharded else "", over if sharded or strategy == "zero1" else ""
    keeps_all = sharded and recipe.batch.accumulate > 1
    gradients = f"4 bytes x {format_count(facts.trained)}"
    gradients += " (accumulation keeps all of them)" if keeps_all else by_weights
    if not sharded and recipe.batch.accumulate == 1 and ranks == 1:
        gradients = "those that exist at the peak, measured"
    shape = f"batch.size {recipe.batch.size}"
    shape += f" x {recipe.data.context:,} tokens" if recipe.data.kind != "own" else ""
    measured = f"on {memory.measured_blocks} blocks" if memory.measured_blocks else "on the whole model"
    lost = memory.fragmentation / max(memory.within_step, 1)
    nccl = f", with {format_bytes(NCCL)} for NCCL" if memory.context > CONTEXT else ""
    copies = f"{recipe.precision.compute}, made by autocast, measured"
    if sharded:
        what = "all blocks and a buffer of one" if strategy == "zero2" else "two of them"
        copies = f"{recipe.precision.compute}, gathered: what lies outside the blocks, and {what}"
    return [
        ("weights", "weights", f"4 bytes x {count}{by_weights}"),
        ("copies", "weight copies", copies),
        ("gradients", "gradients", gradients),
        ("optimizer", "optimizer state", f"{recipe.optimizer.name}, measured{by_state}"),
        ("optimizer_transients", "optimizer transients", "needed during its step, measured"),
        ("activations", "activations", f"measured with MemTracker {measured}, {shape}"),
        ("temporary", "temporary", "gradients of activations, measured"),
        ("communication", "communication", "gradients not yet reduced"),
        ("workspace", "cuBLAS workspace", "assumed"),
        (
            "fragmentation",
            "fragmentation",
            f"{lost:.0%} of what comes and goes in a step, {'measured' if source else 'assumed'}",
        ),
        ("context", "CUDA context", f"assumed{nccl}"),
    ]


def changes_section(found: list[MemoryChange], capacity: float | None) -> PageSection:
    """Each cheaper change with what it saves."""
    section = PageSection("changes", "Changes that need less memory")
    for change in found:
        how = f"{change.lines}: {format_bytes(change.memory.total)}"
        if capacity is not None:
            how += ", fits" if change.fits(capacity) else ", does not fit"
        section.add(
            change.lines, change.words, change.saved, f"-{format_bytes(change.saved)}", f"{how}; {change.price}"
        )
    if not found:
        section.remarks.append("None known.")
    return section

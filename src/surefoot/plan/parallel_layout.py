"""How to distribute a model over the GPUs: what is exchanged, how long that takes, and which layout is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from surefoot.plan.flops import Flops
from surefoot.plan.hardware import Cluster
from surefoot.plan.memory_plan import MemoryPlanner, MemorySplit
from surefoot.plan.model_size import ModelSize
from surefoot.plan.page import PageSection, format_bytes, format_hours
from surefoot.plan.plan_recipe import replaced
from surefoot.plan.sharded_memory import low_width
from surefoot.train.recipe import Recipe

STRATEGIES = ("data", "zero1", "zero2", "zero3")
_TOKENS_PER_PASS = 32768
"""More tokens in one forward pass do not make matrix products faster."""
MARGIN = 0.9
"""The share of the memory that a layout may be planned to need, because a plan may be too low."""
MFU = 0.4
"""Assumed share of the peak FLOP/s that training reaches."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes that each GPU sends per update, and the time of one update."""

    bytes_sent: float
    how: str
    send_seconds: float
    compute_seconds: float

    @property
    def update_seconds(self) -> float:
        """Computing, or sending where that takes longer; they overlap."""
        return max(self.send_seconds, self.compute_seconds)


@dataclass(frozen=True, slots=True)
class Speed:
    """What the time of an update follows from."""

    flops: Flops
    cluster: Cluster
    mfu: float = MFU


def exchange(recipe: Recipe, facts: ModelSize, speed: Speed) -> Exchange:
    """What a ring sends: (N - 1) / N of each tensor for a gather, a scatter or a broadcast, twice that for a sum."""
    cluster, strategy = speed.cluster, recipe.parallel.strategy
    width = low_width(recipe)
    full, low, passes = 4.0 * facts.parameters, float(width * facts.parameters), recipe.batch.accumulate
    gather = f"all-gather of {width} bytes a weight x"
    sent, how = {
        "data": (2 * full, "all-reduce of gradients: 2 x 4 bytes a weight"),
        "zero1": (3 * full, "all-reduce of gradients, broadcast of weights: 3 x 4 bytes a weight"),
        "zero2": (passes * low + full, f"{gather} {passes} passes, reduce-scatter of 4"),
        "zero3": (2 * passes * low + full, f"{gather} 2 x {passes} passes, reduce-scatter of 4"),
    }[strategy]
    sent = sent * (cluster.gpus - 1) / cluster.gpus
    every = recipe.speed.checkpoint_activations
    recompute = 1 + 1 / (3 * every) if every else 1.0
    samples = recipe.batch.size * recipe.batch.accumulate
    peak = speed.mfu * cluster.gpu.peak(recipe.precision.compute)
    return Exchange(sent, how, sent / cluster.bandwidth, samples * speed.flops.per_sample * recompute / peak)


def choose_layout(
    recipe: Recipe, planner: MemoryPlanner, speed: Speed, fixed: frozenset[str], per_rank: int
) -> Recipe | None:
    """The fastest layout that fits and makes `per_rank` samples per update; None if none fits.

    `fixed` names the keys that the user has set; of equally fast ones the simplest is taken.
    """
    best, best_seconds = None, float("inf")
    for variant in _variants(recipe, planner.facts, speed.cluster.gpus, fixed):
        if planner.floor(variant, speed.cluster.gpus) > speed.cluster.gpu.memory:
            continue
        chosen = _largest_batch(variant, planner, speed.cluster, fixed, per_rank)
        if chosen is None:
            continue
        samples = chosen.batch.size * chosen.batch.accumulate
        seconds = exchange(chosen, planner.facts, speed).update_seconds / samples
        if seconds < 0.98 * best_seconds:
            best, best_seconds = chosen, seconds
    return best


def _variants(recipe: Recipe, facts: ModelSize, ranks: int, fixed: frozenset[str]) -> Iterator[Recipe]:
    strategies = STRATEGIES if ranks > 1 and "parallel.strategy" not in fixed else (recipe.parallel.strategy,)
    chosen = "speed.checkpoint_activations" in fixed or not facts.can_recompute
    recomputes = (recipe.speed.checkpoint_activations,) if chosen else (0, 1)
    for recompute in recomputes:
        for strategy in strategies:
            yield replaced(recipe, parallel_strategy=strategy, speed_checkpoint_activations=recompute)


def _largest_batch(
    recipe: Recipe, planner: MemoryPlanner, cluster: Cluster, fixed: frozenset[str], per_rank: int
) -> Recipe | None:
    """With the largest power of two of samples per forward pass that fits, and the accumulation it needs."""
    size = recipe.batch.size if "batch.size" in fixed else _largest_size(recipe.data.context, per_rank)
    while size >= 1:
        if per_rank % size and "batch.size" not in fixed:
            size //= 2
            continue
        accumulate = recipe.batch.accumulate if "batch.accumulate" in fixed else max(1, round(per_rank / size))
        variant = replaced(recipe, batch_size=size, batch_accumulate=accumulate)
        if planner.plan(variant, cluster.gpus).total <= MARGIN * cluster.gpu.memory:
            return variant
        if "batch.size" in fixed:
            return None
        size //= 2
    return None


def _largest_size(context: int, per_rank: int) -> int:
    limit = max(1, min(per_rank, _TOKENS_PER_PASS // context))
    return 1 << (limit.bit_length() - 1)


def proposed_lines(recipe: Recipe, planner: MemoryPlanner, speed: Speed) -> list[str]:
    """What makes the recipe fit, or faster, with the same effective batch; empty if it is as good as can be."""
    now = exchange(recipe, planner.facts, speed).update_seconds
    fits = planner.plan(recipe, speed.cluster.gpus).total <= speed.cluster.gpu.memory
    chosen = choose_layout(recipe, planner, speed, frozenset(), recipe.batch.size * recipe.batch.accumulate)
    if chosen is None or (fits and exchange(chosen, planner.facts, speed).update_seconds > 0.98 * now):
        return []
    keys = ("parallel.strategy", "speed.checkpoint_activations", "batch.size", "batch.accumulate")
    return [f"{key}={_value(chosen, key)}" for key in keys if _value(chosen, key) != _value(recipe, key)]


def _value(recipe: Recipe, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def layout_section(
    recipe: Recipe, facts: ModelSize, sent: Exchange, memory: MemorySplit, cluster: Cluster
) -> PageSection:
    """What is exchanged, and whether it hides behind the computation, as rows."""
    strategy = recipe.parallel.strategy if cluster.gpus > 1 else "single"
    nodes = f"{cluster.gpus} GPUs in {cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    section = PageSection("layout", f"Layout: {strategy}, {nodes if cluster.gpus > 1 else 'one GPU'}")
    if cluster.gpus > 1:
        section.add(
            "sent", "sent per update", sent.bytes_sent, format_bytes(sent.bytes_sent), f"by each GPU: {sent.how}"
        )
        how = f"at {format_bytes(cluster.bandwidth)}/s, the slowest link"
        section.add("send_seconds", "time to send", sent.send_seconds, format_hours(sent.send_seconds), how)
    compute = sent.compute_seconds
    section.add("compute_seconds", "time to compute", compute, format_hours(compute), "see time and cost")
    if sent.send_seconds > compute:
        section.remarks.append(
            "Sending takes longer than computing: a larger batch per GPU, or a faster network, makes it faster."
        )
    if memory.total > cluster.gpu.memory:
        section.remarks.append(_way_out(recipe, facts, memory, cluster))
    section.remarks.append(
        "Rule: data where a copy fits on each GPU; else shard (zero1 to zero3) inside fast links; beyond that tensor "
        "parallelism inside a node and pipeline parallelism between nodes, which recipes do not offer."
    )
    return section


def _way_out(recipe: Recipe, facts: ModelSize, memory: MemorySplit, cluster: Cluster) -> str:
    """What would hold a model that does not fit."""
    if least := min_gpus(recipe, facts, memory, cluster, keeps_all=recipe.batch.accumulate > 1):
        return f"About {least} such GPUs hold it with zero3 and this batch."
    if least := min_gpus(recipe, facts, memory, cluster, keeps_all=False):
        return (
            f"About {least} such GPUs hold it with zero3, this batch.size and batch.accumulate=1: with accumulation "
            "each GPU keeps the whole gradients."
        )
    return "No number of such GPUs holds it: one sample needs tensor parallelism, which recipes do not offer."


def min_gpus(recipe: Recipe, facts: ModelSize, memory: MemorySplit, cluster: Cluster, *, keeps_all: bool) -> int:
    """GPUs over which zero3 would spread the state so that the rest fits; 0 if none suffice."""
    gathered = low_width(recipe) * (facts.root + 2 * facts.largest_block)
    reduced = (low_width(recipe) + 4) * (facts.root + facts.largest_block)
    rest = memory.activations + memory.temporary + memory.fragmentation + memory.context + gathered + reduced
    shards = 1 if recipe.parallel.strategy == "data" else cluster.gpus
    state = 4 * facts.parameters + memory.optimizer * shards + (0 if keeps_all else 4 * facts.trained)
    room = cluster.gpu.memory - rest - (4 * facts.trained if keeps_all else 0)
    return -(-state // int(room)) if room >= 1 else 0

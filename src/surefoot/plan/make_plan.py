"""Makes the plan of a run: all its sections, from a recipe or from options alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from surefoot.data.corpus import TrainingData
from surefoot.data.data_error import DataError
from surefoot.plan.checkpoint_interval import HOURS_BETWEEN_FAILURES, checkpoint_interval, interval_section
from surefoot.plan.compute_cost import cost_section, run_cost
from surefoot.plan.fast_path import fast_path, path_section
from surefoot.plan.flops import flops_of
from surefoot.plan.hardware import Cluster, local_gpu
from surefoot.plan.measured import CheckMeasured, calibrate, clip_section, read_check
from surefoot.plan.memory_pages import changes, changes_section, memory_section, verdict
from surefoot.plan.memory_plan import MemoryPlanner, MemorySplit
from surefoot.plan.model_size import ModelSize, model_size
from surefoot.plan.page import PageSection, format_bytes, format_count
from surefoot.plan.parallel_layout import MFU, Speed, choose_layout, exchange, layout_section, proposed_lines
from surefoot.plan.plan_error import PlanError
from surefoot.plan.plan_recipe import recipe_from_file, recipe_from_options, replaced, usual_settings
from surefoot.plan.settings_advice import settings_section
from surefoot.plan.steps import StepCounts, count_steps, epoch_of, open_recipe_data, steps_section
from surefoot.plan.text_lengths import TextLengths, lengths_section, measure_lengths
from surefoot.train.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is to be planned: a recipe, or a number of parameters."""

    source: str | None = None
    overrides: tuple[str, ...] = ()
    parameters: float | None = None
    seq: int | None = None
    cluster: Cluster | None = None
    """None takes the GPU of this machine; without one, or for the CPU, nothing is said about time."""
    tokens: float | None = None
    """Tokens to train on."""
    stage: str = "pretrain"
    mfu: float = MFU
    price: float | None = None
    """Of a GPU-hour."""
    hours_between_failures: float = HOURS_BETWEEN_FAILURES
    disk: float = 1e9
    """Bytes per second that checkpoints are written with."""
    check: Path | None = None
    """A report of surefoot check --json, to calibrate by."""

    @property
    def ranks(self) -> int:
        return self.cluster.gpus if self.cluster else 1


@dataclass(slots=True)
class Plan:
    """The answer: the recipe that was planned, a sentence on its memory, and the page of numbers."""

    recipe: Recipe
    fits: bool | None
    verdict: str
    sections: list[PageSection] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"recipe": self.recipe.model_dump(mode="json"), "fits": self.fits}
        return data | {"verdict": self.verdict} | {section.key: section.as_json() for section in self.sections}


@dataclass(slots=True)
class KnownData:
    """What could be read of the recipe's data, and why nothing could."""

    data: TrainingData | None = None
    lengths: TextLengths | None = None
    problem: str = ""


def make_plan(request: PlanRequest) -> Plan:
    """Plan a run; PlanError, RecipeError and DataError say what was wrong with the request."""
    recipe = _recipe(request)
    if request.cluster is None and recipe.device != "cpu":
        request = replace(request, cluster=local_gpu())
    check = read_check(request.check) if request.check else None
    facts = model_size(recipe)
    known = _known_data(recipe, request) if request.source is not None else KnownData()
    batch = None
    if known.data is not None and recipe.data.kind == "own":
        batch = next(iter(known.data.train_loader))
    on_gpu = request.cluster is not None or recipe.device != "cpu"
    planner = MemoryPlanner(facts, batch=batch, batch_size=recipe.batch.size, on_gpu=on_gpu)
    speed = _speed(recipe, planner, request)
    if request.source is None:
        recipe = _with_layout(recipe, planner, speed, request)
    if check is not None and (calibration := calibrate(check, planner.plan(recipe, request.ranks))) is not None:
        planner.calibration = calibration
    plan = Plan(recipe, None, "")
    epoch = epoch_of(recipe, request.ranks, known.data, known.lengths)
    counts = count_steps(recipe, request.ranks, epoch, request.tokens)
    plan.sections = [_model_section(recipe, facts), steps_section(counts, recipe, request.ranks)]
    if known.problem:
        plan.sections[-1].remarks.append(f"The data was not opened: {known.problem}")
    if known.lengths is not None:
        plan.sections.append(lengths_section(known.lengths, recipe))
    memory = _add_memory(plan, planner, request)
    plan.sections.append(settings_section(recipe, facts, request.cluster, counts.effective_batch, request.stage))
    if speed is not None:
        _add_time(plan, planner, speed, counts, memory, check, request)
    plan.sections.append(clip_section(recipe, check))
    if request.cluster is not None:
        plan.sections.append(path_section(fast_path(recipe, planner, request.cluster)))
    return plan


def _add_memory(plan: Plan, planner: MemoryPlanner, request: PlanRequest) -> MemorySplit:
    recipe, ranks, capacity = plan.recipe, request.ranks, _capacity(plan.recipe, request.cluster)
    memory = planner.plan(recipe, ranks)
    found = changes(recipe, planner, ranks, memory)
    plan.fits = None if capacity is None else memory.total <= capacity
    plan.verdict = verdict(memory, capacity, found)
    source = planner.calibration.source
    section = memory_section(memory, recipe, planner.facts, ranks, capacity, source)
    if source:
        factor = planner.calibration.within_step
        section.remarks.append(f"Calibrated: what comes and goes in a step x {factor:.3f}, by the peak in {source}.")
    else:
        section.remarks.append(
            "Not calibrated: surefoot check measures the real peak on a GPU; --check FILE reads its --json report."
        )
    plan.sections += [section, changes_section(found, capacity)]
    return memory


def _add_time(
    plan: Plan,
    planner: MemoryPlanner,
    speed: Speed,
    counts: StepCounts,
    memory: MemorySplit,
    check: CheckMeasured | None,
    request: PlanRequest,
) -> None:
    """Hardware, layout, cost and checkpoints."""
    recipe, cluster = plan.recipe, speed.cluster
    sent = exchange(recipe, planner.facts, speed)
    cost = run_cost(counts, sent, cluster, check)
    shards = cluster.gpus if cluster.gpus > 1 and recipe.parallel.strategy != "data" else 1
    state = 4 * planner.facts.parameters + memory.optimizer * shards
    interval = checkpoint_interval(
        state,
        cluster.gpus,
        cost.update_seconds,
        disk=request.disk,
        hours_between_failures=request.hours_between_failures,
    )
    layout = layout_section(recipe, planner.facts, sent, memory, cluster)
    if request.source is not None and (lines := proposed_lines(recipe, planner, speed)):
        layout.remarks.append("A layout that fits, or is faster, with the same effective batch:")
        layout.lines = [" ".join(lines)]
    interval = replace(interval, steps=min(interval.steps, counts.total))
    plan.sections += [
        _hardware_section(recipe, cluster, request.mfu),
        layout,
        cost_section(cost, speed.flops, counts, cluster, request.price),
        interval_section(interval, recipe, cost.update_seconds, request.hours_between_failures, request.disk),
    ]


def _recipe(request: PlanRequest) -> Recipe:
    overrides = list(request.overrides)
    if request.source is not None:
        if request.parameters is not None:
            raise PlanError(f"--params: the recipe {request.source} has its model already; leave out one of the two")
        if request.seq is not None:
            overrides.append(f"data.context={request.seq}")
        return recipe_from_file(request.source, overrides)
    if request.parameters is None:
        raise PlanError("name a recipe, as in surefoot plan lm-124m, or give --params, such as --params 7e9 --seq 4096")
    return recipe_from_options(request.parameters, request.seq or 2048, overrides)


def _known_data(recipe: Recipe, request: PlanRequest) -> KnownData:
    """Open what is quick to open; data that is not here is no obstacle where --tokens says how much there is."""
    known = KnownData()
    try:
        known.lengths = measure_lengths(recipe)
        if known.lengths is None or known.lengths.is_quick:
            known.data = open_recipe_data(recipe, request.ranks)
    except DataError as error:
        if request.tokens is None or recipe.data.kind == "own":
            raise
        known.problem = str(error)
    return known


def _speed(recipe: Recipe, planner: MemoryPlanner, request: PlanRequest) -> Speed | None:
    if request.cluster is None:
        return None
    one = replaced(recipe, batch_size=1)
    return Speed(flops_of(recipe, planner.facts, planner.make_batch(one), 1), request.cluster, request.mfu)


def _capacity(recipe: Recipe, cluster: Cluster | None) -> float | None:
    if cluster is not None:
        return cluster.gpu.memory
    return float(psutil.virtual_memory().total) if recipe.device == "cpu" else None


def _with_layout(recipe: Recipe, planner: MemoryPlanner, speed: Speed | None, request: PlanRequest) -> Recipe:
    """The recipe with strategy, recomputation and batch chosen, except where the user set them."""
    wanted, _ = usual_settings(planner.facts.parameters)
    if request.tokens is not None:
        wanted = min(wanted, request.tokens)
    per_rank = 1 << max(0, round(math.log2(wanted / recipe.data.context / request.ranks)))
    fixed = frozenset(override.partition("=")[0] for override in request.overrides)
    if speed is not None:
        chosen = choose_layout(recipe, planner, speed, fixed, per_rank)
        # Accumulation keeps the whole gradients on each GPU: rather a smaller batch than a run that does not fit.
        chosen = chosen or choose_layout(recipe, planner, speed, fixed | {"batch.accumulate"}, per_rank)
        if chosen is not None:
            return chosen
    free: dict[str, Any] = {}
    if "batch.accumulate" not in fixed:
        free["batch_accumulate"] = max(1, round(per_rank / recipe.batch.size))
    if request.ranks > 1 and "parallel.strategy" not in fixed:
        free["parallel_strategy"] = "zero3"
    if "speed.checkpoint_activations" not in fixed:
        free["speed_checkpoint_activations"] = 1
    return replaced(recipe, **free)


def _model_section(recipe: Recipe, facts: ModelSize) -> PageSection:
    section = PageSection("model", f"Model: {recipe.model.factory}")
    shape = ", ".join(f"{name} {value}" for name, value in recipe.model.arguments.items())
    section.add("parameters", "parameters", facts.parameters, format_count(facts.parameters), shape or "counted")
    if facts.trained != facts.parameters:
        section.add("trained", "trained", facts.trained, format_count(facts.trained), "require a gradient")
    return section


def _hardware_section(recipe: Recipe, cluster: Cluster, mfu: float) -> PageSection:
    gpu, compute = cluster.gpu, recipe.precision.compute
    section = PageSection("hardware", f"Hardware: {cluster.gpus} x {gpu.name}")
    guess = "assumed by its memory; name the GPU for its speed, as 8xH100" if cluster.assumed else "named"
    section.add("gpu", "GPU", gpu.name, gpu.name, f"{guess}, {format_bytes(gpu.memory)}")
    peak = gpu.peak(compute)
    section.add("peak", "peak FLOP/s", peak, f"{peak:.3g}", f"dense products in {compute}, data sheet")
    section.add("mfu", "share reached", mfu, f"{mfu:.0%}", "model FLOPs / peak, assumed (--mfu)")
    section.add("link", "link", gpu.link, f"{format_bytes(gpu.link)}/s", "to another GPU of the node, data sheet")
    if cluster.nodes > 1:
        how = f"per GPU to another node of {cluster.per_node}, assumed (--network)"
        section.add("network", "network", cluster.network, f"{format_bytes(cluster.network)}/s", how)
    return section

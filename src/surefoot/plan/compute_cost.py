"""Time and money of a run."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.plan.flops import Flops
from surefoot.plan.hardware import Cluster
from surefoot.plan.measured import CheckMeasured
from surefoot.plan.page import PageSection, format_hours
from surefoot.plan.parallel_layout import Exchange
from surefoot.plan.steps import StepCounts


@dataclass(frozen=True, slots=True)
class RunCost:
    """Seconds of an update and of the run, and GPU-hours."""

    update_seconds: float
    how: str
    seconds: float
    gpu_hours: float


def run_cost(counts: StepCounts, exchange: Exchange, cluster: Cluster, check: CheckMeasured | None) -> RunCost:
    """From the measured speed where there is one, else from FLOPs at the assumed share of the peak."""
    if check is not None and check.samples_per_second:
        update = counts.effective_batch / check.samples_per_second
        how = f"effective batch / {check.samples_per_second:,.4g} samples/s in {check.source}"
    else:
        update, how = exchange.update_seconds, "the longer of computing and sending; they overlap"
    seconds = update * counts.total
    return RunCost(update, how, seconds, seconds * cluster.gpus / 3600)


def cost_section(cost: RunCost, flops: Flops, counts: StepCounts, cluster: Cluster, price: float | None) -> PageSection:
    """Time and cost as rows."""
    section = PageSection("cost", "Time and cost")
    section.add("flops_per_sample", "FLOPs a sample", flops.per_sample, f"{flops.per_sample:.3g}", flops.how)
    if flops.counted != flops.per_sample:
        how = "counted by torch on fake tensors, attention without a causal mask"
        section.add("flops_counted", "counted", flops.counted, f"{flops.counted:.3g}", how)
    total = flops.per_sample * counts.samples
    section.add("flops", "FLOPs in total", total, f"{total:.3g}", f"x {counts.samples:,} samples")
    section.add("update_seconds", "time of an update", cost.update_seconds, format_hours(cost.update_seconds), cost.how)
    if counts.tokens_per_update is not None:
        speed = counts.tokens_per_update / cost.update_seconds
        section.add("tokens_per_second", "tokens/s", speed, f"{speed:,.0f}", "tokens per update / time of an update")
    how = "total steps x time of an update, without evaluation and failures"
    section.add("seconds", "time of the run", cost.seconds, format_hours(cost.seconds), how)
    how = f"time of the run x {cluster.gpus} GPUs"
    section.add(
        "gpu_hours", "GPU-hours", cost.gpu_hours, f"{cost.gpu_hours:,.{0 if cost.gpu_hours >= 100 else 2}f}", how
    )
    if price is not None:
        how = f"GPU-hours x {price:g} (--price)"
        section.add("price", "cost", cost.gpu_hours * price, f"{cost.gpu_hours * price:,.0f}", how)
    else:
        section.remarks.append("Name the price of a GPU-hour (--price 2.5) for the cost.")
    return section

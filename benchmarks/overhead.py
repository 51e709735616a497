"""`surefoot bench overhead`: step time of the attached loop against the bare clipped one, in alternating blocks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import surefoot
from benchmarks.host_syncs import count_host_syncs
from surefoot.journal.output_files import check_output, output_file
from surefoot.models.decoder import SIZES, Decoder, count_parameters, next_token_loss

BATCH = {"cpu": {"10m": (8, 256)}, "cuda": {"10m": (16, 512), "124m": (16, 1024), "1.3b": (8, 1024)}}
"""Samples and tokens per batch, by device and size."""
CLIP = 1.0
Step = Callable[[], None]


@dataclass(frozen=True)
class OverheadCase:
    """One row of the table: a model, an optimizer, eager or compiled."""

    size: str
    optimizer: str = "fused AdamW"
    compiled: bool = False
    device: str = "cuda"
    variants: tuple[str, ...] = ("bare", "attached")
    rounds: int = 9
    steps: int = 20
    """Timed steps per block; half as many untimed ones precede them, while caches and files warm up."""
    batch: tuple[int, int] | None = None
    """Samples and tokens per batch, if not those of `BATCH`."""

    @property
    def separate_models(self) -> bool:
        """Each variant has its own model, and one guard lasts for the whole run, with snapshots as in a long run."""
        return set(self.variants) == {"bare", "attached"}


@dataclass
class OverheadResult:
    """Milliseconds per step of the bare loop, and every variant as a ratio to it."""

    plan: OverheadCase
    parameters: int
    bare_ms: float
    ratios: dict[str, float] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    """The same ratio from the sums of all rounds, which includes the cost of occasional snapshots."""
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    """First and third quartile of the rounds' ratios."""
    synchronisations: dict[str, float] = field(default_factory=dict)
    """Host syncs per step, on CUDA."""


class OverheadLoop:
    """One model with its optimizers, and a training step for each variant."""

    def __init__(self, plan: OverheadCase) -> None:
        torch.manual_seed(0)
        self.plan = plan
        self.device = torch.device(plan.device)
        self.model = Decoder(SIZES[plan.size]).to(self.device)
        self.forward_model: nn.Module = torch.compile(self.model) if plan.compiled else self.model  # pyright: ignore
        self.optimizers = _optimizers(plan.optimizer, self.model)
        samples, tokens = plan.batch or BATCH[plan.device][plan.size]
        shape = (4, samples, tokens + 1)
        self.batches = torch.randint(0, SIZES[plan.size].vocab, shape, device=self.device)
        self.batches_drawn = 0

    def loss(self) -> tuple[Tensor, Tensor]:
        batch = self.batches[self.batches_drawn % len(self.batches)]
        self.batches_drawn += 1
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return next_token_loss(self.forward_model, batch), batch

    def finish(self) -> None:
        for o in self.optimizers:
            o.step()
        for o in self.optimizers:
            o.zero_grad(set_to_none=True)

    def bare(self) -> None:
        self.loss()[0].backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.finish()

    def item(self) -> None:
        """The common way to watch gradients: `.item()` on every tensor."""
        self.loss()[0].backward()
        for p in self.model.parameters():
            if p.grad is not None:
                g = p.grad
                _ = g.norm().item(), g.mean().item(), g.std().item(), g.isnan().any().item()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.finish()

    @contextlib.contextmanager
    def variant(self, name: str) -> Iterator[Step]:
        """The step function of a variant, inside the context it needs."""
        if name == "attached":
            with tempfile.TemporaryDirectory() as folder:
                guard = surefoot.attach(self.forward_model, self.optimizers, run_dir=folder, clip=CLIP)

                def attached() -> None:
                    loss, batch = self.loss()
                    guard.watch(loss, batch).backward()
                    self.finish()

                yield attached
                guard.close()
        elif name == "anomaly":
            with torch.autograd.set_detect_anomaly(True):
                yield self.bare
        elif name == "debug":
            from transformers.debug_utils import DebugUnderflowOverflow

            DebugUnderflowOverflow(self.model)
            yield self.bare
            for module in self.model.modules():
                module._forward_hooks.clear()
        else:
            yield {"bare": self.bare, "item": self.item}[name]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, step: Step, steps: int) -> float:
        """Milliseconds per step."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        self.synchronize()
        return (time.perf_counter() - start) / steps * 1e3


def _optimizers(name: str, model: nn.Module) -> list[Optimizer]:
    if name == "Muon":
        matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
        rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
        return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-4, fused=True)]
    return [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if name == "fused AdamW" else None)]


def measure(plan: OverheadCase, say: Callable[[str], None]) -> OverheadResult:
    """Alternate short blocks of all variants and report the median of the rounds' ratios."""
    bench = OverheadLoop(plan)
    times: dict[str, list[float]] = {name: [] for name in plan.variants}
    with contextlib.ExitStack() as stack:
        # Each variant has its own model and stays set up for the whole run, so that blocks can be as short as a few
        # steps: whatever slows the host down hits neighbouring blocks alike.
        variants = {
            name: stack.enter_context((bench if name == "bare" else OverheadLoop(plan)).variant(name))
            for name in plan.variants
            if plan.separate_models
        }
        for number in range(plan.rounds + 1):
            order = plan.variants if number % 2 else plan.variants[::-1]  # alternate which comes first
            for name in order:
                with contextlib.nullcontext(variants[name]) if plan.separate_models else bench.variant(name) as step:
                    bench.timed(step, plan.steps // 2 + 1 if number else 3 * plan.steps)
                    spent = bench.timed(step, plan.steps)
                if number:  # the first round warms up everything
                    times[name].append(spent)
            if not plan.separate_models or number % 50 == 0:
                mode = "compiled" if plan.compiled else "eager"
                say(f"{plan.size} {plan.optimizer} {mode}: round {number} of {plan.rounds}")
    result = OverheadResult(plan, count_parameters(bench.model), statistics.median(times["bare"]))
    for name, spent in times.items():
        ratios = [a / b for a, b in zip(spent, times["bare"], strict=True)]
        result.ratios[name] = statistics.median(ratios)
        result.means[name] = sum(spent) / sum(times["bare"])
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        result.spread[name] = (low, high)
    if plan.device == "cuda" and set(plan.variants) == {"bare", "attached"}:
        for name in plan.variants:
            with bench.variant(name) as step:
                bench.timed(step, 5)
                result.synchronisations[name] = count_host_syncs(step, steps=10)
    return result


STEPS = {"cpu": {"10m": 2}, "cuda": {"10m": 5, "124m": 20, "1.3b": 8}}
"""Timed steps per block."""
ROUNDS = {"cpu": {"10m": 15}, "cuda": {"10m": 120, "124m": 7, "1.3b": 5}}
"""Rounds of blocks. A small model on a fast device is host-bound, and host speed varies most: many short rounds."""


def cases(device: str, *, quick: bool) -> list[OverheadCase]:
    """Every row of the table for a device."""

    def line(size: str, optimizer: str, *, compiled: bool = False) -> OverheadCase:
        rounds = 3 if quick else ROUNDS[device][size]
        return OverheadCase(size, optimizer, compiled=compiled, device=device, rounds=rounds, steps=STEPS[device][size])

    lines = [line(size, "fused AdamW", compiled=compiled) for size in STEPS[device] for compiled in (False, True)]
    for size in ("10m", "124m"):
        if size in STEPS[device]:
            lines += [line(size, name) for name in ("default AdamW", "Muon")]
    largest = "124m" if device == "cuda" else "10m"
    return lines + _alternatives(largest, device, STEPS[device][largest] // 4 + 1)


def _alternatives(size: str, device: str, steps: int) -> list[OverheadCase]:
    """Other ways to watch for trouble; transformers' debug mode where it is installed."""
    debug = ("debug",) if importlib.util.find_spec("transformers") else ()
    return [OverheadCase(size, device=device, variants=("bare", "item", "anomaly", *debug), rounds=3, steps=steps)]


def describe_machine(device: str) -> str:
    """The machine, torch and Python, for the heading of a table."""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def report(results: list[OverheadResult], device: str) -> str:
    """The table as Markdown, in the README's format."""
    head = [
        f"Machine: {describe_machine(device)}.",
        "",
        "| model | optimizer | mode | loop | ms/step | ratio | quartiles | ratio of sums | host syncs/step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(line for r in results for line in result_lines(r))])


def result_lines(r: OverheadResult) -> list[str]:
    """One row of the table per variant."""
    mode = "compiled" if r.plan.compiled else "eager"
    lines: list[str] = []
    for name, ratio in r.ratios.items():
        low, high = r.spread[name]
        syncs = f"{r.synchronisations[name]:.1f}" if name in r.synchronisations else "-"
        lines.append(
            f"| {r.parameters / 1e6:,.0f} M | {r.plan.optimizer} | {mode} | {name} | {r.bare_ms * ratio:.2f} | "
            f"{ratio:.3f} | {low:.3f}-{high:.3f} | {r.means[name]:.3f} | {syncs} |"
        )
    return lines


def main(
    device: str | None = None,
    *,
    quick: bool = False,
    only: str = "",
    out: Path | None = None,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> str:
    """Measure the table for a device; `only` keeps the rows whose name contains it."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in STEPS:
        raise ValueError(f"bench overhead: device {device!r} is unknown. Use --device {' or '.join(STEPS)}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench overhead: no CUDA device found. Use --device cpu.")
    chosen = [
        p
        for p in cases(device, quick=quick)
        if only in f"{p.size} {p.optimizer} {'compiled' if p.compiled else 'eager'}"
    ]
    if not chosen:
        raise ValueError(
            f"bench overhead: no row of the table contains {only!r}. Try '124m', 'fused', 'compiled' or 'Muon'."
        )
    if out is not None:
        check_output(out, force=force)
    results: list[OverheadResult] = []
    for plan in chosen:
        results.append(measure(plan, say))
        say("\n".join(result_lines(results[-1])))  # at once, so that an interrupt loses only the rows still to come
        if out is not None:
            made_by = {"made_by": "surefoot bench overhead"}
            report_data = {**made_by, "machine": describe_machine(device), "results": [asdict(r) for r in results]}
            with output_file(out, force=force) as draft:
                draft.write_text(json.dumps(report_data, indent=1))

        if device == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    return report(results, device)

"""All runs of `surefoot bench scale`: within a time limit, with every result on disk as soon as it is there."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import surefoot
from benchmarks.overhead import describe_machine
from benchmarks.scale import scale_controls, scale_faults
from benchmarks.scale.loops import BARE, PEERS, SUREFOOT
from benchmarks.scale.scale_report import ScaleBoard
from benchmarks.scale.scale_scenario import SCENARIOS, ScaleScenario
from benchmarks.scale.scale_trainer import ScaleResult, ScaleTrainer, reproducible_and_quiet
from benchmarks.scale.sizes import SIZES, ScaleSize
from benchmarks.zoo import other_rules
from surefoot import models
from surefoot.journal.output_files import check_output, output_file

MADE_BY = "surefoot bench scale"
QUICK = (
    scale_faults.garbage_for_60,
    scale_faults.wrong_targets_for_80,
    scale_faults.lr_x30,
    scale_faults.second_moments_damaged,
    scale_faults.too_hot_from_birth,
    scale_faults.nan_gradient,
    scale_controls.json_for_good,
    scale_controls.dropout_on,
)
"""What is planted in the scenarios of `--quick`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """What to train."""

    size: ScaleSize
    device: str
    scenarios: tuple[ScaleScenario, ...]
    peers: tuple[str, ...]

    def runs(self) -> Iterator[tuple[ScaleScenario, str]]:
        """Bare and surefoot first, then the other rules, so that a time limit cuts off what tells least."""
        for scenario in self.scenarios:
            yield from ((scenario, loop) for loop in (BARE, SUREFOOT))
        for scenario in self.scenarios:
            yield from ((scenario, loop) for loop in self.peers)


def make_plan(size: str, device: str | None, *, quick: bool = False, only: str = "") -> ScalePlan:
    """The plan for these options; `ValueError` for one that is unknown."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if size not in SIZES or device not in ("cpu", "cuda"):
        raise ValueError(f"bench scale: use --size {' or '.join(SIZES)} and --device cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench scale: no CUDA device found. Use --device cpu --size tiny.")
    by_group = sorted(SCENARIOS.values(), key=lambda scenario: scenario.healthy)  # faults first
    chosen = [s for s in by_group if only in s.name and (not quick or s.plant in QUICK)]
    if not chosen:
        raise ValueError(f"bench scale: no scenario's name contains {only!r}. There are: {', '.join(SCENARIOS)}.")
    scenarios = (scale_controls.FAULT_FREE, *chosen)
    return ScalePlan(size=SIZES[size], device=device, scenarios=scenarios, peers=() if quick else tuple(PEERS))


@dataclass(slots=True)
class ResultFile:
    """The results so far, and the file that holds them. A run is trained again when its sources have changed."""

    plan: ScalePlan
    path: Path | None
    results: dict[tuple[str, str], ScaleResult] = field(default_factory=dict)
    _sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bench = _source_hash(Path(__file__).parent, Path(other_rules.__file__), Path(models.__file__).parent)
        everything = bench + _source_hash(Path(surefoot.__file__).parent)
        self._sources = {name: everything if name == SUREFOOT else bench for name in (BARE, SUREFOOT, *PEERS)}

    @property
    def header(self) -> dict[str, Any]:
        """What all results depend on."""
        machine = describe_machine(self.plan.device)
        return {"made_by": MADE_BY, "machine": machine, "size": asdict(self.plan.size)}

    def load(self) -> None:
        """Take over what an earlier call has written, where it would come out the same now."""
        if self.path is None or not self.path.exists():
            return
        try:
            stored = json.loads(self.path.read_text())
        except ValueError:
            return
        if {key: stored.get(key) for key in self.header} != self.header:
            return
        for row in stored["results"]:
            if row["sources"] == self._sources.get(row["loop"]) and not row["error"]:
                self.results[row["scenario"], row["loop"]] = _parsed(row)

    def add(self, result: ScaleResult) -> None:
        self.results[result.scenario, result.loop] = result
        if self.path is not None:
            rows = [asdict(r) | {"sources": self._sources[r.loop]} for r in self.results.values()]
            with output_file(self.path, force=True) as draft:
                draft.write_text(json.dumps(self.header | {"results": rows}, indent=1, allow_nan=False))


def train_all(
    plan: ScalePlan, file: ResultFile, *, run_dirs: Path, seconds: float, say: Callable[[str], None]
) -> ScaleBoard:
    """Train what is missing; no run begins after `seconds`."""
    began = time.perf_counter()
    missing = [(scenario, loop) for scenario, loop in plan.runs() if (scenario.name, loop) not in file.results]
    trainer: ScaleTrainer | None = None
    for number, (scenario, loop) in enumerate(missing, start=1):
        if time.perf_counter() - began > seconds:
            say(f"the time limit of {seconds:.0f} s is reached: {len(missing) - number + 1} runs are left out")
            break
        trainer = trainer or ScaleTrainer(plan.size, torch.device(plan.device))
        result = trainer.run(scenario, loop, run_dirs / scenario.name)
        file.add(result)
        say(f"[{time.perf_counter() - began:5.0f} s] {number} of {len(missing)}: {progress_line(result)}")
    took = time.perf_counter() - began
    return ScaleBoard(plan.scenarios, (BARE, SUREFOOT, *plan.peers), file.results, plan.size, took)


def stored_board(path: Path) -> ScaleBoard:
    """The scores of a file that an earlier call has written, on whatever machine."""
    try:
        stored = json.loads(path.read_text())
        size, rows = SIZES[stored["size"]["name"]], [_parsed(row) for row in stored["results"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"bench scale: {path} cannot be read as a file that --out wrote: {error!r}") from None
    results = {(row.scenario, row.loop): row for row in rows}
    names = {row.scenario for row in rows}
    scenarios = [s for s in (scale_controls.FAULT_FREE, *SCENARIOS.values()) if s.name in names]
    loops = [loop for loop in (BARE, SUREFOOT, *PEERS) if any(row.loop == loop for row in rows)]
    return ScaleBoard(scenarios, loops, results, size)


def _parsed(row: dict[str, Any]) -> ScaleResult:
    """A result as it was before it became JSON."""
    fields = {key: value for key, value in row.items() if key != "sources"}
    fields["actions"] = tuple(row["actions"])
    fields["eval_losses"] = tuple((step, loss) for step, loss in row["eval_losses"])
    return ScaleResult(**fields)


def progress_line(result: ScaleResult) -> str:
    """One result in one line."""
    ended = result.error or ("broken" if result.loss is None else f"eval loss {result.loss:.4f}")
    parts = [f"{result.scenario}, {result.loop}: {ended}", f"{result.ms_per_update:.1f} ms/update"]
    if result.stopped is not None:
        parts.append(f"stopped at {result.stopped}")
    if result.seen_after is not None:
        parts.append(f"seen after {result.seen_after}")
    if result.cause:
        parts.append(f"cause {result.cause}")
    if result.actions:
        parts.append(" ".join(result.actions))
    elif result.acted:
        parts.append(f"acted {result.acted} times")
    return ", ".join(parts)


def main(
    size: str,
    device: str | None,
    *,
    quick: bool = False,
    only: str = "",
    out: Path | None = None,
    keep: Path | None = None,
    force: bool = False,
    seconds: float,
    say: Callable[[str], None] = print,
) -> ScaleBoard:
    """Train the plan and return its scores; `keep` is a folder for surefoot's run directories."""
    plan = make_plan(size, device, quick=quick, only=only)
    if out is not None:
        check_output(out, force=force)
    file = ResultFile(plan, out)
    file.load()
    with reproducible_and_quiet(), tempfile.TemporaryDirectory(prefix="surefoot-scale-") as folder:
        return train_all(plan, file, run_dirs=keep or Path(folder), seconds=seconds, say=say)


def _source_hash(*paths: Path) -> str:
    """A hash of the Python sources in these files and folders, without surefoot's command line."""
    files: Sequence[Path] = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.parent.name != "cli"):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]

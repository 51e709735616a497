"""Replaying recorded rows makes the recorded decisions; another policy makes different ones."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import surefoot
from benchmarks.golden import SCENARIOS
from benchmarks.recorded_run import LAG, policy_from, read_attaches
from benchmarks.replay import GateReplay, replay
from surefoot.cli import app
from surefoot.gate.clip import Clip, ClipUnit
from surefoot.gate.rule import NormRule, make_decider, new_gate_memory
from surefoot.journal.strict_json import dumps, loads_object
from surefoot.judge.policy import Policy
from surefoot.judge.thresholds import Thresholds
from surefoot.measure import block_layout
from surefoot.measure.block_layout import UNITS_START, SummarySlot, VerdictSlot
from surefoot.records import Action, Decision, Event, StepMetrics, Verdict

GOLDEN = Path(__file__).parent / "golden"
REGENERATE = (
    "If decisions were meant to change, regenerate the recorded runs and review the difference: "
    "OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.golden tests/bench/golden"
)
REFUSED, REWOUND = "gradient_nan-recurrent-clear-11", "rate_too_high-decoder-brutal-11"


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["bench", "replay", *map(str, words)])


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a recorded run that a test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


# -- the recorded runs


@pytest.mark.parametrize("name", SCENARIOS)
def test_replay_makes_the_recorded_decisions(name: str) -> None:
    try:
        replayed = replay(GOLDEN / name)
    except ValueError as error:
        pytest.fail(f"{error}. {REGENERATE}")
    assert not replayed.differences, f"{replayed.differences[0]}\n{REGENERATE}"
    assert not replayed.notes
    result = invoke(GOLDEN / name)
    assert result.exit_code == 0, result.output
    assert f"{len(replayed.recorded)} decisions, all made again" in result.stdout


def test_recorded_runs_cover_the_actions() -> None:
    runs = [replay(GOLDEN / name) for name in SCENARIOS]
    actions = {d.action for run in runs for d in run.recorded}
    assert {Action.REFUSE, Action.REWIND, Action.RELAX} <= actions, REGENERATE
    assert any(not run.recorded for run in runs), "one run has no decisions"
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(SCENARIOS), REGENERATE
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*.*") if path.is_file()) < 1.5e6


def test_stricter_gate_refuses_more() -> None:
    replayed = replay(GOLDEN / REWOUND, Policy(max_norm_ratio=1.2))
    assert not replayed.same_policy
    first = replayed.differences[0]
    assert first.then is None
    assert first.now is not None
    assert first.now.action is Action.REFUSE
    assert not first.hypothetical
    assert all(p.hypothetical for p in replayed.pairs if p.decision.attempt > first.decision.attempt)
    result = invoke(GOLDEN / REWOUND, "--set", "max_norm_ratio=1.2")
    assert result.exit_code == 0
    assert f"the first difference is at attempt {first.decision.attempt} (step {first.decision.step})" in result.stdout
    assert "hypothetical" in result.stdout


def test_observe_decides_the_same_without_applying() -> None:
    replayed = replay(GOLDEN / REFUSED, Policy(observe=True))
    assert replayed.recorded
    assert replayed.differences[0].differing_fields == ["applied"]
    result = invoke(GOLDEN / REFUSED, "--policy", "observe")
    assert result.exit_code == 0
    assert "not applied: refuse" in result.stdout


def test_measurement_settings_do_not_change_the_policy() -> None:
    replayed = replay(GOLDEN / REWOUND, Policy(snapshot_every=7, weights_every=3))
    assert replayed.same_policy
    assert not replayed.differences


def test_json_output() -> None:
    result = invoke(GOLDEN / REWOUND, "--json", "--set", "thresholds.norm_jump_ratio=9", "--set", "max_norm_ratio=1.2")
    assert result.exit_code == 0
    output = json.loads(result.stdout)
    assert output["policy"]["thresholds"]["norm_jump_ratio"] == 9.0
    assert (output["same_policy"], output["differences"] > 0) == (False, True)
    assert {"step", "attempt", "then", "now", "same", "hypothetical"} == output["decisions"][0].keys()
    assert output["recorded"] == sum(pair["then"] is not None for pair in output["decisions"])


def test_replay_needs_no_torch() -> None:
    words = ["bench", "replay", str(GOLDEN / REWOUND), "--set", "max_norm_ratio=1.2"]
    code = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {words}; import surefoot.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- errors are one line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "dare"], "--policy dare is unknown. Use observe or protect"),
        (["--set", "max_norm_rato=10"], "Did you mean max_norm_ratio?"),
        (["--set", "norm_jump_ratio=10"], "Did you mean thresholds.norm_jump_ratio?"),
        (["--set", "thresholds.norm_jmp_ratio=10"], "Did you mean thresholds.norm_jump_ratio?"),
        (["--set", "colour=10"], "Use one of observe, max_norm_ratio"),
        (["--set", "max_norm_ratio"], "has no value"),
        (["--set", "max_consecutive_vetoes=many"], "max_consecutive_vetoes must be a whole number"),
        (["--set", "max_consecutive_vetoes=0"], "max_consecutive_vetoes must be at least 1"),
        (["--set", "thresholds.baseline_rows=0"], "thresholds.baseline_rows must be a whole number, above 0"),
        (["--set", "max_norm_ratio=nan"], "max_norm_ratio must be a number"),
        (["--set", "observe=maybe"], "observe is true or false"),
        (["--set", "snapshot_every=5"], "which no replay can show"),
    ],
)
def test_bad_options_get_one_line(words: list[str], message: str) -> None:
    result = invoke(GOLDEN / REFUSED, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def edit_info(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((run / "run.json").read_text())
    change(info)
    (run / "run.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.update(schema=7), "is of schema 7"),
        (lambda info: info["config"].pop("judged"), "run.json lacks the judge's inputs"),
        (lambda info: info["config"].pop("policy"), "does not hold the complete policy"),
        (lambda info: info["config"]["policy"].update(zeal=3), "the policy of another surefoot version; unknown: zeal"),
        (lambda info: info["config"]["policy"]["sight"].update(zeal=3), "unknown: thresholds.zeal"),
    ],
)
def test_run_of_another_version_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, copied: Callable[[str], Path]
) -> None:
    run = copied(REFUSED)
    edit_info(run, change)
    result = invoke(run)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_missing_run_or_run_without_rows_is_refused(tmp_path: Path, copied: Callable[[str], Path]) -> None:
    assert "does not exist" in invoke(tmp_path / "nowhere").stderr
    assert "is not a run directory" in invoke(tmp_path).stderr
    run = copied(REFUSED)
    shutil.rmtree(run / "signals")
    assert "no rows to replay" in invoke(run).stderr
    assert invoke(run).exit_code == invoke(tmp_path).exit_code == 2


def test_rows_of_another_schema_are_refused(copied: Callable[[str], Path]) -> None:
    run = copied(REFUSED)
    (file,) = (run / "signals").glob("scalars-*.bin")
    file.write_bytes(file.read_bytes().replace(b'"update_ratio"', b'"update_rating'[:13] + b'"', 1))
    result = invoke(run)
    assert result.exit_code == 2
    assert "rows of another schema: no update_ratio" in result.stderr


def test_first_difference_is_shown(copied: Callable[[str], Path]) -> None:
    run = copied(REFUSED)
    events = (run / "events.jsonl").read_text()
    lines = events.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if '"kind":"decision"' in line)
    changed = lines[first].replace('"cause":"unknown"', '"cause":"drift"')
    assert changed != lines[first]
    (run / "events.jsonl").write_text("".join([*lines[:first], changed, *lines[first + 1 :]]))
    result = invoke(run)
    assert result.exit_code == 1
    assert "differs in cause" in result.stdout
    assert "drift" in result.stdout


def test_changed_wording_of_a_reason_is_no_difference(copied: Callable[[str], Path]) -> None:
    run = copied(REFUSED)
    events = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(events.replace('"reason":"', '"reason":"once ', 1))
    assert invoke(run).exit_code == 0


def test_missing_per_tensor_rows_are_noted(copied: Callable[[str], Path]) -> None:
    run = copied(REFUSED)
    for file in (run / "signals").glob("layers-*.bin"):
        file.unlink()
    assert any("no longer on disk" in note for note in replay(run).notes)


# -- a replay equals the live run


class Spy:
    """A judge that decides by plan and records its calls."""

    def __init__(self, plan: dict[int, Action]) -> None:
        self.plan, self.calls = plan, []
        self.names: list[str] = []
        self.quiet, self.wants_weight_check, self.proven = True, False, -1

    def update(self, row: StepMetrics, layers: np.ndarray) -> list[Event]:
        self.calls.append(("row", repr(row), layers.tobytes()))
        self.proven = row.attempt - 1
        action = self.plan.pop(row.attempt, None)
        if action is None:
            return []
        return [Decision(step=row.step, attempt=row.attempt, time=row.time, action=action, reason="planned")]

    def rewound(self, attempt: int, step: int) -> None:
        self.calls.append(("rewound", attempt, step))

    def failed(self, decision: Decision, why: str) -> None:
        self.calls.append(("failed", decision.action, why))

    def rewired(self, names: list[str], scopes: Any) -> None:
        self.names = names


def as_recorded(run_dir: Path) -> Iterator[tuple[Any, ...]]:
    """The calls that a replayed judge gets."""
    for run in read_attaches(run_dir)[0]:
        for recorded in run.rows():
            for notice in recorded.notices:
                rewound = ("rewound", notice.attempt, notice.step)
                failed = notice.failed_decision
                yield rewound if failed is None else ("failed", failed.action, notice.why)
            if recorded.judged:
                assert recorded.layers is not None
                yield "row", repr(recorded.row), recorded.layers.tobytes()


class Loop:
    """A training loop with this many optimizers."""

    def __init__(self, run_dir: Path, optimizers: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(self.model[k:].parameters() if k == optimizers - 1 else self.model[k].parameters(), lr=0.1)
            for k in range(optimizers)
        ]
        options = {"policy": Policy(snapshot_every=2)} | options
        self.guard: Any = surefoot.attach(self.model, self.optimizers, run_dir=run_dir, **options)

    def spy(self, plan: dict[int, Action]) -> Spy:
        judge = Spy(plan)
        judge.names = self.guard._reader.judge.names
        self.guard._reader.judge = judge
        return judge

    def loss(self) -> Tensor:
        return self.guard.watch(self.model(torch.rand(8, 4)).square().mean())

    def train(self, steps: int, *, discards: tuple[int, ...] = ()) -> None:
        for i in range(steps):
            self.loss().backward()
            if i in discards:
                self.model.zero_grad()
                continue
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad()


@pytest.mark.parametrize("optimizers", [1, 2, 3])
@pytest.mark.parametrize("ring", [None, False])
def test_replayed_judge_gets_the_same_calls_in_the_same_order(
    optimizers: int, ring: bool | None, tmp_path: Path
) -> None:
    loop = Loop(tmp_path / "run", optimizers, snapshot_memory=ring)
    spy = loop.spy({6: Action.REWIND, 14: Action.RELAX, 20: Action.REWIND, 21: Action.REWIND})
    loop.train(30, discards=(7, 8, 16, 22))
    loop.guard.close()
    assert {call[0] for call in spy.calls} == {"row", "rewound" if ring is None else "failed"}
    assert list(as_recorded(tmp_path / "run")) == spy.calls


def test_replayed_judge_gets_the_same_calls_after_parameters_were_added(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", snapshot_memory=False)
    spy = loop.spy({7: Action.REWIND, 12: Action.REWIND})
    loop.train(8)
    loop.model.append(nn.Linear(4, 4))
    loop.optimizers[0].add_param_group({"params": loop.model[3].parameters()})
    loop.train(8)
    loop.guard.close()
    assert ("failed", "rewind", "no snapshots are kept") in spy.calls
    assert list(as_recorded(tmp_path / "run")) == spy.calls


def test_every_attach_has_its_own_judge(tmp_path: Path) -> None:
    for limit in (3, 5):
        loop = Loop(tmp_path / "run", policy=Policy(max_consecutive_vetoes=limit))
        loop.train(4)
        with pytest.raises(surefoot.TrainingStopped):
            for _ in range(20):
                (loop.loss() * math.nan).backward()
                loop.optimizers[0].step()
        loop.guard.close()
    replayed = replay(tmp_path / "run")
    assert not replayed.differences
    assert replayed.policy.max_consecutive_vetoes == 5
    runs, _ = read_attaches(tmp_path / "run")
    assert [run.policy.max_consecutive_vetoes for run in runs] == [3, 5]
    assert [
        sum(d.action is Action.REFUSE for d in run.decisions) >= run.policy.max_consecutive_vetoes for run in runs
    ] == [True, True]
    sooner = replay(tmp_path / "run", Policy(max_consecutive_vetoes=2))
    assert sooner.differences[0].now is not None
    assert sooner.differences[0].now.action is Action.STOP


def test_policy_round_trips_through_run_json() -> None:
    policy = Policy(
        max_norm_ratio=math.inf, max_consecutive_vetoes=7, thresholds=Thresholds(norm_jump_ratio=9.5, baseline_rows=17)
    )
    assert policy_from((loads_object(dumps({"policy": asdict(policy)})) or {})["policy"]) == policy


def test_lag_equals_that_of_the_readback() -> None:
    assert LAG == block_layout.LAG


def test_replayed_norm_rule_equals_that_of_the_gate() -> None:
    """Rows of one gate, replayed with other settings, get the verdicts of a gate with those settings."""
    rng = np.random.default_rng(3)
    norms = np.exp(rng.normal(0.0, 1.5, 400)).astype(np.float32)
    policies = (Policy(max_norm_ratio=8.0, warmup=20), Policy(max_norm_ratio=1.5, warmup=5))
    then, now = ([*gated(norms, policy)] for policy in policies)
    assert [row.verdict for row in then] != [row.verdict for row in now]
    gate_replay = GateReplay(*policies)
    again = [gate_replay(row) for row in then]
    assert [row.verdict for row in again] == [row.verdict for row in now]
    for replayed_row, gate_row in zip(again, now, strict=True):
        assert replayed_row.applied or replayed_row.norm_limit == pytest.approx(gate_row.norm_limit)


def gated(norms: np.ndarray, policy: Policy) -> Iterator[StepMetrics]:
    memory = new_gate_memory(0, [ClipUnit(0, slice(0, 1), Clip())], torch.device("cpu"))
    decide = make_decider(memory, NormRule(policy.max_norm_ratio, policy.warmup, policy.norm_max_decay))
    for i, norm in enumerate(norms.tolist()):
        totals = torch.zeros(UNITS_START + 2, dtype=torch.float64)
        totals[SummarySlot.LOSS], totals[SummarySlot.ACTIVE_RANKS], totals[UNITS_START] = 1.0, 1.0, norm**2
        verdict_slots = torch.zeros(len(VerdictSlot), dtype=torch.float64)
        decide(totals, out=verdict_slots, scaled=False, joint=None, commit=True)
        verdict = Verdict(int(verdict_slots[VerdictSlot.VERDICT]))
        yield StepMetrics(
            step=i,
            attempt=i,
            time=0.0,
            loss=1.0,
            norm=norm,
            verdict=verdict,
            norm_limit=float(verdict_slots[VerdictSlot.NORM_LIMIT]),
        )

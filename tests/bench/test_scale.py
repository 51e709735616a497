"""`surefoot bench scale` on a decoder small enough for a test: every scenario trains, faults harm, results are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.scale.loops import BARE, PEERS, SUREFOOT, make_loop
from benchmarks.scale.scale_bench import ResultFile, ScalePlan, make_plan, train_all
from benchmarks.scale.scale_controls import FAULT_FREE
from benchmarks.scale.scale_report import CURED, ScaleBoard
from benchmarks.scale.scale_scenario import SCENARIOS, TWIN, ScaleScenario
from benchmarks.scale.scale_trainer import ScaleTrainer, reproducible_and_quiet
from benchmarks.scale.sizes import SIZES
from surefoot.models.decoder import Decoder, DecoderConfig, count_parameters

MINI = replace(
    SIZES["tiny"],
    name="mini",
    model=DecoderConfig(vocab=256, width=32, layers=2, heads=2, context=16),
    updates=40,
    onset=22,  # the gate refuses finite updates only after its first 20
    batch=2,
    final_batches=4,
)
PLAN = replace(make_plan("tiny", "cpu"), size=MINI, peers=())


@dataclass
class Bench:
    """A trained plan and its results."""

    plan: ScalePlan
    board: ScaleBoard
    path: Path
    folder: Path

    def again(self, plan: ScalePlan, seconds: float = 600.0) -> tuple[ScaleBoard, list[str]]:
        """Run it again with the same file; returns the table and the progress lines."""
        file, lines = ResultFile(plan, self.path), []
        file.load()
        with reproducible_and_quiet():
            return train_all(plan, file, run_dirs=self.folder, seconds=seconds, say=lines.append), lines


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("scale")
    path = folder / "scale.json"
    with reproducible_and_quiet():
        board = train_all(PLAN, ResultFile(PLAN, path), run_dirs=folder, seconds=600.0, say=lambda line: None)
    return Bench(PLAN, board, path, folder)


@pytest.fixture(scope="module")
def trainer() -> ScaleTrainer:
    torch.set_num_threads(1)
    return ScaleTrainer(MINI, torch.device("cpu"))


def test_full_size_has_at_least_80_million_parameters_and_enough_scenarios() -> None:
    with torch.device("meta"):
        assert count_parameters(Decoder(SIZES["85m"].model)) > 80e6
    faults = [s for s in SCENARIOS.values() if not s.healthy]
    assert len(faults) >= 12
    assert len(SCENARIOS) - len(faults) >= 6
    assert len(PEERS) >= 3


def test_every_scenario_has_a_row_for_every_loop(bench: Bench) -> None:
    assert not bench.board.errors
    assert set(bench.board.results) == {(s, loop) for s in (TWIN, *SCENARIOS) for loop in (BARE, SUREFOOT)}
    rows = {line.split(" | ")[0].strip("| ").removesuffix(" (c)") for line in bench.board.as_markdown().splitlines()}
    assert rows >= {TWIN, *SCENARIOS}


def test_results_file_is_strict_json_with_every_result(bench: Bench) -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    stored = json.loads(bench.path.read_text(), parse_constant=refuse)
    losses = {(row["scenario"], row["loop"]): row["loss"] for row in stored["results"]}
    assert losses == {key: result.loss for key, result in bench.board.results.items()}
    assert None in losses.values(), "a broken model has no loss"


def test_nan_gradient_breaks_the_bare_run_but_not_the_guarded_one(bench: Bench) -> None:
    scenario = SCENARIOS["nan_gradient"]
    bare, guarded = (bench.board.results[scenario.name, loop] for loop in (BARE, SUREFOOT))
    assert bare.loss is None
    assert bench.board.is_harmful(scenario)
    assert guarded.seen_after is not None
    assert guarded.seen_after <= 3
    assert guarded.acted > 0
    ratio = bench.board.ratio(scenario, SUREFOOT)
    assert ratio is not None
    assert ratio < CURED


def test_every_fault_changes_the_run_and_a_pause_does_not(bench: Bench) -> None:
    losses = {name: bench.board.results[name, BARE].loss for name in (TWIN, *SCENARIOS)}
    losses.pop("loss_not_divided")  # clipping at 1.0 may take back the factor of the loss
    assert {name for name, loss in losses.items() if loss == losses[TWIN]} == {TWIN, "eval_pauses"}


def test_guarded_run_without_intervention_equals_the_bare_run(bench: Bench) -> None:
    results = bench.board.results
    untouched = [s for s in (TWIN, *SCENARIOS) if not results[s, SUREFOOT].acted + results[s, SUREFOOT].acted_before]
    assert TWIN in untouched
    for name in untouched:
        assert results[name, SUREFOOT].loss == results[name, BARE].loss


@pytest.mark.parametrize("loop_name", [BARE, *PEERS])
@pytest.mark.parametrize("scenario", [FAULT_FREE, SCENARIOS["dropout_on"], SCENARIOS["second_moments_damaged"]])
def test_run_continued_from_the_fault_free_run_equals_a_full_run(
    scenario: ScaleScenario, loop_name: str, trainer: ScaleTrainer, tmp_path: Path
) -> None:
    run, loop = trainer.fresh_run(), make_loop(loop_name, tmp_path)
    scenario.plant(run, MINI.onset)
    run.train(loop, MINI.updates)
    continued = trainer.run(scenario, loop_name, tmp_path)
    assert continued.updates == MINI.updates - MINI.onset
    assert continued.loss == run.eval_loss(MINI.final_batches)


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if not scenario.from_birth])
def test_nothing_differs_before_the_onset(name: str, trainer: ScaleTrainer, tmp_path: Path) -> None:
    """Needed so that a bare run can continue from the fault-free one."""
    weights: list[torch.Tensor] = []
    for plant in (FAULT_FREE.plant, SCENARIOS[name].plant):
        run = trainer.fresh_run()
        plant(run, MINI.onset)
        run.train(make_loop(BARE, tmp_path), MINI.onset)
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert torch.equal(*weights)


def test_second_call_trains_only_missing_runs(bench: Bench) -> None:
    board, lines = bench.again(PLAN)
    assert lines == []
    assert board.results == bench.board.results
    stored = json.loads(bench.path.read_text())
    stored["results"] = [row for row in stored["results"] if row["scenario"] != "nan_gradient" or row["loop"] != BARE]
    bench.path.write_text(json.dumps(stored, indent=1))
    board, lines = bench.again(PLAN)
    assert len(lines) == 1
    assert "nan_gradient, bare" in lines[0]
    assert set(board.results) == set(bench.board.results)


def test_stored_results_are_shown_without_training(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, MINI.name, MINI)
    done = CliRunner().invoke(app, ["scale", "--show", str(bench.path)])
    assert done.exit_code == 0
    assert done.stderr == ""
    assert done.stdout.splitlines()[:-1] == bench.board.as_markdown().splitlines()[:-1]


def test_no_run_starts_after_the_time_limit_and_the_table_says_so(bench: Bench) -> None:
    board, lines = bench.again(replace(PLAN, peers=tuple(PEERS)), seconds=0.0)
    assert len(lines) == 1
    assert f"{len(PLAN.scenarios) * len(PEERS)} runs are left out" in lines[0]
    assert "| - | - | - |" in board.as_markdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "7b"], "--size 85m or small or tiny"),
        (["--device", "cpu", "--only", "nothing_like_it"], "no scenario's name contains 'nothing_like_it'"),
    ],
)
def test_invalid_options_are_refused_with_one_line(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["scale", *options])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1

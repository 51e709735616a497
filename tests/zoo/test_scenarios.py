"""Every scenario: no effect before its onset, an effect after it, the same bits from the same seed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.zoo import CONTROLS, FAULTS
from benchmarks.zoo.families import FAMILIES, Split
from benchmarks.zoo.jobs import all_scenarios
from benchmarks.zoo.scenario import SEEDS, Scenario, ScenarioKind, control, fault
from benchmarks.zoo.training import ZooRun
from benchmarks.zoo.verify import fingerprint_after, is_harmed, loss_ratio
from surefoot.records import Cause

EARLY = 8
"""The onset in these tests, where no baselines need to form first."""


def first_seeds(kind: ScenarioKind) -> list[Scenario]:
    """All families and strengths of a kind, with the first seed of each split."""
    return [s for split in Split for s in kind.scenarios(split) if s.settings.seed == SEEDS[split][0]]


def test_there_are_enough_scenarios() -> None:
    assert len(FAULTS) >= 30
    assert len(CONTROLS) >= 30
    planted = {family for kind in FAULTS.values() for family in kind.families}
    assert planted == set(FAMILIES)
    assert {"encoder", "decoder", "convolution", "recurrent", "plain", "vision_language"} <= planted
    settings = [s.settings for kind in FAULTS.values() for s in first_seeds(kind)]
    assert {s.precision for s in settings} == {"float32", "bfloat16", "float16"}
    optimizers = {type(ZooRun(s).optimizer) for s in {s.family + s.label: s for s in settings}.values()}
    assert len(optimizers) >= 5


@pytest.mark.parametrize("kind", [*FAULTS.values(), *CONTROLS.values()], ids=lambda k: k.name)
def test_every_kind_is_in_both_splits(kind: ScenarioKind) -> None:
    assert {FAMILIES[family].split for family in kind.families} == set(Split)


def test_tuning_and_report_splits_are_disjoint() -> None:
    assert not set(SEEDS[Split.TUNING]) & set(SEEDS[Split.REPORT])
    keys_by_split = {
        split: {(s.settings.family, s.settings.seed) for s in all_scenarios().values() if s.split is split}
        for split in Split
    }
    families = {split: {family for family, _ in pairs} for split, pairs in keys_by_split.items()}
    seeds = {split: {seed for _, seed in pairs} for split, pairs in keys_by_split.items()}
    assert not families[Split.TUNING] & families[Split.REPORT]
    assert not seeds[Split.TUNING] & seeds[Split.REPORT]


@pytest.mark.parametrize("kind", [k for k in FAULTS.values() if k.onset], ids=lambda k: k.name)
def test_fault_has_no_effect_before_its_onset(kind: ScenarioKind) -> None:
    for scenario in first_seeds(replace(kind, onset=EARLY)):
        assert fingerprint_after(scenario, EARLY) == fingerprint_after(scenario.twin, EARLY), scenario.id


NO_NUMERIC_EFFECT = {"memory_leak", "data_starvation", "slow_rank"}
"""Faults that cost time or memory and change no bits."""


@pytest.mark.parametrize("kind", [k for k in FAULTS.values() if k.name not in NO_NUMERIC_EFFECT], ids=lambda k: k.name)
def test_fault_has_an_effect_after_its_onset(kind: ScenarioKind) -> None:
    brutal = [s for s in first_seeds(replace(kind, onset=EARLY if kind.onset else 0)) if s.strength == "brutal"]
    for scenario in brutal:
        assert fingerprint_after(scenario, scenario.onset + 12) != fingerprint_after(
            scenario.twin, scenario.onset + 12
        ), scenario.id


@pytest.mark.parametrize("kind", [*FAULTS.values(), *CONTROLS.values()], ids=lambda k: k.name)
def test_scenarios_are_bit_reproducible(kind: ScenarioKind) -> None:
    scenarios = [s for s in first_seeds(replace(kind, onset=min(kind.onset, 4))) if s.strength in ("", "clear")]
    for scenario in scenarios:
        assert fingerprint_after(scenario, 9) == fingerprint_after(scenario, 9), scenario.id


def test_broken_run_counts_as_harmed() -> None:
    assert is_harmed(float("inf"))
    assert is_harmed(float("nan"))
    assert is_harmed(1.06)
    assert not is_harmed(1.05)


def test_loss_ratio_separates_harmful_from_harmless() -> None:
    scenarios = {s.strength: s for s in FAULTS["bad_batch"].scenarios(Split.TUNING) if s.settings.family == "plain"}
    assert is_harmed(loss_ratio(scenarios["brutal"]))
    assert loss_ratio(scenarios["brutal"].twin) == 1.0


def test_incomplete_scenario_definitions_are_refused() -> None:
    with pytest.raises(ValueError, match="docstring"):
        control("plain")(lambda run, at: None)
    with pytest.raises(ValueError, match="known family"):
        fault(Cause.DRIFT, on={"plane": "..."}, strengths=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="three of"):
        fault(Cause.DRIFT, on={"plain": "!"}, strengths=(1.0, 2.0, 3.0))


def test_run_names_are_unique() -> None:
    scenarios = [s for kind in (*FAULTS.values(), *CONTROLS.values()) for split in Split for s in kind.scenarios(split)]
    assert len({s.id for s in scenarios}) == len(scenarios)
    twins = {(s.twin.id, s.settings) for s in scenarios}
    assert len({name for name, _ in twins}) == len(twins), "twins of different settings must not share their files"


def test_batch_without_the_wanted_classes_is_used_unchanged() -> None:
    """With many seeds such a batch occurs once in some thousand runs and must not stop the benchmark."""
    kind = CONTROLS["class_imbalance"]
    clean = next(kind.scenarios(Split.TUNING)).twin.run()
    clean.on_batch(lambda step, batch: batch.replace(y=torch.zeros_like(batch.y)))
    kind.plant(clean, 0)
    assert clean.batch(12, 0).y.tolist() == [0] * clean.samples

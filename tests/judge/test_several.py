"""Several optimizers: those that step together are judged as one, those that step in turn each by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from made_rows import NAMES, Source, actions, judged, layers, of

from surefoot.judge.judge import Judge
from surefoot.judge.multi_optimizer import MultiOptimizerJudge, make_judge
from surefoot.judge.policy import Policy
from surefoot.records import Action, Decision, Event, Finding, StepMetrics, Verdict

SCOPES = ((0, 3), (3, len(NAMES)))


def judge(policy: Policy | None = None, scopes: Any = SCOPES) -> MultiOptimizerJudge:
    made = make_judge(policy or Policy(), NAMES, scopes=scopes)
    assert isinstance(made, MultiOptimizerJudge)
    return made


def in_turn(rows: int, *sources: Source, first: int = 0) -> Iterator[StepMetrics]:
    """One row of each source after the other; each on a backward of its own."""
    for i in range(rows):
        for k, source in enumerate(sources):
            attempt = first + i * len(sources) + k
            yield dataclasses.replace(source.row(), optimizer=k, attempt=attempt, step=i)


def sides() -> tuple[Source, Source]:
    """A critic whose loss hardly scatters, and a maker whose loss is far higher."""
    return Source(1, loss=0.7, floor=0.69, noise=0.002), Source(2, loss=5.0, floor=5.0, norm=30.0)


def test_one_side_is_not_measured_by_the_other() -> None:
    several = judge()
    assert of(Finding, judged(several, in_turn(400, *sides()))) == []
    found = of(Finding, judged(Judge(Policy(), NAMES), in_turn(400, *sides())))
    assert any(f.detector == "jump" for f in found), "which one judge for both would do"


def test_one_optimizer_has_the_judge_it_always_had() -> None:
    assert type(make_judge(Policy(), NAMES)) is Judge
    assert type(make_judge(Policy(), NAMES, scopes=[(0, 7)])) is Judge


def test_optimizers_that_step_together_are_judged_as_ever() -> None:
    def rows() -> Iterator[StepMetrics]:
        one, other = Source(1), Source(2, norm=5.0)
        for i in range(200):
            swells = 1e3 if i == 120 else 1.0
            row = one.row(swells=swells, times=4.0 if i > 150 else 1.0)
            yield row
            yield dataclasses.replace(other.row(), optimizer=1, attempt=i, step=row.step, loss=row.loss)

    def told(judge: Any) -> list[Event]:
        return [event for row in rows() for event in judge.update(row, layers(np.random.default_rng(row.attempt)))]

    expected = told(Judge(Policy(), NAMES))
    assert expected
    assert told(judge()) == expected


def refused(row: StepMetrics) -> StepMetrics:
    return dataclasses.replace(row, verdict=Verdict.NONFINITE, loss=float("nan"), nonfinite=3.0)


def test_refusals_in_a_row_are_those_of_one_optimizer() -> None:
    several = judge(Policy(max_consecutive_vetoes=4))
    judged(several, in_turn(60, *sides()))
    critic, maker = sides()
    events: list[Event] = []
    for i in range(8):
        events += several.update(refused(dataclasses.replace(critic.row(), attempt=120 + 2 * i)))
        events += several.update(dataclasses.replace(maker.row(), optimizer=1, attempt=121 + 2 * i))
    stops = [d for d in of(Decision, events) if d.action in (Action.STOP, Action.REWIND)]
    assert stops, "though the other one's updates land in between"
    assert stops[0].optimizers == (0,)


def test_while_the_run_is_to_go_back_for_one_nothing_is_decided_for_the_other() -> None:
    several = judge()
    judged(several, in_turn(100, *sides()))
    critic, maker = sides()
    decided: list[Decision] = []
    for i in range(12):
        for k, source in enumerate((critic, maker)):
            row = dataclasses.replace(source.row(), optimizer=k, attempt=200 + 2 * i + k)
            decided += of(Decision, several.update(refused(row)))
    acted = [d for d in decided if d.action is not Action.REFUSE]
    assert [d.action for d in acted] == [Action.REWIND]
    assert 200 <= acted[0].max_attempt <= 201, "told by the run's own count of attempts"
    several.rewound(180, 90)
    assert several.quiet or actions(judged(several, in_turn(40, *sides(), first=300))) == []


def test_three_of_which_two_step_together() -> None:
    several = judge(scopes=((0, 2), (2, 4), (4, 7)))
    critic, maker = sides()
    events: list[Event] = []
    for i in range(200):
        row = critic.row()
        for k in (0, 1):
            events += several.update(
                dataclasses.replace(row, optimizer=k, attempt=2 * i), layers(np.random.default_rng(i))
            )
        events += several.update(
            dataclasses.replace(maker.row(), optimizer=2, attempt=2 * i + 1), layers(np.random.default_rng(i))
        )
    assert of(Finding, events) == []
    assert [held["members"] for held in several.state_dict()["groups"]] == [[0, 1], [2]]


def test_all_that_is_known_goes_into_a_checkpoint() -> None:
    rows = list(in_turn(150, *sides()))
    whole, first, second = judge(), judge(), judge()
    events = judged(whole, rows)
    before = judged(first, rows[:170])
    second.load_state_dict(first.state_dict())
    assert before + judged(second, rows[170:]) == events
    assert repr(second.state_dict()["groups"][1]["judge"]["normal"]) == repr(
        whole.state_dict()["groups"][1]["judge"]["normal"]
    )


def test_a_checkpoint_from_before_is_still_read() -> None:
    old = Judge(Policy(), NAMES)
    judged(old, in_turn(60, *sides()))
    several = judge()
    several.load_state_dict(old.state_dict())
    assert several.proven == old.proven
    assert actions(judged(several, in_turn(100, *sides(), first=120))) == []


def test_a_checkpoint_of_other_optimizers_is_not_taken() -> None:
    several = judge(scopes=((0, 2), (2, 4), (4, 7)))
    judged(several, in_turn(5, *sides(), Source(3)))
    with pytest.raises(ValueError, match="other optimizers"):
        judge().load_state_dict(several.state_dict())


def test_each_sees_its_own_tensors_only() -> None:
    """Gradients that the maker's loss leaves in the critic are none of its own."""
    several, events = judge(), list[Event]()
    for row in in_turn(300, *sides()):
        stats = layers(np.random.default_rng(row.attempt))
        if row.optimizer and row.attempt > 300:
            stats[:3, 0] *= 1e6
        events += several.update(row, stats)
    assert of(Finding, events) == []

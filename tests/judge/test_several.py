"""Several optimizers: those that step together share one judge, alternating ones have one each."""

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
    """Rows of alternating optimizers, each with its own backward."""
    for i in range(rows):
        for k, source in enumerate(sources):
            attempt = first + i * len(sources) + k
            yield dataclasses.replace(source.row(), optimizer=k, attempt=attempt, step=i)


def sides() -> tuple[Source, Source]:
    """A critic with an almost constant loss, and a generator with a far higher one."""
    return Source(1, loss=0.7, floor=0.69, noise=0.002), Source(2, loss=5.0, floor=5.0, norm=30.0)


def test_alternating_optimizers_have_separate_baselines() -> None:
    several = judge()
    assert of(Finding, judged(several, in_turn(400, *sides()))) == []
    findings = of(Finding, judged(Judge(Policy(), NAMES), in_turn(400, *sides())))
    assert any(f.detector == "jump" for f in findings), "a single judge for both finds a jump"


def test_single_optimizer_uses_the_plain_judge() -> None:
    assert type(make_judge(Policy(), NAMES)) is Judge
    assert type(make_judge(Policy(), NAMES, scopes=[(0, 7)])) is Judge


def test_optimizers_that_step_together_share_one_judge() -> None:
    def rows() -> Iterator[StepMetrics]:
        critic, generator = Source(1), Source(2, norm=5.0)
        for i in range(200):
            swells = 1e3 if i == 120 else 1.0
            row = critic.row(swells=swells, times=4.0 if i > 150 else 1.0)
            yield row
            yield dataclasses.replace(generator.row(), optimizer=1, attempt=i, step=row.step, loss=row.loss)

    def events_of(judge: Any) -> list[Event]:
        return [event for row in rows() for event in judge.update(row, layers(np.random.default_rng(row.attempt)))]

    expected = events_of(Judge(Policy(), NAMES))
    assert expected
    assert events_of(judge()) == expected


def refused(row: StepMetrics) -> StepMetrics:
    return dataclasses.replace(row, verdict=Verdict.NONFINITE, loss=float("nan"), nonfinite=3.0)


def test_consecutive_refusals_are_counted_by_optimizer() -> None:
    several = judge(Policy(max_consecutive_vetoes=4))
    judged(several, in_turn(60, *sides()))
    critic, generator = sides()
    events: list[Event] = []
    for i in range(8):
        events += several.update(refused(dataclasses.replace(critic.row(), attempt=120 + 2 * i)))
        events += several.update(dataclasses.replace(generator.row(), optimizer=1, attempt=121 + 2 * i))
    stops = [d for d in of(Decision, events) if d.action in (Action.STOP, Action.REWIND)]
    assert stops, "although the other optimizer's updates are applied in between"
    assert stops[0].optimizers == (0,)


def test_pending_rewind_of_one_optimizer_suspends_decisions_for_the_other() -> None:
    several = judge()
    judged(several, in_turn(100, *sides()))
    critic, generator = sides()
    decided: list[Decision] = []
    for i in range(12):
        for k, source in enumerate((critic, generator)):
            row = dataclasses.replace(source.row(), optimizer=k, attempt=200 + 2 * i + k)
            decided += of(Decision, several.update(refused(row)))
    acted = [d for d in decided if d.action is not Action.REFUSE]
    assert [d.action for d in acted] == [Action.REWIND]
    assert 200 <= acted[0].max_attempt <= 201, "attempts are counted over all optimizers"
    several.rewound(180, 90)
    assert several.quiet or actions(judged(several, in_turn(40, *sides(), first=300))) == []


def test_three_optimizers_of_which_two_step_together() -> None:
    several = judge(scopes=((0, 2), (2, 4), (4, 7)))
    critic, generator = sides()
    events: list[Event] = []
    for i in range(200):
        row = critic.row()
        for k in (0, 1):
            events += several.update(
                dataclasses.replace(row, optimizer=k, attempt=2 * i), layers(np.random.default_rng(i))
            )
        events += several.update(
            dataclasses.replace(generator.row(), optimizer=2, attempt=2 * i + 1), layers(np.random.default_rng(i))
        )
    assert of(Finding, events) == []
    assert [group["members"] for group in several.state_dict()["groups"]] == [[0, 1], [2]]


def test_state_of_all_judges_round_trips() -> None:
    rows = list(in_turn(150, *sides()))
    whole, first, second = judge(), judge(), judge()
    events = judged(whole, rows)
    before = judged(first, rows[:170])
    second.load_state_dict(first.state_dict())
    assert before + judged(second, rows[170:]) == events
    assert repr(second.state_dict()["groups"][1]["judge"]["normal"]) == repr(
        whole.state_dict()["groups"][1]["judge"]["normal"]
    )


def test_state_of_an_earlier_version_is_loaded() -> None:
    old = Judge(Policy(), NAMES)
    judged(old, in_turn(60, *sides()))
    several = judge()
    several.load_state_dict(old.state_dict())
    assert several.proven == old.proven
    assert actions(judged(several, in_turn(100, *sides(), first=120))) == []


def test_state_of_other_optimizers_is_refused() -> None:
    several = judge(scopes=((0, 2), (2, 4), (4, 7)))
    judged(several, in_turn(5, *sides(), Source(3)))
    with pytest.raises(ValueError, match="other optimizers"):
        judge().load_state_dict(several.state_dict())


def test_each_judge_sees_only_its_own_tensors() -> None:
    """Gradients that the generator's loss leaves in the critic are not the critic's."""
    several, events = judge(), list[Event]()
    for row in in_turn(300, *sides()):
        stats = layers(np.random.default_rng(row.attempt))
        if row.optimizer and row.attempt > 300:
            stats[:3, 0] *= 1e6
        events += several.update(row, stats)
    assert of(Finding, events) == []

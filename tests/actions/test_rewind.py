"""A rewound run is bit-identical to the snapshot and continues from there."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Net, bare, batch, loss_of, net, same, snapshot, train
from rewind_runs import same as same_run
from scripted_judge import Watched, script
from torch import Tensor, nn

import surefoot
from surefoot.checkpoint.train_state import TrainState
from surefoot.records import Action

Attach = Callable[..., Any]
Read = Callable[[], surefoot.Run]
BACK = {"action": Action.REWIND}
EVERY4 = surefoot.Policy(snapshot_every=4)


OPTIMIZER_VARIANTS = [
    ("AdamW", "plain", False),
    ("AdamW", "foreach", False),
    ("AdamW", "fused", False),
    ("AdamW", "closure", False),
    ("AdamW", "compiled", False),
    ("AdamW", "plain", True),
    ("AdamW", "fused", True),
    ("SGD", "plain", False),
    ("SGD", "fused", True),
    ("LBFGS", "closure", False),
    ("Adafactor", "plain", False),
    ("SparseAdam", "plain", False),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Detected call")  # from a compiled step
@pytest.mark.parametrize(("name", "implementation", "scaled"), OPTIMIZER_VARIANTS)
def test_rewind_is_bit_identical_and_training_continues(
    name: str, implementation: str, scaled: bool, attach: Attach, read: Read
) -> None:
    torch._dynamo.reset()
    run = Watched(name, implementation, scaled=scaled).scheduled()
    guard = attach(run.model, run.optimizer, policy=EVERY4, scheduler=run.schedulers, scaler=run.scaler)
    run.watch = guard.watch
    judge = script(guard, {9: BACK})
    for i in range(8):
        run.train(i)
    expected = run.contents()
    for i in range(8, 12):
        run.train(i, 50.0)
    assert same_run(expected, run.contents()), "model, optimizer, buffers, schedule, loss scale and random numbers"
    assert judge.rewinds == [(7, 8)]
    for i in range(12, 20):
        run.train(i)
    twin = Watched(name, implementation, scaled=scaled).scheduled()
    for i in [*range(8), *range(12, 20)]:
        twin.train(i)
    assert same_run(twin.contents(), run.contents())
    guard.close()
    rows = read().scalars
    assert rows["attempt"].tolist() == list(range(20)), "every attempt is recorded once"
    assert rows["step"].tolist() == [*range(12), *range(8, 16)]
    assert judge.seen == [*range(10), *range(12, 20)], "rows in flight at the rewind are dropped"
    assert guard.step == 16
    (note,) = [e for e in read().events if e.get("name") == "rewound"]
    assert note["values"] == {"step": 8, "attempt": 7, "lost": 4}


def test_run_that_fails_at_once_rewinds_to_its_start(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    guard = attach(model, optimizer)
    judge = script(guard, {0: BACK | {"max_attempt": 0}}, proves=100)
    start = snapshot(model, optimizer)
    for i in range(3):
        assert len(optimizer.state) == (6 if i else 0)
        train(model, optimizer, guard.watch, i)
    assert same(start, snapshot(model, optimizer)), "no optimizer state yet"
    assert judge.rewinds == [(-1, 0)]
    before = snapshot(model)
    train(model, optimizer, guard.watch, 3)
    assert not same(before, snapshot(model))


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_first_snapshot_is_taken_when_training_starts(without: Callable[[], Any], attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    guard = attach(model, optimizer)
    judge = script(guard, {3: BACK}, proves=100)
    model.eval()
    with without():
        model(batch(0))
    model.train()
    model.load_state_dict(net(7).state_dict())  # a loop that inspects the model first and then loads a checkpoint
    start = snapshot(model)
    for i in range(6):
        train(model, optimizer, guard.watch, i)
    assert judge.rewinds == [(-1, 0)]
    assert same(start, snapshot(model))
    train(model, optimizer, guard.watch, 6)
    assert not guard.disabled


def test_snapshots_from_after_the_onset_are_skipped(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {9: BACK | {"max_attempt": 7}})
    expected = None
    for i in range(12):
        train(model, optimizer, guard.watch, i)
        expected = snapshot(model, optimizer) if i == 3 else expected
    assert judge.rewinds == [(3, 4)]
    assert same(expected, snapshot(model, optimizer))


@pytest.mark.parametrize(("onset_known", "to"), [(True, (7, 8)), (False, (-1, 0))])
def test_with_a_known_onset_an_unconfirmed_snapshot_is_used(
    onset_known: bool, to: tuple[int, int], attach: Attach
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {9: BACK | {"max_attempt": 8, "onset_known": onset_known}}, proves=100)
    snapshots = {-1: snapshot(model)}
    for i in range(12):
        train(model, optimizer, guard.watch, i)
        snapshots[i] = snapshot(model)
    assert judge.rewinds == [to]
    assert same(snapshots[to[0]], snapshot(model))


def test_no_snapshot_is_taken_during_trouble(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {})
    for i in range(11):
        judge.quiet = not 3 <= i <= 8
        train(model, optimizer, guard.watch, i)
    assert [s.attempt for s in guard._recovery.ring.snapshots] == [-1, 9]


def test_no_snapshot_is_taken_between_microbatches(attach: Attach) -> None:
    """Two microbatches an update; the first half of the bad update does not survive the rewind."""

    def update(model: Net, optimizer: torch.optim.Optimizer, watch: Callable[..., Tensor], i: int) -> None:
        for m in range(2):
            (watch(loss_of(model, batch(2 * i + m)), None) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, other = net(), net()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {9: BACK})
    for i in range(15):
        update(model, optimizer, guard.watch, i)
    for i in [*range(8), *range(12, 15)]:
        update(other, plain, bare, i)
    assert judge.rewinds == [(7, 8)]
    assert same(snapshot(model, optimizer), snapshot(other, plain))


@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_rewind_together(fused: bool, attach: Attach, read: Read) -> None:
    def build() -> tuple[Net, list[torch.optim.Optimizer]]:
        model = net()
        return model, [
            torch.optim.AdamW(model.first.parameters(), lr=0.01, fused=fused),
            torch.optim.SGD([*model.norm.parameters(), *model.last.parameters()], lr=0.01, momentum=0.9, fused=fused),
        ]

    (model, optimizers), (other, plain) = build(), build()
    guard = attach(model, optimizers, policy=EVERY4)
    judge = script(guard, {9: BACK})
    for i in range(16):
        train(model, optimizers, guard.watch, i)
    assert judge.rewinds == [(7, 8)], "two rows an update are read one update later"
    for i in [*range(8), *range(11, 16)]:
        train(other, plain, bare, i)
    assert same(snapshot(model, *optimizers), snapshot(other, *plain))
    guard.close()
    assert read().scalars["attempt"].tolist() == [i for i in range(16) for _ in range(2)]
    assert read().scalars["step"].tolist()[20:24] == [10, 10, 8, 8]


def test_alternating_optimizers_are_rewound(attach: Attach) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)})
    sides = [torch.optim.Adam(model[name].parameters(), lr=1e-3) for name in ("judge", "maker")]
    guard = attach(model, sides, policy=EVERY4)
    judge = script(guard, {14: BACK, 25: BACK})
    for i in range(20):
        generated = model["maker"](batch(i))
        for side, sign, seen in ((sides[0], 1.0, generated.detach()), (sides[1], -1.0, generated)):
            side.zero_grad()
            guard.watch(sign * model["judge"](seen).mean(), None).backward()
            side.step()
    assert not guard.disabled
    assert len(judge.rewinds) == 2


def test_gate_memory_is_rewound(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    guard = attach(model, optimizer, policy=EVERY4, clip="adaptive")
    script(guard, {9: BACK})
    memory = guard._pipeline.gates[0].memory
    for i in range(8):
        train(model, optimizer, guard.watch, i)
    expected = {k: v.clone() for k, v in memory.state_dict().items()}
    for i in range(8, 11):
        train(model, optimizer, guard.watch, i, "burst")
    assert memory.baseline[1] > 100 * expected["baseline"][1], "during warmup a large gradient is applied"
    train(model, optimizer, guard.watch, 11)
    assert memory.baseline[1] == expected["baseline"][1]
    assert torch.equal(memory.norms.nan_to_num(), expected["norms"].nan_to_num())


def test_weight_stats_from_before_the_rewind_are_dropped(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=surefoot.Policy(snapshot_every=4, weights_every=1))
    script(guard, {9: BACK})
    for i in range(14):
        train(model, optimizer, guard.watch, i)
        if i == 10:
            with torch.no_grad():
                model.last.weight.fill_(math.nan)
    guard.close()
    bad = read().scalars["nonfinite_params"]
    assert math.isnan(bad[12]), "measured before the rewind"
    assert bad[13] == 0


def test_unregistered_scheduler_is_not_rewound(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {9: BACK})
    for i in range(20):
        train(model, optimizer, guard.watch, i)
        schedule.step()
    guard.close()
    assert judge.rewinds
    expected = [0.05 * (1 + math.cos(math.pi * i / 20)) for i in range(20)]
    assert read().scalars["lr"].tolist() == pytest.approx(expected)


def test_extra_state_is_rewound(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(model)
    draws = torch.Generator().manual_seed(3)
    guard = attach(model, optimizer, policy=EVERY4, extra={"average": average, "draws": draws})
    script(guard, {9: BACK})
    states: list[Any] = []
    # Changes after the step are captured by the next snapshot, so they are rewound one step further.
    for i in range(12):
        states.append([snapshot(average), draws.get_state()])
        x = torch.randn(8, 4, generator=draws)
        guard.watch(loss_of(model, x), x).backward()
        states[-1][1] = draws.get_state()
        optimizer.step()
        optimizer.zero_grad()
        if i < 11:
            average.update_parameters(model)
    assert same(states[7], [snapshot(average), draws.get_state()])


# -- rewinds that fail -----------------------------------------------------------------------------------------------


def test_judge_is_notified_when_there_is_no_good_snapshot(
    attach: Attach, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, snapshot_memory=False)
    judge = script(guard, {2: BACK, 4: BACK | {"remedy": "half the rate"}})
    for i in range(8):
        train(model, optimizer, guard.watch, i)
    assert judge.failures == ["no snapshots are kept"] * 2
    assert judge.rewinds == []
    assert guard.step == 6
    assert not guard.disabled
    guard.close()
    assert "could not be done: rewind: no snapshots are kept" in caplog.text
    assert len([e for e in read().events if e.get("name") == "failed"]) == 2


def test_rewind_fails_without_a_snapshot_from_before_the_onset(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {9: BACK | {"overrides": lr_override(0.5)}})
    guard._recovery.first_forward_began()
    for state in guard._recovery.ring.snapshots:
        state.attempt = 50
    judge.proves = 100
    for i in range(14):
        train(model, optimizer, guard.watch, i)
    assert judge.rewinds == [(50, 0)], "the start is always a good snapshot"
    judge.plan[14] = BACK | {"max_attempt": 40, "overrides": lr_override(0.25)}
    for i in range(14, 20):
        train(model, optimizer, guard.watch, i)
    assert "no good snapshot" in judge.failures[0]
    assert guard._recovery.overrides.active.lr_factor == 0.5, "the overrides of a failed rewind are not applied"


def lr_override(lr_factor: float) -> Any:
    from surefoot.records import StepOverrides

    return StepOverrides(lr_factor=lr_factor)


def test_rewind_fails_when_the_model_has_changed(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {9: BACK})
    for i in range(8):
        train(model, optimizer, guard.watch, i)
    model.last = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"][-2:] = list(model.last.parameters())
    before = snapshot(model)
    for i in range(8, 14):
        train(model, optimizer, guard.watch, i)
    assert len(judge.failures) == 1
    assert "last.weight" in judge.failures[0]
    assert not guard.disabled
    assert not same(before, snapshot(model))


def test_rewind_that_fails_half_way_disables_the_guard(
    attach: Attach, read: Read, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4)
    script(guard, {9: BACK})

    def broken(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(TrainState, "_drop_gradients", broken)
    for i in range(16):
        train(model, optimizer, guard.watch, i)
    (error,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "protection is OFF" in error
    assert "half-way" in error
    assert "checkpoint" in error
    guard.close()
    (note,) = [e for e in read().events if e.get("name") == "degraded"]
    assert "half-way" in note["detail"]


def test_no_memory_for_snapshots_is_logged_once(attach: Attach, read: Read, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4, snapshot_memory="1 kB")
    for i in range(20):
        train(model, optimizer, guard.watch, i)
    guard.close()
    notes = [e["detail"] for e in read().events if e.get("name") == "ring"]
    assert "1 of 2 snapshots" in notes[0]
    assert len(notes) == 2, "with optimizer state the snapshots no longer fit"
    assert "do not fit in the budget of 1 kB" in notes[1]
    assert len([r for r in caplog.records if "cannot be rewound" in r.getMessage()]) == 1


# -- console ----------------------------------------------------------------------------------------------------------


def test_rewind_is_logged_once_with_what_came_of_it(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4)
    script(guard, {9: BACK | {"reason": "the loss jumped", "remedy": "rate x0.5"}})
    for i in range(14):
        train(model, optimizer, guard.watch, i)
    assert caplog.records == [], "it is not known yet whether it helped"
    guard.close()
    (block,) = [r.getMessage() for r in caplog.records]
    assert block.startswith("surefoot: step 9: the loss jumped\n")
    assert "done:     step 9: rewound to step 8, rate x0.5" in block
    assert "result:   not known yet" in block


def test_verbose_rewind_prints_a_line_at_once(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4, verbosity="verbose")
    script(guard, {9: BACK | {"reason": "the loss jumped", "remedy": "rate x0.5"}})
    for i in range(14):
        train(model, optimizer, guard.watch, i)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == "surefoot: step 9: the loss jumped; back to step 8, rate x0.5"


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["it diverged", "it diverged."])
def test_stop_restores_the_last_good_model(attach: Attach, read: Read, reason: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=EVERY4)
    script(guard, {9: {"action": Action.STOP, "reason": reason, "max_attempt": 8}})
    expected = None
    with pytest.raises(surefoot.TrainingStopped, match=r"it diverged\. The model is back at step 8\."):
        for i in range(20):
            train(model, optimizer, guard.watch, i)
            expected = snapshot(model, optimizer) if i == 7 else expected
    assert same(expected, snapshot(model, optimizer))
    guard.close()
    assert read().scalars["attempt"].tolist() == list(range(12)), "no row is missing"


@pytest.mark.parametrize("max_attempt", [-1, 8])
def test_stop_without_snapshots_leaves_the_model_unchanged(max_attempt: int, attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, snapshot_memory=False)
    script(guard, {9: {"action": Action.STOP, "reason": "it diverged.", "max_attempt": max_attempt}})
    with pytest.raises(surefoot.TrainingStopped) as caught:
        for i in range(20):
            train(model, optimizer, guard.watch, i)
    assert ("as the run left it: no snapshots are kept" in str(caught.value)) == (max_attempt >= 0)


# -- observing --------------------------------------------------------------------------------------------------------


def test_observe_does_not_act(attach: Attach, read: Read) -> None:
    model, other = net(), net()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))
    guard = attach(model, optimizer, policy=surefoot.Policy(observe=True, snapshot_every=4))
    request = {"overrides": lr_override(0.5), "reset_optimizer": True, "applied": False}
    judge = script(guard, {9: BACK | request, 10: {"action": Action.STOP, "applied": False}})
    for i in range(14):
        train(model, optimizer, guard.watch, i)
        train(other, plain, bare, i)
    assert same(snapshot(model, optimizer), snapshot(other, plain))
    assert guard._recovery.ring is None
    assert judge.rewinds == []
    guard.close()
    assert [e["action"] for e in read().events if e["kind"] == "decision"] == ["rewind", "stop"]
    assert not [e for e in read().events if e.get("name") in ("ring", "rewound")]

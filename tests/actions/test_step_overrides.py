"""Overrides change exactly the steps they apply to and leave nothing else changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Net, bare, batch, hooks_on, loss_of, net, same, snapshot, train
from scripted_judge import script, set_overrides
from torch import Tensor, nn
from torch.optim import Optimizer

import surefoot
from surefoot.records import Action, StepOverrides, Verdict

Attach = Callable[..., Any]
Read = Callable[[], surefoot.Run]
Make = Callable[[Net], Optimizer]


def two_groups(model: Net, lr: Any) -> list[dict[str, Any]]:
    other_params = [*model.norm.parameters(), *model.last.parameters()]
    plain_model = lr * 0.1 if isinstance(lr, Tensor) else 0.1 * lr
    return [{"params": list(model.first.parameters()), "lr": lr}, {"params": other_params, "lr": plain_model}]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(two_groups(m, 0.01), momentum=0.9),
    "SGD fused": lambda m: torch.optim.SGD(two_groups(m, 0.01), momentum=0.9, fused=True),
    "AdamW plain": lambda m: torch.optim.AdamW(two_groups(m, 0.01), foreach=False),
    "AdamW foreach": lambda m: torch.optim.AdamW(two_groups(m, 0.01), foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(two_groups(m, 0.01), fused=True),
    "AdamW tensor": lambda m: torch.optim.AdamW(two_groups(m, torch.tensor(0.01)), foreach=False),
    "AdamW fused tensor": lambda m: torch.optim.AdamW(two_groups(m, torch.tensor(0.01)), fused=True),
    "SGD tensor": lambda m: torch.optim.SGD(two_groups(m, torch.tensor(0.01)), momentum=0.9),
    "RMSprop": lambda m: torch.optim.RMSprop(two_groups(m, 0.001), momentum=0.9),
    "NAdam": lambda m: torch.optim.NAdam(two_groups(m, 0.001)),
}


def by_hand(model: Net, optimizer: Optimizer, i: int, factor: float, momentum: float = math.inf) -> None:
    """One step of the bare loop with lr and momentum set for this step only."""
    original_groups = [dict(g) for g in optimizer.param_groups]
    for g in optimizer.param_groups:
        if factor != 1.0:
            g["lr"] = g["lr"] * factor
        if "momentum" in g:
            g["momentum"] = min(g["momentum"], momentum)
        if "betas" in g:
            g["betas"] = (min(g["betas"][0], momentum), g["betas"][1])
    train(model, optimizer, bare, i)
    for g, was in zip(optimizer.param_groups, original_groups, strict=True):
        g.update({k: was[k] for k in ("lr", "momentum", "betas") if k in was})


def pair(name: str) -> tuple[Net, Optimizer, Net, Optimizer]:
    model, plain_model = net(), net()
    return model, OPTIMIZERS[name](model), plain_model, OPTIMIZERS[name](plain_model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rewarmup_and_removal(name: str, attach: Attach, read: Read) -> None:
    model, optimizer, plain_model, plain_optimizer = pair(name)
    guard = attach(model, optimizer)
    rates = [g["lr"] for g in optimizer.param_groups]
    values = copy.deepcopy(rates)
    for i in range(12):
        if i == 3:
            set_overrides(guard, lr_factor=0.5, rewarmup_steps=4)
        if i == 10:
            set_overrides(guard)
        train(model, optimizer, guard.watch, i)
        by_hand(plain_model, plain_optimizer, i, [1, 1, 1, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 1, 1][i])
        assert all(a is b["lr"] for a, b in zip(rates, optimizer.param_groups, strict=True)), "the very same object"
        assert rates == values
    assert same(snapshot(model, optimizer), snapshot(plain_model, plain_optimizer))
    guard.close()
    assert read().scalars["lr"].tolist() == pytest.approx([float(rates[0])] * 12), (
        "the journal records what the loop set"
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lr_is_capped(name: str, attach: Attach) -> None:
    model, optimizer, plain_model, plain_optimizer = pair(name)
    guard = attach(model, optimizer)
    first = float(optimizer.param_groups[0]["lr"])
    set_overrides(guard, max_lr=(first / 4,), lr_factor=0.5)
    for i in range(4):
        train(model, optimizer, guard.watch, i)
        by_hand(plain_model, plain_optimizer, i, 0.125)
    for param, plain_param in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(param, plain_param, rtol=1e-5, atol=1e-7)
    set_overrides(guard, max_lr=(first * 4,))  # far above the loop's lr
    train(model, optimizer, guard.watch, 4)
    by_hand(plain_model, plain_optimizer, 4, 1.0)
    for param, plain_param in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(param, plain_param, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_momentum_is_capped(name: str, attach: Attach, read: Read) -> None:
    model, optimizer, plain_model, plain_optimizer = pair(name)
    guard = attach(model, optimizer)
    for i in range(8):
        if i == 2:
            set_overrides(guard, max_momentum=(0.5,))
        if i == 6:
            set_overrides(guard, max_momentum=(0.99,))
        train(model, optimizer, guard.watch, i)
        by_hand(plain_model, plain_optimizer, i, 1.0, 0.5 if 2 <= i < 6 else math.inf)
    assert same(snapshot(model, optimizer), snapshot(plain_model, plain_optimizer))
    guard.close()
    assert read().scalars["momentum"].tolist() == pytest.approx([0.9] * 8), "the journal records what the loop set"


@pytest.mark.parametrize("schedule", ["ExponentialLR", "CosineAnnealingLR", "OneCycleLR"])
def test_schedulers_do_not_see_the_overridden_lr(schedule: str, attach: Attach, read: Read) -> None:
    make: dict[str, Callable[[Optimizer], Any]] = {
        "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
        "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12),
        "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    }
    model, optimizer, plain_model, plain_optimizer = pair("SGD")
    guarded_schedule, plain_schedule = make[schedule](optimizer), make[schedule](plain_optimizer)
    guard = attach(model, optimizer, scheduler=guarded_schedule)
    expected: list[float] = []
    for i in range(10):
        if i == 2:
            set_overrides(guard, lr_factor=0.25)
        expected.append(plain_optimizer.param_groups[0]["lr"])
        train(model, optimizer, guard.watch, i)
        by_hand(plain_model, plain_optimizer, i, 1.0 if i < 2 else 0.25)
        guarded_schedule.step()
        plain_schedule.step()
    assert same(snapshot(model, optimizer), snapshot(plain_model, plain_optimizer))
    assert guarded_schedule.state_dict().keys() == plain_schedule.state_dict().keys()
    assert guarded_schedule.get_last_lr() == plain_schedule.get_last_lr()
    guard.close()
    assert read().scalars["lr"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["SGD", "SGD tensor"])
def test_capped_lr_decays_with_the_schedule(name: str, attach: Attach) -> None:
    model, optimizer, plain_model, plain_optimizer = pair(name)
    guard = attach(model, optimizer)
    set_by_loop = [g["lr"] for g in optimizer.param_groups]
    set_overrides(guard, max_lr=(float(set_by_loop[0]) / 4,))
    for i, part in enumerate((1.0, 1.0, 0.6, 0.5, 0.2)):
        for group, rate in zip(optimizer.param_groups, set_by_loop, strict=True):
            group["lr"] = part * rate
        train(model, optimizer, guard.watch, i)
        by_hand(plain_model, plain_optimizer, i, part / 4 if part > 0.25 else part)  # an lr below the cap is unchanged
    for param, plain_param in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(param, plain_param, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("zero_stale", [True, False])
def test_stale_grads_are_zeroed_only_by_override(zero_stale: bool, attach: Attach, read: Read) -> None:
    model, optimizer, plain_model, plain_optimizer = pair("SGD")
    guard = attach(model, optimizer)
    set_overrides(guard, zero_stale_grads=zero_stale)
    for i in range(5):
        guard.watch(loss_of(model, batch(i))).backward()
        optimizer.step()  # without zero_grad
        train(plain_model, plain_optimizer, bare, i)
    guard.close()
    assert same(snapshot(model, optimizer), snapshot(plain_model, plain_optimizer)) is zero_stale
    assert read().scalars["stale_grads"][1:].tolist() == [0.5 if zero_stale else 1.0] * 4


def test_each_optimizer_has_its_own_cap(attach: Attach) -> None:
    def build() -> tuple[Net, list[Optimizer]]:
        model = net()
        other_params = [*model.norm.parameters(), *model.last.parameters()]
        return model, [torch.optim.SGD(model.first.parameters(), lr=0.1), torch.optim.SGD(other_params, lr=0.01)]

    (model, optimizers), (plain_model, plain_optimizer) = build(), build()
    guard = attach(model, optimizers)
    set_overrides(guard, max_lr=(0.05, 1.0), lr_factor=0.5)
    for i in range(4):
        train(model, optimizers, guard.watch, i)
        for o, lr in zip(plain_optimizer, (0.025, 0.005), strict=True):
            o.param_groups[0]["lr"] = lr
        train(plain_model, plain_optimizer, bare, i)
    for param, plain_param in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(param, plain_param, rtol=1e-6, atol=0.0)


def test_override_applies_inside_a_closure(attach: Attach) -> None:
    model, plain_model = net(), net()
    optimizer, plain_optimizer = (torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, plain_model))
    guard = attach(model, optimizer)
    set_overrides(guard, lr_factor=0.5)

    def step(m: Net, o: Optimizer, watch: Callable[..., Tensor], i: int) -> None:
        def closure() -> Tensor:
            o.zero_grad()
            loss = watch(loss_of(m, batch(i)), None)
            loss.backward()
            return loss

        o.step(closure)  # pyright: ignore[reportArgumentType]

    for i in range(3):
        step(model, optimizer, guard.watch, i)
        plain_optimizer.param_groups[0]["lr"] = 0.05
        step(plain_model, plain_optimizer, bare, i)
    assert same(snapshot(model), snapshot(plain_model))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_error_in_the_step_removes_the_override(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = attach(model, optimizer)
    set_overrides(guard, lr_factor=0.5)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)  # pyright: ignore[reportArgumentType]
    train(model, optimizer, guard.watch, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    guard.close()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_lr_set_during_the_step_is_kept(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = attach(model, optimizer)
    set_overrides(guard, lr_factor=0.5)

    def closure() -> Tensor:
        optimizer.param_groups[0]["lr"] = 0.07
        loss = guard.watch(loss_of(model, batch(0)), None)
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    assert optimizer.param_groups[0]["lr"] == 0.07


def test_new_decision_replaces_earlier_overrides(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = attach(model, optimizer)
    inside: list[float] = []
    plan = {
        1: {"overrides": StepOverrides(lr_factor=0.5)},
        3: {"overrides": StepOverrides(lr_factor=0.25), "action": Action.CONSTRAIN},
        4: {"reason": "no overrides", "action": Action.ACCEPT},
        5: {"overrides": StepOverrides(), "action": Action.RELAX},
    }
    script(guard, plan)
    optimizer.register_step_pre_hook(lambda *_: inside.append(optimizer.param_groups[0]["lr"]))
    for i in range(10):
        train(model, optimizer, guard.watch, i)
    assert inside == [0.1] * 4 + [0.05] * 2 + [0.025] * 2 + [0.1] * 2, (
        "decided two rows later and applied from the next step"
    )


# -- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "SGD fused", "AdamW plain", "AdamW fused"])
@pytest.mark.parametrize("what", ["norm", "loss"])
def test_ceiling_refuses_in_the_same_step(what: str, name: str, attach: Attach, read: Read) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    guard = attach(model, optimizer)
    judge = script(guard, {})
    for i in range(4):
        train(model, optimizer, guard.watch, i)
    norms = guard._reader.history.norms
    top = 3 * max(norms) if what == "norm" else 1e9
    set_overrides(
        guard, norm_ceiling=(top,), loss_ceiling=1e9 if what == "norm" else 3 * max(guard._reader.history.losses)
    )
    train(model, optimizer, guard.watch, 4)
    before = snapshot(model, optimizer)
    train(model, optimizer, guard.watch, 5, "burst")
    assert same(before, snapshot(model, optimizer)), "buffers too"
    train(model, optimizer, guard.watch, 6)
    assert not same(before, snapshot(model, optimizer))
    set_overrides(guard)
    train(model, optimizer, guard.watch, 7, "burst")
    guard.close()
    rows = read().scalars
    assert rows["verdict"].tolist() == [0] * 5 + [Verdict.NORM_OUTLIER, 0, 0]
    assert rows["norm_limit"].tolist()[4:7] == pytest.approx([top] * 3)
    assert math.isnan(rows["norm_limit"][7])
    assert judge.seen[-1] == 7


def test_ceiling_of_one_optimizer_refuses_both(attach: Attach, read: Read) -> None:
    model = net()
    other_params = [*model.norm.parameters(), *model.last.parameters()]
    optimizers = [torch.optim.SGD(model.first.parameters(), lr=0.1), torch.optim.SGD(other_params, lr=0.01)]
    guard = attach(model, optimizers)
    script(guard, {})
    for i in range(3):
        train(model, optimizers, guard.watch, i)
    set_overrides(guard, norm_ceiling=(math.inf, 1e-9))
    before = snapshot(model, *optimizers)
    train(model, optimizers, guard.watch, 3)
    assert same(before, snapshot(model, *optimizers))


@pytest.mark.parametrize("name", ["SGD", "SGD fused", "AdamW plain", "AdamW fused", "AdamW fused tensor"])
@pytest.mark.parametrize("user_clip", [None, 0.5, "groups", "value"])
def test_clip_override_combines_with_the_users_clip(user_clip: Any, name: str, attach: Attach, read: Read) -> None:
    model, optimizer, plain_model, plain_optimizer = pair(name)
    option = {"groups": [0.5, None], "value": {"value": 0.05}}.get(user_clip, user_clip)
    guard = attach(model, optimizer, clip=option)
    plain_groups = [[*plain_model.first.parameters()], [*plain_model.norm.parameters(), *plain_model.last.parameters()]]

    def clip(max_norm: float) -> None:
        if user_clip == "groups":
            nn.utils.clip_grad_norm_(plain_groups[0], min(0.5, max_norm))
            nn.utils.clip_grad_norm_(plain_groups[1], max_norm)
            return
        nn.utils.clip_grad_norm_(
            plain_model.parameters(), min(max_norm, user_clip if isinstance(user_clip, float) else math.inf)
        )
        if user_clip == "value":
            nn.utils.clip_grad_value_(plain_model.parameters(), 0.05)

    for i in range(9):
        if i == 3:
            set_overrides(guard, clip=(0.1,))
        if i == 6:
            set_overrides(guard)
        train(model, optimizer, guard.watch, i)
        loss_of(plain_model, batch(i)).backward()
        clip(0.1 if 3 <= i < 6 else math.inf)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for (param_name, a), b in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        if param_name != "first.bias":  # its gradient is only rounding error, which Adam amplifies
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    guard.close()
    clip_norms = read().scalars["clip"].tolist()
    assert clip_norms[3:6] == pytest.approx([0.1] * 3)
    assert clip_norms[6:] == pytest.approx([0.5 if user_clip in (0.5, "groups") else math.nan] * 3, nan_ok=True)
    assert all(c < 1.0 for c in read().scalars["clip_factor"].tolist()[3:6])


def test_new_gates_get_the_same_ceilings(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    script(guard, {})
    train(model, optimizer, guard.watch, 0)
    set_overrides(guard, norm_ceiling=(1e-9,))
    optimizer.add_param_group({"params": [*model.norm.parameters(), *model.last.parameters()]})
    before = snapshot(model)
    train(model, optimizer, guard.watch, 1)
    assert same(before, snapshot(model))


# -- optimizer state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_reset_the_next_step_is_like_the_first(name: str, attach: Attach) -> None:
    model, optimizer, plain_model, plain_optimizer = pair(name)
    guard = attach(model, optimizer)
    script(guard, {3: {"reset_optimizer": True}})
    for i in range(9):
        if i == 6:
            assert not optimizer.state
            plain_optimizer.state.clear()
        train(model, optimizer, guard.watch, i)
        train(plain_model, plain_optimizer, bare, i)
    assert same(snapshot(model, optimizer), snapshot(plain_model, plain_optimizer))
    before = snapshot(model, optimizer)
    train(model, optimizer, guard.watch, 9, "nan")
    assert same(before, snapshot(model, optimizer))


def test_reset_of_an_optimizer_that_creates_state_in_init(attach: Attach) -> None:
    """Adagrad creates its state in __init__: without it, its next step raises KeyError in some versions of torch."""
    model, plain_model = net(), net()
    optimizer, plain_optimizer = (
        torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.5) for m in (model, plain_model)
    )
    guard = attach(model, optimizer)
    script(guard, {3: {"reset_optimizer": True}})
    for i in range(9):
        if i == 6:
            plain_optimizer = torch.optim.Adagrad(plain_model.parameters(), initial_accumulator_value=0.5)
        train(model, optimizer, guard.watch, i)
        train(plain_model, plain_optimizer, bare, i)
    assert same(snapshot(model, optimizer), snapshot(plain_model, plain_optimizer))


@pytest.mark.parametrize("name", ["SGD fused", "AdamW fused", "AdamW plain"])
def test_veto_right_after_a_reset(name: str, attach: Attach) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    guard = attach(model, optimizer)
    script(guard, {3: {"reset_optimizer": True}})
    for i in range(6):
        train(model, optimizer, guard.watch, i)
    before = snapshot(model)
    train(model, optimizer, guard.watch, 6, "nan")
    assert same(before, snapshot(model))
    train(model, optimizer, guard.watch, 7)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_rewind_with_optimizer_reset(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    guard = attach(model, optimizer, policy=surefoot.Policy(snapshot_every=4))
    script(guard, {9: {"action": Action.REWIND, "reset_optimizer": True, "overrides": StepOverrides(lr_factor=0.5)}})
    expected = None
    for i in range(12):
        train(model, optimizer, guard.watch, i)
        expected = snapshot(model) if i == 7 else expected
    assert same(expected, snapshot(model))
    assert not optimizer.state
    assert guard._recovery.overrides.active.lr_factor == 0.5
    train(model, optimizer, guard.watch, 12)
    assert not guard.disabled


# -- precision --------------------------------------------------------------------------------------------------------


class DtypeRecorder(nn.Module):
    """Records the dtypes of its inputs and of its matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, mask: Tensor, fail: bool = False) -> Tensor:
        out = self.linear(x) * mask
        self.seen += [self.linear(x).dtype, x.dtype, mask.dtype]
        if fail:
            raise KeyError("the user's error")
        return out


def test_force_float32_disables_autocast_inside_the_model(attach: Attach) -> None:
    torch.manual_seed(0)
    model = DtypeRecorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    half, full = torch.bfloat16, torch.float32

    def step(i: int, *, fail: bool = False) -> list[torch.dtype]:
        model.seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(i).to(half), mask=torch.ones(4, dtype=half), fail=fail).float().square().mean()
            assert torch.is_autocast_enabled("cpu")
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is half, "nothing changes outside the model"
        guard.watch(loss, None).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.seen

    assert step(0) == [half] * 3
    set_overrides(guard, float32=True)
    assert step(1) == [full] * 3
    assert step(2) == [full] * 3
    with pytest.raises(KeyError):
        step(3, fail=True)
    assert step(4) == [full] * 3, "an error in forward leaves no context open"
    copied = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        copied(batch(0), mask=torch.ones(4))
    assert copied.seen[-3] is half, "a copy of the model is not affected"
    set_overrides(guard)
    assert step(5) == [half] * 3
    set_overrides(guard, float32=True)
    guard.close()
    assert hooks_on(model, optimizer) == []


def test_force_float32_fails_for_bfloat16_weights(attach: Attach) -> None:
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    judge = script(guard, {1: {"overrides": StepOverrides(float32=True, lr_factor=0.5)}})
    for i in range(5):
        guard.watch(loss_of(model, batch(i).to(torch.bfloat16)), None).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert judge.failures == ["the model cannot compute in float32: it has weights in torch.bfloat16"]
    assert guard._recovery.overrides.active == StepOverrides(), "no part of the decision is applied"

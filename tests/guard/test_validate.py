"""Every invalid use raises a one-line error before anything is trained or hooked."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Net, batch, hooks_on, loss_of, net, same, snapshot, train
from torch import nn

import surefoot
from surefoot.guard.validate import check_snapshot_memory

Attach = Callable[..., Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def frozen() -> nn.Module:
    return net().requires_grad_(False)


CASES: dict[str, tuple[Callable[[Net, torch.optim.Optimizer], dict[str, Any]], tuple[str, ...]]] = {
    "model without parameters": (lambda m, o: {"model": nn.ReLU()}, ("no parameters", "Pass the module")),
    "model all frozen": (lambda m, o: {"model": frozen()}, ("frozen", "Pass the module")),
    "model is a function": (lambda m, o: {"model": m.forward}, ("torch.nn.Module", "method")),
    "model is its parameters": (lambda m, o: {"model": list(m.parameters())}, ("torch.nn.Module", "list")),
    "optimizer of another model": (
        lambda m, o: {"optimizer": sgd(net(1))},
        ("SGD", "none of the", "Make it from"),
    ),
    "one of two optimizers of another model": (
        lambda m, o: {"optimizer": [o, torch.optim.Adam(net(1).parameters())]},
        ("Adam", "none of the model's"),
    ),
    "no optimizer": (lambda m, o: {"optimizer": []}, ("no optimizer", "Pass the optimizer")),
    "optimizer is None": (lambda m, o: {"optimizer": None}, ("NoneType", "torch.optim.Optimizer")),
    "optimizer is a scheduler": (
        lambda m, o: {"optimizer": torch.optim.lr_scheduler.ConstantLR(sgd(net(1)))},
        ("ConstantLR", "torch.optim.Optimizer"),
    ),
    "the same optimizer twice": (lambda m, o: {"optimizer": [o, o]}, ("SGD", "twice")),
    "run_dir missing": (lambda m, o: {"run_dir": None}, ("run_dir=", "missing", "runs/a")),
    "run_dir blank": (lambda m, o: {"run_dir": "  "}, ("run_dir=", "missing")),
    "run_dir is a number": (lambda m, o: {"run_dir": 7}, ("run_dir=", "7")),
    "option misspelt": (lambda m, o: {"polcy": "observe"}, ("polcy=", "Did you mean policy=?")),
    "option unknown": (lambda m, o: {"turbo": True}, ("turbo=", "run_dir", "clip", "policy", "scaler")),
    "step_fn is no function": (lambda m, o: {"step_fn": 3}, ("step_fn=3", "a function of the model and a batch")),
    "resume is a path": (lambda m, o: {"resume": "runs/a"}, ("resume=", "True or False", "run_dir=")),
    "scheduler is a number": (lambda m, o: {"scheduler": 0.1}, ("scheduler=0.1", "state_dict", "a list of them")),
    "one of two schedulers is none": (
        lambda m, o: {"scheduler": [schedule(sgd(m)), "cosine"]},
        ("'cosine'", "state_dict"),
    ),
    "scheduler is its class": (lambda m, o: {"scheduler": torch.optim.lr_scheduler.StepLR}, ("StepLR", "itself")),
    "extra is a list": (lambda m, o: {"extra": [m]}, ("extra=", "mapping", "list")),
    "extra without a state": (lambda m, o: {"extra": {"ema": 1.0}}, ("extra['ema']", "float", "load_state_dict")),
    "option was renamed": (lambda m, o: {"ring": "8GB"}, ("no option ring=", "Did you mean snapshot_memory=?")),
    "snapshot_memory is a word": (
        lambda m, o: {"snapshot_memory": "big"},
        ("snapshot_memory='big'", "False", "8GB"),
    ),
    "snapshot_memory is negative": (lambda m, o: {"snapshot_memory": -1}, ("snapshot_memory=-1", "in bytes")),
    "snapshot_memory is not a number": (
        lambda m, o: {"snapshot_memory": math.nan},
        ("snapshot_memory=nan", "in bytes"),
    ),
    "clip is zero": (lambda m, o: {"clip": 0}, ("clip=0", "positive number")),
    "clip is negative": (lambda m, o: {"clip": -1.0}, ("clip=-1.0", "positive number")),
    "clip is NaN": (lambda m, o: {"clip": math.nan}, ("clip=nan", "positive number")),
    "clip is a truth value": (lambda m, o: {"clip": True}, ("clip=True", "positive number")),
    "clip is a word": (lambda m, o: {"clip": "adaptiv"}, ("adaptiv", "'adaptive'")),
    "clip by something": (lambda m, o: {"clip": {"percentile": 0.9}}, ("percentile", "value")),
    "clip by nothing": (lambda m, o: {"clip": {}}, ("clip={}", "value")),
    "clip by a bad value": (lambda m, o: {"clip": {"value": -1}}, ("value", "positive")),
    "too many clips": (lambda m, o: {"clip": [1.0, 2.0]}, ("2 entries for 1 parameter groups", "one entry per group")),
    "no clips": (lambda m, o: {"clip": []}, ("0 entries", "one entry per group")),
    "a bad clip in a list": (lambda m, o: {"clip": ["off"]}, ("clip='off'", "None (no clipping)")),
    "policy unknown": (lambda m, o: {"policy": "protct"}, ("protct", "'protect'", "'observe'", "surefoot.Policy")),
    "policy is None": (lambda m, o: {"policy": None}, ("policy=None", "'protect'")),
    "policy is its class": (lambda m, o: {"policy": surefoot.Policy}, ("policy=", "surefoot.Policy(...)")),
}


@pytest.mark.parametrize("case", CASES)
def test_attach_raises_and_changes_nothing(case: str, attach: Attach, tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    for i in range(2):
        train(model, optimizer, lambda loss, batch: loss, i)
    before = snapshot(model, optimizer)
    wrong, words = CASES[case]
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        attach(**({"model": model, "optimizer": optimizer} | wrong(model, optimizer)))
    message = str(caught.value)
    for word in words:
        assert word in message
    assert message.startswith("attach: ")
    assert "\n" not in message
    assert same(before, snapshot(model, optimizer))
    assert hooks_on(model, optimizer) == []
    assert list(tmp_path.iterdir()) == [], "nothing was written"
    check_attach_works(attach, model, optimizer)


def check_attach_works(attach: Attach, model: Net, optimizer: torch.optim.Optimizer) -> None:
    """A correct attach to the same model and optimizer works."""
    guard = attach(model, optimizer)
    train(model, optimizer, guard.watch, 0)
    before = snapshot(model, optimizer)
    train(model, optimizer, guard.watch, 1, "nan")
    assert same(before, snapshot(model, optimizer))
    guard.close()
    assert hooks_on(model, optimizer) == []


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None),
        (True, None),
        (False, 0),
        (0, 0),
        (123, 123),
        (2e9, 2_000_000_000),
        ("8GB", 8_000_000_000),
        ("1.5 gb", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("512 MB", 512_000_000),
        ("64k", 64_000),
        ("100", 100),
    ],
)
def test_snapshot_memory_formats(given: Any, wanted: int | None) -> None:
    assert check_snapshot_memory(given) == wanted


def test_policy_with_too_few_snapshots_is_refused() -> None:
    with pytest.raises(ValueError, match="max_snapshots must be at least 2"):
        surefoot.Policy(max_snapshots=1)
    with pytest.raises(ValueError, match="snapshot_every must be at least 1"):
        surefoot.Policy(snapshot_every=0)


def test_run_dir_used_by_a_live_process_is_refused(attach: Attach, tmp_path: Path) -> None:
    program = (
        "import sys, torch, surefoot\n"
        "model = torch.nn.Linear(2, 2)\n"
        "guard = surefoot.attach(model, torch.optim.SGD(model.parameters()), run_dir=sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "guard.close()\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    model = net()
    optimizer = sgd(model)
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(ValueError, match="in use") as caught:
            attach(model, optimizer)
        assert str(other.pid) in str(caught.value)
        assert "Choose another run_dir" in str(caught.value)
        assert hooks_on(model, optimizer) == []
        other.communicate("")
    assert other.returncode == 0
    check_attach_works(attach, model, optimizer)


def test_run_dir_used_by_another_guard_of_this_process_is_refused(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    attach(model, optimizer)
    other = net(1)
    with pytest.raises(ValueError, match="this very process") as caught:
        attach(other, sgd(other))
    assert "close" in str(caught.value)
    assert hooks_on(other) == []


@pytest.mark.parametrize("where", ["is a file", "below a file", "not writable"])
def test_unwritable_run_dir_is_refused(where: str, attach: Attach, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    target = {"is a file": file, "below a file": file / "run", "not writable": Path("/proc/surefoot/run")}[where]
    model = net()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=re.escape(str(target))) as caught:
        attach(model, optimizer, run_dir=target)
    assert "Choose a run_dir" in str(caught.value)
    assert hooks_on(model, optimizer) == []
    check_attach_works(attach, model, optimizer)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_dir_without_permission_is_refused(attach: Attach, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    model = net()
    with pytest.raises(ValueError, match="Choose a run_dir"):
        attach(model, sgd(model), run_dir=closed)


def under_no_grad(model: Net) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(model, batch(0))


LOSSES: dict[str, tuple[Callable[[Net], Any], tuple[str, ...]]] = {
    "a float": (lambda m: loss_of(m, batch(0)).item(), ("must be a tensor", "float", ".item()")),
    "None": (lambda m: None, ("must be a tensor", "NoneType")),
    "a tuple": (lambda m: (loss_of(m, batch(0)), 1), ("must be a tensor", "tuple")),
    "a vector": (lambda m: m(batch(0)), ("one number", "(16,)", "loss.mean()")),
    "empty": (lambda m: m(batch(0))[:0], ("one number", "(0,)")),
    "detached": (lambda m: loss_of(m, batch(0)).detach(), ("no graph", "before .detach()")),
    "without a graph": (lambda m: torch.tensor(1.0), ("no graph", "Watch training losses only")),
    "under no_grad": (under_no_grad, ("no graph", "torch.no_grad()")),
}


@pytest.mark.parametrize("case", LOSSES)
def test_watch_refuses_invalid_losses(case: str, attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    make, words = LOSSES[case]
    before = snapshot(model, optimizer)[1]
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        guard.watch(make(model), batch(0))
    message = str(caught.value)
    for word in words:
        assert word in message
    assert message.startswith("watch: ")
    assert same(before, snapshot(model, optimizer)[1])
    train(model, optimizer, guard.watch, 0)  # the guard still works


def test_step_without_watch_raises_before_the_weights_change(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    loss_of(model, batch(0)).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="watch was never called") as caught:
        optimizer.step()
    assert "guard.watch(loss, batch)" in str(caught.value)
    assert same(before, snapshot(model, optimizer))
    train(model, optimizer, guard.watch, 1)
    assert not same(before, snapshot(model, optimizer))


def test_closure_without_watch_raises_before_the_weights_change(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    attach(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(0))
        loss.backward()
        return loss

    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="watch was never called"):
        optimizer.step(closure)
    assert same(weights, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("values", [{"tokens": "many"}, {"total_steps": None}])
def test_non_numeric_report_raises_and_the_protection_stays(values: dict[str, Any], attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    with pytest.raises(ValueError, match=next(iter(values))):
        guard.report(**values)
    train(model, optimizer, guard.watch, 0)
    before = snapshot(model, optimizer)
    train(model, optimizer, guard.watch, 1, "nan")
    assert same(before, snapshot(model, optimizer))

"""Buffer shadows: changes that a refused batch made to buffers are reverted, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from surefoot.checkpoint.buffers import SMALL, BufferShadow


class BufferModel(nn.Module):
    """Buffers of many kinds and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("large", torch.zeros(SMALL), persistent=False)
        self.register_buffer("nothing", None)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.fixture(params=["host", "device"])
def verdict(request: pytest.FixtureRequest, device: torch.device) -> Callable[[bool], bool | Tensor]:
    """Makes a verdict as a bool on the host or as a tensor on the device."""
    if request.param == "host":
        return bool
    return lambda refused: torch.tensor(float(refused), device=device)


def train(model: BufferModel, value: float) -> None:
    """Change the buffers as a forward pass in training does."""
    device_of_model = model.mean.device
    model.norm(torch.full((8, 4), value, device=device_of_model) * torch.randn(8, 4, device=device_of_model))
    model.mean.add_(value)
    model.mask.logical_not_()
    model.count.add_(1)
    model.turned.mul_(value)
    model.large.add_(value)


def contents(model: nn.Module) -> list[Tensor]:
    return [b.clone() for b in model.buffers()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_refused_changes_are_reverted_and_accepted_ones_kept(
    device: torch.device, verdict: Callable[[bool], bool | Tensor]
) -> None:
    model = BufferModel().to(device)
    shadow = BufferShadow(model)
    for turn in range(6):
        train(model, 1.0 + turn)
        accepted = contents(model)
        shadow.commit_or_revert(verdict(False))
        assert same(accepted, contents(model))
        train(model, math.nan)
        train(model, math.inf)
        shadow.commit_or_revert(verdict(True))
        assert same(accepted, contents(model))
        shadow.commit_or_revert(verdict(True))
        assert same(accepted, contents(model)), "refused again with nothing in between"


def test_contiguous_buffers(device: torch.device, verdict: Callable[[bool], bool | Tensor]) -> None:
    model = BufferModel().to(device)
    del model.turned
    model.turned = torch.zeros(0)  # an attribute and no buffer: the rest is contiguous
    shadow = BufferShadow(model)
    for refused in (False, True, True, False, True):
        before = contents(model)
        train(model, math.nan if refused else 1.0)
        after = contents(model)
        shadow.commit_or_revert(verdict(refused))
        assert same(before if refused else after, contents(model))


def test_first_update_can_be_refused(device: torch.device, verdict: Callable[[bool], bool | Tensor]) -> None:
    model = BufferModel().to(device)
    shadow = BufferShadow(model)
    start = contents(model)
    train(model, math.nan)
    shadow.commit_or_revert(verdict(True))
    assert same(start, contents(model))


def test_keep_false_checks_without_committing(device: torch.device, verdict: Callable[[bool], bool | Tensor]) -> None:
    model = BufferModel().to(device)
    shadow = BufferShadow(model)
    start = contents(model)
    train(model, 2.0)
    after = contents(model)
    shadow.commit_or_revert(verdict(False), keep=False)
    assert same(after, contents(model))
    shadow.commit_or_revert(verdict(True))
    assert same(start, contents(model)), "an update with keep=False is reverted by a later refusal"


def test_large_batch_norm_buffers_are_tracked_without_version_changes() -> None:
    model = nn.BatchNorm1d(SMALL // 4 + 1)
    shadow = BufferShadow(model)
    model(torch.randn(2, SMALL // 4 + 1))
    shadow.commit_or_revert(False)
    accepted = contents(model)
    model(torch.full((2, SMALL // 4 + 1), math.nan))
    shadow.commit_or_revert(True)
    assert same(accepted, contents(model))


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_large_buffer_replaced_in_every_forward(times: int) -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    for _ in range(3):
        for _ in range(times):
            model.large = model.large + 1.0
        shadow.commit_or_revert(False)
        accepted = contents(model)
        for _ in range(times):
            model.large = model.large * math.nan
        shadow.commit_or_revert(True)
        assert same(accepted, contents(model))


def test_load_state_dict_resets_the_shadow() -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    state = model.state_dict()
    state["mean"] = torch.full((3,), 9.0)
    model.load_state_dict(state)
    train(model, math.nan)
    shadow.commit_or_revert(True)
    assert model.mean.tolist() == [9.0] * 3


def test_load_state_dict_of_a_submodule_resets_the_shadow() -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    state = model.norm.state_dict()
    state["running_mean"] = torch.full((4,), 9.0)
    model.norm.load_state_dict(state)
    train(model, math.nan)
    shadow.commit_or_revert(True)
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.tolist() == [9.0] * 4


def test_replaced_buffer_is_tracked() -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    model.mean = torch.full((3,), 4.0)
    shadow.commit_or_revert(False)
    train(model, math.nan)
    shadow.commit_or_revert(True)
    assert model.mean.tolist() == [4.0] * 3
    model.mean = torch.zeros(7)  # another shape, like a cache that has grown
    shadow.commit_or_revert(False)
    train(model, math.nan)
    shadow.commit_or_revert(True)
    assert model.mean.tolist() == [0.0] * 7


def test_buffer_resized_in_a_refused_batch_does_not_stop_the_revert(
    verdict: Callable[[bool], bool | Tensor],
) -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    train(model, 1.0)
    shadow.commit_or_revert(verdict(False))
    train(model, math.nan)
    model.mean = torch.zeros(7)
    shadow.commit_or_revert(verdict(True))
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.isfinite().all()
    assert model.large.isfinite().all()


@pytest.mark.parametrize("change", ["none", "gone", "new"])
def test_added_and_removed_buffers(change: str) -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    if change == "none":
        model.mean = None
    elif change == "gone":
        del model.mean
    else:
        model.register_buffer("more", torch.zeros(2))
    model.norm(torch.full((8, 4), math.nan))
    shadow.commit_or_revert(True)
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.isfinite().all()
    shadow.commit_or_revert(False)


def test_buffer_removed_in_an_accepted_update_stays_removed(verdict: Callable[[bool], bool | Tensor]) -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    model.mean = None
    shadow.commit_or_revert(verdict(False))
    model.norm(torch.full((8, 4), math.nan))
    shadow.commit_or_revert(verdict(True))
    assert model.mean is None
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.isfinite().all()


def test_buffer_shared_by_two_modules_is_reverted_once() -> None:
    model = nn.Sequential(BufferModel(), BufferModel())
    model[1].mean = model[0].mean
    shadow = BufferShadow(model)
    train(model[0], 1.0)
    shadow.commit_or_revert(False)
    accepted = contents(model)
    train(model[1], math.nan)
    shadow.commit_or_revert(True)
    assert same(accepted, contents(model))


def test_model_without_buffers() -> None:
    model = nn.Linear(2, 2)
    shadow = BufferShadow(model)
    shadow.commit_or_revert(True)
    shadow.commit_or_revert(torch.tensor(1.0))


def test_close_removes_all_hooks() -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    shadow.close()
    shadow.close()
    for module in model.modules():
        assert not module._load_state_dict_post_hooks


def test_shadows_record_no_gradient() -> None:
    model = BufferModel()
    shadow = BufferShadow(model)
    model.mean = nn.functional.softplus(torch.zeros(3, requires_grad=True))
    shadow.commit_or_revert(False)
    shadow.commit_or_revert(True)
    assert all(not t.requires_grad for t in shadow._shadows)

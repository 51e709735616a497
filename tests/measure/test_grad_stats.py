"""All statistics of one step, on the device and on the host."""

from __future__ import annotations

import math

import pytest
import torch
from reference_stats import reference
from torch import nn

from surefoot.measure.block_layout import MAX_MICROBATCHES, UNITS_START, HostBlock, SummarySlot
from surefoot.measure.grad_stats import GradStats
from surefoot.measure.layout import layout_params
from surefoot.measure.stats_torch import torch_summariser
from surefoot.records import LAYER_STATS


def stats_of(model: nn.Module, device: torch.device) -> GradStats:
    """Two units: the first layer's tensors, and the last layer's."""
    layout = layout_params(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return GradStats(layout, [slice(0, 2), slice(2, 4)], device)


def model_on(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)


def test_gradients_of_accumulated_microbatches(device: torch.device) -> None:
    model = model_on(device)
    grad_stats = stats_of(model, device)
    losses: list[float] = []
    squares: list[float] = []
    for i in range(3):
        loss = model(torch.randn(4, 6, device=device)).square().mean() * (i + 1)
        loss.backward()
        grad_stats.measure(loss.detach(), scale=None)
        losses.append(loss.item())
        squares.append(sum(reference(p.grad)[0] ** 2 for p in model.parameters() if p.grad is not None))
    block = HostBlock(grad_stats.raw.cpu().numpy().copy(), grad_stats.block_layout)
    assert grad_stats.num_microbatches == 3
    assert grad_stats.present == (True,) * 4
    assert math.isclose(float(block.summary[SummarySlot.LOSS]), sum(losses), rel_tol=1e-6)
    assert block.summary[SummarySlot.NUM_MICROBATCHES] == 3
    units = [reference(p.grad)[0] ** 2 for p in model.parameters() if p.grad is not None]
    assert grad_stats.block.summary[UNITS_START::2].tolist() == pytest.approx(
        [sum(units[:2]), sum(units[2:])], rel=1e-5
    )
    assert block.microbatches[:3, 0].tolist() == pytest.approx(losses, rel=1e-6)
    assert block.microbatches[:3, 1].tolist() == pytest.approx(squares, rel=1e-5)
    for row, p in zip(block.stats, model.parameters(), strict=True):
        assert p.grad is not None
        assert row.tolist() == pytest.approx(reference(p.grad), rel=1e-5, abs=1e-6)
    grad_stats.num_microbatches = 0
    grad_stats.measure(torch.tensor(7.0, device=device), scale=None)
    assert grad_stats.block.summary[: SummarySlot.ACTIVE_RANKS].tolist() == [
        7.0,
        1.0,
    ]  # the sums of the last update are reset
    grad_stats.num_microbatches = 0
    grad_stats.measure(None, scale=None)
    assert grad_stats.block.summary[: SummarySlot.ACTIVE_RANKS].tolist() == [0.0, 0.0]


def test_more_microbatches_than_lines(device: torch.device) -> None:
    model = model_on(device)
    grad_stats = stats_of(model, device)
    loss = torch.tensor(2.0, device=device)
    for _ in range(MAX_MICROBATCHES + 6):
        grad_stats.measure(loss, scale=None)
    assert grad_stats.block.summary[SummarySlot.LOSS] == 2.0 * (MAX_MICROBATCHES + 6)
    assert grad_stats.block.summary[SummarySlot.NUM_MICROBATCHES] == MAX_MICROBATCHES + 6


def test_a_step_without_a_watched_loss_is_measured(device: torch.device) -> None:
    model = model_on(device)
    model(torch.randn(4, 6, device=device)).sum().backward()
    model[0].bias.grad = None
    grad_stats = stats_of(model, device)
    grad_stats.measure(None, scale=None)
    assert grad_stats.num_microbatches == 0
    assert grad_stats.present == (True, False, True, True)
    assert grad_stats.block.stats[1, LAYER_STATS.index("nonfinite")] == -1
    assert grad_stats.block.summary[UNITS_START + 2] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_losses_of_any_kind_add_up_exactly(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    grad_stats = stats_of(model_on(device), device)
    values = [1.0, 2.0**-12, 2.0**-12]  # the sum is not representable in bfloat16 or float16
    for value in values:
        grad_stats.measure(torch.full(shape, value, dtype=dtype, device=device), scale=None)
    assert float(grad_stats.block.summary[SummarySlot.LOSS]) == sum(values)
    assert grad_stats.block.microbatches[:3, 0].tolist() == values


def test_scaled_gradients_are_measured_unscaled(device: torch.device) -> None:
    model = model_on(device)
    loss = model(torch.randn(4, 6, device=device)).square().mean()
    (loss * 1024.0).backward()
    grad_stats = stats_of(model, device)
    grad_stats.measure(loss.detach(), scale=torch.tensor(1024.0, device=device))
    expected = [reference(p.grad, 1024.0)[0] for p in model.parameters() if p.grad is not None]
    assert grad_stats.block.stats[:, 0].tolist() == pytest.approx(expected, rel=1e-5)


def test_nonfinite_weights_and_buffers_are_counted(device: torch.device) -> None:
    model = model_on(device)
    grad_stats = stats_of(model, device)
    expected = math.sqrt(sum(reference(p)[0] ** 2 for p in model.parameters()))
    change, sampled = torch.tensor(4.0, device=device), torch.tensor(16.0, device=device)
    buffers = [torch.zeros(3, device=device), torch.tensor([1, 2], device=device)]
    grad_stats.measure_weights(change, sampled, buffers)
    summary = grad_stats.block.summary
    assert math.isclose(math.sqrt(float(summary[SummarySlot.PARAM_SQUARES])), expected, rel_tol=1e-5)
    assert summary[SummarySlot.NONFINITE_PARAMS] == 0
    assert [summary[SummarySlot.UPDATE_SQUARES], summary[SummarySlot.SAMPLED_SQUARES]] == [4.0, 16.0]
    with torch.no_grad():
        model[0].weight[0, :2] = math.nan
        buffers[0][1] = math.inf
    grad_stats.measure_weights(change, sampled, buffers)
    assert summary[SummarySlot.NONFINITE_PARAMS] == 3


def test_tensors_owned_by_another_rank_are_not_counted() -> None:
    stats = torch.zeros(3, len(LAYER_STATS))
    stats[:, 0] = torch.tensor([3.0, 4.0, 12.0])
    summary = torch.zeros(UNITS_START + 4, dtype=torch.float64)
    microbatches = torch.zeros(MAX_MICROBATCHES, 3, dtype=torch.float64)
    summarise = torch_summariser([slice(0, 2), slice(2, 3)])
    owned = torch.tensor([1, 0, 1])
    summarise(stats, owned=owned, loss=torch.tensor(1.5), summary=summary, microbatches=microbatches, microbatch=0)
    assert summary[UNITS_START:].tolist() == [9.0, 0.0, 144.0, 0.0]
    stats[1, 5] = 2  # non-finite values count on every rank
    summarise(stats, owned=owned, loss=torch.tensor(1.5), summary=summary, microbatches=microbatches, microbatch=1)
    assert summary[UNITS_START:].tolist() == [9.0, 2.0, 144.0, 0.0]
    assert summary[: SummarySlot.ACTIVE_RANKS].tolist() == [3.0, 2.0]

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.parallel import (
    ParallelError,
    World,
    find_blocks,
    grad_sync,
    shard_optimizer,
    sync_batch_norms,
    unwrap_model,
    wrap_model,
)
from surefoot.parallel.versions import compare_versions, local_versions

ALONE, PAIR = World(0, 1, 0, torch.device("cpu")), World(0, 2, 0, torch.device("cpu"))


@pytest.mark.parametrize("strategy", ["data", "zero1", "zero2", "zero3"])
def test_with_one_process_model_and_optimizer_are_unchanged(strategy: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters())
    assert wrap_model(model, strategy, ALONE) is model
    assert shard_optimizer(optimizer, strategy, ALONE) is optimizer
    with grad_sync(model, sync=False):
        model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None


def test_blocks_are_those_of_the_models_lists() -> None:
    decoder = Decoder(DecoderConfig(vocab=8, width=16, layers=3, heads=2, context=4))
    assert find_blocks(decoder) == list(decoder.blocks)
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_block_with_tied_weights_is_not_sharded_separately() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.GELU()])
    model.head = nn.Linear(4, 4, bias=False)
    model.head.weight = model.blocks[1].weight
    assert find_blocks(model) == [model.blocks[0]]


def test_unwrap_model_removes_the_compilers_wrapper() -> None:
    model = nn.Linear(2, 2)
    assert unwrap_model(torch.compile(model, backend="eager")) is model


def test_models_and_optimizers_that_cannot_be_sharded_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ParallelError, match="one of data, zero1, zero2, zero3; got 'zero4'"):
        wrap_model(model, "zero4", PAIR)
    with pytest.raises(ParallelError, match="Linear has nothing to train"):
        wrap_model(nn.Linear(2, 2).requires_grad_(False), "data", PAIR)
    with pytest.raises(ParallelError, match=r"zero1 cannot shard LBFGS.*or parallel.strategy=zero2"):
        shard_optimizer(torch.optim.LBFGS(model.parameters()), "zero1", PAIR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ParallelError, match="SGD has already stepped"):
        shard_optimizer(optimizer, "zero1", PAIR)


def test_batch_norm_with_few_samples_is_synchronised_on_gpus_and_noted_elsewhere() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    gpus = World(0, 2, 0, torch.device("cuda", 0))
    converted, notes = sync_batch_norms(net, gpus, samples=2)
    assert isinstance(converted[1], nn.SyncBatchNorm)
    assert notes == ["1 batch norms use the samples of all 2 ranks, since 2 per rank are too few"]
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    same, notes = sync_batch_norms(net, PAIR, samples=2, accumulate=4)
    assert same is net
    assert "on GPUs only" in notes[0]
    assert "not the 8 of an update" in notes[1]
    assert sync_batch_norms(net, gpus, samples=4) == (net, [])
    assert sync_batch_norms(nn.Linear(2, 2), gpus, samples=1)[1] == []


def test_rank_with_other_versions_is_named() -> None:
    usual = {**local_versions(torch.device("cpu")), "host": "a", "torch": "2.11.0"}
    versions = [{**usual, "host": "b", "torch": "2.10.1"}, usual, {**usual, "driver": "550.54.14"}]
    errors, notes = compare_versions(versions)
    assert errors == ["rank 0 on b has torch 2.10.1, most have 2.11.0"]
    assert notes == ["rank 2 on a has driver 550.54.14, most have none"]
    assert compare_versions([usual] * 3) == ([], [])

"""Two ranks train a sharded model on half of the samples each; the results are differences to the unsharded model."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from surefoot.models.decoder import Decoder, DecoderConfig, next_token_loss
from surefoot.train.optimizers import make_optimizers
from surefoot.train.recipe.schema import OptimizerSection

EPS = 1e-3
"""Far above the rounding error of a gradient, which must not decide the direction of an update."""
SPECS = (
    OptimizerSection(name="adamw", lr=0.01, eps=EPS),
    OptimizerSection(name="sgd", lr=0.1),
    OptimizerSection(name="adagrad", lr=0.01, eps=EPS),
    OptimizerSection(name="lars", lr=3.0),
    OptimizerSection(name="muon", lr=0.01),
)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, Any] = {spec.name: _relative_difference(spec, rank) for spec in SPECS}
    for name in ("lamb", "rprop"):
        try:
            make_optimizers(_sharded(_model()), OptimizerSection(name=name))
        except ValueError as error:
            results[name] = str(error)
    (out / f"results-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab=32, width=16, layers=1, heads=2, context=16))


def _sharded(model: Decoder) -> Decoder:
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def _relative_difference(spec: OptimizerSection, rank: int) -> float:
    """The largest difference after three updates, relative to the largest update."""
    start = _model()
    unsharded, shards = copy.deepcopy(start), _sharded(copy.deepcopy(start))
    optimizers = [make_optimizers(model, spec) for model in (unsharded, shards)]
    tokens = torch.arange(64).reshape(4, 16) * 5 % 31
    for _ in range(3):
        next_token_loss(unsharded, tokens).backward()
        next_token_loss(shards, tokens[2 * rank : 2 * rank + 2]).backward()
        for optimizer in (each for pair in optimizers for each in pair):
            optimizer.step()
            optimizer.zero_grad()
    gathered = [p.full_tensor() for p in shards.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
    return _max_difference(list(unsharded.parameters()), gathered) / _max_difference(
        list(unsharded.parameters()), list(start.parameters())
    )


def _max_difference(some: list[nn.Parameter], others: list[Any]) -> float:
    return max((a - b).detach().abs().max().item() for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

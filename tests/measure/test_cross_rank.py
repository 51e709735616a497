"""Merged statistics of shards equal those of the full tensor."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_stats import ABSENT, PLANTED, assert_row, odd_tensor

from surefoot.measure.cross_rank import merge_parts
from surefoot.measure.stats_torch import TorchStats
from surefoot.records import LAYER_STATS

CPU = torch.device("cpu")


def rows(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    """The statistics that one rank measures."""
    out = torch.zeros(len(tensors), len(LAYER_STATS))
    TorchStats([0 if t is None else t.numel() for t in tensors], CPU).measure(tensors, out=out)
    return out


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 200), min_size=1, max_size=5).map(sorted),
    exponent=st.integers(-7, 2),
    offset=st.sampled_from((0.0, 3.0)),
    planted=st.lists(st.sampled_from(PLANTED), max_size=5).map(tuple),
)
def test_random_splits(seed: int, cuts: list[int], exponent: int, offset: float, planted: tuple[float, ...]) -> None:
    full = odd_tensor("long", torch.float32, seed=seed, size=10.0**exponent, offset=offset, planted=planted)[:200]
    edges = [0, *cuts, 200]
    parts = [full[a:b] for a, b in pairwise(edges)]
    stats = torch.stack([rows([part]) for part in parts])
    counts = torch.tensor([[float(part.numel())] for part in parts], dtype=torch.float64)
    assert_row(merge_parts(stats, counts)[0], full, where=edges)


def test_a_replica_on_another_rank_is_counted_once() -> None:
    full = odd_tensor("matrix", torch.float32, seed=1, planted=(math.nan, 0.0, 1e-6))
    stats = torch.stack([rows([full])] * 3)
    counts = torch.tensor([[0.0], [float(full.numel())], [0.0]], dtype=torch.float64)
    assert_row(merge_parts(stats, counts)[0], full)


def test_sharded_replicated_and_absent_tensors() -> None:
    sharded = odd_tensor("vector", torch.float32, seed=1)
    copied = odd_tensor("vector", torch.float32, seed=2)
    stats = torch.stack([rows([part, copied, None]) for part in (sharded[:30], sharded[30:])])
    counts = torch.tensor([[30.0, 37.0, 5.0], [7.0, 0.0, 5.0]], dtype=torch.float64)
    merged = merge_parts(stats, counts)
    assert_row(merged[0], sharded)
    assert_row(merged[1], copied)
    assert merged[2].tolist() == ABSENT

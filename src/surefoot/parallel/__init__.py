"""Many processes on torch.distributed, nothing home-made: how they meet, how a model is spread over them."""

from surefoot.parallel.blocks import bare, blocks_of
from surefoot.parallel.exchange import exchanging
from surefoot.parallel.norms import synchronised
from surefoot.parallel.optimizer import optimizer_for
from surefoot.parallel.spreading import shards, spread
from surefoot.parallel.talking import from_first, total
from surefoot.parallel.versions import same_everywhere
from surefoot.parallel.world import ParallelError, World, end, start

__all__ = [
    "ParallelError",
    "World",
    "bare",
    "blocks_of",
    "end",
    "exchanging",
    "from_first",
    "optimizer_for",
    "same_everywhere",
    "shards",
    "spread",
    "start",
    "synchronised",
    "total",
]

"""Many processes on torch.distributed, nothing home-made: how they meet, how a model is spread over them."""

from surefoot.parallel.blocks import find_blocks, unwrap_model
from surefoot.parallel.exchange import grad_sync
from surefoot.parallel.norms import sync_batch_norms
from surefoot.parallel.optimizer import shard_optimizer
from surefoot.parallel.spreading import shards_weights, wrap_model
from surefoot.parallel.talking import all_reduce_sum, broadcast
from surefoot.parallel.versions import check_versions
from surefoot.parallel.world import ParallelError, World, init_distributed, shutdown

__all__ = [
    "ParallelError",
    "World",
    "all_reduce_sum",
    "broadcast",
    "check_versions",
    "find_blocks",
    "grad_sync",
    "init_distributed",
    "shard_optimizer",
    "shards_weights",
    "shutdown",
    "sync_batch_norms",
    "unwrap_model",
    "wrap_model",
]

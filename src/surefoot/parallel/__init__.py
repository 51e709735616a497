"""Training on many processes with torch.distributed: joining them, and replicating or sharding model and optimizer."""

from surefoot.parallel.process_group import ParallelError, World, all_reduce_sum, broadcast, init_distributed, shutdown
from surefoot.parallel.sharding import (
    find_blocks,
    forward_failed,
    grad_sync,
    shard_optimizer,
    shards_weights,
    sync_batch_norms,
    unwrap_model,
    wrap_model,
)
from surefoot.parallel.versions import check_versions

__all__ = [
    "ParallelError",
    "World",
    "all_reduce_sum",
    "broadcast",
    "check_versions",
    "find_blocks",
    "forward_failed",
    "grad_sync",
    "init_distributed",
    "shard_optimizer",
    "shards_weights",
    "shutdown",
    "sync_batch_norms",
    "unwrap_model",
    "wrap_model",
]

"""surefoot in a loop on Accelerate.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
guard = attach(accelerator, model, optimizer, run_dir="runs/a")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator, DistributedType
from torch import nn

from surefoot.guard.attach import attach as attach_model
from surefoot.guard.guard import Guard
from surefoot.guard.validate import Misuse
from surefoot.integrations.watched_backward import WatchedBackward


def attach(accelerator: Accelerator, model: nn.Module, optimizer: Any | Sequence[Any], **options: Any) -> Guard:
    """`surefoot.attach` after `accelerator.prepare`: the loss is watched in `accelerator.backward`.

    Call `guard.watch(loss, batch)` before it where the batch should be known, as for `step_fn`. With
    `accelerator.register_for_checkpointing(guard)` the guard's state is in the checkpoints of `accelerator.save_state`.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise Misuse(
            f"attach: {accelerator.distributed_type} clips and steps inside its own engine, where no update can be "
            "refused. Use FSDP or DDP."
        )
    guard = attach_model(model, optimizer, **{"scaler": accelerator.scaler, **options})
    WatchedBackward(guard, accelerator, "backward")
    return guard

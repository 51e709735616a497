"""Passes of a model that is replicated (DDP) or sharded (FSDP2) over ranks, without a collective inside of them.

In a trial, weights are gathered before `step_fn` is called and gradients are averaged after backward, both by all ranks
together. In between no rank communicates: where `step_fn` fails on one rank, or runs out of memory there, the others
end their pass and learn of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.checkpoint.snapshot_memory import free_bytes
from surefoot.measure.cross_rank import Ranks
from surefoot.measure.layout import to_local
from surefoot.trials.rank_agreement import RankAgreement, TrialFailed

BUCKET_ELEMENTS = 1 << 23
"""Elements of gradients that are averaged in one collective."""
FSDP_ATTRIBUTES = (
    "_post_forward_indices",
    "_training_state",
    "comm_ctx",
    "fsdp_params",
    "mesh_info",
    "post_forward_mesh_info",
    "reduce_grads",
    "reshard_after_backward",
)
"""Of a group of sharded parameters, as used here."""
GRADIENT_BYTES = 4
"""Per element of an unsharded gradient, which is accumulated in float32."""


def unsupported_layout(model: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks) -> str | None:
    """Why no trials can be run with this model on several ranks; None if they can."""
    if any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        return "SyncBatchNorm lets the ranks communicate within a forward pass"
    params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    groups = _param_groups(model)
    return _not_sharded_alike(groups, params, ranks) if groups else _not_replicated(model, params, ranks)


def _not_sharded_alike(groups: Sequence[Any], params: Sequence[Tensor], ranks: Ranks) -> str | None:
    if not all(hasattr(group, name) for group in groups for name in FSDP_ATTRIBUTES):
        return "this version of torch keeps FSDP2's state in another way"
    sharded = {id(p.sharded_param) for group in groups for p in group.fsdp_params}
    if any((group.mesh_info.mesh.ndim, group.mesh_info.mesh.size()) != (1, ranks.world_size) for group in groups):
        return "the model is not sharded over all ranks in one dimension"
    if not all(id(p) in sharded for p in params):
        return "FSDP2 does not shard all of the optimizer's parameters"
    return None


def _not_replicated(model: nn.Module, params: Sequence[Tensor], ranks: Ranks) -> str | None:
    ddp = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if not ddp or any(isinstance(p, DTensor) for p in params):
        return "the ranks train neither with DistributedDataParallel nor with FSDP2 alone"
    if any(dist.get_world_size(m.process_group) != ranks.world_size for m in ddp):
        return "the model is replicated over a part of the ranks only, as in a pipeline"
    return None


class CommunicationFound(TrialFailed):
    """`step_fn` communicates between ranks."""


class _NoCommunication(TorchDispatchMode):
    """Raises before any collective inside begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"):
            raise CommunicationFound(
                f"step_fn communicates between ranks ({func.name()}), which a trial cannot do: compute the loss of "
                "this rank's batch alone in it"
            )
        return func(*args, **(kwargs or {}))


class DataParallelPasses:
    """Runs passes of one model on all ranks; on a single rank it adds nothing."""

    def __init__(self, model: nn.Module, params: Sequence[Tensor], agreement: RankAgreement) -> None:
        self._model, self._params, self._agreement = model, params, agreement
        self._ddp = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._fsdp = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._checked: set[bool] = set()
        """Whether passes with gradients, and without, were checked for communication in the current trial."""

    @contextmanager
    def local(self) -> Iterator[None]:
        """Within this, neither DDP nor FSDP2 communicates in a forward or backward pass."""
        if self._agreement.alone:
            yield
            return
        self._check_memory()
        self._checked.clear()
        with ExitStack() as stack:
            for module in self._ddp:
                for name in ("require_backward_grad_sync", "require_forward_param_sync"):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, False)
            for group in _param_groups(self._model):
                # They stay gathered from the begin of a forward pass to the end of its backward pass.
                changes = {"reduce_grads": False, "reshard_after_backward": False, "post_forward_mesh_info": None}
                for name, value in changes.items():
                    stack.callback(setattr, group, name, getattr(group, name))
                    setattr(group, name, value)
            if "torch._dynamo" in sys.modules:  # these settings would have compiled code compiled again
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(self._shard)
            yield

    def _check_memory(self) -> None:
        """All weights and their gradients must fit, whole, on each rank."""
        numel = sum(p.sharded_param.numel() for group in _param_groups(self._model) for p in group.fsdp_params)
        device = to_local(self._params[0]).device
        lacking = numel > 0 and device.type == "cuda" and free_bytes(device) < 2 * numel * GRADIENT_BYTES
        if self._agreement.any(lacking):
            raise TrialFailed("the whole model with its gradients does not fit into the memory of one rank")

    def losses(self, passes: Callable[[], list[float]], weights: Callable[[], list[float]], count: int) -> list[float]:
        """The `count` losses of forward passes, each as the mean over the ranks by the weights that go with them."""
        if self._agreement.alone:
            return passes()
        rows = self._run(lambda: [*passes(), *weights()], 2 * count)
        self._shard()
        return [_mean([row[i] for row in rows], [row[count + i] for row in rows]) for i in range(count)]

    def backward(self, passes: Callable[[], float], weight: Callable[[], float]) -> float:
        """The loss that forward and backward passes return, as the mean over the ranks; gradients are averaged."""
        if self._agreement.alone:
            return passes()
        rows = self._run(
            lambda: [passes(), weight(), *(grad is not None for grad in self._own_grads())], 2 + len(self._params)
        )
        weights = [row[1] for row in rows]
        present = [any(row[2 + i] for row in rows) for i in range(len(self._params))]
        own = weights[self._agreement.rank] / sum(weights) if sum(weights) else 1.0 / len(weights)
        self._agreement.together(lambda: self._average_grads(own, present))
        self._shard()
        return _mean([row[0] for row in rows], weights)

    def total_norm(self, norm: float) -> float:
        """The norm of all gradients, from that of the ones on this rank; the same on all ranks."""
        norms = [row[0] for row in self._agreement.gather([norm])]
        return math.hypot(*norms) if self._fsdp and len(norms) > 1 else norms[0]

    def _run(self, passes: Callable[[], Sequence[float]], count: int) -> list[list[float]]:
        """Run passes on all ranks; returns the `count` numbers that each rank got from them. Where they fail on one
        rank, all of them raise."""
        self._gather_weights()
        try:
            return self._agreement.exchange(lambda: self._without_communication(passes), count)
        except TrialFailed:
            self._shard()
            raise

    def _without_communication(self, passes: Callable[[], Sequence[float]]) -> Sequence[float]:
        with_grad = torch.is_grad_enabled()
        if with_grad in self._checked:
            return passes()
        try:
            with _NoCommunication():
                values = passes()
        except TrialFailed as error:
            if isinstance(error.__cause__, CommunicationFound):
                raise error.__cause__ from None
            raise
        self._checked.add(with_grad)
        return values

    def _gather_weights(self) -> None:
        for module in self._ddp:
            old_name = getattr(module, "broadcast_buffers", False)
            if getattr(module, "forward_sync_buffers", old_name):  # as DDP does before a forward pass
                for buffer in module.modules_buffers:
                    dist.broadcast(buffer, 0, group=module.process_group)
        for module in self._fsdp:
            handle = module.unshard()
            if handle is not None:
                handle.wait()

    def _own_grads(self) -> list[Tensor | None]:
        """The gradients of this rank's batches, whole, in the order of the parameters."""
        shards = self._shards()
        return [p.grad if id(p) not in shards else _unsharded_grad(shards[id(p)]) for p in self._params]

    def _shards(self) -> dict[int, Any]:
        """What FSDP2 keeps for each sharded parameter, by its `id`."""
        return {id(p.sharded_param): p for group in _param_groups(self._model) for p in group.fsdp_params}

    @torch.no_grad()
    def _average_grads(self, weight: float, present: Sequence[bool]) -> None:
        """Give each parameter that has a gradient on any rank the sum of them, this rank's times `weight`."""
        shards = self._shards()
        owners = [(p, grad) for p, grad, has in zip(self._params, self._own_grads(), present, strict=True) if has]
        grads = [_zeros(p) if grad is None else grad.to(p.dtype) for p, grad in owners]
        for bucket in _buckets(grads):
            flat = torch.cat([g.reshape(-1) for g in bucket]).mul_(weight)
            dist.all_reduce(flat)
            for g, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                g.copy_(mean.view_as(g))
        for (p, _), g in zip(owners, grads, strict=True):
            p.grad = _own_shard(shards[id(p)], g) if id(p) in shards else g

    def _shard(self) -> None:
        """Drop gathered weights and their gradients, and whatever a pass that failed has left in FSDP's state."""
        for group in _param_groups(self._model):
            for p in group.fsdp_params:
                p.unsharded_accumulated_grad = None
                if hasattr(p, "_unsharded_param"):
                    p._unsharded_param.grad = None
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
            group._training_state = _idle(group)
        for module in self._fsdp:
            state: Any = module._get_fsdp_state()
            state._training_state = _idle(state)
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            getattr(state, "_modules_to_run_forward", set[Any]()).clear()
            module.reshard()


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean by weights; where all of them are 0, the plain one."""
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True) if weight)


def _zeros(param: Tensor) -> Tensor:
    """For the whole of a parameter that may be sharded."""
    return torch.zeros(param.shape, dtype=param.dtype, device=to_local(param).device)


def _idle(holder: Any) -> Any:
    return type(holder._training_state).IDLE


def _param_groups(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that are gathered together."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # several modules may share one
            for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
                groups[id(group)] = group
    return [group for group in groups.values() if group is not None]


def _unsharded_grad(param: Any) -> Tensor | None:
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad
    return param._unsharded_param.grad if hasattr(param, "_unsharded_param") else None


def _own_shard(param: Any, grad: Tensor) -> DTensor:
    """This rank's part of a whole gradient."""
    rank, local = param.mesh_info.shard_mesh_rank, to_local(param.sharded_param)
    parts = grad.chunk(param.mesh_info.shard_mesh_size, dim=param.fsdp_placement.dim)
    part = parts[rank].clone() if rank < len(parts) else torch.empty_like(local)
    return param.to_sharded_dtensor(part.to(local.device))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, up to a size."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        other = bool(bucket) and (bucket[0].dtype, bucket[0].device) != (grad.dtype, grad.device)
        if bucket and (other or size + grad.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket

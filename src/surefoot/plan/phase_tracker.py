"""Peak memory of a training step by phase: torch's MemTracker, with a peak for each block's forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

Phase = tuple[str, ...]
"""Such as ("forward", "head") or ("backward", "block", "0", "end", "1")."""
Bytes = dict[str, int]
"""Bytes by kind, see KINDS."""

KINDS: tuple[str, ...] = ("weights", "buffers", "gradients", "optimizer", "activations", "temporary", "weight_copies")
"""weight_copies: the weights in autocast's type; temporary: gradients of activations and other short-lived tensors."""
_KIND_OF = {
    _MemRefType.PARAM: "weights",
    _MemRefType.BUFFER: "buffers",
    _MemRefType.GRAD: "gradients",
    _MemRefType.OPT: "optimizer",
    _MemRefType.ACT: "activations",
    _MemRefType.TEMP: "temporary",
    _MemRefType.OTH: "weight_copies",
}
_CASTS = (torch.ops.aten._to_copy.default,)


def is_attention(module: nn.Module) -> bool:
    """Whether the class is named as attention usually is."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


class PhaseTracker(MemTracker):
    """Records the peak of each phase of a step, and the activations that each block and its attention keep.

    `labels` maps the blocks to (stack, place) labels. A phase lasts until the next begins: a block's forward or
    backward, and `head` for what follows the last block. Of `recomputed` blocks nothing that attention makes is kept.
    """

    def __init__(
        self, model: nn.Module, labels: Mapping[nn.Module, Phase], recomputed: Collection[nn.Module] = ()
    ) -> None:
        super().__init__()
        self.peaks: dict[Phase, Bytes] = {}
        self.kept: dict[Phase, int] = {}
        """Bytes of activations that a block keeps for backward."""
        self.kept_by_attention: dict[Phase, int] = {}
        self.recording = False
        self._phase: Phase = ("forward", "start")
        self._labels, self._recomputed, self._recomputes = labels, set(recomputed), False
        self._entered: dict[int, tuple[Phase, int]] = {}
        self._block: Phase | None = None
        self._params = {id(p) for p in model.parameters()}
        self._track_module_params_and_buffers(model, install_grad_hooks=True)

    def current(self) -> Bytes:
        """What is allocated now."""
        snapshot = self.get_tracker_snapshot()
        counts: Bytes = dict.fromkeys(KINDS, 0)
        for by_kind in snapshot.values():
            for kind, name in _KIND_OF.items():
                counts[name] += by_kind.get(kind, 0)
        return counts

    def track_gradients(self, model: nn.Module) -> None:
        """Count the gradients that were assigned to the model's weights as such."""
        self._track_module_params_and_buffers(model, install_grad_hooks=False)

    def begin(self, *phase: str) -> None:
        """Start a phase; its peak begins at what is allocated now."""
        self._phase = phase
        self._update_peak_stats(None)

    def _update_peak_stats(self, peak_state: Any) -> None:
        if not self.recording:
            return
        before = self.peaks.get(self._phase)
        total = sum(by_kind["Total"] for by_kind in self._curr_mem_snap.values())
        if before is None or total > sum(before.values()):
            self.peaks[self._phase] = self.current()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _CASTS and id(args[0]) in self._params and isinstance(result, torch.Tensor):
            self._update_and_maybe_create_winfos(result, _MemRefType.OTH)
        return result

    # Hooks that MemTracker installs on every module; its own statistics by module are not needed.

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if self._mod_tracker.is_bw:
            if self._ac_mod is None:
                self._ac_mod, self._in_ac = weakref.ref(module), True
            return
        label = self._labels.get(module)
        if label is not None:
            self._block = label
            self.begin("forward", *label)
            self._recomputes = module in self._recomputed
        if self._block is not None and (label is not None or (is_attention(module) and not self._recomputes)):
            self._entered[id(module)] = (self._block, self.current()["activations"])

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._mod_tracker.is_bw:
            if self._ac_mod is not None and self._ac_mod() is module:
                self._ac_mod, self._in_ac = None, False
            return
        if (entered := self._entered.pop(id(module), None)) is not None and self.recording:
            block, before = entered
            kept = self.kept if module in self._labels else self.kept_by_attention
            kept[block] = self.current()["activations"] - before
        if module in self._labels:
            self._block = None
            self.begin("forward", "head")

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        label = self._labels.get(module) if module is not None else None
        if label is not None:
            self.begin("backward", *label)

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        if module is not None and module in self._labels:
            self.begin("backward", "rest")


def block_labels(stacks: Sequence[Sequence[nn.Module]], starts: Sequence[int]) -> dict[nn.Module, Phase]:
    """Labels for the blocks of each stack: the first `starts` count from the start, the others from the end."""
    labels: dict[nn.Module, Phase] = {}
    for number, (blocks, first) in enumerate(zip(stacks, starts, strict=True)):
        for index, block in enumerate(blocks):
            place = ("start", str(index)) if index < first else ("end", str(len(blocks) - 1 - index))
            labels[block] = ("block", str(number), *place)
    return labels

"""A file of torch.save as safetensors and JSON, read with nothing but `weights_only=True`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.checkpoint.store.manifest import to_json_values
from surefoot.journal.output_files import OutputRefused, check_output, output_file
from surefoot.logs.checkpoint import torchfile
from surefoot.logs.table import Unreadable

_DEEPEST = 64
LARGEST_EXPANDED = 1 << 30
"""Bytes up to which a view that stores less than its shape says, such as a broadcast buffer, is written out."""


def convert(source: Path, out: Path) -> dict[str, Any]:
    """Write all tensors of `source` to `out`, and what else it holds to a .json beside it; raises Unreadable."""
    out = out if out.suffix == ".safetensors" else out.with_name(out.name + ".safetensors")
    beside = out.with_suffix(".json")
    for path in (out, beside):
        check_output(path, inputs=[source], new=True)
    if not source.is_file():
        raise Unreadable(f"{source} is {'a folder' if source.is_dir() else 'not there'}. Name a file of torch.save")
    tensors: dict[str, Any] = {}
    rest = _apart(torchfile.load_plain(source), "", tensors, 0)
    if not tensors:
        raise Unreadable(f"{source} holds no tensors")
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_room(source, out, tensors)
    _save(source, out, tensors)
    with output_file(beside, new=True) as draft:
        draft.write_text(json.dumps(to_json_values(rest), indent=1, allow_nan=False) + "\n")
    words = f"{len(tensors)} tensors written to {out}, the rest to {beside}"
    return {"words": words, "tensors": len(tensors), "out": str(out), "rest": str(beside)}


def _check_room(source: Path, out: Path, tensors: Mapping[str, Any]) -> None:
    """A view may be far larger than what the file stores of it: each tensor is written out in full."""
    for name, tensor in tensors.items():
        size, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if size > max(stored, LARGEST_EXPANDED):
            raise Unreadable(
                f"{source} cannot be converted: {name[:200]} is a view of shape {list(tensor.shape)[:8]} that takes"
                f" {size:,} bytes written out, and {stored:,} bytes are stored of it. Save the tensor it was expanded"
                " from"
            )
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    memory, disk = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), shutil.disk_usage(out.parent).free
    if size > min(memory, disk):
        raise Unreadable(
            f"{source} cannot be converted: its tensors take {size:,} bytes written out, and here are"
            f" {memory:,} bytes of memory and {disk:,} bytes free at {out.parent}. Convert it on a larger machine"
        )


def _save(source: Path, out: Path, tensors: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    try:
        # Copies of their own: tied weights share memory, which the format does not know.
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        with output_file(out, new=True) as draft:
            save_file(copies, draft, metadata={"format": "pt"})
    except (OutputRefused, OSError):
        raise
    except Exception as error:  # of torch and safetensors: too large, a type the format lacks, a disk that is full
        words = " ".join(str(error).split())[:200]
        raise Unreadable(f"{source} cannot be converted: {type(error).__name__}, {words}") from None


def _apart(value: Any, path: str, tensors: dict[str, Any], depth: int) -> Any:
    """The same nesting with the name of a tensor where one stood; the tensors are gathered."""
    import torch

    if depth > _DEEPEST:
        raise Unreadable(f"its values are nested more than {_DEEPEST} deep at {path[:100]}")
    if isinstance(value, torch.Tensor):
        return {"tensor": _put(value, path or "tensor", tensors)}
    if isinstance(value, dict):
        return {str(key): _apart(item, _join(path, key), tensors, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_apart(item, _join(path, i), tensors, depth + 1) for i, item in enumerate(value)]
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _put(tensor: Any, name: str, tensors: dict[str, Any]) -> str:
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_complex():
        raise Unreadable(f"{name} is sparse, quantised or complex, which safetensors cannot hold")
    while name in tensors or name == "__metadata__":  # which stands for something else in the format
        name += "_"
    tensors[name] = tensor.detach()
    return name

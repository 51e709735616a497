"""Converts a file of torch.save to safetensors and JSON; it is read with `weights_only=True`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.checkpoint.store.manifest import to_json_values
from surefoot.inspect import torch_file
from surefoot.journal.output_files import OutputRefused, check_output, output_file
from surefoot.logs.log_diagnosis import UnreadableInput

_MAX_DEPTH = 64
MAX_EXPANDED_BYTES = 1 << 30
"""A view that stores less than its shape, such as a broadcast buffer, is expanded up to this size."""


def convert(source: Path, out: Path) -> dict[str, Any]:
    """Write all tensors of `source` to `out`, and everything else to a .json beside it; raises UnreadableInput."""
    out = out if out.suffix == ".safetensors" else out.with_name(out.name + ".safetensors")
    json_file = out.with_suffix(".json")
    for path in (out, json_file):
        check_output(path, inputs=[source], new=True)
    if not source.is_file():
        raise UnreadableInput(
            f"{source} {'is a folder' if source.is_dir() else 'does not exist'}. Name a file of torch.save"
        )
    tensors: dict[str, Any] = {}
    rest = _split_tensors(torch_file.load_strict(source), "", tensors, 0)
    if not tensors:
        raise UnreadableInput(f"{source} holds no tensors")
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_space(source, out, tensors)
    _save(source, out, tensors)
    with output_file(json_file, new=True) as draft:
        draft.write_text(json.dumps(to_json_values(rest), indent=1, allow_nan=False) + "\n")
    message = f"{len(tensors)} tensors written to {out}, the rest to {json_file}"
    return {"words": message, "tensors": len(tensors), "out": str(out), "rest": str(json_file)}


def _check_space(source: Path, out: Path, tensors: Mapping[str, Any]) -> None:
    """Refuse tensors that do not fit: views are written out in full, and may be far larger than what is stored."""
    for name, tensor in tensors.items():
        size, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if size > max(stored, MAX_EXPANDED_BYTES):
            raise UnreadableInput(
                f"{source} cannot be converted: {name[:200]} is a view of shape {list(tensor.shape)[:8]} of"
                f" {size:,} bytes, of which the file stores {stored:,} bytes. Save the tensor it was expanded from"
            )
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    memory, disk = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), shutil.disk_usage(out.parent).free
    if size > min(memory, disk):
        raise UnreadableInput(
            f"{source} cannot be converted: its tensors take {size:,} bytes, and this machine has"
            f" {memory:,} bytes of memory and {disk:,} bytes free at {out.parent}. Convert it on a larger machine"
        )


def _save(source: Path, out: Path, tensors: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    try:
        # Copies: tied weights share memory, which safetensors refuses.
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        with output_file(out, new=True) as draft:
            save_file(copies, draft, metadata={"format": "pt"})
    except (OutputRefused, OSError):
        raise
    except Exception as error:  # from torch or safetensors: too large, an unsupported dtype, a full disk
        message = " ".join(str(error).split())[:200]
        raise UnreadableInput(f"{source} cannot be converted: {type(error).__name__}, {message}") from None


def _split_tensors(value: Any, path: str, tensors: dict[str, Any], depth: int) -> Any:
    """The same nesting with each tensor replaced by its name; the tensors are collected in `tensors`."""
    import torch

    if depth > _MAX_DEPTH:
        raise UnreadableInput(f"values are nested more than {_MAX_DEPTH} levels deep at {path[:100]}")
    if isinstance(value, torch.Tensor):
        return {"tensor": _add_tensor(value, path or "tensor", tensors)}
    if isinstance(value, dict):
        return {str(key): _split_tensors(item, _join(path, key), tensors, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split_tensors(item, _join(path, i), tensors, depth + 1) for i, item in enumerate(value)]
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _add_tensor(tensor: Any, name: str, tensors: dict[str, Any]) -> str:
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_complex():
        raise UnreadableInput(f"{name} is sparse, quantised or complex, which safetensors cannot hold")
    while name in tensors or name == "__metadata__":  # reserved by the format
        name += "_"
    tensors[name] = tensor.detach()
    return name

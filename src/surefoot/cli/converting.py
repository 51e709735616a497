"""A file of torch.save as safetensors and JSON, read with nothing but `weights_only=True`."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from surefoot.logs.checkpoint import torchfile
from surefoot.logs.table import Unreadable
from surefoot.state.store.manifest import plain

_DEEPEST = 64


def convert(source: Path, out: Path) -> dict[str, Any]:
    """Write all tensors of `source` to `out`, and what else it holds to a .json beside it; raises Unreadable."""
    out = out if out.suffix == ".safetensors" else out.with_name(out.name + ".safetensors")
    beside = out.with_suffix(".json")
    for path in (out, beside):
        if path.exists():
            raise Unreadable(f"{path} is there already; name a new file")
    if not source.is_file():
        raise Unreadable(f"{source} is {'a folder' if source.is_dir() else 'not there'}. Name a file of torch.save")
    tensors: dict[str, Any] = {}
    rest = _apart(torchfile.load_plain(source), "", tensors, 0)
    if not tensors:
        raise Unreadable(f"{source} holds no tensors")
    from safetensors.torch import save_file

    out.parent.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole: a full disk leaves no half of a file that looks like a checkpoint.
    draft = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    try:
        save_file(tensors, draft, metadata={"format": "pt"})
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    beside.write_text(json.dumps(plain(rest), indent=1, allow_nan=False) + "\n")
    words = f"{len(tensors)} tensors written to {out}, the rest to {beside}"
    return {"words": words, "tensors": len(tensors), "out": str(out), "rest": str(beside)}


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
    while name in tensors:
        name += "_"
    # A copy of its own: tied weights share memory, which the format does not know.
    tensors[name] = tensor.detach().clone().contiguous()
    return name

"""Exports the weights of a checkpoint as one ordinary safetensors file; needs no torch, and memory for one tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from surefoot.checkpoint.format.rank_files import (
    CARRIED_AS,
    CheckpointMismatch,
    TensorEntry,
    TensorPart,
    read_entries,
    read_states,
    root_of,
)
from surefoot.journal.output_files import output_file
from surefoot.journal.safetensors_header import DTYPES

CHUNK = 1 << 24
_FORMAT_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


def export(folder: Path, out: Path, *, source: str = "model") -> int:
    """Write weights for inference under the model's own names, and return the number of tensors.

    `source` is `model`, or `extra.NAME` for another module that was saved with the run, such as averaged weights.
    Parameters and persistent buffers are exported, each in its saved dtype. Tied weights are written under every name
    they have, so that `load_state_dict` finds them all. The file is written atomically, and replaces none.
    """
    states = read_states(folder)
    entries = read_entries(folder, len(states))
    chosen = _select(states, entries, source)
    if not chosen:
        roots = sorted({root_of(name) for state in states for name in state["tensors"]})
        raise CheckpointMismatch(f"{folder} holds no weights of {source!r}; it has {', '.join(roots)}")
    if out.exists():
        raise FileExistsError(f"{out} already exists. Choose another name, or remove it")
    with output_file(out, new=True) as draft, draft.open("wb") as file:
        _write(file, chosen)
    return len(chosen)


def _select(states: list[dict], entries: dict[str, TensorEntry], source: str) -> dict[str, TensorEntry]:
    """The tensors to export, by their new names."""
    non_persistent = {name for state in states for name in state["passing"]}
    saved = {name for state in states for name in state["tensors"]} - non_persistent
    names = {name: name for name in saved if name in entries}
    for state in states:
        names |= {alias: str(name) for alias, name in state["aliases"].items() if name in names}
    prefix = f"{source}."
    chosen = {name.removeprefix(prefix): entries[stored] for name, stored in names.items() if name.startswith(prefix)}
    return dict(sorted(chosen.items(), key=lambda item: (-_width(item[1]), item[0])))


def _width(entry: TensorEntry) -> int:
    """Bytes of one stored value: wide ones come first, so that all are aligned to their size."""
    return DTYPES[CARRIED_AS[entry.dtype][0]][1] if entry.dtype in CARRIED_AS else entry.itemsize


def _write(file: BinaryIO, chosen: dict[str, TensorEntry]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in chosen.items():
        begin, end = end, end + math.prod(entry.shape) * entry.itemsize
        dtype, shape = _FORMAT_NAMES.get(entry.dtype), list(entry.shape)
        if dtype is None:
            dtype, count = CARRIED_AS[entry.dtype]
            shape += [count] if count > 1 else []
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for entry in chosen.values():
        for chunk in _tensor_bytes(entry):
            file.write(chunk)
    file.flush()
    os.fsync(file.fileno())


def _tensor_bytes(entry: TensorEntry) -> Iterator[bytes | memoryview]:
    """The bytes of the full tensor. Parts that are rows of it are streamed; others are assembled first."""
    parts = sorted(entry.parts, key=lambda part: part.offsets)
    if all(part.shape[1:] == entry.shape[1:] for part in parts):
        for part in parts:
            yield from _read_part(entry, part)
        return
    full = np.empty((*entry.shape, entry.itemsize), dtype=np.uint8)
    for part in parts:
        block = np.empty((*part.shape, entry.itemsize), dtype=np.uint8)
        flat, at = block.reshape(-1), 0
        for chunk in _read_part(entry, part):
            flat[at : at + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
            at += len(chunk)
        full[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))] = block
    yield full.reshape(-1).data


def _read_part(entry: TensorEntry, part: TensorPart) -> Iterator[bytes]:
    remaining = math.prod(part.shape) * entry.itemsize
    with part.file.open("rb") as file:
        file.seek(part.begin)
        while remaining:
            chunk = file.read(min(remaining, CHUNK))
            if not chunk:
                raise CheckpointMismatch(f"{part.file} ends too early")
            remaining -= len(chunk)
            yield chunk

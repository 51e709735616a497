"""The weights of a checkpoint as one ordinary safetensors file; needs no torch, and room for one tensor at most."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from surefoot.checkpoint.format.mismatch import DoesNotFit
from surefoot.checkpoint.format.safetensors_headers import CARRIED, FORMAT, Entry, Part, read_entries
from surefoot.checkpoint.format.state_files import read_states, root_of
from surefoot.journal.output_files import output_file

CHUNK = 1 << 24
_SHORT = {name: short for short, (name, _) in FORMAT.items()}


def export(folder: Path, out: Path, *, source: str = "model") -> int:
    """Write weights for inference under the model's own names, and hand back how many tensors that were.

    `source` is `model`, or `extra.NAME` for another module that was saved with the run, such as averaged weights.
    Parameters and persistent buffers are taken, each in the type it was saved in. Tied weights stand under every name
    they have, so that `load_state_dict` finds them all. The file appears whole or not at all, and replaces none.
    """
    told = read_states(folder)
    entries = read_entries(folder, len(told))
    chosen = _chosen(told, entries, source)
    if not chosen:
        there = sorted({root_of(name) for one in told for name in one["tensors"]})
        raise DoesNotFit(f"{folder} holds no weights of {source!r}; there are {', '.join(there)}")
    if out.exists():
        raise FileExistsError(f"{out} is there already. Give another name, or remove it")
    with output_file(out, new=True) as draft, draft.open("wb") as file:
        _write(file, chosen)
    return len(chosen)


def _chosen(told: list[dict], entries: dict[str, Entry], source: str) -> dict[str, Entry]:
    """What is to be written, by the names that it will have."""
    passing = {name for one in told for name in one["passing"]}
    held = {name for one in told for name in one["tensors"]} - passing
    names = {name: name for name in held if name in entries}
    for one in told:
        names |= {alias: str(name) for alias, name in one["aliases"].items() if name in names}
    start = f"{source}."
    found = {name.removeprefix(start): entries[stored] for name, stored in names.items() if name.startswith(start)}
    return dict(sorted(found.items(), key=lambda one: (-_width(one[1]), one[0])))


def _width(entry: Entry) -> int:
    """Bytes of what stands in the file: numbers lie at multiples of their size, wide ones first."""
    return FORMAT[CARRIED[entry.dtype][0]][1] if entry.dtype in CARRIED else entry.itemsize


def _write(file: BinaryIO, chosen: dict[str, Entry]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in chosen.items():
        begin, end = end, end + math.prod(entry.shape) * entry.itemsize
        kind, shape = _SHORT.get(entry.dtype), list(entry.shape)
        if kind is None:
            kind, count = CARRIED[entry.dtype]
            shape += [count] if count > 1 else []
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for entry in chosen.values():
        for piece in _bytes_of(entry):
            file.write(piece)
    file.flush()
    os.fsync(file.fileno())


def _bytes_of(entry: Entry) -> Iterator[bytes | memoryview]:
    """The whole tensor in a row. Parts that are rows of it follow each other; others are put together first."""
    parts = sorted(entry.parts, key=lambda part: part.offsets)
    if all(part.shape[1:] == entry.shape[1:] for part in parts):
        for part in parts:
            yield from _stored(entry, part)
        return
    whole = np.empty((*entry.shape, entry.itemsize), dtype=np.uint8)
    for part in parts:
        block = np.empty((*part.shape, entry.itemsize), dtype=np.uint8)
        row, at = block.reshape(-1), 0
        for piece in _stored(entry, part):
            row[at : at + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            at += len(piece)
        whole[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))] = block
    yield whole.reshape(-1).data


def _stored(entry: Entry, part: Part) -> Iterator[bytes]:
    left = math.prod(part.shape) * entry.itemsize
    with part.file.open("rb") as file:
        file.seek(part.begin)
        while left:
            piece = file.read(min(left, CHUNK))
            if not piece:
                raise DoesNotFit(f"{part.file} ends too early")
            left -= len(piece)
            yield piece

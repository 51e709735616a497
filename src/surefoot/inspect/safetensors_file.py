"""safetensors files, read with numpy: the JSON header is validated first, then tensors are read in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from surefoot.inspect.contents import FLOAT_DTYPES, CheckpointContents, Numbers, StoredTensor, to_floats
from surefoot.journal import safetensors_header
from surefoot.journal.safetensors_header import MAX_HEADER_BYTES, BadSafetensors, SafetensorsHeader
from surefoot.logs.log_diagnosis import UnreadableInput

_DTYPES = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "u1"),
}
_UNKNOWN = "unknown "
_COUNTER = "num_batches_tracked"


def is_safetensors(head: bytes) -> bool:
    return len(head) >= 9 and 2 <= int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES and head[8:9] == b"{"


def read_safetensors(path: Path) -> CheckpointContents:
    contents = CheckpointContents("safetensors")
    for name, span in read_header(path).tensors.items():
        dtype, width = _DTYPES.get(span.dtype, (_UNKNOWN + span.dtype, ""))
        chunks = _FileChunks(path, span.begin, dtype, width, prod(span.shape))
        _add_tensor(contents, StoredTensor(name, dtype, span.shape, span.end - span.begin, chunks))
    return contents


def read_header(path: Path) -> SafetensorsHeader:
    """The validated header; raises `UnreadableInput`."""
    try:
        return safetensors_header.read_header(path)
    except BadSafetensors as error:
        if error.cut_off:
            raise UnreadableInput(
                f"{path} is cut off: {error}. The copy, download or save was interrupted; get the file again, or use an"
                " earlier checkpoint"
            ) from None
        raise UnreadableInput(f"{path} has a damaged header: {error}. Get the file again") from None


def _add_tensor(contents: CheckpointContents, tensor: StoredTensor) -> None:
    if tensor.dtype in FLOAT_DTYPES:
        contents.weights.append(tensor)
    elif tensor.dtype.startswith(_UNKNOWN):
        contents.skipped[f"tensors of the unknown dtype {tensor.dtype.removeprefix(_UNKNOWN)[:20]}"] += 1
    elif tensor.name.endswith(_COUNTER) and tensor.numel == 1:
        contents.counters[tensor.name] = int(next(tensor.chunks(1))[0])
    else:
        contents.skip_integer_tensor(tensor.name, tensor.dtype, tensor.numel)


class _FileChunks:
    """Reads the values of one tensor from the file in chunks."""

    def __init__(self, path: Path, start: int, dtype: str, width: str, count: int) -> None:
        self._path = path
        self._start = start
        self._dtype = dtype
        self._width = width
        self._count = count

    def __call__(self, size: int) -> Iterator[Numbers]:
        with self._path.open("rb") as stream:
            stream.seek(self._start)
            left = self._count
            while left > 0:
                raw = np.fromfile(stream, self._width, min(size, left))
                if not len(raw):
                    raise UnreadableInput(f"{self._path} got shorter while it was being read")
                left -= len(raw)
                yield to_floats(raw, self._dtype)

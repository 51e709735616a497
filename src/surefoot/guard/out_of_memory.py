"""Recognises an out-of-memory error, and what its message says."""

from __future__ import annotations

import re
import sys

_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device or the host ran out of memory, by this error or by what caused it."""
    torch = sys.modules.get("torch")
    while error is not None:
        if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def first_line(error: BaseException) -> str:
    """The first line of the error's message; keeps nothing of the error alive."""
    return (str(error) or type(error).__name__).splitlines()[0]

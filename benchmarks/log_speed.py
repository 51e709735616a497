"""`surefoot bench logs --speed`: time and memory of `surefoot diagnose` for large logs.

The logs are generated in a temporary folder, and the command runs in its own process, as users run it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.checkout import worker_env

ROWS = 1_000_000
LONG_ROWS = 11_000_000
"""Rows of a text log of more than 1 GB."""
_CHUNK_ROWS = 50_000
Line = Callable[[int, float, float], str]


def _json(step: int, loss: float, norm: float) -> str:
    return f'{{"step": {step}, "loss": {loss:.5f}, "grad_norm": {norm:.4f}, "learning_rate": 1.000e-04}}\n'


def _csv(step: int, loss: float, norm: float) -> str:
    return f"{step},{loss:.6f},{norm:.5f},1.000e-04\n"


def _text(step: int, loss: float, norm: float) -> str:
    return (
        f"[2025-01-01 10:00:00] iter {step}: loss {loss:.5f}, norm {norm:.4f}, lr 1.000e-04, time 12.3ms, mfu 31.2%\n"
    )


LOGS: dict[str, tuple[str, Line, int]] = {
    "JSONL": ("", _json, ROWS),
    "CSV": ("step,loss,grad_norm,lr\n", _csv, ROWS),
    "console text": ("", _text, ROWS),
    "console text, long": ("", _text, LONG_ROWS),
}


def main(*, say: Callable[[str], None]) -> str:
    """The table for this machine."""
    if not hasattr(os, "wait4"):
        return "bench logs --speed: this system does not report the peak memory of a process. Use Linux or macOS."
    lines = [
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before",
        f"{'log':<20}{'rows':>12}{'MB':>8}{'seconds':>9}{'of CPU':>8}{'peak MB':>9}",
    ]
    with tempfile.TemporaryDirectory(prefix="surefoot-") as folder:
        for name, (header, line, rows) in LOGS.items():
            say(f"{name}: writing {rows:,} rows")
            path = Path(folder) / "log"
            with path.open("w", encoding="utf-8") as file:
                file.write(header)
                file.writelines(_make_lines(line, rows))
            seconds, used, peak = _time_diagnose(path)
            size = path.stat().st_size / 1e6
            lines.append(f"{name:<20}{rows:>12,}{size:>8,.0f}{seconds:>9.1f}{used:>8.1f}{peak / 1e6:>9,.0f}")
    return "\n".join(lines)


def _make_lines(line: Line, rows: int) -> Iterator[str]:
    """Lines of a falling, noisy loss, a chunk of rows at a time."""
    random = np.random.default_rng(0)
    for start in range(0, rows, _CHUNK_ROWS):
        steps = np.arange(start, min(rows, start + _CHUNK_ROWS))
        losses = 0.5 + 3 * np.exp(-5 * steps / rows) + random.normal(0, 0.05, len(steps))
        norms = 1 + 0.3 * random.random(len(steps))
        yield "".join(map(line, steps.tolist(), losses.tolist(), norms.tolist()))


def _time_diagnose(path: Path) -> tuple[float, float, int]:
    """Wall-clock seconds including the start of Python, CPU seconds, and peak memory in bytes."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "surefoot", "diagnose", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=worker_env())
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"surefoot diagnose exited with {process.returncode} on a healthy log: {path}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)

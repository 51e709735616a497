"""How fast `surefoot watch` opens, zooms into and follows a long run: a made run directory, and pages that read it."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from surefoot.journal.pyramid_writer import PyramidWriter
from surefoot.journal.row_file import SCALARS_HEADER, RowFile, RowHeader, layers_header
from surefoot.journal.run_json import RUN_JSON, SIGNALS_DIR
from surefoot.journal.segments import make_segment
from surefoot.journal.thinning import keep_one_in
from surefoot.records import LAYER_STATS

_CHUNK = 8192
_WINDOW = 10_000


@dataclass(frozen=True, slots=True)
class MadeRun:
    """A made run directory with one spike of a single step and one NaN in it."""

    path: Path
    steps: int
    layers: int
    spike: int
    nan: int


def make_run(path: Path, *, steps: int, layers: int, say: Callable[[str], None] = lambda _: None) -> MadeRun:
    """Write a run of `steps` healthy updates; per-layer rows are complete at the end and thinned before."""
    run = MadeRun(path, steps, layers, spike=int(steps * 0.612), nan=int(steps * 0.287))
    folder = path / SIGNALS_DIR
    folder.mkdir(parents=True)
    (path / RUN_JSON).write_text(json.dumps({"schema": 2, "config": {"model": "made", "tensors": layers}}))
    (path / "events.jsonl").write_text("")
    header = layers_header([f"blocks.{at // 6}.weight_{at % 6}" for at in range(layers)], [1 << 20] * layers)
    scalar_file = RowFile(make_segment(folder, "scalars", 0).path, SCALARS_HEADER)
    scalar_pyramid, layer_pyramid = PyramidWriter(folder, "scalars"), PyramidWriter(folder, "layers")
    scalar_pyramid.begin(SCALARS_HEADER)
    layer_pyramid.begin(header)
    rng = np.random.default_rng(0)
    for segment, start in enumerate(range(0, steps, _CHUNK)):
        attempts = np.arange(start, min(start + _CHUNK, steps))
        scalars = _scalars(run, attempts, rng)
        scalar_file.append(scalars)
        scalar_pyramid.add(scalars)
        rows = _layers(header, attempts, rng)
        layer_pyramid.add(rows)
        age = steps - int(attempts[-1])
        kept = rows if age <= _WINDOW else rows[keep_one_in(attempts, 1 << (age // _WINDOW).bit_length())]
        file = RowFile(make_segment(folder, "layers", segment).path, header)
        file.append(kept)
        file.close()
        if segment % 20 == 19:
            say(f"{attempts[-1] + 1:,} of {steps:,} steps written")
    for closing in (scalar_file, scalar_pyramid, layer_pyramid):
        closing.close()
    return run


def _scalars(run: MadeRun, attempts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    rows = np.zeros(len(attempts), SCALARS_HEADER.dtype)
    for name in rows.dtype.names or ():
        if rows.dtype[name] == np.dtype("<f4"):
            rows[name] = np.nan
    noise = rng.standard_normal(len(attempts))
    rows["step"] = rows["attempt"] = attempts
    rows["time"] = 1.7e9 + attempts * 0.3
    rows["loss"] = 1.8 + 8 / (1 + attempts / (run.steps / 60)) ** 0.7 + 0.05 * noise
    rows["norm"] = 0.4 + 0.05 * np.abs(noise)
    rows["lr"] = 3e-4 * np.minimum(1, (attempts + 1) / (run.steps / 50)) * (1 - 0.9 * attempts / run.steps)
    rows["seconds"], rows["data_wait"], rows["tokens"] = 0.3 + 0.01 * np.abs(noise), 0.01, 65536
    rows["memory"] = 6.1e10 + 1e8 * noise
    rows["eval_loss"][attempts % (run.steps // 200 or 1) == 0] = 2.0
    rows["loss"][attempts == run.spike] = 41.25
    rows["loss"][attempts == run.nan] = np.nan
    rows["verdict"][attempts == run.nan] = 1
    return rows


def _layers(header: RowHeader, attempts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    count = len(header.names)
    rows = np.zeros(len(attempts), header.dtype)
    rows["step"] = rows["attempt"] = attempts
    depth = np.exp(-2 * np.linspace(0, 1, count))
    level = (0.05 + 0.1 * (1 + np.sin(attempts / 5e4))[:, None] * depth).astype(np.float32)
    rows["stats"][:, :, LAYER_STATS.index("norm")] = level * (1 + 0.1 * rng.standard_normal((len(attempts), 1)))
    return rows


def main(folder: Path | None, *, steps: int, layers: int, say: Callable[[str], None]) -> str:
    """Make the run, or use the one in `folder`; returns the figures as text."""
    base = Path(tempfile.mkdtemp(prefix="surefoot-watch-")) if folder is None else folder
    path = base / "run"
    try:
        if not path.exists():
            make_run(path, steps=steps, layers=layers, say=say)
        return _measure(path, steps=steps, layers=layers)
    finally:
        if folder is None:
            shutil.rmtree(base, ignore_errors=True)


def _measure(path: Path, *, steps: int, layers: int) -> str:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    pyramid = sum(file.stat().st_size for file in path.rglob("pyramid-*"))
    command = [sys.executable, "-m", "surefoot", "watch", str(path), "--web"]
    begin = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        url = server.stdout.readline().strip()
        started = time.monotonic() - begin
        key = json.loads(_get(url + "runs"))["first"]
        first = time.monotonic()
        for kind, count in (("run", 0), ("curves", 1500), ("flow", 400)):
            _get(f"{url}{kind}/{key}?size={count}&first=0")
        opened = time.monotonic() - first
        zooms = [_zoom(url, key, steps, at) for at in range(20)]
        tail = [_timed(f"{url}curves/{key}?first={steps - 5}&size=1500") for _ in range(20)]
        peak, own = _memory(server.pid, "VmHWM"), _memory(server.pid, "RssAnon")
    finally:
        server.terminate()
        server.communicate()
    once = _timed_once(path)
    lines = [
        f"{steps:,} steps x {layers} layers: {size / 1e6:,.0f} MB on disk, {pyramid / 1e6:,.0f} MB of it the pyramid",
        f"server started and run found            {started:6.2f} s (imports included)",
        f"summary, curves and gradient flow       {opened:6.2f} s",
        f"zoom to a random range, median of 20    {statistics.median(zooms):6.3f} s, longest {max(zooms):.3f} s",
        f"newest rows at a cursor, median of 20   {statistics.median(tail):6.3f} s",
        f"peak memory of the server               {peak:6.0f} MB with mapped pages of files, {own:.0f} MB of its own",
        f"surefoot watch --once, whole command    {once:6.2f} s",
    ]
    return "\n".join(lines)


def _zoom(url: str, key: str, steps: int, at: int) -> float:
    width = max(50, steps // 10 ** (at % 5 + 1))
    first = int(np.random.default_rng(at).integers(0, max(1, steps - width)))
    begin = time.monotonic()
    for kind, count in (("curves", 1500), ("flow", 400)):
        _get(f"{url}{kind}/{key}?first={first}&last={first + width}&size={count}")
    return time.monotonic() - begin


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def _timed(url: str) -> float:
    begin = time.monotonic()
    _get(url)
    return time.monotonic() - begin


def _timed_once(path: Path) -> float:
    begin = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "surefoot", "watch", str(path), "--once"], stdout=subprocess.DEVNULL, check=False
    )
    return time.monotonic() - begin


def _memory(pid: int, field: str) -> float:
    """Megabytes; NaN where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field)), float("nan"))

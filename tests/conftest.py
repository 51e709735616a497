from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import surefoot

sys.path.insert(0, str(Path(__file__).parent))
from child_processes import run as run_to_the_end
from leftovers import pytest_configure, pytest_runtest_teardown, pytest_sessionfinish  # noqa: F401 - pytest's hooks

# On a busy machine, intra-op threads make operations on small tensors many times slower.
torch.set_num_threads(1)

# A shell that runs pytest in the background ignores SIGINT, and nohup ignores SIGHUP; child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Inductor's cache does not record for which vector width it compiled: kernels left by a run with another
# ATEN_CPU_CAPABILITY, or on another processor, give wrong numbers or crash. Each test run has its own cache.
if "PYTEST_XDIST_WORKER" not in os.environ:
    inductor_cache = tempfile.TemporaryDirectory(prefix="surefoot-inductor-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor_cache.name

# No test asserts a time, so hypothesis has no deadline. Its examples are deterministic: among thousands of noisy curves
# a few rightly get another diagnosis, and main must not fail at random. To explore new examples:
# pytest --hypothesis-profile=explore
hypothesis.settings.register_profile("surefoot", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("surefoot")

LONG = ("zoo/test_bench.py", "demo/test_demo.py", "chaos/test_chaos.py", "parallel/test_two_processes.py")
"""Files that take minutes: run first, so that no xdist worker is left with one at the end."""
TRAINS = (
    "actions/test_step_overrides.py",
    "actions/test_rewind.py",
    "bench/test_scale.py",
    "demo/test_demo.py",
    "gate/test_processes.py",
    "guard/test_clip.py",
    "guard/test_guard.py",
    "guard/test_loops.py",
    "guard/test_resume_proof.py",
    "guard/test_trials.py",
    "models/test_decoder.py",
    "parallel/test_two_processes.py",
    "story/test_live_story.py",
    "checkpoint/test_snapshots.py",
    "train/test_custom_parts.py",
    "train/test_memory_recovery.py",
    "train/test_mixed_precision.py",
    "train/test_sharded_optimizers.py",
    "train/test_two_rank_memory.py",
    "train/test_two_rank_train.py",
    "trials/test_two_rank_trials.py",
    "trainers/test_accelerate.py",
    "trainers/test_hf_callback.py",
    "trainers/test_hf_trainer.py",
    "trainers/test_lightning.py",
    "trainers/test_lightning_callback.py",
    "trainers/test_trl.py",
    "trainers/test_two_rank_trainers.py",
    "zoo/test_bench.py",
    "zoo/test_other_rules.py",
)
"""Files whose tests depend on training results: `make portable` runs them with another CPU capability."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))
    for item in items:
        if item.path.as_posix().endswith(TRAINS):
            item.add_marker(pytest.mark.trains)


TwoProcesses = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> TwoProcesses:
    """Runs a script on two ranks under torchrun with a folder, in which it writes results-0.json and results-1.json."""

    def run(script: Path, *options: str) -> list[Any]:
        out = tmp_path_factory.mktemp(script.stem)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
        done = run_to_the_end([*command, str(script), str(out)], env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads((out / f"results-{rank}.json").read_text()) for rank in (0, 1)]

    return run


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Reset the thread count, also after a test that raised it."""
    torch.set_num_threads(1)


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`surefoot.attach` into the test's own directory, closed at the end."""
    guards: list[surefoot.Guard] = []

    def attach(model: Any, optimizer: Any, **options: Any) -> surefoot.Guard:
        guard = surefoot.attach(model, optimizer, **({"run_dir": tmp_path / "run"} | options))
        guards.append(guard)
        return guard

    yield attach
    for guard in guards:
        guard.close()


@pytest.fixture
def read(tmp_path: Path) -> Callable[[], surefoot.Run]:
    """Read the test's run directory."""
    return lambda: surefoot.read(tmp_path / "run")

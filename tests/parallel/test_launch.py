"""The templates in examples/launch, with a stand-in for surefoot that only handles signals and exits."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
STAND_IN = """
import os, signal, sys, time
from pathlib import Path
out, rank = Path(sys.argv[2]), os.environ["RANK"]
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: sys.exit(75))
(out / f"began-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(str(sorted(os.sched_getaffinity(0))))
if sys.argv[3] == f"rank={rank}":
    sys.exit(int(sys.argv[4]))
time.sleep(120)
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the templates are for Linux")


def start_launcher(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start torchrun.sh with two ranks that run the stand-in."""
    (folder / "surefoot").mkdir()
    (folder / "surefoot" / "__init__.py").write_text("")
    (folder / "surefoot" / "__main__.py").write_text(STAND_IN)
    environment = {"PYTHON": sys.executable, "PROCESSES": "2", "RESTARTS": "1", "PYTHONPATH": str(folder)}
    return subprocess.Popen(
        ["bash", str(LAUNCH / "torchrun.sh"), str(folder), *options],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_signal_reaches_every_rank_and_the_restart_code_is_returned(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, "nobody")
    began = [tmp_path / f"began-{rank}-0" for rank in (0, 1)]
    while not all(path.exists() and path.read_text() for path in began):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(timeout=120) == 75
    first, second = (set(yaml.safe_load(path.read_text())) for path in began)
    assert len(os.sched_getaffinity(0)) < 2 or not first & second, "each rank is bound to its own cores"


def test_do_not_restart_code_of_one_rank_wins(tmp_path: Path) -> None:
    assert start_launcher(tmp_path, "rank=1", "76").wait(timeout=120) == 76
    assert not (tmp_path / "began-1-1").exists()


def test_launcher_without_a_recipe_prints_its_usage() -> None:
    done = subprocess.run(["bash", str(LAUNCH / "torchrun.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torchrun.sh RECIPE" in done.stderr


def test_neighbouring_cores_go_to_the_same_rank() -> None:
    bound = _bound()
    assert [bound.cores_of(range(10_000, 10_007), local, 3) for local in range(3)] == [
        {10_000, 10_001},
        {10_002, 10_003},
        {10_004, 10_005},
    ]
    assert bound.cores_of([10_000], 1, 4) == {10_000}, "fewer cores than ranks"


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_launch_scripts_are_valid_and_executable(name: str) -> None:
    subprocess.run(["bash", "-n", str(LAUNCH / name)], check=True)
    assert os.access(LAUNCH / name, os.X_OK)


def test_kubernetes_restarts_only_on_the_restart_code() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    rules = {
        code: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert rules == {2: "FailJob", 76: "FailJob", 75: "Ignore"}
    pod = job["spec"]["template"]["spec"]
    environment = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    assert int(environment["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert environment["HEAD"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert int(environment["GRACE"]) < pod["terminationGracePeriodSeconds"]


def _bound() -> Any:
    spec = importlib.util.spec_from_file_location("bound", LAUNCH / "bound.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

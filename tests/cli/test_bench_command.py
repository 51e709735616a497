"""`surefoot bench` finds benchmarks/ in a checkout from any directory, and says where it is missing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import surefoot
from benchmarks.checkout import ROOT
from surefoot.cli import app

BENCH_MODULE = importlib.import_module("surefoot.cli.bench")  # as an attribute of surefoot.cli it is the group
SRC = Path(surefoot.__file__).resolve().parents[1]


def run_surefoot(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "surefoot", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_command_works_from_another_directory(tmp_path: Path) -> None:
    golden = ROOT / "tests" / "bench" / "golden" / "spike_that_heals-recurrent-11"
    done = run_surefoot("bench", "replay", str(golden), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all made again" in done.stdout


def test_other_benchmarks_package_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    done = run_surefoot("bench", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "visits" in done.stdout


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "--help"], ["bench", "zoo"], ["bench", "zoo", "--quick"]])
def test_no_checkout_is_one_message_and_exit_code_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BENCH_MODULE, "checkout_root", lambda: tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.count("benchmarks/ is part of the source checkout") == 1
    assert result.stderr.count("\n") == 1
    assert not result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["diagnose", "--help"], ["--version"]])
def test_other_commands_do_not_import_benchmarks(arguments: list[str]) -> None:
    code = (
        "import sys, atexit, surefoot.cli as c\n"
        "atexit.register(lambda: print('LOADED' if 'benchmarks' in sys.modules else 'CLEAN'))\n"
        f"sys.argv[1:] = {arguments}\nc.main()"
    )
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("CLEAN\n")


def test_visits_counts_a_step_and_a_save(tmp_path: Path) -> None:
    done = run_surefoot("bench", "visits", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert 5 < counts["step"]["files"] < counts["save"]["files_all_threads"]
    assert counts["step"]["functions"] >= counts["step"]["files"]
    assert "guard/attached.py" in counts["step"]["visited"]
    assert any(name.startswith("checkpoint/") for name in counts["save"]["visited_all_threads"])


def test_a_healthy_step_and_a_save_stay_short(tmp_path: Path) -> None:
    """Work that is seldom needed is not called at every step."""
    counts = json.loads(run_surefoot("bench", "visits", "--json", cwd=tmp_path).stdout)
    step = counts["step"]["visited"]
    assert len(step) <= 28, sorted(step)
    assert sum(map(len, step.values())) <= 94, step
    assert not [name for name in step if name.startswith(("checkpoint/", "actions/"))]
    save = counts["save"]["visited_all_threads"]
    assert len(save) <= 52, sorted(save)

"""`surefoot diagnose` in an environment with only the required packages: no torch, no matplotlib."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest

import surefoot

FALL = np.round(2 + 8 * np.exp(-np.arange(60) / 12) + 0.02 * np.cos(np.arange(60) * 2.4), 4).tolist()
LOSSES = [*FALL, *["NaN"] * 20]


def required(name: str, names: set[str]) -> set[str]:
    """The required packages of a package, recursively, without extras."""
    if name in names:
        return names
    try:
        needs = distribution(name).requires or []
    except PackageNotFoundError:
        return names  # for another system or an older Python
    names.add(name)
    for need in needs:
        if "extra ==" not in need:
            required(re.split(r"[^\w.-]", need, maxsplit=1)[0].lower(), names)
    return names


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with only the required packages."""
    home = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(with_pip=False, symlinks=sys.platform != "win32").create(home)
    places = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", "venv", places))
    for name in required("surefoot", set()) - {"surefoot"}:
        for file in distribution(name).files or []:
            top, there = file.parts[0], Path(str(distribution(name).locate_file(file.parts[0])))
            if top != ".." and not top.endswith((".dist-info", "__pycache__")) and not (site / top).exists():
                (site / top).symlink_to(there)
    (site / "surefoot").symlink_to(Path(surefoot.__file__).parent)
    scripts = Path(sysconfig.get_path("scripts", "venv", places))
    return scripts / ("python.exe" if sys.platform == "win32" else "python")


def run(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-I", *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run, failed at step 60, in four log formats."""
    home = tmp_path_factory.mktemp("logs")
    records = [f'{{"step": {k}, "loss": {loss}}}' for k, loss in enumerate(LOSSES)]
    written = {
        "csv": "step,train_loss\n" + "".join(f"{k},{loss}\n" for k, loss in enumerate(LOSSES)),
        "jsonl": "\n".join(records),
        "trainer_state": f'{{"global_step": 80, "log_history": [{", ".join(records)}]}}',
        "text": "".join(f"[2024-05-01 10:00:00] step {k} | loss {loss}\n" for k, loss in enumerate(LOSSES)),
    }
    for form, text in written.items():
        (home / form).write_text(text)
    return {form: home / form for form in written}


@pytest.mark.parametrize("package", ["torch", "matplotlib", "pandas", "tensorboard", "google.protobuf", "wandb"])
def test_environment_has_no_extra_packages(python: Path, package: str) -> None:
    assert "No module named" in run(python, "-c", f"import {package}").stderr


def test_every_kind_of_log_is_diagnosed(python: Path, logs: dict[str, Path]) -> None:
    done = run(python, "-m", "surefoot", "diagnose", "--json", *logs.values())
    assert done.stderr == ""
    assert done.returncode == 1
    diagnoses = json.loads(done.stdout)
    assert [diagnosis["source"]["format"] for diagnosis in diagnoses] == list(logs)
    assert {(diagnosis["verdict"], diagnosis["pattern"], diagnosis["onset_step"]) for diagnosis in diagnoses} == {
        ("failed", "nonfinite", 60)
    }


def test_html_page_and_comparison_need_no_extras(python: Path, logs: dict[str, Path], tmp_path: Path) -> None:
    done = run(python, "-m", "surefoot", "diagnose", logs["csv"], "--html", tmp_path / "a.html")
    assert done.stdout.startswith("FAILED")
    assert "<svg" in (tmp_path / "a.html").read_text(encoding="utf-8")
    done = run(python, "-m", "surefoot", "diagnose", "--compare", logs["csv"], logs["text"])
    assert "A and B are level" in done.stdout


def test_plot_without_matplotlib_is_refused_with_advice(python: Path, logs: dict[str, Path], tmp_path: Path) -> None:
    done = run(python, "-m", "surefoot", "diagnose", logs["csv"], "--plot", tmp_path / "a.png")
    assert done.returncode == 2
    assert "pip install 'surefoot[plots]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_diagnose_from_python(python: Path) -> None:
    code = "import surefoot; print(surefoot.diagnose([2.0, 1.5, 1.2, 1.1, float('nan'), float('nan')]).verdict)"
    assert run(python, "-c", code).stdout == "failed\n"

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import surefoot
from surefoot.cli import app


def test_version_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['--version']; import surefoot.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"surefoot {surefoot.__version__}"


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.stdout


BENCH = ["bench", "overhead"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["dance"],
        ["--loud"],
        ["demo", "--steps", "many"],
        ["demo", "--steps", "3"],
        [*BENCH, "--device", "tpu"],
        [*BENCH, "--only", "nonsense"],
        ["bench", "equal", "--steps", "no"],
        ["bench", "checkpoint", "--size", "10m", "--device", "cpu", "--folder", "/no/such/folder"],
        ["bench", "healthy", "--seed", "-1"],
    ],
)
def test_bad_usage_is_explained_without_a_traceback(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert arguments[-1].strip("-") in result.stderr or arguments[-2] in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", [["demo"], ["bench", "overhead"]])
def test_missing_torch_names_what_to_install(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "pip install" in result.stderr

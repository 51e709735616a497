"""`surefoot replay` on incidents of runs that were started from recipes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from small_runs import small_recipe
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.cli.train import show
from surefoot.train import exit_codes

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The recipe of a run, of the user's own code, that refused one update."""
    parts = {
        "model": {"factory": "custom_parts:classifier"},
        "loss": {"factory": "custom_parts:mean_loss"},
        "data": {"kind": "own", "dataset": "custom_parts:points_with_one_nan"},
    }
    path = small_recipe(tmp_path_factory.mktemp("replayed"), **parts)
    assert show(path, ()) == exit_codes.DONE
    return path


def test_the_refused_update_is_seen_again(recipe: str) -> None:
    (incident,) = Path(recipe).parent.glob("run/incidents/*-refuse")
    done = CliRunner().invoke(app, ["replay", str(incident), "--recipe", recipe, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["bit_equal"]
    assert result["steps"][-1]["loss"] == "nan"
    assert all(math.isfinite(step["loss"]) for step in result["steps"][:-1])
    page = CliRunner().invoke(app, ["replay", str(incident), "--recipe", recipe])
    assert "refuse: the loss is nan" in page.stdout
    assert "bit for bit" in page.stdout


def test_code_that_a_bundle_names_is_not_imported(recipe: str, tmp_path: Path) -> None:
    (incident,) = Path(recipe).parent.glob("run/incidents/*-refuse")
    done = CliRunner().invoke(app, ["replay", str(incident)])
    assert done.exit_code == 2
    assert "custom_parts:classifier" in done.stderr
    assert "--recipe" in done.stderr


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == 2
    assert "not an incident bundle" in done.stderr

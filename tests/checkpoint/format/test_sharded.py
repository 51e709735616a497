"""Runs of several ranks: each resumes its own state, and any number of ranks loads what another number saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from surefoot.checkpoint.format.export import export

SCRIPT = Path(__file__).parent / "sharded_runs.py"


def spread(folder: Path, processes: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), str(folder), str(processes)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return spread(folder, 2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero"])
def test_two_processes_go_on_bit_by_bit(kind: str, two: list[dict[str, Any]]) -> None:
    for told in two:
        assert [what for what, right in told[kind].items() if not right] == []


def test_what_was_saved_one_way_is_loaded_any_other(two: list[dict[str, Any]]) -> None:
    for told in two:
        assert len(told["crosses"]) == 12
        assert [way for way, right in (told["crosses"] | told["from one"]).items() if not right] == []


def test_what_each_process_has_for_itself_cannot_be_loaded_by_another_number(two: list[dict[str, Any]]) -> None:
    for told in two:
        assert told["by hand"] == dict.fromkeys(["alike to two", "alike to one", "apart to two", "apart to one"], True)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero"])
def test_weights_that_were_spread_are_exported_as_one(kind: str, two: list[Any], folder: Path, tmp_path: Path) -> None:
    check_export(folder, kind, tmp_path)


def check_export(folder: Path, kind: str, tmp_path: Path) -> None:
    export(folder / kind, tmp_path / "out.safetensors")
    found, true = load_file(tmp_path / "out.safetensors"), load_file(folder / f"{kind}.safetensors")
    assert set(true) <= set(found)
    assert all(found[name].equal(true[name]) for name in true)


def test_four_processes_on_a_mesh_of_two_by_two(tmp_path: Path) -> None:
    for told in spread(tmp_path, 4):
        for part in told.values():
            assert [what for what, right in part.items() if not right] == []
    check_export(tmp_path, "fsdp2 x tp", tmp_path)

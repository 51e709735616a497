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


def run_sharded(folder: Path, world_size: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), str(folder), str(world_size)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_sharded(folder, 2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero"])
def test_two_ranks_resume_bit_identically(kind: str, two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert [check for check, passed in result[kind].items() if not passed] == []


def test_checkpoints_load_across_kinds_and_world_sizes(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert len(result["crosses"]) == 12
        assert [case for case, passed in (result["crosses"] | result["from one"]).items() if not passed] == []


def test_unsharded_weights_that_differ_need_the_same_world_size(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert result["by hand"] == dict.fromkeys(
            ["alike to two", "alike to one", "apart to two", "apart to one"], True
        )


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero"])
def test_sharded_weights_are_exported_as_full_tensors(
    kind: str, two_ranks: list[Any], folder: Path, tmp_path: Path
) -> None:
    check_export(folder, kind, tmp_path)


def check_export(folder: Path, kind: str, tmp_path: Path) -> None:
    export(folder / kind, tmp_path / "out.safetensors")
    exported, expected = load_file(tmp_path / "out.safetensors"), load_file(folder / f"{kind}.safetensors")
    assert set(expected) <= set(exported)
    assert all(exported[name].equal(expected[name]) for name in expected)


def test_four_ranks_on_a_2x2_mesh(tmp_path: Path) -> None:
    for result in run_sharded(tmp_path, 4):
        for part in result.values():
            assert [check for check, passed in part.items() if not passed] == []
    check_export(tmp_path, "fsdp2 x tp", tmp_path)

"""Importing is light and does nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "matplotlib", "transformers", "lightning", "triton", "rich", "typer")
ARRAYS = ("numpy",)
"""The judge looks at all tensors of a row at once; merely naming surefoot needs none of it."""


def loaded_after(statement: str) -> set[str]:
    """The top-level packages that an import brings along, in a process of its own."""
    program = (
        f"{statement}\nimport sys, logging\nassert not logging.getLogger('surefoot').handlers\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_surefoot_itself_brings_nothing_heavy() -> None:
    assert not loaded_after("import surefoot") & {*HEAVY, *ARRAYS}


@pytest.mark.parametrize("room", ["judge.judge", "judge.policy", "judge.history", "records"])
def test_rows_are_judged_without_torch(room: str) -> None:
    found = loaded_after(f"import surefoot.{room}")
    assert "surefoot" in found
    assert not found & set(HEAVY)


def test_every_module_of_the_judge_does_without_torch() -> None:
    walk = (
        "import importlib, pkgutil, surefoot.judge as room\n"
        "for found in pkgutil.walk_packages(room.__path__, 'surefoot.judge.'):\n"
        "    importlib.import_module(found.name)"
    )
    assert not loaded_after(walk) & set(HEAVY)


def test_a_run_is_read_without_torch() -> None:
    assert "torch" not in loaded_after("import surefoot\nsurefoot.read\nsurefoot.Run\nsurefoot.Policy")


def test_every_public_name_is_there() -> None:
    import surefoot

    for name in surefoot.__all__:
        assert getattr(surefoot, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        _ = surefoot.atach

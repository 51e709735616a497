"""Imports are cheap and without side effects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "matplotlib", "transformers", "lightning", "triton", "rich", "typer")
ARRAYS = ("numpy",)
"""The judge needs NumPy; `import surefoot` alone does not."""


def loaded_after(statement: str) -> set[str]:
    """The top-level packages that an import loads, in its own process."""
    program = (
        f"{statement}\nimport sys, logging\nassert not logging.getLogger('surefoot').handlers\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_import_surefoot_loads_no_heavy_packages() -> None:
    assert not loaded_after("import surefoot") & {*HEAVY, *ARRAYS}


@pytest.mark.parametrize("module", ["judge.judge", "judge.policy", "judge.history", "records"])
def test_judge_imports_without_torch(module: str) -> None:
    packages = loaded_after(f"import surefoot.{module}")
    assert "surefoot" in packages
    assert not packages & set(HEAVY)


def test_no_judge_module_imports_torch() -> None:
    walk = (
        "import importlib, pkgutil, surefoot.judge as judge\n"
        "for module in pkgutil.walk_packages(judge.__path__, 'surefoot.judge.'):\n"
        "    importlib.import_module(module.name)"
    )
    assert not loaded_after(walk) & set(HEAVY)


def test_reading_a_run_needs_no_torch() -> None:
    assert "torch" not in loaded_after("import surefoot\nsurefoot.read\nsurefoot.Run\nsurefoot.Policy")


def test_every_public_name_exists() -> None:
    import surefoot

    for name in surefoot.__all__:
        assert getattr(surefoot, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        _ = surefoot.atach

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from surefoot.checkpoint.store import CheckpointStore
from surefoot.cli import app
from surefoot.cli.checkpoint_commands import translate_old_form


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10, 20 and 20 again."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step, attempt in ((10, 10), (20, 20), (20, 25)):
        with store.writing(step, attempt) as draft:
            tensors = {"model.bias": torch.zeros(3), "model.weight": torch.full((2, 2), float(attempt))}
            save_file(tensors, draft.folder / "weights.safetensors")
            (draft.folder / "rest.json").write_text("{}")
            store.commit(draft, None, {"metrics": {"loss": 1 / attempt}})
    store.mark("step-00000010", "healthy", "100 good steps after it")
    return tmp_path / "run"


def test_lists_checkpoints(run: Path) -> None:
    result = invoke("list", run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "step", "attempt", "age", "size", "kind", "health", "intact"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["step-00000020-attempt-00000025", "20", "25"],
        ["step-00000020", "20", "20"],
        ["step-00000010", "10", "10"],
    ]
    assert "not read" in lines[1]
    assert "healthy" in lines[3]
    rows = json.loads(invoke("list", run / "checkpoints", "--json").stdout)
    assert [row["step"] for row in rows] == [20, 20, 10]
    assert rows[0]["whole"] is None
    assert rows[2]["metrics"] == {"loss": 0.1}


def test_verify_reads_every_byte(run: Path) -> None:
    result = invoke("verify", run, "--json")
    assert result.exit_code == 0
    assert [row["whole"] for row in json.loads(result.stdout)] == [True] * 3
    damaged = run / "checkpoints" / "step-00000020" / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert invoke("list", run).exit_code == 0  # list checks sizes only
    result = invoke("verify", run)
    assert result.exit_code == 1
    assert "step-00000020: weights.safetensors: content has changed" in result.stdout


def test_works_without_torch(run: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import surefoot.cli as c; c.main()"
    for command in (["list", run], ["verify", run], ["compare", run, "10", "20"]):
        done = subprocess.run([sys.executable, "-c", code, "checkpoints", *map(str, command)], check=False)
        assert done.returncode == 0


def test_compare_names_the_files_and_tensors_that_differ(run: Path) -> None:
    comparison = json.loads(invoke("compare", run, "10", "step-00000020", "--json").stdout)
    assert comparison["files"]["different"] == ["weights.safetensors"]
    assert comparison["files"]["the same"] == ["rest.json"]
    assert comparison["tensors"]["different"] == ["model.weight"]
    assert comparison["tensors"]["the same"] == ["model.bias"]
    assert "different: model.weight" in invoke("compare", run, "10", "newest").stdout
    same = json.loads(invoke("compare", run, "10", "10", "--json").stdout)
    assert same["tensors"]["the same"] == ["model.bias", "model.weight"]
    assert not same["tensors"]["different"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["RUN"], ["list", "RUN"]),
        (["--json", "RUN", "--weights", "x"], ["list", "RUN", "--json"]),
        (["RUN", "--verify"], ["verify", "RUN"]),
        (["--verify", "--json", "RUN"], ["verify", "RUN", "--json"]),
        (["RUN", "--compare", "10", "20"], ["compare", "RUN", "10", "20"]),
        (["--compare", "10", "20", "RUN", "--json"], ["compare", "RUN", "10", "20", "--json"]),
        (["RUN", "--export", "10", "o", "--weights", "m"], ["export", "RUN", "10", "o", "--weights", "m"]),
        (["RUN", "--weights=m", "--export", "10", "o"], ["export", "RUN", "10", "o", "--weights=m"]),
        (["--convert", "a.pt", "b"], ["convert", "a.pt", "b"]),
    ],
)
def test_old_form_translates_to_the_subcommand(old: list[str], new: list[str]) -> None:
    assert translate_old_form(old) == new


def test_old_form_still_works(run: Path, tmp_path: Path) -> None:
    assert [row["whole"] for row in json.loads(invoke(run, "--json").stdout)] == [None] * 3
    assert [row["whole"] for row in json.loads(invoke(run, "--verify", "--json").stdout)] == [True] * 3
    assert invoke(run, "--compare", "10", "20").stdout == invoke("compare", run, "10", "20").stdout
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    assert invoke("--convert", tmp_path / "model.pt", tmp_path / "old").exit_code == 0
    assert load_file(tmp_path / "old.safetensors").keys() == {"w"}
    assert invoke(run, "--compare", "10").exit_code == 2
    assert invoke("--help").exit_code == 0


def test_converts_a_plain_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tied = model.state_dict() | {"head": model.weight}
    saved = {"model": tied, "optimizer": optimizer.state_dict(), "step": 7, "loss": float("nan"), "names": ("a", "b")}
    torch.save(saved, tmp_path / "model.pt")
    result = invoke("convert", tmp_path / "model.pt", tmp_path / "out")
    assert result.exit_code == 0, result.output
    tensors = load_file(tmp_path / "out.safetensors")
    assert torch.equal(tensors["model.weight"], model.weight)
    assert torch.equal(tensors["model.head"], model.weight)
    assert torch.equal(tensors["optimizer.state.0.exp_avg"], optimizer.state[model.weight]["exp_avg"])
    converted = json.loads((tmp_path / "out.json").read_text())
    assert (converted["step"], converted["loss"], converted["names"]) == (7, "nan", ["a", "b"])
    assert converted["model"]["weight"] == {"tensor": "model.weight"}
    assert invoke("convert", tmp_path / "model.pt", tmp_path / "out").exit_code == 2  # no file is overwritten


ran: list[int] = []


class Planted:
    def __reduce__(self) -> Any:
        return (ran.append, (1,))


class Settings:
    rate = 1.0


@pytest.mark.parametrize("settings", [Planted(), Settings()], ids=["code", "object"])
def test_pickle_that_may_run_code_is_not_converted(tmp_path: Path, settings: object) -> None:
    torch.save({"model": torch.ones(2), "args": settings}, tmp_path / "model.pt")
    result = invoke("convert", tmp_path / "model.pt", tmp_path / "out.safetensors")
    assert result.exit_code == 2
    assert "model.pt" in result.stderr
    assert "a pickle may run any code" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not ran
    assert not list(tmp_path.glob("out*"))


def test_bad_input_gets_one_clear_message(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([], "name a run"),
        (["list", tmp_path / "nowhere"], "does not exist"),
        (["list", tmp_path / "text.pt"], "is a file"),
        (["list", tmp_path / "empty"], "is not a run directory"),
        (["compare", run, "10", "99"], "no checkpoint 99; its steps are 20, 20, 10"),
        (["export", run, "99", tmp_path / "x"], "no checkpoint 99"),
        ([run, "--verify", "--compare", "10", "20"], "at a time"),
        (["convert", tmp_path / "no.pt", tmp_path / "x"], "does not exist"),
        (["convert", tmp_path / "text.pt", tmp_path / "x"], "text.pt"),
        (["convert", tmp_path, tmp_path / "x"], "a folder"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.stderr, arguments
        assert len(result.stderr.splitlines()) == 1
        assert "Traceback" not in result.output


def test_run_without_checkpoints_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    result = invoke("list", tmp_path)
    assert result.exit_code == 0
    assert "no checkpoints" in result.stdout
    assert json.loads(invoke("list", tmp_path, "--json").stdout) == []


def test_view_far_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    petabyte = torch.zeros(1).expand(1 << 20, 1 << 28)
    torch.save({"w": petabyte, "b": torch.ones(3)}, tmp_path / "model.pt")
    result = invoke("convert", tmp_path / "model.pt", tmp_path / "out.safetensors")
    assert result.exit_code == 2, result.output
    assert "w is a view of shape [1048576, 268435456]" in result.stderr
    assert "the file stores 4 bytes" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*out*"))


def test_views_overlaps_and_a_tensor_named_metadata_are_converted(tmp_path: Path) -> None:
    saved = {
        "row": torch.arange(3.0).expand(4, 3),
        "windows": torch.arange(5.0).as_strided((3, 3), (1, 1)),
        "empty": torch.zeros(0, 1 << 40),
        "__metadata__": torch.ones(1),
    }
    torch.save(saved, tmp_path / "model.pt")
    result = invoke("convert", tmp_path / "model.pt", tmp_path / "out.safetensors")
    assert result.exit_code == 0, result.output
    tensors = load_file(tmp_path / "out.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(tensors["__metadata___" if name == "__metadata__" else name], tensor)


def test_meta_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.empty(2, device="meta")}, tmp_path / "model.pt")
    result = invoke("convert", tmp_path / "model.pt", tmp_path / "out.safetensors")
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("*out*"))


def test_export_and_convert_replace_no_file(run: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "null.safetensors").symlink_to("/dev/null")
    for arguments in (
        ["convert", tmp_path / "model.pt", tmp_path / "there.safetensors"],  # its .json exists
        ["convert", tmp_path / "model.pt", tmp_path / "null.safetensors"],
        ["export", run, "10", tmp_path / "null.safetensors"],
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, result.output
        assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "there.json").read_text() == "mine"
    assert not (tmp_path / "there.safetensors").exists()
    assert (tmp_path / "null.safetensors").is_symlink()

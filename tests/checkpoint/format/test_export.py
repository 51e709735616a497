"""Weights for inference are exported from a checkpoint to one safetensors file, without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from save_and_load import save

from surefoot.checkpoint.format.export import export
from surefoot.checkpoint.format.rank_files import CheckpointMismatch, list_tensors
from surefoot.checkpoint.store import CheckpointStore
from surefoot.checkpoint.train_state import TrainState
from surefoot.cli import app


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.table.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Net, AveragedModel, Path]:
    model = Net()
    average = AveragedModel(model)
    with torch.no_grad():
        model.norm.weight.add_(1)
    compiled: Any = torch.compile(model, backend="eager")
    save(TrainState(compiled, torch.optim.Adam(model.parameters()), extra={"ema": average}), tmp_path / "saved")
    return model, average, tmp_path / "saved"


def test_exported_file_loads_into_the_model(saved: tuple[Net, AveragedModel, Path], tmp_path: Path) -> None:
    model, _, folder = saved
    count = export(folder, tmp_path / "out.safetensors")
    tensors = load_file(tmp_path / "out.safetensors")
    assert set(tensors) == set(model.state_dict())
    assert count == len(tensors)
    tensors["wave"] = torch.view_as_complex(tensors["wave"])  # safetensors has no complex dtype
    other = Net()
    other.load_state_dict(tensors)
    for name, value in model.state_dict().items():
        assert value.equal(other.state_dict()[name])
        assert value.dtype == other.state_dict()[name].dtype
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


def test_averaged_weights_can_be_exported(saved: tuple[Net, AveragedModel, Path], tmp_path: Path) -> None:
    _, average, folder = saved
    export(folder, tmp_path / "out.safetensors", source="extra.ema")
    tensors = load_file(tmp_path / "out.safetensors")
    assert set(tensors) == set(average.state_dict())
    assert tensors["module.norm.weight"].equal(torch.ones(3))


def test_missing_source_is_named_and_no_file_is_replaced(
    saved: tuple[Net, AveragedModel, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointMismatch, match=r"no weights of 'extra.slow'; it has extra.ema, model"):
        export(saved[2], tmp_path / "out.safetensors", source="extra.slow")
    assert not (tmp_path / "out.safetensors").exists()
    (tmp_path / "out.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match="another name"):
        export(saved[2], tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_text() == "mine"


def test_list_tensors_reads_headers_only(saved: tuple[Net, AveragedModel, Path]) -> None:
    tensors = list_tensors(saved[2])
    assert tensors["model.table.weight"] == ("bfloat16", (5, 3))
    assert tensors["model.wave"] == ("complex64", (2,))
    assert tensors["extra.ema.n_averaged"] == ("int64", ())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_the_files(saved: tuple[Net, AveragedModel, Path]) -> None:
    model, _, folder = saved
    tensors = {"model.norm.weight": torch.zeros(3), "model.table.weight": torch.zeros(5, 3, dtype=torch.bfloat16)}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert tensors["model.norm.weight"].equal(model.norm.weight)
    assert tensors["model.table.weight"].equal(model.table.weight)


def test_export_works_without_torch(saved: tuple[Net, AveragedModel, Path], tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path;"
        "from surefoot.checkpoint.format.export import export;"
        "from surefoot.checkpoint.format.rank_files import list_tensors;"
        "folder, out = map(Path, sys.argv[1:]); assert list_tensors(folder); export(folder, out)"
    )
    subprocess.run([sys.executable, "-c", code, str(saved[2]), str(tmp_path / "out.safetensors")], check=True)
    assert (tmp_path / "out.safetensors").stat().st_size > 0


@pytest.mark.parametrize(("options", "name"), [((), "norm.weight"), (("--weights", "extra.ema"), "module.norm.weight")])
def test_export_command(
    options: tuple[str, ...], name: str, saved: tuple[Net, AveragedModel, Path], tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    with store.writing(5, 5) as draft:
        shutil.copytree(saved[2], draft.folder, dirs_exist_ok=True)
        store.commit(draft, None, {})
    out = tmp_path / "out.safetensors"
    command = ["checkpoints", "export", str(tmp_path / "run"), "newest", str(out), *options]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert name in load_file(out)
    out.unlink()
    assert CliRunner().invoke(app, [*command, "--weights", "extra.none"]).exit_code == 2
    assert not out.exists()

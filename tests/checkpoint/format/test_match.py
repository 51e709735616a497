"""A checkpoint of another run, or an incomplete one, is refused with a way out, and the run is unchanged."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))
from save_and_load import hashed, load, save

from surefoot.checkpoint.format.rank_files import (
    CheckpointMismatch,
    check_complete,
    list_tensors,
    shard_file,
    state_file,
)
from surefoot.checkpoint.train_state import TrainState

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(*sizes: int, **more: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, **more) for a, b in itertools.pairwise(sizes)))


def run(model: nn.Module, make: Make = lambda m: torch.optim.Adam(m.parameters()), **more: Any) -> TrainState:
    optimizer = make(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()
    return TrainState(model, optimizer, **more)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(run(net(2, 3, 2)), folder)
    return folder


def refused(state: TrainState, folder: Path, *words: str, **which: int) -> None:
    """Refused with these words, and the run is what it was."""
    before = hashed(state)
    with pytest.raises(CheckpointMismatch) as caught:
        load(state, folder, **which)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert hashed(state) == before


def two_groups(m: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": m[0].parameters()}, {"params": m[1].parameters()}])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: run(net(2, 3, 2, 2)), ["another model", "not in the checkpoint: model.2.weight, model.2.bias"]),
        (lambda: run(net(2, 3)), ["another model", "only in the checkpoint: model.1.bias, model.1.weight"]),
        (lambda: run(net(2, 4, 2)), ["model.0.weight has shape (4, 2), but (3, 2) was saved", "Build the model"]),
        (lambda: run(net(2, 3, 2, dtype=torch.bfloat16)), ["torch.bfloat16", "torch.float32 was saved"]),
        (lambda: run(net(2, 3, 2), lambda m: torch.optim.SGD(m.parameters())), ["is SGD, but Adam was saved", "Build"]),
        (lambda: run(net(2, 3, 2), two_groups), ["2 parameter groups, but 1 were saved", "Build the groups"]),
        (
            lambda: run(net(2, 3, 2), lambda m: torch.optim.Adam([*m.parameters()][:2])),
            ["gone: model.1.bias, model.1.weight"],
        ),
        (
            lambda: TrainState(
                m := net(2, 3, 2), [torch.optim.Adam(m[0].parameters()), torch.optim.Adam(m[1].parameters())]
            ),
            ["1 optimizers, and now there are 2"],
        ),
    ],
    ids=["layer more", "layer less", "wider", "type", "class", "groups", "fewer held", "two optimizers"],
)
def test_another_run_is_refused(build: Callable[[], TrainState], words: list[str], saved: Path) -> None:
    refused(build(), saved, *words)


def test_the_same_run_is_not_refused(saved: Path) -> None:
    assert load(run(net(2, 3, 2)), saved).notes == []


def test_a_schedule_that_came_since_is_refused(saved: Path) -> None:
    model = net(2, 3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    refused(
        TrainState(model, optimizer, scheduler=lr_scheduler.StepLR(optimizer, 1)),
        saved,
        "0 schedulers, and now there are 1",
    )


def test_lbfgs_counts_on_the_order_of_its_parameters(tmp_path: Path) -> None:
    save(run(net(2, 2, 2), lambda m: torch.optim.LBFGS(m.parameters())), tmp_path)
    turned = run(net(2, 2, 2), lambda m: torch.optim.LBFGS([*m.parameters()][::-1]))
    refused(turned, tmp_path, "another order", "Pass them in the order in which they were saved")


def test_a_model_that_waits_for_its_shapes_is_told_to_run_first(saved: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    refused(TrainState(model, torch.optim.Adam(model[1].parameters())), saved, "Run a forward pass first")


# -- files that are missing, or make no sense


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "damaged"))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / state_file(0)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_files_that_are_not_there(damaged: Path) -> None:
    (damaged / shard_file(0)).unlink()
    refused(run(net(2, 3, 2)), damaged, shard_file(0), "Use an older checkpoint")
    (damaged / state_file(0)).unlink()
    refused(run(net(2, 3, 2)), damaged, state_file(0))


def test_files_of_a_process_that_are_not_there(damaged: Path) -> None:
    edit(damaged, world_size=2)
    refused(run(net(2, 3, 2)), damaged, state_file(1), "saved by 2 ranks")
    second = json.loads((damaged / state_file(0)).read_text()) | {"rank": 1}
    (damaged / state_file(1)).write_text(json.dumps(second))
    refused(run(net(2, 3, 2)), damaged, shard_file(1))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"schema": 2}, "schema 2, and this version reads 1"),
        ({"schema": None}, "schema"),
        ({"optimizers": "none"}, "optimizers"),
        ({"optimizers": [{}]}, "optimizers"),
        ({"world_size": 0}, "rank"),
        ({"chance": {"torch": {"$random": "!"}}}, "contains an invalid state"),
        ({"extra": []}, "extra"),
        ({"guard": {"$eval": "1"}}, "$eval is not allowed"),
        ({"guard": {"$tensor": "nowhere"}}, "lacks the tensor nowhere"),
    ],
)
def test_json_that_makes_no_sense(changes: dict[str, Any], word: str, damaged: Path) -> None:
    edit(damaged, **changes)
    refused(run(net(2, 3, 2)), damaged, word)


def test_a_state_without_its_tensor_is_refused(damaged: Path) -> None:
    told = json.loads((damaged / state_file(0)).read_text())
    told["optimizers"][0]["state"]["model.1.bias"]["exp_avg"]["$tensor"] = "gone"
    (damaged / state_file(0)).write_text(json.dumps(told))
    refused(run(net(2, 3, 2)), damaged, "lacks the tensor gone")


def test_what_no_process_wrote_is_found_before_a_checkpoint_gets_its_name(damaged: Path) -> None:
    check_complete(damaged)
    told = json.loads((damaged / state_file(0)).read_text())
    edit(damaged, tensors=[*told["tensors"], "model.ghost"])
    with pytest.raises(CheckpointMismatch, match=r"lacks model\.ghost, which no rank wrote"):
        check_complete(damaged)
    edit(damaged, tensors=told["tensors"], extra={"a": [{"$tensor": "ghost"}]})
    with pytest.raises(CheckpointMismatch, match="lacks ghost"):
        check_complete(damaged)


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_files_that_end_too_early(size: int, damaged: Path) -> None:
    path = damaged / shard_file(0)
    path.write_bytes(path.read_bytes()[:size])
    refused(run(net(2, 3, 2)), damaged, "no valid header")


def test_a_file_that_lacks_its_last_bytes(damaged: Path) -> None:
    path = damaged / shard_file(0)
    path.write_bytes(path.read_bytes()[:-1])
    refused(run(net(2, 3, 2)), damaged, "does not lie within the file")


@settings(max_examples=60)
@given(data=st.data())
def test_no_header_does_harm(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, saved: Path) -> None:
    raw = bytearray((saved / shard_file(0)).read_bytes())
    length = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("harm")
    (folder / shard_file(0)).write_bytes(raw)
    with contextlib.suppress(CheckpointMismatch):
        list_tensors(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"a": %s, "a": %s}', "a occurs twice"),
        ('{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}', "no valid header"),
    ],
)
def test_doubled_names_and_very_many_dimensions_are_refused(header: str, message: str, tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    many = ", ".join(["2305843009213693952"] * 300_000)
    text = (header % (entry, entry) if "twice" in message else header % many).encode()
    (tmp_path / shard_file(0)).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(CheckpointMismatch, match=message):
        list_tensors(tmp_path)


def test_a_pickle_is_no_state(damaged: Path, saved: Path) -> None:
    import pickle

    class Harm:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit('ran')",)

    planted = pickle.dumps(Harm())
    for name in (state_file(0), shard_file(0), ".metadata"):
        (damaged / name).write_bytes(planted)
    refused(run(net(2, 3, 2)), damaged, "cannot be read")
    shutil.copy(saved / state_file(0), damaged)
    refused(run(net(2, 3, 2)), damaged, "no valid header")
    shutil.copy(saved / shard_file(0), damaged)
    load(run(net(2, 3, 2)), damaged)

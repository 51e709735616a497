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


def net(*sizes: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, **options) for a, b in itertools.pairwise(sizes)))


def run(model: nn.Module, make: Make = lambda m: torch.optim.Adam(m.parameters()), **options: Any) -> TrainState:
    optimizer = make(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()
    return TrainState(model, optimizer, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(run(net(2, 3, 2)), folder)
    return folder


def assert_refused(state: TrainState, folder: Path, *messages: str, **rank_options: int) -> None:
    """Loading is refused with a message that contains these words, and the run is unchanged."""
    before = hashed(state)
    with pytest.raises(CheckpointMismatch) as error:
        load(state, folder, **rank_options)
    for message_part in messages:
        assert message_part in str(error.value), str(error.value)
    assert hashed(state) == before


def two_groups(m: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": m[0].parameters()}, {"params": m[1].parameters()}])


@pytest.mark.parametrize(
    ("build", "messages"),
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
    ids=["layer more", "layer less", "wider", "type", "class", "groups", "fewer parameters", "two optimizers"],
)
def test_checkpoint_of_another_run_is_refused(
    build: Callable[[], TrainState], messages: list[str], saved: Path
) -> None:
    assert_refused(build(), saved, *messages)


def test_checkpoint_of_the_same_run_is_accepted(saved: Path) -> None:
    assert load(run(net(2, 3, 2)), saved).notes == []


def test_added_scheduler_is_refused(saved: Path) -> None:
    model = net(2, 3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    assert_refused(
        TrainState(model, optimizer, scheduler=lr_scheduler.StepLR(optimizer, 1)),
        saved,
        "0 schedulers, and now there are 1",
    )


def test_lbfgs_with_reordered_parameters_is_refused(tmp_path: Path) -> None:
    save(run(net(2, 2, 2), lambda m: torch.optim.LBFGS(m.parameters())), tmp_path)
    reordered = run(net(2, 2, 2), lambda m: torch.optim.LBFGS([*m.parameters()][::-1]))
    assert_refused(reordered, tmp_path, "another order", "Pass them in the order in which they were saved")


def test_lazy_model_must_run_a_forward_pass_first(saved: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    assert_refused(TrainState(model, torch.optim.Adam(model[1].parameters())), saved, "Run a forward pass first")


# -- missing and invalid files


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "damaged"))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / state_file(0)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_files_are_named(damaged: Path) -> None:
    (damaged / shard_file(0)).unlink()
    assert_refused(run(net(2, 3, 2)), damaged, shard_file(0), "Use an older checkpoint")
    (damaged / state_file(0)).unlink()
    assert_refused(run(net(2, 3, 2)), damaged, state_file(0))


def test_missing_files_of_a_rank_are_named(damaged: Path) -> None:
    edit(damaged, world_size=2)
    assert_refused(run(net(2, 3, 2)), damaged, state_file(1), "saved by 2 ranks")
    second = json.loads((damaged / state_file(0)).read_text()) | {"rank": 1}
    (damaged / state_file(1)).write_text(json.dumps(second))
    assert_refused(run(net(2, 3, 2)), damaged, shard_file(1))


@pytest.mark.parametrize(
    ("changes", "message_part"),
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
def test_invalid_json_fields_are_refused(changes: dict[str, Any], message_part: str, damaged: Path) -> None:
    edit(damaged, **changes)
    assert_refused(run(net(2, 3, 2)), damaged, message_part)


def test_state_with_a_missing_tensor_is_refused(damaged: Path) -> None:
    state = json.loads((damaged / state_file(0)).read_text())
    state["optimizers"][0]["state"]["model.1.bias"]["exp_avg"]["$tensor"] = "gone"
    (damaged / state_file(0)).write_text(json.dumps(state))
    assert_refused(run(net(2, 3, 2)), damaged, "lacks the tensor gone")


def test_check_complete_finds_tensors_that_no_rank_wrote(damaged: Path) -> None:
    check_complete(damaged)
    state = json.loads((damaged / state_file(0)).read_text())
    edit(damaged, tensors=[*state["tensors"], "model.ghost"])
    with pytest.raises(CheckpointMismatch, match=r"lacks model\.ghost, which no rank wrote"):
        check_complete(damaged)
    edit(damaged, tensors=state["tensors"], extra={"a": [{"$tensor": "ghost"}]})
    with pytest.raises(CheckpointMismatch, match="lacks ghost"):
        check_complete(damaged)


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_truncated_header_is_refused(size: int, damaged: Path) -> None:
    path = damaged / shard_file(0)
    path.write_bytes(path.read_bytes()[:size])
    assert_refused(run(net(2, 3, 2)), damaged, "no valid header")


def test_truncated_data_is_refused(damaged: Path) -> None:
    path = damaged / shard_file(0)
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(run(net(2, 3, 2)), damaged, "does not lie within the file")


@settings(max_examples=60)
@given(data=st.data())
def test_any_header_is_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, saved: Path
) -> None:
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
def test_duplicate_names_and_huge_shapes_are_refused(header: str, message: str, tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    many = ", ".join(["2305843009213693952"] * 300_000)
    text = (header % (entry, entry) if "twice" in message else header % many).encode()
    (tmp_path / shard_file(0)).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(CheckpointMismatch, match=message):
        list_tensors(tmp_path)


def test_pickle_is_refused_and_not_run(damaged: Path, saved: Path) -> None:
    import pickle

    class MaliciousPickle:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit('ran')",)

    planted = pickle.dumps(MaliciousPickle())
    for name in (state_file(0), shard_file(0), ".metadata"):
        (damaged / name).write_bytes(planted)
    assert_refused(run(net(2, 3, 2)), damaged, "cannot be read")
    shutil.copy(saved / state_file(0), damaged)
    assert_refused(run(net(2, 3, 2)), damaged, "no valid header")
    shutil.copy(saved / shard_file(0), damaged)
    load(run(net(2, 3, 2)), damaged)

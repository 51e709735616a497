"""Checkpoints of small trained models: healthy ones are reported healthy, planted damage is found and named."""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from surefoot.inspect import diagnose_checkpoint, is_checkpoint_file, is_checkpoint_folder
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth, UnreadableInput
from surefoot.records import Cause, Pattern

State_ = dict[str, Tensor]
NAN, INF = float("nan"), float("inf")


class Reader(nn.Module):
    """A small transformer with what healthy ones have: padding, a mask of -inf, tied weights, position buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("causal", torch.full((8, 8), -INF).triu(1))
        self.register_buffer("inv_freq", 1e4 ** -torch.linspace(0, 1, 8))
        self.register_buffer("position_ids", torch.arange(8))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens), mask=self.causal))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 16, 2, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(self.cells(values)[0])


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.PReLU(),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.BatchNorm2d(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (Reader, lambda: torch.randint(0, 40, (4, 8))),
    "recurrent": (Recurrent, lambda: torch.randn(4, 10, 8)),
    "convolutional": (convolutional, lambda: torch.randn(8, 3, 12, 12)),
    "regression": (lambda: nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1)), lambda: torch.randn(16, 1)),
}


def trained(family: str, steps: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    make, data = FAMILIES[family]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(data()) - 1).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def reader() -> State_:
    return trained("transformer")[0].state_dict()


def changed(state: State_, **tensors: Callable[[Tensor], Any]) -> State_:
    """A copy with some tensors changed in place; `__` stands for a dot."""
    copy = {name: tensor.clone() for name, tensor in state.items()}
    for name, change in tensors.items():
        change(copy[name.replace("__", ".")])
    return copy


def saved(path: Path, value: Any) -> LogDiagnosis:
    torch.save(value, path)
    return diagnose_checkpoint(path)


def set_value(index: Any, value: float) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor[index] = value

    return change


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["weights", "full", "module", "old", "half"])
def test_healthy_checkpoint_is_reported_healthy(tmp_path: Path, family: str, form: str) -> None:
    model, optimizer = trained(family)
    file = tmp_path / "model.pt"
    if form == "weights":
        diagnosis = saved(file, model.state_dict())
    elif form == "full":
        diagnosis = saved(
            file, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 8, "loss": 0.5}
        )
        assert diagnosis.last_step == 8
    elif form == "module":
        diagnosis = saved(file, model)
        assert "not loaded" in " ".join(diagnosis.notes)
    elif form == "old":
        torch.save(model.state_dict(), file, _use_new_zipfile_serialization=False)
        diagnosis = diagnose_checkpoint(file)
    else:
        diagnosis = saved(file, model.to(torch.bfloat16).state_dict())
    assert diagnosis.verdict is RunHealth.HEALTHY, diagnosis.sentence
    assert not diagnosis.causes
    assert diagnosis.source["tensors"] > 3
    assert diagnosis.source["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_safetensors_are_read_in_every_precision(tmp_path: Path, reader: State_, dtype: torch.dtype) -> None:
    state = {
        name: tensor.clone().to(dtype) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in reader.items()
    }
    save_file(state, tmp_path / "model.safetensors")
    diagnosis = diagnose_checkpoint(tmp_path / "model.safetensors")
    assert diagnosis.verdict is RunHealth.HEALTHY, diagnosis.sentence
    norm = max(float(p.double().norm()) for name, p in state.items() if "causal" not in name and p.is_floating_point())
    assert diagnosis.source["largest_norm"]["norm"] == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_float8_values_are_read(tmp_path: Path, dtype: torch.dtype, form: str) -> None:
    values = torch.randn(64, 64).to(dtype)
    file = tmp_path / f"model.{form}"
    torch.save({"a.weight": values}, file) if form == "pt" else save_file({"a.weight": values}, file)
    diagnosis = diagnose_checkpoint(file)
    assert diagnosis.source["largest_norm"]["norm"] == pytest.approx(float(values.float().norm()), rel=1e-5)
    raw = values.view(torch.uint8).clone()
    raw[3, 3] = 0x7F
    broken = {"a.weight": raw.view(dtype)}
    torch.save(broken, file) if form == "pt" else save_file(broken, file)
    assert diagnose_checkpoint(file).pattern is Pattern.NONFINITE


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_nonfinite_values_are_found_and_counted(tmp_path: Path, reader: State_, value: float, form: str) -> None:
    state = changed(reader, layers__layers__2__linear1__weight=set_value((3, slice(0, 5)), value))
    state.pop("head.weight")
    file = tmp_path / f"model.{form}"
    torch.save(state, file) if form == "pt" else save_file(state, file)
    diagnosis = diagnose_checkpoint(file)
    assert diagnosis.verdict is RunHealth.FAILED
    assert diagnosis.pattern is Pattern.NONFINITE
    assert diagnosis.causes[0].cause is Cause.WEIGHTS_DAMAGED
    assert "layers.layers.2.linear1.weight" in diagnosis.causes[0].evidence[0]
    assert "5 " in diagnosis.causes[0].evidence[0]
    assert "1 of 32 rows" in diagnosis.causes[0].evidence[0]


def test_infinities_in_float16_are_an_overflow(tmp_path: Path, reader: State_) -> None:
    state = changed(reader, layers__layers__2__linear1__weight=set_value((3, 3), 1e6))
    diagnosis = saved(tmp_path / "model.pt", {name: tensor.half() for name, tensor in state.items()})
    assert diagnosis.verdict is RunHealth.FAILED
    assert diagnosis.causes[0].cause is Cause.PRECISION_OVERFLOW


def test_weights_near_the_float16_limit_are_a_warning(tmp_path: Path, reader: State_) -> None:
    state = changed(reader, layers__layers__2__norm1__weight=set_value(3, 60000.0))
    diagnosis = saved(tmp_path / "model.pt", {name: tensor.half() for name, tensor in state.items()})
    assert Cause.PRECISION_OVERFLOW in {tensor.cause for tensor in diagnosis.causes}


def test_one_huge_value_is_damage_and_many_are_an_explosion(tmp_path: Path, reader: State_) -> None:
    diagnosis = saved(tmp_path / "a.pt", changed(reader, layers__layers__2__linear1__weight=set_value((3, 3), 1e30)))
    assert diagnosis.verdict is RunHealth.FAILED
    assert diagnosis.causes[0].cause is Cause.WEIGHTS_DAMAGED
    grown = {
        name: tensor * 1e9 if tensor.is_floating_point() and "layers" in name else tensor
        for name, tensor in reader.items()
    }
    diagnosis = saved(tmp_path / "b.pt", grown)
    assert diagnosis.verdict is RunHealth.FAILED
    assert diagnosis.causes[0].cause is Cause.EXPLODING_GRADIENT


def test_layer_much_larger_than_its_siblings_is_named(tmp_path: Path, reader: State_) -> None:
    diagnosis = saved(
        tmp_path / "model.pt", changed(reader, layers__layers__4__linear2__weight=lambda tensor: tensor.mul_(60))
    )
    assert diagnosis.verdict is RunHealth.WARNING
    assert "layers.layers.4.linear2.weight" in diagnosis.sentence


def test_outliers_of_trained_norm_layers_are_healthy(tmp_path: Path, reader: State_) -> None:
    state = changed(
        reader,
        layers__layers__4__norm2__weight=set_value(3, 40.0),
        layers__layers__1__norm2__weight=lambda tensor: tensor.mul_(5),
    )
    assert saved(tmp_path / "model.pt", state).verdict is RunHealth.HEALTHY


def test_layer_of_zeros_is_found(tmp_path: Path, reader: State_) -> None:
    diagnosis = saved(
        tmp_path / "model.pt", changed(reader, layers__layers__4__linear2__weight=lambda tensor: tensor.zero_())
    )
    assert diagnosis.verdict is RunHealth.WARNING
    assert "layers.layers.4.linear2.weight" in diagnosis.sentence
    assert "only zeros" in diagnosis.sentence


def test_zero_biases_and_zero_embeddings_are_healthy(tmp_path: Path, reader: State_) -> None:
    state = {
        name: tensor.clone().zero_() if name.endswith("linear1.bias") else tensor for name, tensor in reader.items()
    }
    state = changed(state, embed__weight=set_value(slice(0, 9), 0.0))
    diagnosis = saved(tmp_path / "model.pt", state)
    assert diagnosis.verdict is RunHealth.HEALTHY
    assert any("9 of 40 rows are zero" in note for note in diagnosis.notes)


def test_dead_units_are_counted(tmp_path: Path, reader: State_) -> None:
    diagnosis = saved(
        tmp_path / "model.pt", changed(reader, layers__layers__0__linear1__weight=set_value(slice(0, 20), 0.0))
    )
    assert diagnosis.verdict is RunHealth.WARNING
    assert diagnosis.causes[0].cause is Cause.DEAD_UNITS
    assert "20 of 32" in diagnosis.sentence


def test_untrained_adapter_is_reported(tmp_path: Path) -> None:
    def adapter(b: float) -> State_:
        names = [f"base_model.model.layers.{n}.q_proj.lora_{half}.weight" for n in range(3) for half in "AB"]
        return {name: torch.randn(8, 8) * (b if "lora_B" in name else 1) for name in names}

    save_file(adapter(0.0), tmp_path / "new.safetensors")
    save_file(adapter(0.01), tmp_path / "trained.safetensors")
    diagnosis = diagnose_checkpoint(tmp_path / "new.safetensors")
    assert diagnosis.verdict is RunHealth.WARNING
    assert diagnosis.causes[0].cause is Cause.NOT_UPDATING
    assert "3 of 3" in diagnosis.sentence
    assert diagnose_checkpoint(tmp_path / "trained.safetensors").verdict is RunHealth.HEALTHY


def test_untrained_model_is_reported(tmp_path: Path) -> None:
    diagnosis = saved(tmp_path / "model.pt", Reader().state_dict())
    assert diagnosis.verdict is RunHealth.WARNING
    assert "untrained" in diagnosis.sentence
    diagnosis = saved(tmp_path / "half.pt", Reader().to(torch.bfloat16).state_dict())
    assert diagnosis.causes[0].cause is Cause.PRECISION_UNDERFLOW


@pytest.mark.parametrize(
    ("value", "verdict", "cause"),
    [
        (-1.0, RunHealth.FAILED, Cause.WEIGHTS_DAMAGED),
        (1e20, RunHealth.WARNING, Cause.EXPLODING_GRADIENT),
        (0.0, RunHealth.WARNING, Cause.ZERO_VARIANCE),
    ],
)
def test_impossible_batch_norm_statistics_are_found(
    tmp_path: Path, value: float, verdict: RunHealth, cause: Cause
) -> None:
    state = trained("convolutional")[0].state_dict()
    diagnosis = saved(tmp_path / "model.pt", changed(state, **{"1__running_var": set_value(slice(0, 12), value)}))
    assert diagnosis.verdict is verdict
    assert diagnosis.causes[0].cause is cause


def test_infinite_running_mean_is_not_taken_for_a_mask(tmp_path: Path) -> None:
    state = trained("convolutional")[0].state_dict()
    diagnosis = saved(tmp_path / "model.pt", changed(state, **{"1__running_mean": set_value(2, INF)}))
    assert diagnosis.pattern is Pattern.NONFINITE


def checkpoint_with(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A full checkpoint with a changed optimizer state."""
    model, optimizer = trained("recurrent")
    state = optimizer.state_dict()
    change(state)
    return {"model": model.state_dict(), "optimizer": state, "global_step": 8}


@pytest.mark.parametrize(
    ("change", "verdict", "cause"),
    [
        (lambda s: s["state"][1]["exp_avg"].fill_(NAN), RunHealth.FAILED, Cause.OPTIMIZER_STATE),
        (lambda s: s["state"][1]["exp_avg_sq"].fill_(INF), RunHealth.FAILED, Cause.OPTIMIZER_STATE),
        (lambda s: s["state"][1]["exp_avg_sq"].neg_(), RunHealth.FAILED, Cause.OPTIMIZER_STATE),
        (
            lambda s: [tensor["exp_avg_sq"].zero_() for tensor in s["state"].values()],
            RunHealth.WARNING,
            Cause.NOT_UPDATING,
        ),
        (lambda s: s["param_groups"][0].update(lr=NAN), RunHealth.FAILED, Cause.LEARNING_RATE),
        (lambda s: s["param_groups"][0].update(lr=5e3), RunHealth.WARNING, Cause.LEARNING_RATE),
        (lambda s: s["param_groups"][0].update(lr=0.0), RunHealth.WARNING, Cause.NOT_UPDATING),
    ],
)
def test_bad_optimizer_state_is_found(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], verdict: RunHealth, cause: Cause
) -> None:
    diagnosis = saved(tmp_path / "model.pt", checkpoint_with(change))
    assert diagnosis.verdict is verdict
    assert diagnosis.causes[0].cause is cause
    assert diagnosis.last_step == 8


def test_moments_are_named_after_their_weights(tmp_path: Path) -> None:
    diagnosis = saved(tmp_path / "model.pt", checkpoint_with(lambda state: state["state"][8]["exp_avg"].fill_(NAN)))
    assert "exp_avg of out.weight" in diagnosis.causes[0].evidence[0]


def test_zero_lr_at_the_end_of_a_schedule_is_healthy(tmp_path: Path) -> None:
    diagnosis = saved(
        tmp_path / "a.pt", checkpoint_with(lambda state: state["param_groups"][0].update(lr=0.0, initial_lr=1e-3))
    )
    assert diagnosis.verdict is RunHealth.HEALTHY


def test_disagreeing_step_counters_are_noted(tmp_path: Path) -> None:
    diagnosis = saved(tmp_path / "model.pt", checkpoint_with(lambda state: state["state"][3]["step"].fill_(2)))
    assert diagnosis.verdict is RunHealth.HEALTHY
    assert any("disagree" in note for note in diagnosis.notes)


@pytest.mark.parametrize(
    ("scale", "verdict"), [(65536.0, RunHealth.HEALTHY), (0.25, RunHealth.WARNING), (0.0, RunHealth.FAILED)]
)
def test_collapsed_loss_scale_is_reported(tmp_path: Path, scale: float, verdict: RunHealth) -> None:
    scaler = {"scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    diagnosis = saved(tmp_path / "model.pt", {"model": trained("regression")[0].state_dict(), "scaler": scaler})
    assert diagnosis.verdict is verdict


def test_nan_loss_in_the_checkpoint_is_reported(tmp_path: Path) -> None:
    weights = trained("regression")[0].state_dict()
    assert saved(tmp_path / "a.pt", {"model": weights, "val_loss": NAN}).verdict is RunHealth.WARNING
    assert saved(tmp_path / "b.pt", {"model": weights, "best_loss": INF, "epoch": 3}).last_step == 3


def test_bit_flip_that_torch_does_not_detect_is_found(tmp_path: Path) -> None:
    weights = trained("regression")[0].state_dict()
    torch.save(weights, tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[data.find(weights["0.weight"].numpy().tobytes()) + 1] ^= 1
    (tmp_path / "model.pt").write_bytes(data)
    diagnosis = diagnose_checkpoint(tmp_path / "model.pt")
    assert diagnosis.verdict is RunHealth.FAILED
    assert "checksum" in diagnosis.sentence


def test_settings_and_numpy_values_are_ignored(tmp_path: Path) -> None:
    other_values = {
        "args": argparse.Namespace(lr=0.1),
        "best": np.float64(3.0),
        "curve": np.arange(3.0),
        "path": Path("x"),
        "counts": defaultdict(list, {"a": [1]}),
        "order": OrderedDict(a=1),
    }
    diagnosis = saved(tmp_path / "model.pt", {"model": trained("regression")[0].state_dict(), **other_values})
    assert diagnosis.verdict is RunHealth.HEALTHY
    assert "argparse.Namespace" in diagnosis.notes[0]


class MaliciousPickle:
    """Creates a file when unpickled."""

    def __init__(self, call: Callable[..., Any], *args: str) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return self.call, self.args


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(("call", "name"), [(os.system, "system"), (eval, "eval"), (subprocess.Popen, "Popen")])
def test_code_in_a_checkpoint_is_named_and_not_run(tmp_path: Path, call: Any, name: str, new: bool) -> None:
    created_file = tmp_path / "ran"
    code = f"open({str(created_file)!r}, 'w')" if call is eval else f"touch {created_file}"
    weights = {"a.weight": torch.randn(4, 4), "harm": MaliciousPickle(call, code)}
    torch.save(weights, tmp_path / "model.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(UnreadableInput, match=rf"{name}.*not (?:called|loaded)"):
        diagnose_checkpoint(tmp_path / "model.pt")
    assert not created_file.exists()


def test_quantised_weights_are_skipped_and_counted(tmp_path: Path) -> None:
    state = {"a.qweight": torch.zeros(64, 64, dtype=torch.int32), "b.weight": torch.randn(8, 8)}
    save_file(state, tmp_path / "model.safetensors")
    assert diagnose_checkpoint(tmp_path / "model.safetensors").source["skipped"] == {"quantised weights": 1}
    save_file({"a.qweight": torch.zeros(64, 64, dtype=torch.int32)}, tmp_path / "all.safetensors")
    assert diagnose_checkpoint(tmp_path / "all.safetensors").verdict is RunHealth.UNKNOWN


def test_expanded_tensor_of_any_shape_is_fast(tmp_path: Path) -> None:
    diagnosis = saved(tmp_path / "model.pt", {"a.weight": torch.ones(1).expand(1 << 50), "b.weight": torch.randn(8, 8)})
    assert diagnosis.source["parameters"] == 65


def sharded(folder: Path, state: State_) -> None:
    """Two shards, the index, an optimizer and the trainer's state, as HF Trainer writes them."""
    folder.mkdir(exist_ok=True)
    names = sorted(state)
    places = {name: f"model-0000{1 + (index % 2)}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: state[name].clone() for name in names if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    torch.save(trained("recurrent")[1].state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 500, "log_history": []}')
    (folder / "training_args.bin").write_bytes(b"\x80\x04nothing")


def test_sharded_folder_is_one_checkpoint(tmp_path: Path, reader: State_) -> None:
    sharded(tmp_path, reader)
    assert is_checkpoint_folder(tmp_path)
    diagnosis = diagnose_checkpoint(tmp_path)
    assert diagnosis.verdict is RunHealth.HEALTHY, diagnosis.sentence
    assert diagnosis.last_step == 500
    assert diagnosis.source["tensors"] == len(reader) - 1


def test_missing_shard_is_reported(tmp_path: Path, reader: State_) -> None:
    sharded(tmp_path, reader)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    diagnosis = diagnose_checkpoint(tmp_path)
    assert diagnosis.verdict is RunHealth.FAILED
    assert "model-00002-of-00002.safetensors" in diagnosis.sentence


def test_folder_without_weights_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    assert not is_checkpoint_folder(tmp_path)
    assert not is_checkpoint_folder(tmp_path / "nowhere")


def header(table: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(first: int, last: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": shape if not isinstance(shape, tuple) else list(shape),
        "data_offsets": [first, last],
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header({"a": entry(0, 8)}, b"\0" * 7), "is cut off"),
        (header({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12), "overlap"),
        (header({"a": entry(0, 12)}, b"\0" * 12), "cannot be 12"),
        (header({"a": entry(8, 0)}, b"\0" * 8), "ends before it begins"),
        (header({"a": entry(0, 8, "x")}, b"\0" * 8), "impossible"),
        (header({"a": entry(-8, 0)}, b"\0" * 8), "impossible"),
        (header({"a": {"dtype": "F32"}}), "lacks its"),
        (header({"a": 3}), "lacks its"),
        (header(b'{"a": 1, "a": 2}'), "twice"),
        (header(b"{not json}"), "damaged header"),
        (header(b"{" * 5000), "damaged header"),
        (header({}, length=5000), "is cut off: its header"),
        (b"", "is empty"),
        (b"step,loss\n1,2\n", "neither"),
        (b"PK\x03\x04" + b"\0" * 30 + b"archive/data.pkl" + b"\0" * 100, "cut off or damaged"),
        (b"\x80\x02}q\0.", "cannot be read as a checkpoint"),
        (b"\x80\x04\x95\0\0\0", "cannot be read as a checkpoint"),
    ],
)
def test_damaged_files_are_refused_with_a_message(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model").write_bytes(data)
    with pytest.raises(UnreadableInput, match=message):
        diagnose_checkpoint(tmp_path / "model")


def test_duplicate_name_among_many_is_found_quickly(tmp_path: Path) -> None:
    names = [f"blocks.{number}.weight" for number in range(120_000)]
    text = ",".join(f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for name in [*names, names[-1]])
    (tmp_path / "model").write_bytes(header(f"{{{text}}}".encode()))
    with pytest.raises(UnreadableInput, match=r"blocks\.119999\.weight occurs twice"):
        diagnose_checkpoint(tmp_path / "model")


def test_huge_number_of_dimensions_is_refused_quickly(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(header({"a": entry(0, 8, [1 << 61] * 300_000)}, b"\0" * 8))
    with pytest.raises(UnreadableInput, match="impossible"):
        diagnose_checkpoint(tmp_path / "model")


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match="cannot be read"):
        diagnose_checkpoint(tmp_path / "nothing.pt")


def test_truncated_torch_archive_is_reported(tmp_path: Path) -> None:
    torch.save(trained("regression")[0].state_dict(), tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(UnreadableInput, match="The disk may have been full"):
        diagnose_checkpoint(tmp_path / "model.pt")


def test_archive_with_a_damaged_directory_is_reported(tmp_path: Path) -> None:
    torch.save(trained("regression")[0].state_dict(), tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    spans_disks = struct.pack("<4sIQI", b"PK\x06\x07", 0, 0, 7)
    (tmp_path / "model.pt").write_bytes(data[:-22] + spans_disks + data[-22:])
    with pytest.raises(UnreadableInput, match="cut off or damaged"):
        diagnose_checkpoint(tmp_path / "model.pt")


def test_torchscript_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(torchscript_archive())
    with pytest.raises(UnreadableInput, match="TorchScript"):
        diagnose_checkpoint(tmp_path / "model.pt")


def torchscript_archive() -> bytes:
    """An archive that looks like TorchScript: it has constants."""
    import io
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "version"):
            archive.writestr(f"model/{name}", b"3\n")
    return out.getvalue()


def test_checkpoint_files_are_recognised_by_content() -> None:
    weights = {"a": torch.zeros(2)}
    assert is_checkpoint_file(save(weights))
    assert is_checkpoint_file(header({"a": entry(0, 8)}))
    assert not is_checkpoint_file(b'{"loss": 1}\n{"loss": 2}\n')
    assert not is_checkpoint_file(b"step,loss\n1,2\n")
    assert not is_checkpoint_file(b"")


def test_progress_is_reported_up_to_the_end(tmp_path: Path, reader: State_) -> None:
    progress: list[tuple[int, int]] = []
    torch.save(reader, tmp_path / "model.pt")
    diagnose_checkpoint(tmp_path / "model.pt", lambda done, total: progress.append((done, total)))
    assert progress == sorted(progress)
    assert 0.9 < progress[-1][0] / progress[-1][1] <= 1


def test_safetensors_are_read_without_torch(tmp_path: Path) -> None:
    save_file({"a.weight": torch.randn(4, 4)}, tmp_path / "model.safetensors")
    torch.save({"a.weight": torch.randn(4, 4)}, tmp_path / "model.pt")
    code = """
import sys
sys.modules["torch"] = None
from surefoot.inspect import diagnose_checkpoint
from surefoot.logs.log_diagnosis import UnreadableInput
print(diagnose_checkpoint(sys.argv[1] + "/model.safetensors").verdict)
try:
    diagnose_checkpoint(sys.argv[1] + "/model.pt")
except UnreadableInput as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    assert first == "healthy"
    assert "torch is not installed" in second
    assert "safetensors" in second


_SAFE = save({"a.weight": torch.ones(4, 4), "b.bias": torch.zeros(4), "c": torch.zeros(2, dtype=torch.int64)})


def _torch_bytes(new: bool) -> bytes:
    import io

    out = io.BytesIO()
    torch.save({"a.weight": torch.ones(4, 4), "step": 3}, out, _use_new_zipfile_serialization=new)
    return out.getvalue()


@given(
    sample=st.sampled_from([_SAFE, _torch_bytes(True), _torch_bytes(False)]),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=3),
    noise=st.binary(max_size=40),
)
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_and_spliced_files_never_crash(
    tmp_path: Path, sample: bytes, cuts: list[tuple[float, float]], noise: bytes
) -> None:
    data = sample
    for first, last in cuts:
        data = data[: int(first * len(data))] + noise + data[int(last * len(data)) :]
    (tmp_path / "model").write_bytes(data)
    is_checkpoint_file(data[: 1 << 16])
    try:
        diagnosis = diagnose_checkpoint(tmp_path / "model")
    except UnreadableInput:
        return
    assert diagnosis.sentence


def test_folder_with_a_log_is_diagnosed_from_the_log(tmp_path: Path, reader: State_) -> None:
    from surefoot.logs.diagnose_log import diagnose

    sharded(tmp_path / "step", reader)
    (tmp_path / "step" / "trainer_state.json").unlink()
    assert diagnose(tmp_path / "step").source["format"] == "checkpoint folder"
    losses = [{"step": step, "loss": 3.0 / step} for step in range(1, 20)]
    (tmp_path / "step" / "trainer_state.json").write_text(json.dumps({"log_history": losses}))
    diagnosis = diagnose(tmp_path / "step")
    assert diagnosis.source["format"] == "trainer_state"
    assert any("the folder also contains weights" in note for note in diagnosis.notes)

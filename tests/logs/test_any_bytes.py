"""For any bytes, `diagnose` returns a diagnosis or raises one clear message: no traceback, no hang."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from eventfiles import event, opening, simple
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from wandbfiles import ended, file, printed, steps

from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.log_diagnosis import LogDiagnosis, UnreadableInput

LOSSES = [*np.round(2 + 8 * np.exp(-np.arange(50) / 12) + 0.02 * np.cos(np.arange(50) * 2.4), 4).tolist(), *["NaN"] * 9]
RECORDS = [f'{{"step": {k}, "loss": {loss}, "lr": 1e-4}}' for k, loss in enumerate(LOSSES)]
CRASH = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB
"""


def _torch_file(new: bool) -> bytes:
    out = io.BytesIO()
    torch.save({"model": {"a.weight": torch.ones(4, 4)}, "step": 3}, out, _use_new_zipfile_serialization=new)
    return out.getvalue()


TEXTS = {
    "jsonl": "\n".join(RECORDS) + "\n",
    "trainer state": f'{{"global_step": 80, "log_history": [{", ".join(RECORDS)}]}}',
    "history": json.dumps({"loss": [float(loss) for loss in LOSSES], "val_loss": [1.0] * len(LOSSES)}),
    "csv": "epoch,step,train/loss,val/loss\n" + "".join(f"{k // 9},{k},{loss},\n" for k, loss in enumerate(LOSSES)),
    "decimal comma": "Schritt;Loss\n"
    + "".join(f"{k};{str(loss).replace('.', ',')}\n" for k, loss in enumerate(LOSSES)),
    "tsv": "step\tloss\n" + "".join(f"{k}\t{loss}\n" for k, loss in enumerate(LOSSES)),
    "text": "".join(f"[2024-05-01 10:00:00] step {k} | loss {loss} | norm 1.5\n" for k, loss in enumerate(LOSSES))
    + CRASH,
    "dictionaries": "".join(f"{{'loss': {loss}, 'epoch': {k / 9:.2f}}}\n" for k, loss in enumerate(LOSSES)),
    "bars": "".join(f"\r{k}/59 [=====>....] - 1s 2ms/step - loss: {loss}" for k, loss in enumerate(LOSSES)),
    "tables": "epoch  train_loss  dur\n-----  ----------  ---\n"
    + "".join(f"{k}  {v}  0.5\n" for k, v in enumerate(LOSSES)),
}
FILES = {
    **{name: text.encode() for name, text in TEXTS.items()},
    "tensorboard": opening() + b"".join(event(k, simple("loss", float(loss))) for k, loss in enumerate(LOSSES)),
    "wandb": file(*steps(50), printed("step 3 loss 2.0\n"), ended(1)),
    "safetensors": save({"a.weight": np.ones((4, 4), np.float32), "b.bias": np.zeros(4, np.float32)}),
    "torch": _torch_file(True),
    "old torch": _torch_file(False),
}
PACKERS = [bytes, gzip.compress, bz2.compress, lzma.compress]
ENCODINGS = ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp1252"]


def damaged(seed: int) -> bytes:
    """A file of some format, or parts of two: re-encoded, compressed, cut, spliced, or with changed bytes."""
    chance = random.Random(seed)
    data = chance.choice([*FILES.values(), chance.randbytes(600)])
    if chance.random() < 0.2:
        data = chance.choice(list(TEXTS.values())).encode(chance.choice(ENCODINGS), "replace")
    for _ in range(chance.randint(0, 3)):
        first, last = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
        noise = chance.randbytes(chance.randint(0, 30))
        other = chance.choice(list(FILES.values()))
        at = chance.randint(0, len(other))
        data = chance.choice(
            [
                data[first:],
                data[:last],
                data[:first] + data[last:],
                data[:first] + noise + data[first:],
                data[:first] + other[at : at + 400] + data[first:],
                data[:last] + data[first:last] * chance.randint(1, 40) + data[last:],
                data.replace(b"\n", chance.choice([b"\r\n", b"\r", b"", b"\0", b"\n\n"])),
                bytes(byte if chance.random() > 0.01 else chance.randrange(256) for byte in data),
            ]
        )
    packed = chance.choice(PACKERS)(data) if chance.random() < 0.2 else data
    return packed[: chance.randint(0, len(packed))] if chance.random() < 0.2 else packed


@given(st.integers(0, 2**32))
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_a_diagnosis_or_one_message(tmp_path: Path, seed: int) -> None:
    (tmp_path / "any").write_bytes(damaged(seed))
    try:
        diagnosis = diagnose(tmp_path / "any")
    except UnreadableInput as error:
        output = str(error)
    else:
        assert isinstance(diagnosis, LogDiagnosis)
        assert diagnosis.sentence
        assert repr(diagnosis).startswith(diagnosis.verdict.upper())
        assert diagnosis._repr_html_()
        output = json.dumps(diagnosis.as_json(), allow_nan=False)
    assert str(tmp_path) in output


def test_command_gives_a_diagnosis_or_one_message(tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}" for seed in range(20)]
    for seed, path in enumerate(paths):
        path.write_bytes(damaged(seed))
    command = [sys.executable, "-m", "surefoot", "diagnose", "--json", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode == 2
    assert len(json.loads(done.stdout)) == len(paths)
    assert all(line.startswith(f"surefoot diagnose: {tmp_path}") for line in done.stderr.splitlines())


def test_undamaged_files_are_read(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / "log").write_bytes(data)
        assert diagnose(tmp_path / "log").source["points"], name


AT_THE_LIMITS = [1.7976931348623157e308, -1.7976931348623157e308, 1e308, -1e200, 1e155, 5e-324, -5e-324, 1e-308, 0.0]
AT_THE_LIMITS += [-0.0, float("inf"), float("-inf"), float("nan"), 2.0**63, -(2.0**64), 1e38, 0.5, -1.0]
NAMES = ["step", "loss", "grad_norm", "learning_rate", "eval_loss", "loss_scale", "epoch", "loss_cls", "loss_box"]


@st.composite
def extreme_logs(draw: st.DrawFn) -> dict[str, list[float]]:
    """A usual log in which some numbers are at the limits of a float."""
    count = draw(st.sampled_from([3, 8, 20, 60, 150]))
    names = draw(st.lists(st.sampled_from(NAMES[3:]), unique=True, max_size=4))
    fall = 2 + 8 * np.exp(-np.arange(count) / 12) + 0.02 * np.cos(np.arange(count) * 2.4)
    columns = {name: fall.tolist() for name in ("loss", "grad_norm", *names)}
    columns["step"] = [10.0 * k for k in range(count)]
    for values in columns.values():
        for at in draw(st.lists(st.integers(0, count - 1), max_size=6)):
            values[at] = draw(st.sampled_from(AT_THE_LIMITS))
    return columns


def _written(columns: dict[str, list[float]], form: str) -> str:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if form == "trainer state":
        return json.dumps({"global_step": 80, "max_steps": 100, "log_history": rows})
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    if form == "csv":
        return ",".join(columns) + "\n" + "".join(",".join(map(repr, row.values())) + "\n" for row in rows)
    return "".join(" ".join(f"{name} {value!r}," for name, value in row.items()) + "\n" for row in rows)


@given(extreme_logs(), st.sampled_from(["trainer state", "jsonl", "csv", "text", "arrays"]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_extreme_floats_raise_no_warning(tmp_path: Path, columns: dict[str, list[float]], form: str) -> None:
    (tmp_path / "log").write_text(_written(columns, form) if form != "arrays" else "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnosis = diagnose(columns if form == "arrays" else tmp_path / "log")
    assert diagnosis.sentence
    assert repr(diagnosis).startswith(diagnosis.verdict.upper())
    assert diagnosis._repr_html_()
    json.dumps(diagnosis.as_json(), allow_nan=False)

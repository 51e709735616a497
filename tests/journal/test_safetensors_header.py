"""The header parser reads what the safetensors library writes, and names the damage of a damaged file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from surefoot.journal.safetensors_header import BadSafetensors, read_header


def test_tensors_are_at_the_offsets_of_the_header(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([], np.int64), "c": np.ones(3, np.int8)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "np"})
    header = read_header(path)
    content = path.read_bytes()
    assert header.metadata == {"format": "np"}
    assert {name: span.shape for name, span in header.tensors.items()} == {n: t.shape for n, t in tensors.items()}
    assert {name: content[span.begin : span.end] for name, span in header.tensors.items()} == {
        name: tensor.tobytes() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("kept", [4, 20, -1])
def test_truncated_file_is_recognised(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(8, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadSafetensors) as caught:
        read_header(path)
    assert caught.value.cut_off == (kept != 4), "without a header it is unknown whether the file is truncated"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}, "impossible"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "impossible"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "cannot be 4 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "lacks its"),
        ({"dtype": "XYZ", "shape": [2], "data_offsets": [0, 4]}, None),
    ],
)
def test_entries_are_validated_and_unknown_dtypes_left_to_the_reader(
    entry: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    text = json.dumps({"a": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    if message is None:
        assert read_header(path).tensors["a"].dtype == "XYZ"
        return
    with pytest.raises(BadSafetensors, match=message):
        read_header(path)

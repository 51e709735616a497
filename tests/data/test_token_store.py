"""Token files: NumPy and raw, several joined, and one far larger than memory."""

from __future__ import annotations

import pickle
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchdata")
sys.path.insert(0, str(Path(__file__).parent))
from corpora import counted_targets, opened, write_tokens

from surefoot.data.corpus import check_vocab
from surefoot.data.data_error import DataError
from surefoot.data.token_store import FileTokens, JoinedTokens, open_token_file


def resident() -> int:
    """Resident memory of this process in bytes, with pages of mapped files."""
    psutil = pytest.importorskip("psutil")
    return psutil.Process().memory_info().rss


def test_a_2_gb_token_file_takes_almost_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # sparse: it uses no disk space
    opened("tokens", path=write_tokens(tmp_path / "small.bin"))  # warm up
    before = resident()
    data = opened("tokens", path=path, context=1024, batch_size=16)
    check_vocab(data, 1000)
    for batch in islice(data.train_loader, 300):
        assert batch["count"] == 16 * 1024
    assert data.tokens == (1 << 30) * 0.95 // 1
    assert resident() - before < 100 << 20
    assert data.hash is not None
    assert data.hash.startswith("xxh3-sampled:")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_tokens_of_every_dtype_are_read(tmp_path: Path, dtype: str) -> None:
    raw = write_tokens(tmp_path / "a.bin", 33, dtype, vocab=200)
    tokens = np.fromfile(raw, dtype)
    np.save(tmp_path / "b.npy", tokens)
    for name in ("a.bin", "b.npy"):  # a NumPy file names its dtype
        dtype_option = dtype if name == "a.bin" else "uint16"
        data = opened("tokens", path=tmp_path / name, dtype=dtype_option, held_out=0, shuffle=False)
        assert counted_targets(next(iter(data.train_loader))) == tokens[1:].tolist()


def test_several_files_are_joined(tmp_path: Path) -> None:
    for i in range(4):
        np.arange(i * 10, i * 10 + 10, dtype=np.uint16).tofile(tmp_path / f"{i}.bin")
    data = opened("tokens", path=tmp_path, held_out=0, shuffle=False, batch_size=100)
    assert counted_targets(next(iter(data.train_loader))) == list(range(1, 40))
    assert data.samples == 5
    joined = JoinedTokens([open_token_file(tmp_path / f"{i}.bin", "uint16") for i in range(4)])
    assert joined.read(9, 22).tolist() == list(range(9, 31))
    assert joined.read(38, 10).tolist() == [38, 39]


def test_a_limit_is_in_tokens(tmp_path: Path) -> None:
    data = opened("tokens", path=write_tokens(tmp_path / "a.bin", 1000), limit=101, held_out=0)
    assert data.tokens == 100


def test_an_array_that_is_not_1d_integers_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 3)))
    with pytest.raises(DataError, match=r"holds float64 of shape \(3, 3\): expected a 1-D array of integers"):
        opened("tokens", path=tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="begins like a NumPy file but cannot be read"):
        opened("tokens", path=tmp_path / "b.npy")


def test_a_negative_token_is_noticed(tmp_path: Path) -> None:
    np.array([1, 2, -1, 3] * 10, np.int32).tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="the data has token -1 at position 2"):
        check_vocab(opened("tokens", path=tmp_path / "a.bin", dtype="int32"), 100)


def test_a_spawned_worker_opens_the_file_itself(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 50)
    opened_here = FileTokens(path, np.dtype("uint16"), length=50)
    opened_here.read(0, 5)
    unpickled = pickle.loads(pickle.dumps(opened_here))
    assert unpickled.read(7, 9).tolist() == opened_here.read(7, 9).tolist()

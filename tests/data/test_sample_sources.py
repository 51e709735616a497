"""A loader names the file and line, or the row, that a sample comes from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

pytest.importorskip("torchdata")
sys.path.insert(0, str(Path(__file__).parent))
from corpora import opened, write_chats, write_texts, write_tokens

from surefoot.data import make_loader, token_cache
from surefoot.data.corpus import TrainingData


def sources(data: TrainingData) -> list[str]:
    return [data.train_loader.source_of(i) for i in range(data.samples)]


def write_jsonl(path: Path) -> Path:
    """Four texts on lines 1, 3, 4 and 6."""
    texts = ["aaaa", None, "bbbbbb", "cc", None, "dddd"]
    path.write_text("".join((json.dumps({"text": text}) if text else "") + "\n" for text in texts))
    return path


@pytest.mark.parametrize("cached", [True, False])
def test_lines_of_a_jsonl_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cached: bool) -> None:
    if cached:
        monkeypatch.setattr("surefoot.data.corpus._MAX_IN_MEMORY_BYTE_TOKENS", 0)
    path = write_jsonl(tmp_path / "a.jsonl")
    for _ in range(2):  # the second time from the cache
        data = opened(path=path, packing=False, held_out=0, context=32, cache=tmp_path / "cache")
        assert sources(data) == [f"{path}:{line}" for line in (1, 3, 4, 6)]
    assert any((tmp_path / "cache").rglob("places.npy")) is cached


def test_windows_over_several_lines_and_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    data = opened(path=path, packing=True, held_out=0, context=8)
    assert sources(data)[0] == f"{path}:1 to 3"
    folder = write_texts(tmp_path / "texts", 3)
    assert sources(opened(path=folder, packing=False, held_out=0, context=200)) == [
        str(folder / f"text-00{i}.txt") for i in range(3)
    ]


def test_chats_and_tokens(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 6)
    named = sources(opened("chat", path=chats, packing=False, held_out=0, context=400))
    assert named == [f"{chats}:{line}" for line in range(1, 7)]
    tokens = write_tokens(tmp_path / "t.bin", 100)
    assert sources(opened("tokens", path=tokens, dtype="uint16", vocab=500, held_out=0))[1] == (
        f"tokens 8 to 17 of {tokens}"
    )


def test_an_old_cache_without_places_still_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.data.corpus._MAX_IN_MEMORY_BYTE_TOKENS", 0)
    path = write_jsonl(tmp_path / "a.jsonl")
    options: dict[str, Any] = {"path": path, "packing": False, "held_out": 0, "context": 32, "cache": tmp_path / "c"}
    opened(**options)
    (places,) = (tmp_path / "c").rglob("places.npy")
    places.unlink()
    assert sources(opened(**options))[0].startswith("tokens 0 to ")
    assert token_cache._VERSION == 1


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)

    def source_of(self, index: int) -> str:
        if index == 7:
            raise KeyError(index)
        return f"images/{index}.png"


def test_your_own_data_set() -> None:
    for num_workers in (0, 1):
        loader = make_loader(Named(), 2, seed=0, num_workers=num_workers)
        assert (loader.source_of(3), loader.source_of(7)) == ("images/3.png", "")
    augmented = make_loader(Named(), 2, seed=0, augment=lambda sample, generator: sample)
    assert augmented.source_of(3) == "images/3.png"
    assert make_loader(Subset(Named(), [5, 6]), 1, seed=0).source_of(1) == "images/6.png"
    plain = TensorDataset(torch.arange(9))
    assert make_loader(Subset(plain, [5, 6]), 1, seed=0).source_of(1) == "row 6"
    assert make_loader(plain, 1, seed=0).source_of(1) == ""


def test_bans_outlast_a_move_to_an_older_position_until_they_are_lifted() -> None:
    loader = make_loader(Named(), 2, seed=0, shuffle=False)
    before = loader.state_dict()
    changes: list[tuple[int, ...]] = []
    loader.bans_changed = lambda: changes.append(tuple(loader.banned))
    loader.ban([0, 3])
    loader.load_state_dict(before)
    assert [sample for batch in loader for sample in batch.tolist()] == [1, 2, 4, 5, 6, 7]
    loader.lift(3)
    assert (loader.banned, loader.num_samples) == ((0,), 8)
    assert changes == [(0, 3), (0,)]
    assert [sample for batch in loader for sample in batch.tolist()] == [1, 2, 3, 4, 5, 6, 7]

"""Data from a recipe: splitting, packing, ranks, resuming, and error messages."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchdata")
sys.path.insert(0, str(Path(__file__).parent))
from corpora import counted_targets, opened, write_chats, write_texts, write_tokens

from surefoot.data.corpus import check_vocab
from surefoot.data.data_error import DataError


def numbers(path: Path) -> list[int]:
    return np.fromfile(path, "uint16").tolist()


# -- batches


def test_python_library_needs_no_path_and_holds_texts_out() -> None:
    data = opened("library", context=64, limit=300_000)
    batch = next(iter(data.train_loader))
    assert batch["inputs"].shape == batch["targets"].shape == (4, 64)
    assert batch["inputs"].dtype == batch["targets"].dtype == torch.int64
    assert batch["count"] == 256
    assert data.vocab == 256
    assert data.tokenizer is not None
    assert data.tokenizer.encode("né") == [110, 195, 169]
    assert data.eval_loader is not None
    assert 0.03 < len(data.eval_loader.samples) / (data.samples + len(data.eval_loader.samples)) < 0.07


def test_every_token_is_a_target_exactly_once_per_epoch(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 45)
    data = opened("tokens", path=path, held_out=0, shuffle=False, batch_size=100)
    (batch,) = data.train_loader
    assert counted_targets(batch) == numbers(path)[1:]
    assert batch["inputs"].shape == (6, 8)
    assert batch["count"] == data.tokens == 44
    assert batch["inputs"].flatten()[:44].tolist() == numbers(path)[:44]


def test_packed_batches_all_have_one_shape(tmp_path: Path) -> None:
    data = opened("tokens", path=write_tokens(tmp_path / "a.bin"), held_out=0)
    assert {batch["inputs"].shape for batch in data.train_loader} == {(4, 8)}


def test_padded_texts_are_as_long_as_the_longest_of_their_batch(tmp_path: Path) -> None:
    for name in ("a", "bcd", "efghijklmn", "o" * 50):
        (tmp_path / f"{name[0]}.txt").write_text(name)
    data = opened(path=tmp_path, packing=False, held_out=0, shuffle=False, batch_size=2, context=20)
    first, second = data.train_loader
    assert first["inputs"].tolist() == [[97, 0, 0], [98, 99, 100]]
    assert first["targets"].tolist() == [[0, -100, -100], [99, 100, 0]]
    assert first["count"] == 4
    assert second["inputs"].shape == (2, 20)
    assert second["count"] == 10 + 20
    assert data.notes == [
        "1 of 4 texts are longer than data.context 20 and were truncated: 44.1% of all tokens are lost"
    ]


def test_segments_number_the_texts_of_a_sample_and_no_target_crosses(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("defg")
    data = opened(path=tmp_path, held_out=0, shuffle=False, segments=True, context=8, batch_size=1)
    (batch,) = data.train_loader
    assert batch["segments"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert batch["targets"].tolist() == [[98, 99, 0, -100, 101, 102, 103, 0]]
    assert batch["count"] == 7


# -- held-out data


@pytest.mark.parametrize("packing", [True, False])
def test_no_text_and_no_copy_of_one_is_in_both_splits(tmp_path: Path, packing: bool) -> None:
    write_texts(tmp_path / "first")
    write_texts(tmp_path / "copies")
    data = opened(path=tmp_path, packing=packing, held_out=0.3, context=400)
    assert data.eval_loader is not None

    def texts(batches: Any) -> set[str]:
        rows = [row.tolist() for batch in batches for row in batch["inputs"]]
        return {bytes(part).decode() for row in rows for part in bytes(row).split(b"\0") if len(part) > 10}

    train, eval_texts = texts(data.train_loader), texts(data.eval_loader)
    complete_texts = {path.read_text() for path in tmp_path.rglob("*.txt")}
    assert eval_texts
    assert train
    complete_eval_texts = eval_texts & complete_texts
    assert complete_eval_texts
    assert not complete_eval_texts & train


def test_the_tail_of_tokens_and_of_a_single_text_is_held_out(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 200)
    data = opened("tokens", path=path, held_out=0.25, shuffle=False, batch_size=100)
    assert counted_targets(next(iter(data.train_loader))) == numbers(path)[1:150]
    assert data.eval_loader is not None
    assert sorted(counted_targets(next(iter(data.eval_loader)))) == sorted(numbers(path)[151:])

    (tmp_path / "one.txt").write_text("abcdefghij" * 20)
    single = opened(path=tmp_path / "one.txt", held_out=0.25)
    assert single.notes == ["there is only one text: its last 25.0% is held out"]
    assert single.eval_loader is not None


def test_all_of_held_out_path_is_used_for_eval(tmp_path: Path) -> None:
    train, held_out = write_tokens(tmp_path / "a.bin", 100), write_tokens(tmp_path / "b.bin", 33)
    data = opened("tokens", path=train, held_out_path=held_out, batch_size=100)
    assert data.tokens == 99
    assert data.notes == []
    assert data.eval_loader is not None
    assert sorted(counted_targets(next(iter(data.eval_loader)))) == sorted(numbers(held_out)[1:])


def test_eval_texts_that_are_also_in_the_training_data_are_noted(tmp_path: Path) -> None:
    train, held_out = write_texts(tmp_path / "a"), write_texts(tmp_path / "b", 4)
    (held_out / "text-000.txt").write_text("a text that is nowhere else")
    assert opened(path=train, held_out_path=held_out).notes == ["3 of 4 held-out texts are also in the training data"]


def test_eval_batches_are_disjoint_by_rank_and_equally_many(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 3000)
    shares = [opened("tokens", path=path, held_out=0.2, rank=rank, world=3).eval_loader for rank in range(3)]
    samples = [share.samples for share in shares if share]
    assert len({len(list(share)) for share in shares if share}) == 1
    assert len(set().union(*samples)) == sum(map(len, samples)) == 75
    assert shares[0] is not None
    again = [[counted_targets(batch) for batch in shares[0]] for _ in range(2)]
    assert again[0] == again[1]


def test_every_rank_has_eval_batches_even_with_little_data(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 100)
    for rank in range(4):
        eval_loader = opened("tokens", path=path, held_out=0.1, rank=rank, world=4, batch_size=1).eval_loader
        assert eval_loader is not None
        assert len(list(eval_loader)) == 1


# -- resuming


def make(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "tokens":
        return {"path": write_tokens(folder / "a.bin")}
    if kind == "chat":
        return {"path": write_chats(folder / "a.jsonl", 60), "context": 64, "packing": False}
    return {"path": write_texts(folder / "texts")}


def targets_by_batch(loader: Any, most: int) -> list[list[int]]:
    seen: list[list[int]] = []
    while len(seen) < most:
        seen += [counted_targets(batch) for batch in islice(loader, most - len(seen))]
    return seen


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("text", 0, 2), ("text", 2, 0), ("tokens", 2, 2), ("chat", 0, 0), ("tokens", 0, 0)]
)
def test_a_run_resumes_with_the_next_batch(tmp_path: Path, kind: str, before: int, after: int) -> None:
    fields = make(kind, tmp_path)
    expected = targets_by_batch(opened(kind, **fields).train_loader, 40)  # more than one epoch of each
    first = opened(kind, workers=before, **fields)
    seen = targets_by_batch(first.train_loader, 11)
    second = opened(kind, workers=after, **fields)
    second.train_loader.load_state_dict(json.loads(json.dumps(first.train_loader.state_dict())))
    assert seen + targets_by_batch(second.train_loader, 29) == expected


def test_a_run_of_two_ranks_resumes_with_one_and_with_four(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 2001)
    pair = [opened("tokens", path=path, held_out=0, rank=rank, world=2) for rank in range(2)]
    seen = [tokens for data in pair for tokens in targets_by_batch(data.train_loader, 7)]
    state = pair[0].train_loader.state_dict()
    assert state == pair[1].train_loader.state_dict()
    for world in (1, 4):
        remaining = []
        for rank in range(world):
            data = opened("tokens", path=path, held_out=0, rank=rank, world=world)
            data.train_loader.load_state_dict(state)
            remaining += [counted_targets(batch) for batch in data.train_loader]
        all_tokens = sorted(token for tokens in seen + remaining for token in tokens)
        left_out = 2000 - len(all_tokens)
        assert 0 <= left_out < 8 * 4 * world  # the last batch, when not full
        if not left_out:
            assert all_tokens == sorted(numbers(path)[1:])


# -- error messages


def error_of(*args: Any, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(*args, **fields)
    return str(caught.value)


def test_each_invalid_setting_gets_one_message_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "a.txt").write_text("")
    (tmp_path / "short.txt").write_text("abc")
    texts = write_texts(tmp_path / "texts")
    assert "data.kind text needs data.path" in error_of()
    assert f"Did you mean {texts}?" in error_of(path=tmp_path / "textes")
    assert "has no file" in error_of(path=tmp_path / "empty")
    assert "has no file that ends in .jsonl" in error_of("chat", path=texts)
    assert "no file matches" in error_of(path=tmp_path / "*.md")
    assert "there is no text in" in error_of(path=tmp_path / "void")
    assert "shorten data.context" in error_of(path=tmp_path / "short.txt")
    assert "data.tokenizer: there is no file" in error_of(path=texts, tokenizer="nowhere")
    assert "data.packing must be true" in error_of("tokens", path=tmp_path / "short.txt", packing=False)
    assert "remove it" in error_of("library", path=texts)


def test_a_token_file_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 101)
    assert "has 202 bytes, which is no multiple of the 4 bytes of one uint32" in error_of(
        "tokens", path=path, dtype="uint32"
    )


def test_fewer_samples_than_ranks_are_refused(tmp_path: Path) -> None:
    assert "a step needs at least 8" in error_of(
        "tokens", path=write_tokens(tmp_path / "a.bin", 30), held_out=0, world=8, batch_size=1
    )


def test_a_vocabulary_too_small_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    data = opened("tokens", path=write_tokens(tmp_path / "a.bin"))
    check_vocab(data, 500)
    with pytest.raises(DataError, match=r"the data has token .* and the model's vocabulary is 300: raise it"):
        check_vocab(data, 300)
    texts = opened(path=write_texts(tmp_path / "texts"))
    with pytest.raises(DataError, match="the tokenizer has 256 tokens and the model's vocabulary 100"):
        check_vocab(texts, 100)


def test_one_token_beyond_the_vocabulary_skips_only_its_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    tokens = np.ones(200_000, np.uint16)
    tokens[100_003] = 60_000
    tokens.tofile(path)
    data = opened("tokens", path=path, context=100, batch_size=50)
    check_vocab(data, 1000)
    assert {token for batch in data.train_loader for token in counted_targets(batch)} == {1}
    assert [str(sample) for sample in data.unreadable] == [
        "sample 1000: ValueError: token 60000 is beyond the model's vocabulary of 1000"
    ]


# -- content hash


def test_the_hash_covers_the_content_or_samples_of_huge_files(tmp_path: Path) -> None:
    from surefoot.data.source_files import fingerprint_files

    path = tmp_path / "a.txt"
    path.write_text("hello there, this is a text")
    names = [fingerprint_files([path]), fingerprint_files([path], max_full_bytes=3)]
    assert [name.split(":")[0] for name in names] == ["xxh3", "xxh3-sampled"]
    assert opened(path=path).hash == names[0]
    path.write_text("hello there, this is a tent")
    assert fingerprint_files([path]) != names[0]
    assert fingerprint_files([path], max_full_bytes=3) != names[1]

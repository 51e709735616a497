"""The token cache: several processes at once, one of them killed, and damaged files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata")
sys.path.insert(0, str(Path(__file__).parent))
from corpora import counted_targets, opened, write_chats, write_texts

from surefoot.data import corpus
from surefoot.data.data_error import DataError
from surefoot.data.tokenizers import ByteTokenizer


@pytest.fixture(autouse=True)
def _never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_MAX_IN_MEMORY_BYTE_TOKENS", 0)


def all_targets(data: Any) -> list[list[int]]:
    return [counted_targets(batch) for batch in data.train_loader]


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_tokens_from_files_are_those_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = write_texts(tmp_path / "texts") if kind == "text" else write_chats(tmp_path / "a.jsonl")
    (path / "blob" if kind == "text" else tmp_path / "b.jsonl").write_bytes(b"\0 no\n")
    fields: dict[str, Any] = {"path": path if kind == "text" else tmp_path / "*.jsonl", "context": 64}
    written, cached = (opened(kind, cache=tmp_path / "cache", **fields) for _ in range(2))
    monkeypatch.setattr(corpus, "_MAX_IN_MEMORY_BYTE_TOKENS", 1 << 30)
    memory = opened(kind, **fields)
    assert all_targets(written) == all_targets(cached) == all_targets(memory)
    assert written.unreadable == cached.unreadable == memory.unreadable
    assert len(written.unreadable) == 1
    assert written.notes == cached.notes == memory.notes


def open_slowly(folder: Path, results_queue: Any) -> None:
    """Run in a separate process; records whether it tokenized."""
    corpus._MAX_IN_MEMORY_BYTE_TOKENS = 0
    real_encode_many = ByteTokenizer.encode_many

    def encode_many(self: ByteTokenizer, texts: Any) -> Any:
        (folder / f"worked-{os.getpid()}").touch()
        return real_encode_many(self, texts)

    ByteTokenizer.encode_many = encode_many  # pyright: ignore[reportAttributeAccessIssue]
    data = opened(path=folder / "texts", cache=folder / "cache")
    results_queue.put((data.hash, data.tokens, all_targets(data)))


def test_one_of_several_processes_tokenizes_and_the_others_wait(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    context = multiprocessing.get_context("fork")
    results_queue = context.Queue()
    ranks = [context.Process(target=open_slowly, args=(tmp_path, results_queue)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    results = [results_queue.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    assert all(result == results[0] for result in results)
    assert len(list(tmp_path.glob("worked-*"))) == 1


def die_while_tokenizing(folder: Path) -> None:
    corpus._MAX_IN_MEMORY_BYTE_TOKENS = 0
    ByteTokenizer.encode_many = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore
    opened(path=folder / "texts", cache=folder / "cache")


def test_when_the_tokenizing_process_is_killed_the_next_starts_over(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    victim = multiprocessing.get_context("fork").Process(target=die_while_tokenizing, args=(tmp_path,))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert opened(path=tmp_path / "texts", cache=tmp_path / "cache").samples > 0


def test_changed_texts_are_tokenized_again(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 3)
    before = opened(path=texts, cache=tmp_path / "cache", held_out=0)
    (texts / "text-001.txt").write_text("something else entirely, and longer than it was before by far " * 3)
    after = opened(path=texts, cache=tmp_path / "cache", held_out=0)
    assert after.tokens != before.tokens
    assert after.hash != before.hash


def test_damaged_files_are_refused_with_what_to_delete(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    opened(path=texts, cache=tmp_path / "cache")
    (token_file,) = (tmp_path / "cache").rglob("tokens.bin")
    token_file.write_bytes(token_file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"are damaged \(tokens.bin has the wrong size\): delete that folder"):
        opened(path=texts, cache=tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(DataError, match="Set SUREFOOT_CACHE to a folder with free space"):
        opened(path=write_texts(tmp_path / "texts"), cache=tmp_path / "cache")

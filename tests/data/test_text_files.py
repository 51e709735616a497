"""Text files with invalid bytes, other encodings, or no text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchdata")
sys.path.insert(0, str(Path(__file__).parent))
from corpora import counted_targets, opened, write_texts

from surefoot.data import text_files
from surefoot.data.data_error import DataError


def test_a_file_that_is_not_text_is_skipped_and_named(tmp_path: Path) -> None:
    write_texts(tmp_path)
    healthy = opened(path=tmp_path)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (tmp_path / "wide.txt").write_bytes("some words".encode("utf-16-le"))
    (tmp_path / "french.txt").write_bytes("déjà vu à Orléans".encode("latin-1"))
    data = opened(path=tmp_path)
    assert (data.tokens, data.samples) == (healthy.tokens, healthy.samples)
    assert healthy.unreadable == []
    assert [Path(sample.name).name for sample in data.unreadable] == ["french.txt", "picture.png", "wide.txt"]
    assert "4 of 17 bytes are invalid" in data.unreadable[0].reason
    assert "byte 4 is zero" in data.unreadable[1].reason


def test_a_few_invalid_bytes_are_replaced_and_noted(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_bytes(b"a line of text\n" * 500 + b"\xff and more\n")
    data = opened(path=tmp_path)
    assert data.unreadable == []
    assert any("texts have bytes that are not valid UTF-8, first" in note for note in data.notes)


def test_too_many_unreadable_files_stop_the_run_and_the_first_are_named(tmp_path: Path) -> None:
    write_texts(tmp_path, 3)
    for i in range(7):
        (tmp_path / f"blob-{i}").write_bytes(b"\0" * 9)
    with pytest.raises(DataError) as caught:
        opened(path=tmp_path, bad_samples=6)
    message = str(caught.value)
    assert "7 samples could not be read, and data.bad_samples allows 6" in message
    assert "blob-0: not text: byte 0 is zero" in message
    assert "and 2 more" in message
    assert "blob-6" not in message


def test_files_without_read_permission_are_reported_first(tmp_path: Path) -> None:
    write_texts(tmp_path, 3)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert opened(path=tmp_path).unreadable == []  # a dangling link is no file
    with pytest.raises(DataError, match=r"there is no file or folder .*gone\.txt"):
        opened(path=tmp_path / "gone.txt")


def test_patterns_folders_and_files_may_overlap_and_hidden_files_stay_hidden(tmp_path: Path) -> None:
    write_texts(tmp_path / "deep" / "er", 4)
    (tmp_path / "deep" / ".secret").write_text("do not read this")
    once = opened(path=tmp_path / "deep", held_out=0)
    assert opened(path=[tmp_path / "**/*.txt", tmp_path / "deep"], held_out=0).tokens == once.tokens


def test_a_limit_truncates_the_last_text(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 10)
    data = opened(path=tmp_path, limit=15, held_out=0, shuffle=False, batch_size=9)
    assert bytes(counted_targets(next(iter(data.train_loader)))) == b"a" * 9 + b"\0" + b"b" * 5 + b"\0"


def test_long_texts_are_read_in_pieces_with_nothing_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"Zeile {i} für alle → ok\n" for i in range(300)) + "ohne Ende: " + "ß" * 200
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig")
    monkeypatch.setattr(text_files, "_PIECE_BYTES", 37)
    monkeypatch.setattr(text_files, "_GROUP_CHARS", 500)
    data = opened(path=tmp_path, held_out=0, shuffle=False, batch_size=10_000)
    assert data.unreadable == []
    assert bytes(counted_targets(next(iter(data.train_loader)))) == text.encode()[1:] + b"\0"


def test_in_a_file_of_json_lines_each_line_is_a_text(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"text": "two\nlines"}, {"texts": 1}, {"text": ""}, {"text": "\ud800"}, {"text": "six"}]
    content = "".join(json.dumps(line) + "\n" for line in lines) + "{broken\n\n"
    (tmp_path / "a.jsonl").write_text(content)
    data = opened(path=tmp_path / "a.jsonl", held_out=0, shuffle=False, batch_size=9)
    assert bytes(counted_targets(next(iter(data.train_loader)))) == b"ne\0two\nlines\0six\0"
    assert [sample.name.rsplit(" ", 1)[1] for sample in data.unreadable] == ["3", "5", "7"]
    assert "set data.kind to chat" in data.unreadable[0].reason
    assert opened(path=tmp_path / "a.jsonl", held_out=0, limit=8, context=4).tokens == len(b"one\0two\nlines\0") - 1

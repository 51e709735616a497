"""Format detection: any input is read or refused with one clear message."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import zipfile
from pathlib import Path

import pytest

from surefoot.logs.formats import detect
from surefoot.logs.formats.log_source import LogSource, decode
from surefoot.logs.log_diagnosis import UnreadableInput

LINES = "".join(f'{{"step": {n}, "loss": {1.0 / (n + 1)}}}\n' for n in range(500))
TABLE = "step,loss\n" + "".join(f"{n},{1.0 / (n + 1)}\n" for n in range(500))
TEXT = "".join(f"step {n} | loss {1.0 / (n + 1):.4f}\n" for n in range(500))


def losses(path: Path) -> int:
    (table,) = detect.read_log(path)
    return len(table.columns["loss"])


@pytest.mark.parametrize(("content", "format"), [(LINES, "jsonl"), (TABLE, "csv"), (TEXT, "text")])
@pytest.mark.parametrize("name", ["log", "log.png", "log.csv", "log.json"])
def test_format_is_detected_by_content(tmp_path: Path, content: str, format: str, name: str) -> None:
    (tmp_path / name).write_text(content)
    (table,) = detect.read_log(tmp_path / name)
    assert table.format == format
    assert len(table.columns["loss"]) == 500


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("content", [LINES, TABLE, TEXT])
def test_compressed_logs(tmp_path: Path, content: str, pack) -> None:
    (tmp_path / "log").write_bytes(pack(content.encode()))
    assert losses(tmp_path / "log") == 500


@pytest.mark.parametrize("content", [LINES, TABLE, TEXT])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig", "utf-32"])
def test_utf16_and_utf32(tmp_path: Path, content: str, encoding: str) -> None:
    (tmp_path / "log").write_bytes(content.replace("\n", "\r\n").encode(encoding))
    assert losses(tmp_path / "log") == 500


def test_truncated_compressed_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n * 7919 % 99_991 / 7}\n" for n in range(60_000))
    (tmp_path / "log.gz").write_bytes(gzip.compress(("step,loss\n" + rows).encode())[:-20_000])
    (table,) = detect.read_log(tmp_path / "log.gz")
    assert 1000 < table.records < 60_000
    assert any("end" in note for note in table.notes)


@pytest.mark.parametrize("content", [LINES, TABLE, TEXT])
def test_pipe_is_read(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    (table,) = detect.read_log("-")
    assert len(table.columns["loss"]) == 500
    assert table.path == "-"


def archive(name: str) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as packed:
        packed.writestr(name, "step,loss\n1,2\n")
    return memory.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"\0" * 100, "NUL"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "image"),
        (b"\x7fELF" + bytes(100), "program"),
        (archive("log.csv"), "zip archive"),
        (archive("xl/workbook.xml"), "Excel"),
        (b"\x28\xb5\x2f\xfd" + bytes(50), "zstd"),
        (bytes(range(256)) * 20, "binary"),
        (b"SQLite format 3\0" + bytes(50), "database"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git lfs pull"),
        (b"GGUF\3\0\0\0", "GGUF model"),
        (gzip.compress(b"", mtime=0)[:12], "decompressed|empty"),
    ],
)
def test_other_file_types_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(UnreadableInput, match=words) as caught:
        detect.read_log(tmp_path / "log")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "head", [b"\x80\x02}q\0.", archive("archive/data.pkl"), b'\x40\0\0\0\0\0\0\0{"a": {"dtype": "F32"}}' + bytes(40)]
)
def test_checkpoints_are_recognised(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "model").write_bytes(head)
    assert detect.is_checkpoint(tmp_path / "model")
    assert detect.detect_format(head) == "checkpoint"


@pytest.mark.parametrize("content", [LINES, TABLE, TEXT])
def test_logs_are_not_taken_for_checkpoints(tmp_path: Path, content: str) -> None:
    (tmp_path / "log").write_text(content)
    assert not detect.is_checkpoint(tmp_path / "log")
    assert not detect.is_checkpoint(tmp_path)
    assert not detect.is_checkpoint("-")


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match="does not exist"):
        detect.read_log(tmp_path / "missing.csv")
    with pytest.raises(UnreadableInput, match="cannot be read"):
        detect.read_log("a\0b")
    with pytest.raises(UnreadableInput, match="neither a file nor a folder"):
        detect.read_log("/dev/null")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="file permissions do not apply to this user")
def test_file_without_read_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(TEXT)
    (tmp_path / "log").chmod(0)
    with pytest.raises(UnreadableInput, match="cannot be read"):
        detect.read_log(tmp_path / "log")


def test_blocks_end_at_line_ends(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes((b"x" * 700 + b"\n") * 300 + b"y" * 3_000_000 + b"\nend")
    with LogSource.open(tmp_path / "log") as source:
        blocks = list(source.blocks(100_000))
    assert b"".join(blocks) == (tmp_path / "log").read_bytes()
    assert all(block.endswith(b"\n") for block in blocks[:3])
    assert max(map(len, blocks)) < 1_300_000


def test_text_in_no_known_encoding_is_still_text() -> None:
    assert decode(b"caf\xe9 \0\0 5") == "café  5"
    assert decode("é中".encode()) == "é中"

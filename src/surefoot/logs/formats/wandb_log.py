"""Run files of Weights & Biases (`run-abc.wandb`, offline or not): history, settings and console output.

The file is a LevelDB log: blocks of 32 KiB that contain records or pieces of records, each with a checksum. All are
verified; after a damaged piece reading continues with the next block. A record is a protocol buffer with the field
numbers of wandb_internal.proto.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.logs.formats import protobuf
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.formats.protobuf import BYTES, VARINT, fields, text
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import MAX_TAIL_CHARS, LogTable, TableBuilder

FORMAT = "wandb"
IDENT = b":W&B"

_BLOCK = 1 << 15
_HEADER = 7
_PIECE = struct.Struct("<IHB").unpack_from
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_SEEDS = [zlib.crc32(bytes([kind])) for kind in range(5)]
_MAX_RECORD_BYTES = 1 << 26
_MAX_DEPTH = 4
_MAX_SETTINGS = 2000
_RUN_FILES = ("output.log", "wandb-summary.json", "wandb-metadata.json")
_FLAGS = {"true": 1.0, "false": 0.0}
_HISTORY, _SUMMARY, _OUTPUT, _CONFIG, _STATS, _RAW_OUTPUT, _RUN, _EXIT = 2, 3, 4, 5, 7, 13, 17, 18


def fits(head: bytes) -> bool:
    return head.startswith(IDENT)


def read(source: LogSource) -> LogTable:
    """Read `_step`, `_timestamp` and the logged names (nested ones joined by a dot), settings, console end."""
    reader = _WandbReader()
    for record in _records(source, reader.builder):
        try:
            reader.take(record)
        except protobuf.BadProtobuf:
            reader.builder.skip("records that are not valid messages")
    return reader.table(source.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbFolder:
    """The parts of a folder such as `wandb/offline-run-20240911_195503-nkpgd3me`."""

    record: Path | None = None
    """The run file, the best source; often empty, or missing in version control."""
    console: Path | None = None
    """What the run printed."""
    settings: Mapping[str, float | str] = field(default_factory=dict)
    """Settings of the run and the last values it logged (`summary.loss`)."""


def open_run_folder(path: str | os.PathLike[str]) -> WandbFolder | None:
    """The parts of a run folder, or None if `path` is not one."""
    folder = Path(path)
    files = folder / "files"
    record = next((file for file in sorted(folder.glob("*.wandb")) if file.stat().st_size > _HEADER), None)
    console = files / "output.log"
    if record is None and not (files.is_dir() and any((files / name).is_file() for name in _RUN_FILES)):
        return None
    facts: dict[str, float | str] = dict(_parse_config_yaml(files / "config.yaml"))
    facts.update(_flatten("summary", _parse_json(_read_small(files / "wandb-summary.json")), _MAX_DEPTH))
    return WandbFolder(record=record, console=console if console.is_file() else None, settings=facts)


def _read_small(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(1 << 20)
    except OSError:
        return b""


def _parse_config_yaml(file: Path) -> Iterator[tuple[str, float | str]]:
    """The plain settings in W&B's config.yaml: a name, and indented below it `value: ...`."""
    name = ""
    for line in _read_small(file).decode("utf-8", "replace").splitlines():
        if match := re.match(r"([^\s:#][^:]*):", line):
            name = match[1].strip("\"' ")
        elif name and (match := re.match(r"\s+value:\s*(\S.*)$", line)) and not name.startswith(("_wandb", "wandb_")):
            value = match[1].strip()
            yield name, _FLAGS[value] if value in _FLAGS else _number_or_text(value)


def _number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value.strip("\"'")[:1000]


class _WandbReader:
    def __init__(self) -> None:
        self.builder = TableBuilder()
        self._summary: dict[str, float] = {}
        self._console: list[str] = []
        self._printed = 0
        self._exit: int | None = None
        self._step = 0.0
        self._any_record = False

    def table(self, path: str) -> LogTable:
        builder = self.builder
        if not self._any_record:
            raise UnreadableInput(f"{path} is a W&B run file without a complete record. Try files/output.log beside it")
        if self._exit is None:
            builder.note(
                "the file has no exit record: the run was killed, or was still running when the file was copied"
            )
        else:
            builder.settings["exit_code"] = float(self._exit)
        if not builder.records and self._summary:
            builder.add(self._summary)
            builder.note("only the summary was logged")
        return builder.build(FORMAT, path, "".join(self._console))

    def take(self, data: bytes) -> None:
        self._any_record = True
        for number, kind, first, last in fields(data, 0, len(data)):
            if kind != BYTES:
                continue
            if number == _HISTORY:
                self._add_history(data, first, last)
            elif number in (_OUTPUT, _RAW_OUTPUT):
                self._add_output(data, first, last)
            elif number == _SUMMARY:
                self._add_summary(data, first, last)
            elif number == _CONFIG:
                self._add_config(data, first, last)
            elif number == _STATS:
                self._add_memory_stats(data, first, last)
            elif number == _RUN:
                self._parse_run(data, first, last)
            elif number == _EXIT:
                self._exit = 0
                for inner, inner_kind, value, _ in fields(data, first, last):
                    if inner == 1 and inner_kind == VARINT:
                        self._exit = protobuf.signed(value)

    def _add_history(self, data: bytes, start: int, end: int) -> None:
        record = self._numbers(data, start, end, 1)
        if "_step" not in record:
            for number, kind, first, last in fields(data, start, end):
                if number == 2 and kind == BYTES:
                    steps = [value for inner, _, value, _ in fields(data, first, last) if inner == 1]
                    record["_step"] = float(steps[0]) if steps else 0.0
        self._step = record.get("_step", self._step)
        self.builder.add(record)

    def _numbers(self, data: bytes, start: int, end: int, items: int) -> dict[str, float]:
        """The numbers among the items, without those that belong to images or histograms."""
        record: dict[str, float] = {}
        other: set[str] = set()
        for number, kind, first, last in fields(data, start, end):
            if number != items or kind != BYTES:
                continue
            name, raw = _parse_item(data, first, last)
            try:
                record[name] = float(raw)
            except ValueError:
                nested = {
                    key: value
                    for key, value in _flatten(name, _parse_json(raw), _MAX_DEPTH)
                    if isinstance(value, float)
                }
                record |= nested
                if not nested:
                    other.add(name.removesuffix("._type") if name.endswith("._type") else name)
        if other:
            media = tuple(name + "." for name in other)
            record = {name: value for name, value in record.items() if not name.startswith(media)}
            count = sum(not name.startswith(media) for name in other)
            self.builder.skip("logged values other than numbers (images, histograms, tables, text)", count)
        return record

    def _add_summary(self, data: bytes, start: int, end: int) -> None:
        skipped = self.builder.skipped.copy()
        self._summary.update(self._numbers(data, start, end, 1))
        self.builder.skipped = skipped  # the summary repeats the history: count nothing twice

    def _add_memory_stats(self, data: bytes, start: int, end: int) -> None:
        """Add memory use, at the last logged step."""
        record = {
            f"system.{name}": value for name, value in self._numbers(data, start, end, 3).items() if "memory" in name
        }
        if record:
            self.builder.add({"_step": self._step} | record)

    def _add_output(self, data: bytes, start: int, end: int) -> None:
        for number, kind, first, last in fields(data, start, end):
            if number == 3 and kind == BYTES:
                self._console.append(text(data, first, last))
                self._printed += last - first
        if self._printed > 8 * MAX_TAIL_CHARS:
            self._console = ["".join(self._console)[-MAX_TAIL_CHARS:]]
            self._printed = MAX_TAIL_CHARS

    def _parse_run(self, data: bytes, start: int, end: int) -> None:
        for number, kind, first, last in fields(data, start, end):
            if number == 4 and kind == BYTES:
                self._add_config(data, first, last)
            elif number == 5 and kind == BYTES:
                self._add_summary(data, first, last)
            elif number == 8 and kind == BYTES:
                self.builder.settings["display_name"] = text(data, first, last)
            elif number == 18 and kind == VARINT and first:
                self.builder.note("the run was resumed: its earlier part is in another file")

    def _add_config(self, data: bytes, start: int, end: int) -> None:
        for number, kind, first, last in fields(data, start, end):
            if number == 1 and kind == BYTES:
                name, raw = _parse_item(data, first, last)
                if not name.startswith("_wandb") and len(self.builder.settings) < _MAX_SETTINGS:
                    self.builder.settings.update(_flatten(name, _parse_json(raw), _MAX_DEPTH))


def _parse_item(data: bytes, start: int, end: int) -> tuple[str, bytes]:
    """Name and JSON of one logged value."""
    names: list[str] = []
    raw = b""
    for number, kind, first, last in fields(data, start, end):
        if kind == BYTES and number in (1, 2) and last > first:
            names.append(text(data, first, last))
        elif kind == BYTES and number == 16:
            raw = data[first:last]
    return ".".join(names).strip(), raw


def _parse_json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _flatten(name: str, value: Any, depth: int) -> Iterator[tuple[str, float | str]]:
    """The numbers and texts in a value, without media, lists and deeply nested parts."""
    if isinstance(value, bool | int | float):
        try:
            yield name, float(value)
        except OverflowError:
            yield name, math.copysign(math.inf, value)
    elif isinstance(value, str):
        special = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}
        yield name, special.get(value.strip().lower(), value[:1000])
    elif isinstance(value, dict) and depth and "_type" not in value:
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner, depth - 1)


def _records(source: LogSource, builder: TableBuilder) -> Iterator[bytes]:
    """Records, joined from their pieces."""
    pieces: list[bytes] = []
    for kind, data in _pieces(source, builder):
        if kind in (_WHOLE, _FIRST, 0) and pieces:
            builder.skip("records with a missing piece")
            pieces = []
        if kind == _WHOLE:
            yield data
        elif kind == _FIRST:
            pieces = [data]
        elif kind and pieces:
            pieces.append(data)
            if kind == _LAST:
                yield b"".join(pieces)
                pieces = []
            elif len(pieces) * _BLOCK > _MAX_RECORD_BYTES:
                builder.skip("records too large for numbers")
                pieces = []
    if pieces:
        builder.skip("records cut off at the end of the file")


def _pieces(source: LogSource, builder: TableBuilder) -> Iterator[tuple[int, bytes]]:
    """Kind and data of each valid piece; kind 0 for damage."""
    at = _HEADER
    for block, final in _blocks(source):
        while at + _HEADER <= len(block):
            checksum, size, kind = _PIECE(block, at)
            data = block[at + _HEADER : at + _HEADER + size]
            if kind in (_WHOLE, _FIRST, _MIDDLE, _LAST) and zlib.crc32(data, _SEEDS[kind]) == checksum:
                yield kind, data
                at += _HEADER + size
                continue
            if block[at:].strip(b"\0"):
                cut = final and at + _HEADER + size > len(block)
                builder.skip("records cut off at the end of the file" if cut else "damaged places in the file")
                yield 0, b""
            break
        at = 0


def _blocks(source: LogSource) -> Iterator[tuple[bytes, bool]]:
    """The file in blocks of 32 KiB, and whether a block is the last one."""
    rest = b""
    for chunk in source.chunks(_BLOCK * 32):
        rest += chunk
        while len(rest) > _BLOCK:
            yield rest[:_BLOCK], False
            rest = rest[_BLOCK:]
    yield rest, True

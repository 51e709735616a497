"""TensorBoard event files, as TensorFlow and PyTorch write them."""

from __future__ import annotations

import json
import os
import struct
from array import array

import numpy as np

from surefoot.logs.formats import protobuf, tfrecord
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.formats.protobuf import BYTES, FIXED32, FIXED64, VARINT, fields
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable, TableBuilder

FORMAT = "tensorboard"

_BATCH = 1 << 14
_MAX_LAYOUTS = 8
_DOUBLE, _FLOAT = struct.Struct("<d").unpack_from, struct.Struct("<f").unpack_from
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", 17: "<u2", 19: "<f2"}
_DTYPES |= {22: "<u4", 23: "<u8", 14: "<u2"}
_BFLOAT, _HALF, _UINT64 = 14, 19, 23
_HF_ARGUMENTS_TAG = "args/text_summary"
"""The tag under which the Hugging Face Trainer stores its settings as JSON."""


def fits(head: bytes) -> bool:
    """Whether the bytes contain a record whose length has a valid checksum: first, or later in a damaged file."""
    if b"brain.Event:" in head[:64] or tfrecord.is_record_at(head, 0):
        return True
    return b"\0\0\0\0" in head and tfrecord.next_record(head, 0) >= 0


def read(source: LogSource) -> LogTable:
    """Read one event file: `step`, `wall_time` and the tags, one record per event."""
    reader = EventReader()
    reader.read(source)
    return reader.table(source.path)


class EventReader:
    """Reads event files one after the other.

    Consecutive scalars differ only in time, step and value. The bytes around the value are remembered with the tag, so
    that most events need one dictionary lookup instead of parsing field by field.
    """

    def __init__(self) -> None:
        self.builder = TableBuilder()
        self.hyperparameters = False
        """Whether the file belongs to the hyperparameter dashboard, which repeats one number per metric."""
        self._known_layouts: dict[tuple[int, int], dict[bytes, str]] = {}
        """(Bytes from the value to the record's end, the value's width) -> bytes around the value -> tag."""
        self._steps, self._walls, self._values = array("d"), array("d"), array("d")
        self._tags: list[str] = []

    def table(self, path: str) -> LogTable:
        self._flush()
        return self.builder.build(FORMAT, path)

    def read(self, source: LogSource) -> None:
        records = tfrecord.TfRecordReader(self.builder)
        for data, starts, sizes in records.read(source):
            for start, size in zip(starts, sizes, strict=True):
                self._record(data, start, start + size)
        if not records.any_record:
            raise UnreadableInput(
                f"{source.path} starts like a TensorBoard event file, but contains no complete record."
                " It may have been cut off, or changed by a transfer in text mode"
            )

    def _record(self, data: bytes, start: int, end: int) -> None:
        step, body = _parse_prefix(data, start, end)
        if body:
            around = data[body:end]
            for (back, width), tags in self._known_layouts.items():
                tag = tags.get(around[:-back] + around[len(around) - back + width :])
                if tag is not None:
                    value = (_FLOAT if width == 4 else _DOUBLE)(data, end - back)[0]
                    self._add_scalar(step, _DOUBLE(data, start + 1)[0], tag, value)
                    return
        try:
            self._parse_event(data, start, end, body)
        except protobuf.BadProtobuf:
            self.builder.skip("records that are not events")

    def _add_scalar(self, step: float, wall: float, tag: str, value: float) -> None:
        self._steps.append(step)
        self._walls.append(wall)
        self._values.append(value)
        self._tags.append(tag)
        if len(self._tags) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        """Add the collected scalars; all tags share one array, and `present` masks the values of each."""
        if not self._tags:
            return
        numbers: dict[str, int] = {}
        ids = np.array([numbers.setdefault(tag, len(numbers)) for tag in self._tags])
        columns = {"step": np.array(self._steps), "wall_time": np.array(self._walls)}
        columns = dict.fromkeys(numbers, np.array(self._values)) | columns
        present = {tag: ids == number for tag, number in numbers.items() if tag not in ("step", "wall_time")}
        self.builder.extend(columns, present)
        self._steps, self._walls, self._values = array("d"), array("d"), array("d")
        self._tags = []

    def _parse_event(self, data: bytes, start: int, end: int, body: int) -> None:
        """Parse an event with an unknown layout."""
        step, wall = 0.0, None
        values: list[tuple[str, float, int, int]] = []
        for number, kind, first, last in fields(data, start, end):
            if number == 1 and kind == FIXED64:
                wall = _DOUBLE(data, first)[0]
            elif number == 2 and kind == VARINT:
                step = float(protobuf.signed(first))
            elif number == 5 and kind == BYTES:
                values += self._parse_summary(data, first, last)
        if len(values) == 1 and wall is not None:
            tag, value, place, width = values[0]
            if body and width:
                self._remember_layout((end - place, width), data[body:place] + data[place + width : end], tag)
            self._add_scalar(step, wall, tag, value)
        elif values:
            self._flush()
            known = {"step": step} if wall is None else {"step": step, "wall_time": wall}
            self.builder.add({tag: value for tag, value, _, _ in values} | known)

    def _remember_layout(self, shape: tuple[int, int], around: bytes, tag: str) -> None:
        if shape in self._known_layouts or len(self._known_layouts) < _MAX_LAYOUTS:
            tags = self._known_layouts.setdefault(shape, {})
            if len(tags) < _BATCH:
                tags[around] = tag

    def _parse_summary(self, data: bytes, start: int, end: int) -> list[tuple[str, float, int, int]]:
        """Tag and value of each scalar, and the offset and width of its bytes; width 0 if they cannot be located."""
        values: list[tuple[str, float, int, int]] = []
        for number, kind, first, last in fields(data, start, end):
            if number != 1 or kind != BYTES:
                continue
            tag, value, plugin = _parse_value(data, first, last)
            if value is None:
                self._skip_summary(tag, plugin, data, first, last)
            else:
                values.append((tag, *value))
        return values

    def _skip_summary(self, tag: str, plugin: str, data: bytes, start: int, end: int) -> None:
        if plugin == "hparams" or tag.startswith("_hparams_/"):
            self.hyperparameters = True
        elif tag == _HF_ARGUMENTS_TAG:
            self._parse_arguments(data[start:end])
        else:
            self.builder.skip("summaries other than scalars (images, histograms, text)")

    def _parse_arguments(self, data: bytes) -> None:
        try:
            settings = json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])
        except (ValueError, RecursionError):
            return
        if isinstance(settings, dict):
            for name, value in settings.items():
                if isinstance(value, str | float | int):
                    self.builder.settings[name] = value if isinstance(value, str) else float(value)


def _parse_prefix(data: bytes, start: int, end: int) -> tuple[float, int]:
    """The step, and the offset after time and step; offset 0 if the event does not start in the usual way."""
    if end - start < 16 or data[start] != 0x09:
        return 0.0, 0
    at = start + 9
    if data[at] == 0x2A:
        return 0.0, at
    if data[at] != 0x10:
        return 0.0, 0
    step = data[at + 1]
    at += 2
    if step >= 128:
        step &= 127
        shift = 7
        while at < end and shift < 63:
            byte = data[at]
            at += 1
            step |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
        else:
            return 0.0, 0
    return float(step), at


def _parse_value(data: bytes, start: int, end: int) -> tuple[str, tuple[float, int, int] | None, str]:
    """Tag, value with its offset and width, and the plugin that shows it."""
    tag = plugin = ""
    value = None
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == BYTES:
            tag = protobuf.text(data, first, last).strip()
        elif number == 2 and kind == FIXED32:
            value = _FLOAT(data, first)[0], first, 4
        elif number == 8 and kind == BYTES:
            value = _parse_tensor(data, first, last)
        elif number == 9 and kind == BYTES:
            plugin = _parse_plugin(data, first, last)
    return tag, None if plugin == "hparams" else value, plugin


def _parse_plugin(data: bytes, start: int, end: int) -> str:
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == BYTES:
            for inner, inner_kind, inner_first, inner_last in fields(data, first, last):
                if inner == 1 and inner_kind == BYTES:
                    return protobuf.text(data, inner_first, inner_last)
    return ""


def _parse_tensor(data: bytes, start: int, end: int) -> tuple[float, int, int] | None:
    """The value of a one-element tensor, its offset and width; None for any other tensor."""
    dtype = 1
    value: tuple[float, int, int] | None = None
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == VARINT:
            dtype = first
        elif number == 2 and kind == BYTES and _count_elements(data, first, last) != 1:
            return None
        elif number == 4 and kind == BYTES and last > first:
            value = _decode_content(data, first, last, dtype)
        elif number in (5, 6):
            value = _decode_content(data, first, last, 1 if number == 5 else 2)
        elif number in (7, 10, 11, 13, 16, 17):
            value = _decode_integer(data, kind, first, last, dtype)
    return value


def _count_elements(data: bytes, start: int, end: int) -> int:
    count = 1
    for number, kind, first, last in fields(data, start, end):
        if number == 2 and kind == BYTES:
            for inner, inner_kind, size, _ in fields(data, first, last):
                if inner == 1 and inner_kind == VARINT:
                    count *= size
    return count


def _decode_content(data: bytes, start: int, end: int, dtype: int) -> tuple[float, int, int] | None:
    kind = np.dtype(_DTYPES.get(dtype, "V16"))
    if end - start != kind.itemsize or kind.kind == "V":
        return None
    number = np.frombuffer(data, kind, 1, start)
    if dtype == _BFLOAT:
        number = (number.astype(np.uint32) << 16).view(np.float32)
    return float(number[0]), start, {1: 4, 2: 8}.get(dtype, 0)


def _decode_integer(data: bytes, kind: int, start: int, end: int, dtype: int) -> tuple[float, int, int] | None:
    """An integer of a tensor, packed or not; 16-bit floats are stored as the integers of their bits."""
    number, after = (start, end) if kind == VARINT else protobuf.varint(data, start, end)
    if after != end:
        return None
    if dtype in (_HALF, _BFLOAT):
        bits = struct.pack("<H", number & 0xFFFF)
        decoded = _decode_content(bits, 0, 2, dtype)
        return None if decoded is None else (decoded[0], 0, 0)
    return float(number if dtype == _UINT64 else protobuf.signed(number)), 0, 0


def read_folder(path: str | os.PathLike[str]) -> list[LogTable]:
    """The runs in a folder of event files; see `tensorboard_folder`."""
    from surefoot.logs.formats import tensorboard_folder

    return tensorboard_folder.read_event_folder(path)

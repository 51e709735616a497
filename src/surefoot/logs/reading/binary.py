"""Files that are no logs, told by how they begin."""

from __future__ import annotations

_EXPORT_AS_TEXT = "Save it as text (CSV or JSONL) and pass that"
_MAGICS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "the pointer of Git LFS, not the file itself", "Fetch it: git lfs pull"),
    (b"\x89PNG", "an image", "Pass the log that it was drawn from"),
    (b"\xff\xd8\xff", "an image", "Pass the log that it was drawn from"),
    (b"GIF8", "an image", "Pass the log that it was drawn from"),
    (b"RIFF", "a sound, film or image", "Pass the log of the run"),
    (b"%PDF", "a PDF document", "Pass the log of the run"),
    (b"\x7fELF", "a program", "Pass the log of the run"),
    (b"MZ\x90\0", "a program", "Pass the log of the run"),
    (b"\xcf\xfa\xed\xfe", "a program", "Pass the log of the run"),
    (b"\x89HDF", "an HDF5 file, as Keras writes them", "Save the weights as safetensors to have them looked at"),
    (b"\x93NUMPY", "a NumPy array", "Load it and pass the array to surefoot.diagnose"),
    (b"PAR1", "a Parquet file", _EXPORT_AS_TEXT),
    (b"ARROW1", "an Arrow file", _EXPORT_AS_TEXT),
    (b"SQLite format 3\0", "an SQLite database", "Export the metrics of the run as CSV and pass that"),
    (b"GGUF", "a GGUF model, whose weights are quantised", "Pass the checkpoint that it was made from"),
    (b"7z\xbc\xaf", "a 7z archive", "Unpack it and pass the log in it"),
    (b"Rar!", "a RAR archive", "Unpack it and pass the log in it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "Unpack it with `zstd -d` and pass the result, or pipe it in"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "Unpack it and pass the result, or pipe it in"),
    (b"PK\x03\x04", "a zip archive", "Unpack it and pass the log in it"),
    (b"PK\x05\x06", "an empty zip archive", "Pass the log of the run"),
)
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x08\x1b\x1e\x07") | {127})


def describe_known_binary(head: bytes) -> str:
    """What a file of a known kind that is no log is, and the way out; else nothing."""
    for magic, what, way_out in _MAGICS:
        if head.startswith(magic):
            if b"xl/workbook" in head or b"xl/worksheets" in head:
                return f"is an Excel workbook. {_EXPORT_AS_TEXT}"
            return f"is {what}. {way_out}"
    return "is a tar archive. Unpack it and pass the log in it" if head[257:262] == b"ustar" else ""


def why_not_a_log(head: bytes) -> str:
    """What a file is instead of a log, and the way out; empty where it may be one."""
    if told := describe_known_binary(head):
        return told
    text = head.replace(b"\0", b"")
    if not text.strip():
        return "holds nothing but NUL bytes: a crash took what was in it" if head.strip() else "is empty"
    return (
        "is a binary file of a kind unknown here. Pass a log as text, a checkpoint or a folder" if _is_binary(text) else ""
    )


def _is_binary(text: bytes) -> bool:
    """Whether bytes are hardly text: control characters all over, or neither UTF-8 nor any Latin alphabet."""
    controls = len(text) - len(text.translate(None, _CONTROL))
    if controls > 0.05 * len(text) + 2:
        return True
    high = sum(byte >= 128 for byte in text)
    if high <= 0.3 * len(text):
        return False
    return text.decode("utf-8", "replace").count("\ufffd") > 0.1 * len(text)

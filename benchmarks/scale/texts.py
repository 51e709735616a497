"""The texts that the decoder reads, as bytes on its device; every Python installation has them."""

from __future__ import annotations

import json
import sys
import unicodedata
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.data import split, standard_library

MAX_BYTES = 4 << 20
"""Bytes of a text that are used at most: more than a run reads."""


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on, and others to evaluate on."""

    train: Tensor
    held_out: Tensor

    def to(self, device: torch.device) -> Text:
        return Text(self.train.to(device), self.held_out.to(device))


@dataclass(frozen=True, slots=True)
class Texts:
    """What the runs read: Python source, and two other domains for healthy changes of the data."""

    source: Text
    prose: Text
    records: Text


def load_texts(device: torch.device) -> Texts:
    """The standard library's source, Python's manual in English, and Unicode's characters as JSON."""
    corpora = (standard_library(MAX_BYTES), _as_tokens(_manual()), _as_tokens(_unicode_records()))
    return Texts(*(Text(*split(corpus)).to(device) for corpus in corpora))


def _as_tokens(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()[:MAX_BYTES]), dtype=torch.uint8)


def _manual() -> str:
    """The chapters behind `help()`, in their alphabetical order."""
    from pydoc_data.topics import topics  # pyright: ignore[reportAttributeAccessIssue, reportMissingModuleSource]

    return "\n\n".join(topics[name] for name in sorted(topics))


def _unicode_records() -> str:
    """One JSON object per named character."""
    lines: list[str] = []
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        if name := unicodedata.name(character, ""):
            record = {
                "code": f"U+{code:04X}",
                "name": name,
                "category": unicodedata.category(character),
                "width": unicodedata.east_asian_width(character),
                "bidi": unicodedata.bidirectional(character),
            }
            lines.append(json.dumps(record))
        if len(lines) > MAX_BYTES // 80:
            break
    return "\n".join(lines)

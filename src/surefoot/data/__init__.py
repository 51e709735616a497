"""Data to train on, in plain torch: nothing here knows about surefoot."""

from __future__ import annotations

from surefoot.data.text import batches, split, standard_library

__all__ = ["batches", "split", "standard_library"]

"""Checkpoints on disk: whole or not there, verified before anything is read from them. Knows no tensors."""

from surefoot.state.store.failures import CheckpointWarning, NothingWhole, Problem, SaveFailed
from surefoot.state.store.files import Entry, Files, entry_of, settle
from surefoot.state.store.kept import Health, Kept
from surefoot.state.store.retention import Retention
from surefoot.state.store.store import Saved, Store
from surefoot.state.store.writing import Draft

__all__ = [
    "CheckpointWarning",
    "Draft",
    "Entry",
    "Files",
    "Health",
    "Kept",
    "NothingWhole",
    "Problem",
    "Retention",
    "SaveFailed",
    "Saved",
    "Store",
    "entry_of",
    "settle",
]

"""Checkpoints on disk: whole or not there, verified before anything is read from them. Knows no tensors."""

from surefoot.checkpoint.store.entry import Health, StoredCheckpoint
from surefoot.checkpoint.store.failures import CheckpointWarning, NothingWhole, Problem, SaveFailed
from surefoot.checkpoint.store.files import Entry, Files, entry_of, settle
from surefoot.checkpoint.store.retention import Retention
from surefoot.checkpoint.store.store import Saved, Store
from surefoot.checkpoint.store.write import Draft

__all__ = [
    "CheckpointWarning",
    "Draft",
    "Entry",
    "Files",
    "Health",
    "NothingWhole",
    "Problem",
    "Retention",
    "SaveFailed",
    "Saved",
    "Store",
    "StoredCheckpoint",
    "entry_of",
    "settle",
]

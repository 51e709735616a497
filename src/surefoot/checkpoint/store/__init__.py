"""Checkpoint folders on disk: complete or absent, and verified before anything is loaded. Does not import torch."""

from surefoot.checkpoint.store.failures import CheckpointWarning, NoUsableCheckpoint, Problem, SaveFailed
from surefoot.checkpoint.store.files import FileEntry, Files, flush_and_hash, hash_file
from surefoot.checkpoint.store.retention import Retention
from surefoot.checkpoint.store.store import CheckpointStore, CommitResult, Draft
from surefoot.checkpoint.store.stored_checkpoint import Health, StoredCheckpoint

__all__ = [
    "CheckpointStore",
    "CheckpointWarning",
    "CommitResult",
    "Draft",
    "FileEntry",
    "Files",
    "Health",
    "NoUsableCheckpoint",
    "Problem",
    "Retention",
    "SaveFailed",
    "StoredCheckpoint",
    "flush_and_hash",
    "hash_file",
]

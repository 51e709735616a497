"""Whether a checkpoint proved healthy: a small file beside the manifest, which itself is never rewritten."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import cast

from surefoot.checkpoint.store import folder_names, manifest
from surefoot.checkpoint.store.entry import Health, StoredCheckpoint
from surefoot.checkpoint.store.failures import Damage
from surefoot.checkpoint.store.files import Files

_DAMAGED = "its mark is damaged, and does not count"


def write(kept: StoredCheckpoint, health: Health, why: str, files: Files) -> None:
    """Put a mark, whole or not at all, in place of any there was."""
    content = {"surefoot": "health", "schema": manifest.SCHEMA, "health": health, "why": why[:2000], "of": kept.seal}
    draft = kept.folder / folder_names.owned("marking")
    try:
        files.write(draft, manifest.sealed(content))
        files.replace(draft, kept.folder / manifest.MARK)
    except OSError:
        with suppress(OSError):  # else the next clean-up takes it
            files.unlink(draft)
        raise
    files.flush_folder(kept.folder)


def marked(kept: StoredCheckpoint) -> StoredCheckpoint:
    """The checkpoint with its mark; one that is damaged, or belongs to another checkpoint, leaves it unproven."""
    if not (kept.folder / manifest.MARK).exists() or not kept.seal:
        return kept
    try:
        content, _ = manifest.unsealed(manifest.read_small(kept.folder, manifest.MARK), manifest.MARK)
    except Damage:
        return replace(kept, why=_DAMAGED)
    health, why = content.get("health"), content.get("why")
    if content.get("of") != kept.seal or health not in ("healthy", "suspect") or not isinstance(why, str):
        return replace(kept, why=_DAMAGED)
    return replace(kept, health=cast("Health", health), why=why)

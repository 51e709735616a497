"""Any damage to the files of a checkpoint is detected and named, and an older checkpoint is used."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint.store import CheckpointStore, CheckpointWarning, NoUsableCheckpoint
from surefoot.checkpoint.store.manifest import SCHEMA, Manifest, read_manifest, seal_json

from .conftest import Saver

NAMES = ("manifest.json", "weights.safetensors", "rank1/rest.json")


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def zero(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 16, 4096)))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def swap(path: Path, rng: random.Random) -> None:
    """Swap with the same file of the previous checkpoint or with another file of the same one."""
    folder = path.parent.parent if path.parent.name == "rank1" else path.parent
    same_checkpoint = [folder / name for name in NAMES if folder / name != path]
    other = rng.choice([*same_checkpoint, folder.with_name("step-00000010") / path.relative_to(folder)])
    content, other_content = path.read_bytes(), other.read_bytes()
    path.write_bytes(other_content)
    if other in same_checkpoint:
        other.write_bytes(content)


def lose(path: Path, rng: random.Random) -> None:
    path.unlink()


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(rng.choice((1, 10, 512))))


def folder_instead(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link_instead(path: Path, rng: random.Random) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe_instead(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [flip, flip, flip, truncate, zero, swap, lose, lengthen, folder_instead, link_instead, pipe_instead]


def test_random_damage_is_always_detected_and_the_previous_checkpoint_used(quick: Path, save: Saver) -> None:
    template = quick / "template"
    store = CheckpointStore(template)
    save(store, 10)
    newer = template / save(store, 20)
    for number in range(200):
        rng = random.Random(number)
        root = quick / str(number)
        shutil.copytree(template, root)
        name = rng.choice(NAMES)
        damage = rng.choice(DAMAGES)
        damage(root / newer.name / name, rng)
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            checkpoint = CheckpointStore(root).newest()
        assert checkpoint is not None, (damage, name)
        assert checkpoint.step == 10, (damage, name)
        assert [warning.category for warning in caught_warnings] == [CheckpointWarning], (damage, name)
        assert newer.name in checkpoint.skipped[0], (damage, name)
        assert damage is swap or name in checkpoint.skipped[0], (damage, name)
        shutil.rmtree(root)
    untouched = store.newest()  # the control
    assert untouched is not None
    assert untouched.step == 20


def test_no_intact_checkpoint_lists_the_problem_of_each(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / save(store, 1) / "weights.safetensors").unlink()
    (tmp_path / save(store, 2) / "manifest.json").write_text("{}")
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(NoUsableCheckpoint) as raised:
        store.newest()
    for message in (
        "step-00000001: weights.safetensors: missing",
        "step-00000002: manifest.json: its content does not match",
        "step-00000003: manifest.json: missing",
    ):
        assert message in str(raised.value)


def test_unreadable_store_is_not_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(NoUsableCheckpoint, match="cannot be read"):
        CheckpointStore(tmp_path / "checkpoints").newest()


def test_renamed_checkpoint_folder_is_detected(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000003")
    with pytest.warns(CheckpointWarning, match="it belongs to step 2, attempt 2, but lies in step-00000003"):
        checkpoint = store.newest()
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_extra_file_is_reported_and_kept(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / save(store, 1) / "notes.txt").write_text("mine")
    checkpoint = store.newest()
    assert checkpoint is not None
    assert checkpoint.extra == ("notes.txt",)
    assert not checkpoint.problems


ran: list[str] = []


class Planted:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return (ran.append, ("code from a file",))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Planted()),
        b'{"__reduce__": ["os.system", "touch planted"], "py/object": "os.system"}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"\xff\xfe\x00",
        b'{"schema": 1, "schema": ' + b"9" * 10_000 + b"}",
        b'{"schema": NaN}',
        b"null",
    ],
    ids=["pickle", "odd keys", "deep list", "deep table", "no text", "huge number", "nan", "null"],
)
def test_code_in_a_file_is_not_run_and_the_file_is_named(
    tmp_path: Path, save: Saver, name: str, content: bytes
) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / save(store, 1) / name).write_bytes(content)
    with pytest.raises(NoUsableCheckpoint, match=name):
        store.newest()
    assert not ran


def crafted(folder: Path, **changes: Any) -> None:
    """Write a manifest that was tampered with but has a valid seal."""
    data = json.loads((folder / "manifest.json").read_bytes())
    data.pop("hash")
    (folder / "manifest.json").write_bytes(seal_json(data | changes))


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "/etc/hostname", "a/../../secret", "", ".", "a//b", "C:\\secret", "..\\secret", "./a", "sub/"),
        *("a\0b", "a\nb", "x" * 5000, "con.", "manifest.json", "health.json"),
    ],
)
def test_manifest_with_a_path_outside_its_folder_is_refused(tmp_path: Path, save: Saver, name: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    (tmp_path / "secret").write_text("not yours")
    crafted(store.root / save(store, 1), files={name: {"size": 9, "xxh3_128": "0" * 32}})
    with pytest.raises(NoUsableCheckpoint, match=r"manifest\.json: it lists a file outside its folder"):
        store.newest()


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"step": "1"},
        {"attempt": None},
        {"attempt": 1 << 70},
        {"about": []},
        {"files": []},
        {"files": {"weights.safetensors": None}},
        {"files": {"weights.safetensors": {"size": -1, "xxh3_128": "0" * 32}}},
        {"files": {"weights.safetensors": {"size": 1, "xxh3_128": "not hex"}}},
        {"schema": 0},
        {"schema": "1"},
        {"schema": None},
    ],
    ids=str,
)
def test_manifest_with_wrong_types_is_refused(tmp_path: Path, save: Saver, changes: dict[str, Any]) -> None:
    store = CheckpointStore(tmp_path)
    crafted(tmp_path / save(store, 1), **changes)
    with pytest.raises(NoUsableCheckpoint, match=r"manifest\.json"):
        store.newest()


def test_symlinked_file_is_refused(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = store.root / save(store, 1)
    (folder / "rank1").rename(tmp_path / "rank1")
    (folder / "rank1").symlink_to(tmp_path / "rank1")
    with pytest.raises(NoUsableCheckpoint, match=r"rank1/rest\.json: is a link, or lies behind one"):
        store.newest()


def test_checkpoint_of_a_newer_surefoot_is_refused_and_never_removed(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    newer = tmp_path / save(store, 2)
    crafted(newer, schema=SCHEMA + 1)
    with pytest.warns(CheckpointWarning, match="written by a newer surefoot"):
        assert store.newest() is not None
    for step in range(3, 12):
        save(store, step)
    assert newer.exists()


def test_huge_manifest_is_not_read(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    with (tmp_path / save(store, 1) / "manifest.json").open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: it takes no disk space
    with pytest.raises(NoUsableCheckpoint, match="far more than a manifest needs"):
        store.newest()


def test_values_that_json_cannot_represent_are_described(tmp_path: Path, save: Saver) -> None:
    about = {"metrics": {"loss": float("nan")}, "where": tmp_path, 5: {1}, "big": 1 << 5000}
    manifest = Manifest(step=1, attempt=1, about=about, files={})
    (tmp_path / "manifest.json").write_bytes(manifest.as_bytes())
    manifest_read = read_manifest(tmp_path)
    assert manifest_read.about == {
        "metrics": {"loss": "nan"},
        "where": str(tmp_path),
        "5": [1],
        "big": "<int of 5001 bits>",
    }
    assert replace(manifest_read, about={}, seal="") == replace(manifest, about={})

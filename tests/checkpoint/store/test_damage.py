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


def flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])


def zero(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = dice.randrange(len(data))
    end = min(len(data), start + dice.choice((1, 16, 4096)))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def swap(path: Path, dice: random.Random) -> None:
    """With the same file of the checkpoint before it, or with another one of its own."""
    folder = path.parent.parent if path.parent.name == "rank1" else path.parent
    own = [folder / name for name in NAMES if folder / name != path]
    other = dice.choice([*own, folder.with_name("step-00000010") / path.relative_to(folder)])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    if other in own:
        other.write_bytes(mine)


def lose(path: Path, dice: random.Random) -> None:
    path.unlink()


def lengthen(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(dice.choice((1, 10, 512))))


def folder_instead(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link_instead(path: Path, dice: random.Random) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe_instead(path: Path, dice: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


KINDS = [flip, flip, flip, truncate, zero, swap, lose, lengthen, folder_instead, link_instead, pipe_instead]


def test_two_hundred_damages_are_all_noticed_and_the_checkpoint_before_is_taken(quick: Path, save: Saver) -> None:
    made = quick / "made"
    store = CheckpointStore(made)
    save(store, 10)
    newer = made / save(store, 20)
    for number in range(200):
        dice = random.Random(number)
        root = quick / str(number)
        shutil.copytree(made, root)
        name = dice.choice(NAMES)
        kind = dice.choice(KINDS)
        kind(root / newer.name / name, dice)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            kept = CheckpointStore(root).newest()
        assert kept is not None, (kind, name)
        assert kept.step == 10, (kind, name)
        assert [warning.category for warning in told] == [CheckpointWarning], (kind, name)
        assert newer.name in kept.skipped[0], (kind, name)
        assert kind is swap or name in kept.skipped[0], (kind, name)
        shutil.rmtree(root)
    untouched = store.newest()  # the control
    assert untouched is not None
    assert untouched.step == 20


def test_when_none_is_whole_it_says_what_is_wrong_with_each(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / save(store, 1) / "weights.safetensors").unlink()
    (tmp_path / save(store, 2) / "manifest.json").write_text("{}")
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(NoUsableCheckpoint) as raised:
        store.newest()
    for words in (
        "step-00000001: weights.safetensors: missing",
        "step-00000002: manifest.json: its content does not match",
        "step-00000003: manifest.json: missing",
    ):
        assert words in str(raised.value)


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(NoUsableCheckpoint, match="cannot be read"):
        CheckpointStore(tmp_path / "checkpoints").newest()


def test_two_folders_that_changed_their_names_are_noticed(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000003")
    with pytest.warns(CheckpointWarning, match="it belongs to step 2, attempt 2, but lies in step-00000003"):
        kept = store.newest()
    assert kept is not None
    assert kept.step == 1


def test_a_file_that_does_not_belong_there_is_told_and_left_alone(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / save(store, 1) / "notes.txt").write_text("mine")
    kept = store.newest()
    assert kept is not None
    assert kept.extra == ("notes.txt",)
    assert not kept.problems


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
def test_nothing_in_a_file_is_ever_run_and_the_error_names_it(
    tmp_path: Path, save: Saver, name: str, content: bytes
) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / save(store, 1) / name).write_bytes(content)
    with pytest.raises(NoUsableCheckpoint, match=name):
        store.newest()
    assert not ran


def crafted(folder: Path, **changes: Any) -> None:
    """A manifest that somebody made with care: its seal is right."""
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
def test_a_manifest_that_points_out_of_its_folder_is_refused(tmp_path: Path, save: Saver, name: str) -> None:
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
def test_a_manifest_with_the_wrong_kinds_of_values_is_refused(
    tmp_path: Path, save: Saver, changes: dict[str, Any]
) -> None:
    store = CheckpointStore(tmp_path)
    crafted(tmp_path / save(store, 1), **changes)
    with pytest.raises(NoUsableCheckpoint, match=r"manifest\.json"):
        store.newest()


def test_a_file_behind_a_link_is_refused(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = store.root / save(store, 1)
    (folder / "rank1").rename(tmp_path / "rank1")
    (folder / "rank1").symlink_to(tmp_path / "rank1")
    with pytest.raises(NoUsableCheckpoint, match=r"rank1/rest\.json: is a link, or lies behind one"):
        store.newest()


def test_a_manifest_of_a_newer_surefoot_is_refused_in_words_and_never_removed(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    newer = tmp_path / save(store, 2)
    crafted(newer, schema=SCHEMA + 1)
    with pytest.warns(CheckpointWarning, match="written by a newer surefoot"):
        assert store.newest() is not None
    for step in range(3, 12):
        save(store, step)
    assert newer.exists()


def test_a_manifest_beyond_all_measure_is_not_even_read(tmp_path: Path, save: Saver) -> None:
    store = CheckpointStore(tmp_path)
    with (tmp_path / save(store, 1) / "manifest.json").open("wb") as stream:
        stream.truncate(1 << 40)  # a hole: it takes no room
    with pytest.raises(NoUsableCheckpoint, match="far more than a manifest needs"):
        store.newest()


def test_what_json_cannot_hold_is_told_in_words(tmp_path: Path, save: Saver) -> None:
    about = {"metrics": {"loss": float("nan")}, "where": tmp_path, 5: {1}, "big": 1 << 5000}
    manifest = Manifest(step=1, attempt=1, about=about, files={})
    (tmp_path / "manifest.json").write_bytes(manifest.as_bytes())
    back = read_manifest(tmp_path)
    assert back.about == {"metrics": {"loss": "nan"}, "where": str(tmp_path), "5": [1], "big": "<int of 5001 bits>"}
    assert replace(back, about={}, seal="") == replace(manifest, about={})

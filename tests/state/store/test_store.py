from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.state.store import Store


def save(store: Store, step: int, attempt: int | None = None, text: str = "", **about: object) -> str:
    with store.writing(step, step if attempt is None else attempt) as draft:
        (draft.folder / "weights.safetensors").write_bytes(b"w%d" % step * 1000 + text.encode())
        (draft.folder / "rest.json").write_text(f'{{"step": {step}}}')
        return store.commit(draft, None, about).kept.name


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "run" / "checkpoints")
    assert store.newest() is None
    save(store, 5)
    save(store, 10, metrics={"loss": 0.5})
    kept = Store(store.root).newest()
    assert kept is not None
    assert (kept.name, kept.step, kept.kind, kept.health) == ("step-00000010", 10, "regular", "unproven")
    assert kept.about["metrics"] == {"loss": 0.5}
    assert sorted(kept.files) == ["rest.json", "weights.safetensors"]
    assert (kept.folder / "rest.json").read_text() == '{"step": 10}'


def test_a_damaged_one_is_named_and_the_one_before_it_taken(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 5)
    (tmp_path / save(store, 10) / "rest.json").write_text('{"step": 11}')
    with pytest.warns(match=r"step-00000010: rest.json: its content has changed"):
        kept = store.newest()
    assert kept is not None
    assert kept.step == 5

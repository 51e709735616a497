from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.train.recipe import Recipe, RecipeError, load
from surefoot.train.recipe.parse import parse_scalar

Write = Callable[..., str]
SMALL = "steps: 10\nmodel: mine:make\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def load_one(source: str, *overrides: str) -> Recipe:
    (recipe,) = load(source, overrides)
    return recipe


def error_of(source: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        load(source, overrides)
    return str(error.value)


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "+1e-4", "100.e-6"])
def test_numbers_in_every_notation(write: Write, text: str) -> None:
    recipe = load_one(write(f"{SMALL}optimizer:\n  lr: {text}\n"))
    assert recipe.optimizer.lr == pytest.approx(1e-4)


def test_yes_no_on_off_are_not_booleans(write: Write) -> None:
    text = f"{SMALL}protection: {{mode: off}}\nlog: {{wandb: off}}\noptimizer: {{scale_with_batch: no}}\n"
    recipe = load_one(write(text))
    assert (recipe.protection.mode, recipe.log.wandb, recipe.optimizer.scale_with_batch) == ("off", "off", "no")
    assert load_one(write(f"{SMALL}speed: {{compile: yes}}\n")).speed.compile is True


def test_leading_zeros_and_colons_do_not_change_values() -> None:
    assert (
        parse_scalar("0100"),
        parse_scalar("1_000"),
        parse_scalar("0x10"),
        parse_scalar("1:30"),
        parse_scalar("2026-01-01"),
    ) == (
        100,
        1000,
        16,
        "1:30",
        "2026-01-01",
    )


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_repr_of_a_number_round_trips(number: float) -> None:
    assert parse_scalar(repr(number)) == number


@given(st.text())
def test_any_text_parses_to_a_scalar(text: str) -> None:
    assert isinstance(parse_scalar(text), str | int | float | bool | None)


def test_json_recipe_is_read(write: Write) -> None:
    recipe = load_one(write(json.dumps({"steps": 10, "model": "mine:make", "optimizer": {"lr": 1e-4}}), "mine.json"))
    assert (recipe.optimizer.lr, recipe.name) == (1e-4, "mine")


def test_section_without_keys_has_its_defaults(write: Write) -> None:
    assert load_one(write(f"{SMALL}optimizer:\n  # lr: 1\n")).optimizer == Recipe(steps=1, model="a:b").optimizer  # pyright: ignore


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: 10\nmodel: [1, 2\n", ("line 3, column 1", "not YAML", "bracket")),
        ("steps: 10\n\tmodel: a:b\n", ("line 2, column 1", "tab", "spaces")),
        ("steps: 10\nseed: 1\nsteps: 20\n", ("line 3, column 1", "duplicate key steps, first set in line 1")),
        ("optimizer:\n  lr: 1\n  lr: 2\n", ("line 3", "duplicate key lr")),
        ("", ("is empty", "surefoot recipes lm-tiny --to")),
        ("# nothing\n", ("only comments",)),
        ("- steps: 1\n", ("holds a list", "steps: 1000")),
        ("just words\n", ("single value",)),
        ("a: 1\n---\nb: 2\n", ("line 2", "second document")),
        ("model: !!python/object/apply:os.system ['touch /tmp/owned']\n", ("line 1", "plain data")),
        ("model: !!python/name:os.system\n", ("line 1", "plain data")),
        ("when: !!timestamp 2026-01-01\n", ("line 1", "plain data")),
        (f"steps: {'1' * 5000}\n", ("line 1, column 8", "5000 digits")),
        ("1: 2\n", ("key 1 must be text",)),
        ("model: &a\n  factory: a:b\n  x: *a\n", ("nested too deep",)),
        ("a: " + "[" * 1500 + "]" * 1500 + "\n", ("nested too deep",)),
        (b"steps: 1\nname: \xff\xfe\n", ("line 2", "UTF-8")),
        (b"steps: 1\x00\n", ("not YAML",)),
        (b"x" * (2 << 20), ("larger than a recipe",)),
    ],
)
def test_unreadable_file_is_refused_with_its_line(write: Write, text: str | bytes, expected: tuple[str, ...]) -> None:
    message = error_of(write(text))
    assert "mine.yaml" in message
    for text_part in expected:
        assert text_part in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"steps": 10,\n "model" "a:b"}', ("line 2, column 10", "not JSON")),
        ('{"steps": 10, "steps": 20}', ("duplicate key steps",)),
        ('{"steps": NaN}', ("NaN is not a number",)),
        ("[]", ("holds a list",)),
        ("[" * 100_000, ("too deep",)),
    ],
)
def test_unreadable_json_is_refused(write: Write, text: str, expected: tuple[str, ...]) -> None:
    message = error_of(write(text, "mine.json"))
    for text_part in ("mine.json", *expected):
        assert message.count(text_part) == 1


def test_anchors_work_and_cannot_explode(write: Write) -> None:
    policy = "  policy:\n    <<: {max_consecutive_vetoes: 5}\n    warmup: 9\n"
    text = f"{SMALL}data: &d {{context: 64}}\nprotection:\n{policy}"
    assert load_one(write(text)).protection.policy == {"max_consecutive_vetoes": 5, "warmup": 9}
    bomb = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert "far too long" in error_of(write(bomb))


def test_source_is_a_shipped_name_or_a_path_with_suggestions(write: Write, tmp_path: Path) -> None:
    assert load_one("lm-tiny").name == "lm-tiny"
    assert "Did you mean lm-tiny?" in error_of("lm-tinny")
    write(SMALL)
    assert f"Did you mean {tmp_path / 'mine.yaml'}?" in error_of(str(tmp_path / "mien.yaml"))
    assert "there is no folder" in error_of(str(tmp_path / "no" / "mine.yaml")).lower()
    assert "is a folder" in error_of(str(tmp_path))
    assert "no file and no shipped recipe" in error_of("x" * 5000)
    assert "name the recipe first" in error_of("optimizer.lr=3")


def test_file_without_read_permission_is_refused(write: Write) -> None:
    path = Path(write(SMALL))
    path.chmod(0)
    try:
        if not _readable(path):
            assert "cannot be read: Permission denied" in error_of(str(path))
    finally:
        path.chmod(0o600)


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True

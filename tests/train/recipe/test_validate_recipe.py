from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.train.recipe import RecipeError, check_arguments, load, policy_of, remarks


def error_of(*overrides: str, source: str = "lm-tiny") -> str:
    with pytest.raises(RecipeError) as error:
        load(source, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("optimizer.lrr=1", "optimizer.lr"),
        ("optimiser.lr=1", "optimizer"),
        ("lr=1", "optimizer.lr"),
        ("learning_rate=1", "optimizer.lr"),
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("data.batch_size=1", "batch.size"),
        ("max_grad_norm=1", "protection.clip"),
        ("stesp=1", "steps"),
        ("checkpoint.every=1", "checkpoints"),
        ("precision.dtype=bfloat16", "precision.compute"),
        ("protection.policy.snapshot_evry=5", "snapshot_every"),
        ("protection.policy.thresholds.norm_jmp_ratio=5", "norm_jump_ratio"),
    ],
)
def test_unknown_key_gets_a_suggestion(override: str, suggestion: str) -> None:
    assert f"Did you mean {suggestion}?" in error_of(override)


def test_unknown_key_without_a_match_names_the_key_list() -> None:
    assert "surefoot recipes --keys" in error_of("xyzzy=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=fast", 'expected a number (above 0), got "fast"'),
        ("optimizer.lr=0", "expected a number (above 0), got 0"),
        ("optimizer.lr=.inf", "expected a number (above 0)"),
        ("optimizer.lr=.nan", "expected a number (above 0)"),
        ("optimizer.lr=true", "expected a number (above 0), got true"),
        ("steps=1.5", "expected a whole number (1 or more) or null, got 1.5"),
        ("data.held_out=1", "expected a number (0 or more, below 1), got 1"),
        ("schedule.name=cosin", "expected one of constant, linear, cosine"),
        ("speed.compile=maybe", 'expected true or false, got "maybe"'),
        ("protection.clip=hard", "expected a number, adaptive or null"),
        ("protection.clip=0", "expected a number above 0, adaptive, or null"),
        ("optimizer.betas=[0.9,0.95,1]", "expected a list of two numbers"),
        ("optimizer.betas=[0.9,1.5]", "expected two numbers from 0 to below 1"),
        ("protection.policy.max_consecutive_vetoes=0", "max_consecutive_vetoes must be at least 1"),
        ("protection.policy.max_consecutive_vetoes=few", "expected a valid integer"),
        ("protection.policy.save_every=5", "set checkpoints.every instead"),
        ("optimizer=fast", "expected keys and values"),
        ("model=decoder", "expected module:name"),
        ("model.factory=null", "expected module:name, such as surefoot.models:decoder, got nothing"),
        ("name=", "there is no value after the ="),
        ("name", "expected key=value"),
        ("optimizer.lr.x=1", "has no keys"),
        ("optimizer.lr=[1", "cannot be read"),
        ("optimizer.lr=[1, 2]]", "cannot be read"),
    ],
)
def test_invalid_value_is_reported_with_key_and_expectation(override: str, expected: str) -> None:
    message = error_of(override)
    assert override in message
    assert expected in message
    assert "\n" not in message


def test_all_problems_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: a:b\nsteps: ten\noptimizer:\n  lr: -1\n  beta: 3\nspeed:\n  compile: 7\n")
    first, *rest = error_of("seed=-1", source=str(path)).splitlines()
    assert first == f"{path} has 5 problems:"
    assert sorted(line.split(": ")[0].strip() for line in rest) == [
        "command line, seed=-1",
        "line 2",
        "line 4",
        "line 5",
        "line 7",
    ]
    assert "line 5: optimizer.beta: there is no such key. Did you mean optimizer.betas?" in "\n".join(rest)


def test_at_most_five_problems_are_listed() -> None:
    lines = error_of(*(f"wrong{n}=1" for n in range(30))).splitlines()
    assert len(lines) == 7
    assert lines[-1].strip() == "and 25 more"


def test_recipe_needs_either_steps_or_epochs(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: a:b\n")
    assert "set how long to train" in error_of(source=str(path))
    assert "keep one of the two" in error_of("steps=10", "epochs=1", source=str(path))
    path.write_text("seed: 1\n")
    assert "model: missing" in error_of(source=str(path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.context=512"], "samples have 512 tokens, but the model reads 256"),
        (["schedule.warmup=700"], "more than the run's 600 steps"),
        (["data.kind=text"], "data.path: missing"),
        (["data.path=a.txt"], "kind library reads no files"),
        (["data.kind=own"], "data.dataset: missing"),
        (["data.dataset=a:b"], "set data.kind to own"),
        (["optimizer.scale_with_batch=linear"], "base_batch"),
    ],
)
def test_incompatible_keys_are_refused(overrides: list[str], message: str) -> None:
    assert message in error_of(*overrides)


def test_questionable_settings_are_remarked() -> None:
    assert remarks(load("lm-tiny")[0]) == []
    (remark,) = remarks(load("lm-tiny", ["precision.compute=float16"])[0])
    assert "float16 on the CPU" in remark
    old = ["protection.policy.thresholds.raised=9", "protection.policy.tight_ceiling=2"]
    assert [
        remark.rpartition(" is not used: ")[0].rpartition(".")[2] for remark in remarks(load("lm-tiny", old)[0])
    ] == [
        "tight_ceiling",
        "level_sigmas",
    ]
    (remark,) = remarks(load("lm-tiny", ["data.held_out=0"])[0])
    assert "nothing is evaluated" in remark


def test_policy_of_combines_policy_and_checkpoint_settings() -> None:
    overrides = [
        "protection.policy.max_consecutive_vetoes=5",
        "protection.policy.thresholds.norm_jump_ratio=8",
        "protection.mode=observe",
    ]
    policy = policy_of(load("lm-tiny", overrides)[0])
    assert (policy.max_consecutive_vetoes, policy.thresholds.norm_jump_ratio, policy.observe, policy.save_every) == (
        5,
        8.0,
        True,
        200,
    )


def make(width: int, *, heads: int = 4, dropout: float = 0.0) -> None:
    pass


class Anything:
    def __init__(self, size: int, **more: object) -> None:
        pass


@pytest.mark.parametrize(("value", "updates"), [("null", None), ("20", 20)])
def test_snapshot_interval_is_a_number_or_chosen(value: str, updates: int | None) -> None:
    assert policy_of(load("lm-tiny")[0]).snapshot_every is None
    assert policy_of(load("lm-tiny", [f"protection.policy.snapshot_every={value}"])[0]).snapshot_every == updates


def test_factory_arguments_are_checked_against_the_signature() -> None:
    check_arguments("model", make, {"width": 3, "heads": 2})
    check_arguments("model", Anything, {"size": 3, "whatever": 2})
    check_arguments("model", print, {"end": ""})
    with pytest.raises(RecipeError, match=r"^model: there is no argument head \(did you mean heads\?\)\. make takes"):
        check_arguments("model", make, {"width": 3, "head": 2})
    with pytest.raises(RecipeError, match=r"model: width must be given\. make takes width, heads, dropout\."):
        check_arguments("model", make, {})

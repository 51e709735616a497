"""Plain data to a validated `Recipe`: all problems are collected before any is reported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from surefoot.alarms.alarm_target import AlarmError, alarm_targets
from surefoot.journal.policy_aliases import derived_figures, upgraded_policy
from surefoot.judge.policy import Policy, Thresholds
from surefoot.sinks.sink import SinkError
from surefoot.sinks.sink_choice import sink_choices
from surefoot.train.recipe.errors import (
    KeyPath,
    RecipeError,
    RecipeOrigin,
    RecipeProblem,
    format_value,
    nearest,
    raise_problems,
    similar_key,
)
from surefoot.train.recipe.keys import FACTORY, Key, keys, owner, sections
from surefoot.train.recipe.schema import DataSection, Recipe

_ALL_KEYS = "Every key: surefoot recipes --keys"
_POLICY = ("protection", "policy")
_POLICY_KEYS = {
    "observe": "protection.mode",
    "save_every": "checkpoints.every",
    "save_seconds": "checkpoints.seconds",
    "cautious_after_crash": "checkpoints.cautious_after_crash",
}
"""Fields of `Policy` that a recipe sets with a key of their own."""


def validate(plain: Mapping[str, Any], origin: RecipeOrigin) -> Recipe:
    """The recipe, or a RecipeError that lists all of its problems."""
    plain = {name: {} if value is None and name in sections() else value for name, value in plain.items()}
    problems = [*_unknown_keys(plain), *_bools_for_numbers(plain)]
    recipe = None
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        problems += _validation_problems(error, plain, {problem.path for problem in problems})
    if recipe and not problems:
        problems += _cross_problems(recipe)
    raise_problems(origin, problems)
    assert recipe is not None
    return recipe


def policy_of(recipe: Recipe) -> Policy:
    """The policy a recipe describes."""
    from_keys = {
        "observe": recipe.protection.mode == "observe",
        "save_every": recipe.checkpoints.every,
        "save_seconds": recipe.checkpoints.seconds,
        "cautious_after_crash": recipe.checkpoints.cautious_after_crash,
    }
    return TypeAdapter(Policy).validate_python(from_keys | upgraded_policy(recipe.protection.policy))


def remarks(recipe: Recipe) -> list[str]:
    """Settings that work but may not be intended."""
    return list(_remarks(recipe))


def check_arguments(section: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments a factory does not have, with the most similar one, and name required ones that are missing."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return  # some C functions have no signature
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if has_kwargs else [name for name in arguments if name not in named]
    missing = [name for name, p in named.items() if p.default is p.empty and name not in arguments]
    function_name = getattr(function, "__name__", type(function).__name__)
    problems = [f"there is no argument {name}{_did_you_mean(nearest(name, named))}" for name in unknown]
    if missing:
        problems.append(f"{', '.join(missing)} must be given")
    if problems:
        accepted = ", ".join(named) or "no arguments"
        raise RecipeError(f"{section}: {'; '.join(problems)}. {function_name} takes {accepted}.")


def _did_you_mean(near: str | None) -> str:
    return f" (did you mean {near}?)" if near else ""


# Single keys


def _unknown_keys(plain: Mapping[str, Any]) -> list[RecipeProblem]:
    paths: list[KeyPath] = []
    for name, value in plain.items():
        if name not in sections():
            paths.append((name,))
        elif isinstance(value, dict):
            paths += [(name, inner) for inner in value]
    known = [key.name for key in keys().values()]
    return [RecipeProblem(path, _no_such_key(path, known)) for path in paths if not owner(path)]


def _no_such_key(path: KeyPath, known: list[str]) -> str:
    near = similar_key(".".join(path), [*known, *sections()])
    return f"there is no such key. {f'Did you mean {near}?' if near else _ALL_KEYS}"


def _bools_for_numbers(plain: Mapping[str, Any]) -> list[RecipeProblem]:
    """`lr: true` would otherwise be read as 1."""
    problems = []
    for path, key in keys().items():
        value = _value_at(plain, path)
        if isinstance(value, bool) and not key.takes_bool:
            problems.append(_expected(key, value))
    return problems


def _validation_problems(
    error: ValidationError, plain: Mapping[str, Any], reported: set[KeyPath]
) -> list[RecipeProblem]:
    """One problem per key, in our words rather than pydantic's."""
    problems: dict[KeyPath, RecipeProblem] = {}
    for item in error.errors(include_url=False, include_context=False):
        path = tuple(str(part) for part in item["loc"])
        if item["type"] != "extra_forbidden":
            problem = _validation_problem(item["type"], item["msg"], path, plain)
            problems.setdefault(problem.path, problem)
    return [problem for path, problem in problems.items() if path not in reported]


def _validation_problem(kind: str, message: str, path: KeyPath, plain: Mapping[str, Any]) -> RecipeProblem:
    key = owner(path[:2]) or owner(path[:1])
    if kind == "value_error":  # raised by a validator of the section itself
        return RecipeProblem(key.path if key else path, message.removeprefix("Value error, "))
    if key is None:
        return RecipeProblem(path[:1], f"expected keys and values, got {format_value(_value_at(plain, path[:1]))}")
    if path[-1] == "factory":  # missing or malformed
        value = _value_at(plain, key.path)
        if isinstance(value, str):
            return RecipeProblem(key.path, f"expected {FACTORY}, got {format_value(value)}")
        value = value.get("factory")
        got = "nothing" if value is None else format_value(value)
        return RecipeProblem((*key.path, "factory"), f"expected {FACTORY}, got {got}")
    if kind == "missing":
        return RecipeProblem(key.path, f"missing; expected {key.kind}")
    return _expected(key, _value_at(plain, key.path))


def _expected(key: Key, value: Any) -> RecipeProblem:
    return RecipeProblem(key.path, f"expected {key.kind}, got {format_value(value)}")


def _value_at(plain: Any, path: KeyPath) -> Any:
    for name in path:
        plain = plain.get(name) if isinstance(plain, dict) else None
    return plain


# Keys that do not fit together


def _cross_problems(recipe: Recipe) -> list[RecipeProblem]:
    return [
        *_length_problems(recipe),
        *_data_problems(recipe.data),
        *_context_problems(recipe),
        *_optimizer_problems(recipe),
        *_protection_problems(recipe),
        *_alarm_problems(recipe),
    ]


def _length_problems(recipe: Recipe) -> Iterator[RecipeProblem]:
    if recipe.steps is None and recipe.epochs is None:
        yield RecipeProblem(("steps",), "missing; set how long to train, with `steps: 1000` or `epochs: 1`")
    if recipe.steps is not None and recipe.epochs is not None:
        yield RecipeProblem(("epochs",), "steps is given too; keep one of the two, or set the other to null")
    warmup = recipe.schedule.warmup
    if recipe.steps is not None and warmup >= 1 and warmup > recipe.steps:
        yield RecipeProblem(
            ("schedule", "warmup"),
            f"{warmup:g} updates of warmup are more than the run's {recipe.steps} steps; a value below 1, such as "
            "0.05, is a fraction of the run",
        )


def _data_problems(data: DataSection) -> Iterator[RecipeProblem]:
    """Data that is named but would not be read is never intended."""
    reads_files = data.kind in ("text", "tokens", "chat")
    if reads_files and not data.path:
        yield RecipeProblem(
            ("data", "path"), f"missing; kind {data.kind} reads files: name them, as `path: [corpus.txt]`"
        )
    if data.kind == "own" and data.dataset is None:
        yield RecipeProblem(("data", "dataset"), "missing; kind own needs module:name of what makes the dataset")
    for name in ("path", "held_out_path"):
        if getattr(data, name) and not reads_files:
            yield RecipeProblem(
                ("data", name), f"kind {data.kind} reads no files; set data.kind to text, tokens or chat"
            )
    for name in ("dataset", "held_out_dataset", "collate"):
        if getattr(data, name) is not None and data.kind != "own":
            yield RecipeProblem(("data", name), f"kind {data.kind} does not use it; set data.kind to own")


def _context_problems(recipe: Recipe) -> Iterator[RecipeProblem]:
    model_context = recipe.model.arguments.get("context")
    if isinstance(model_context, int) and recipe.data.kind != "own" and recipe.data.context > model_context:
        yield RecipeProblem(
            ("data", "context"),
            f"samples have {recipe.data.context} tokens, but the model reads {model_context}; raise model.context or "
            "lower this",
        )


def _optimizer_problems(recipe: Recipe) -> Iterator[RecipeProblem]:
    betas = recipe.optimizer.betas or ()
    if not all(0 <= beta < 1 for beta in betas):
        yield RecipeProblem(("optimizer", "betas"), f"expected two numbers from 0 to below 1, got {list(betas)}")


def _protection_problems(recipe: Recipe) -> Iterator[RecipeProblem]:
    clip = recipe.protection.clip
    if isinstance(clip, float) and clip <= 0:
        message = f"expected a number above 0, adaptive, or null for none, got {clip:g}"
        yield RecipeProblem(("protection", "clip"), message)
    policy = upgraded_policy(recipe.protection.policy)
    yield from [*_unknown_policy_fields(policy)] or [*_invalid_policy_values(recipe)]


def _alarm_problems(recipe: Recipe) -> Iterator[RecipeProblem]:
    try:
        alarm_targets(recipe.alarms)
    except AlarmError as error:
        yield RecipeProblem(("alarms",), str(error))
    try:
        sink_choices(recipe.log.sinks)
    except SinkError as error:
        yield RecipeProblem(("log", "sinks"), str(error))


def _unknown_policy_fields(policy: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    for name in policy:
        if name in _POLICY_KEYS:
            yield RecipeProblem((*_POLICY, name), f"set {_POLICY_KEYS[name]} instead")
        else:
            yield from _unknown_field((name,), Policy)
    if isinstance(thresholds := policy.get("thresholds"), dict):
        for name in thresholds:
            yield from _unknown_field(("thresholds", name), Thresholds)


def _unknown_field(path: KeyPath, cls: type[Policy | Thresholds]) -> Iterator[RecipeProblem]:
    known = [field.name for field in fields(cls) if field.name not in _POLICY_KEYS]
    if path[-1] not in known:
        near = nearest(path[-1], known)
        hint = f"Did you mean {near}?" if near else f"There are {', '.join(known)}."
        yield RecipeProblem((*_POLICY, *path), f"surefoot.{cls.__name__} has no such field. {hint}")


def _invalid_policy_values(recipe: Recipe) -> Iterator[RecipeProblem]:
    try:
        policy_of(recipe)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False):
            message = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1).rstrip(".")
            yield RecipeProblem((*_POLICY, *map(str, item["loc"])), message)


def _remarks(recipe: Recipe) -> Iterator[str]:
    data, schedule, mode = recipe.data, recipe.schedule, recipe.protection.mode
    for name, (_, _, why) in derived_figures(recipe.protection.policy).items():
        yield f"{'.'.join(_POLICY)}.{name} is not used: it {why}."
    if recipe.precision.compute == "float16" and recipe.device == "cpu":
        yield "float16 on the CPU is slow and overflows early; use precision.compute=bfloat16 or float32 there."
    if recipe.precision.compute == "tf32" and recipe.device == "cpu":
        yield "tf32 is a GPU format; on the CPU it is float32."
    has_eval_data = data.held_out or data.held_out_path or data.held_out_dataset
    if recipe.evaluation.every and not has_eval_data:
        yield "No data is held out (data.held_out=0), so nothing is evaluated."
    if recipe.steps and schedule.name == "step" and schedule.every >= recipe.steps:
        yield f"schedule.every={schedule.every:g} is past the end of the run: the lr never steps down."
    if schedule.start > recipe.optimizer.lr:
        yield f"The warmup starts at {schedule.start:g}, above the peak lr {recipe.optimizer.lr:g}: the lr falls."
    if mode == "off":
        yield "protection.mode is off: nothing watches, clips or saves this run."
        if recipe.alarms or recipe.log.sinks:
            yield "protection.mode is off: no alarms are sent, and log.sinks gets nothing."
    if mode == "observe":
        yield "protection.mode is observe: nothing is clipped or saved, so the same command starts from the beginning."

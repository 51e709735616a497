"""What the words in a record say of its numbers: that they are of training or of evaluation, or what they measure."""

from __future__ import annotations

import re

_SPLIT_FIELDS = frozenset(
    {"split", "phase", "mode", "type", "stage", "kind", "event", "set", "subset", "dataset", "partition", "_type"}
    | {"section", "category", "state", "job", "tag", "prefix", "step_type", "log_type", "data_split", "run_type"}
)
_METRIC_FIELDS = ("metric", "metric_name", "tag", "key", "name", "variable", "series", "scalar", "measure")
_VALUE_FIELDS = ("value", "scalar_value", "metric_value", "simple_value")
_TRAIN_LABELS = frozenset({"train", "training", "trn", "tr", "fit"})
_EVAL_LABELS = frozenset({"eval", "evaluation", "val", "valid", "validation", "dev", "test", "testing", "holdout", "vali"})
_NEUTRAL_LABELS = frozenset({"step", "iter", "iteration", "batch", "log", "metrics", "metric", "progress", "update", "scalar"})
_SETTINGS_LABELS = frozenset(
    {"config", "configuration", "meta", "metadata", "hparams", "args", "params", "header", "setup", "system", "env"}
    | {"summary", "final", "finish", "finished", "done", "result", "results", "start", "init", "end"}
)
_COUNTER_FIELDS = frozenset(
    {"step", "steps", "global_step", "epoch", "epochs", "iteration", "iterations", "iter", "iters", "it", "update"}
    | {
        "timestep",
        "timesteps",
        "_step",
        "time",
        "timestamp",
        "wall_time",
        "_timestamp",
        "_runtime",
        "walltime",
        "index",
    }
    | {"current_steps", "total_steps", "trainer/global_step", "batch", "batch_idx", "num_updates", "datetime", "date"}
)
_LABEL_SEPARATORS = re.compile(r"[^0-9a-z]+")
SETTINGS = "settings"
"""What `split_of` says of a record that holds settings or a summary: it is no point of the run."""


def is_split_field(name: str) -> bool:
    """Whether a field of this name can tell training from evaluation."""
    return name.strip().lower() in _SPLIT_FIELDS


def is_counter_field(name: str) -> bool:
    """Whether a field of this name counts, so that the records of all splits share it."""
    return name.strip().lower() in _COUNTER_FIELDS


def metric_fields(names: tuple[str, ...]) -> tuple[str, str] | None:
    """For records that hold one value each: the field with its name and the field with the value."""
    known = {name.strip().lower(): name for name in names}
    value = next((known[one] for one in _VALUE_FIELDS if one in known), None)
    told = next((known[one] for one in _METRIC_FIELDS if one in known), None)
    return (told, value) if told is not None and value is not None else None


def split_of(text: str) -> str | None:
    """The word to put before the names of a record, by what its label says; nothing where it says nothing."""
    word = text.strip().lower()
    parts = [part for part in _LABEL_SEPARATORS.split(word) if part]
    for part in parts[:4]:
        if part in _TRAIN_LABELS or part in _EVAL_LABELS:
            return part
    if "epoch" in parts:
        return "epoch"
    if word in _NEUTRAL_LABELS:
        return ""
    return SETTINGS if parts and parts[0] in _SETTINGS_LABELS else None


def with_split(split: str, name: str) -> str:
    """The name with its split before it; counters are shared, and a name that tells the split itself stays."""
    if not split or is_counter_field(name):
        return name
    if split in _TRAIN_LABELS or split in _EVAL_LABELS or split == "epoch":
        said = set(_LABEL_SEPARATORS.split(name.lower()))
        if split in said or said & (_EVAL_LABELS | _TRAIN_LABELS):
            return name
    return f"{split}/{name}"

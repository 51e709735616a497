"""Derives from a name what a column measures, and from labels whether a record belongs to training or evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class MetricRole(StrEnum):
    """What a column measures; the values are part of the JSON output."""

    STEP = "step"
    EPOCH_STEP = "inner"
    """A counter that restarts every epoch: a batch index, a share of the epoch."""
    EPOCH = "epoch"
    LOSS = "loss"
    GRAD_NORM = "norm"
    LR = "rate"
    LOSS_SCALE = "scale"
    SKIPPED = "skipped"
    """Updates skipped because of loss scale overflow."""
    PERPLEXITY = "perplexity"
    ERROR = "error"
    ACCURACY = "accuracy"
    REWARD = "reward"
    SPEED = "speed"
    """Steps, samples or tokens per second."""
    SECONDS = "seconds"
    """Seconds per step."""
    MEMORY = "memory"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class MetricName:
    """What a column name says."""

    role: MetricRole
    is_eval: bool = False
    """Measured on data that is not trained on."""
    term: str = ""
    """For one term of a loss: which term; empty for the total."""
    is_test: bool = False
    """Measured on test data, often only at the end."""


_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SEPARATORS = re.compile(r"[^0-9a-z%一-鿿]+")
_GLUED = re.compile(r"^(train|training|val|valid|eval|test|dev|lm|total|avg|mean|running|gen|disc)(loss|acc|accuracy)$")
_CHINESE = (("验证", " val "), ("测试", " test "), ("训练", " train "), ("损失", " loss "), ("学习率", " lr "),
            ("梯度范数", " grad norm "), ("准确率", " accuracy "), ("轮", " epoch "), ("步", " step "))  # fmt: skip

_EVAL = frozenset({"eval", "val", "valid", "validation", "dev", "evaluation", "holdout", "heldout", "test", "vali"})
_TEST = frozenset({"test"})
_TRAIN = frozenset({"train", "training", "trn"})
_COUNTS = frozenset({"step", "steps", "iteration", "iterations", "iter", "iters", "it", "update", "updates"})
_STEPS = frozenset({"timestep", "timesteps", "itr", "itrs"}) | _COUNTS
_EPOCH_STEPS = frozenset({"batch", "minibatch", "progress", "percent", "%", "batches"})
_EPOCHS = frozenset({"epoch", "epochs", "ep"})
_FILLER = frozenset(
    {"global", "num", "number", "n", "total", "current", "cur", "trainer", "optimizer", "the", "of", "idx", "index"}
    | {"counter", "count", "log", "charts", "metrics", "metric", "id", "no", "model"}
)
_TOTAL_WORDS = frozenset(
    {"total", "mean", "avg", "average", "running", "current", "cur", "overall", "sum", "all", "lm", "global"}
    | {"model", "final", "main", "on", "per", "step", "epoch", "batch", "iter", "iteration", "the", "of", "log", "set"}
    | {"metrics", "metric", "charts", "scalars", "losses", "smoothed", "smooth", "ema", "median", "s", "ce", "nll"}
    | {"cross", "entropy", "xent", "crossentropy", "interval", "combined", "token", "tokens", "logged", "reduced"}
    | {"phase", "history", "logs", "data", "b", "rank", "0", "1", "causal", "language", "modeling", "modelling", "raw"}
    | {"binary", "multi"}
)
_LOSSES = frozenset({"loss", "losses", "nll", "cost", "objective", "elbo", "xent", "criterion", "lossb", "logloss"})
_NOT_A_LOSS = frozenset(
    {"scale", "scaler", "scaling", "weight", "weights", "coef", "coeff", "lambda", "lr", "time", "std", "var", "min"}
    | {"max", "best", "delta", "diff", "change", "ratio", "threshold", "skip", "skipped", "count", "patience", "grad"}
    | {"improvement", "variance", "norm", "gradient", "function", "fn", "rate", "sec", "second", "reserved"}
)
_GRADIENTS = frozenset({"grad", "gradient", "grads", "gradients"})
_ERRORS = frozenset({"mse", "mae", "rmse", "error", "err", "wer", "cer", "mape", "residual"})
_LIGHTGBM_ERRORS = frozenset({"l1", "l2"})
"""Errors in LightGBM logs, if nothing else is in the name: elsewhere these are penalties."""
_ACCURACIES = frozenset({"acc", "accuracy", "top1", "top5", "f1", "map", "auc", "miou", "iou", "dice", "bleu", "map50"})
_REWARDS = frozenset({"reward", "rewards", "return", "returns", "rew", "score", "winrate"})
_PERPLEXITIES = frozenset({"perplexity", "ppl"})


@lru_cache(maxsize=4096)
def split_words(name: str) -> tuple[str, ...]:
    """Split a column name into lower-case words, without the run name in front.

    >>> split_words("proud-sun-7 - train/loss_epoch")
    ('train', 'loss', 'epoch')
    """
    name = name.strip().rsplit(" - ", 1)[-1]
    for theirs, ours in _CHINESE:
        name = name.replace(theirs, ours)
    spaced = _SEPARATORS.sub(" ", _CAMEL.sub(" ", name).lower()).split()
    words: list[str] = []
    for word in spaced:
        glued = _GLUED.match(word)
        words += [glued[1], glued[2]] if glued else [word]
    return tuple(words)


@lru_cache(maxsize=4096)
def parse_metric_name(name: str) -> MetricName:
    """Parse a column name.

    >>> parse_metric_name("val/loss").role, parse_metric_name("val/loss").is_eval
    (<MetricRole.LOSS: 'loss'>, True)
    """
    words = split_words(name)
    word_set = frozenset(words)
    held_out = bool(word_set & _EVAL) and not word_set & _TRAIN
    role, part = _role(words, word_set)
    return MetricName(role, held_out, part, bool(word_set & _TEST))


def _role(words: tuple[str, ...], word_set: frozenset[str]) -> tuple[MetricRole, str]:
    for find_role in (_counter_role, _optimizer_role):
        role = find_role(words, word_set)
        if role is not None:
            return role, ""
    if word_set & _LOSSES and not word_set & _NOT_A_LOSS:
        left = [word for word in words if word not in _LOSSES | _TOTAL_WORDS | _EVAL | _TRAIN]
        return MetricRole.LOSS, " ".join(left)
    if word_set & {"min", "max", "std"} and not word_set & _REWARDS:
        return MetricRole.OTHER, ""
    for role, known in (
        (MetricRole.PERPLEXITY, _PERPLEXITIES),
        (MetricRole.REWARD, _REWARDS),
        (MetricRole.ACCURACY, _ACCURACIES),
        (MetricRole.ERROR, _ERRORS),
    ):
        if word_set & known:
            return role, ""
    boosted = word_set & _LIGHTGBM_ERRORS and word_set <= _LIGHTGBM_ERRORS | _TRAIN | _EVAL | {"s", "0", "1"}
    return (MetricRole.ERROR if boosted else MetricRole.OTHER), ""


def _optimizer_role(words: tuple[str, ...], word_set: frozenset[str]) -> MetricRole | None:
    """Gradient norms, learning rates, loss scales, and resource use."""
    whole = "".join(words)
    if word_set & {"min", "max"} and whole.endswith(("min", "max")):
        return MetricRole.OTHER
    plain = word_set <= {"norm"} | _FILLER | _TRAIN  # an unspecified norm is nearly always that of the gradients
    if "gnorm" in word_set or ("norm" in word_set and (plain or word_set & _GRADIENTS)) or "gradnorm" in whole:
        return MetricRole.OTHER if len(word_set - _FILLER) > 4 else MetricRole.GRAD_NORM
    if word_set & {"skipped", "overflow", "overflows"}:
        return MetricRole.SKIPPED
    if "lossscale" in whole or "gradscale" in whole or "scalerscale" in whole or whole in ("scale", "ampscale"):
        return MetricRole.LOSS_SCALE
    if "lr" in word_set or "learningrate" in whole:
        return MetricRole.LR
    return _resource_role(words, word_set)


def _resource_role(words: tuple[str, ...], word_set: frozenset[str]) -> MetricRole | None:
    if word_set & {"memory", "mem", "vram", "rss"}:
        return MetricRole.MEMORY
    if word_set & {"wps", "tps", "fps", "ups", "throughput", "tflops", "speed"} or (
        word_set & {"per", "s"}
        and word_set & {"second", "sec", "s"}
        and word_set & {"samples", "tokens", "steps", "it", "tok"}
    ):
        return MetricRole.SPEED
    if word_set & {"time", "runtime", "elapsed", "eta", "duration", "ms", "seconds", "wall", "timestamp", "date"}:
        return MetricRole.SECONDS if word_set & {"step", "iteration", "iter", "batch", "per"} else MetricRole.OTHER
    return None


def _counter_role(words: tuple[str, ...], word_set: frozenset[str]) -> MetricRole | None:
    bare = word_set - _FILLER - _TRAIN - _EVAL
    if word_set & {"timesteps", "timestep"}:
        bare -= {"time"}
    if not bare:
        return None
    if bare <= _STEPS:
        return MetricRole.STEP
    if bare <= _EPOCHS:
        return MetricRole.EPOCH
    if bare <= _EPOCH_STEPS | _EPOCHS | _STEPS and bare & _EPOCH_STEPS:
        return MetricRole.EPOCH_STEP
    return None


_SPLIT_FIELDS = frozenset(
    {"split", "phase", "mode", "type", "stage", "kind", "event", "set", "subset", "dataset", "partition", "_type"}
    | {"section", "category", "state", "job", "tag", "prefix", "step_type", "log_type", "data_split", "run_type"}
)
_METRIC_FIELDS = ("metric", "metric_name", "tag", "key", "name", "variable", "series", "scalar", "measure")
_VALUE_FIELDS = ("value", "scalar_value", "metric_value", "simple_value")
_TRAIN_LABELS = frozenset({"train", "training", "trn", "tr", "fit"})
_EVAL_LABELS = frozenset(
    {"eval", "evaluation", "val", "valid", "validation", "dev", "test", "testing", "holdout", "vali"}
)
_NEUTRAL_LABELS = frozenset(
    {"step", "iter", "iteration", "batch", "log", "metrics", "metric", "progress", "update", "scalar"}
)
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
"""Returned by `split_of` for a record of settings or a summary, which is no point of the run."""


def is_split_field(name: str) -> bool:
    """Whether a field of this name can distinguish training from evaluation."""
    return name.strip().lower() in _SPLIT_FIELDS


def is_counter_field(name: str) -> bool:
    """Whether a field of this name is a counter, which the records of all splits share."""
    return name.strip().lower() in _COUNTER_FIELDS


def metric_fields(names: tuple[str, ...]) -> tuple[str, str] | None:
    """For records with one value each: the field with the metric's name and the field with its value."""
    known = {name.strip().lower(): name for name in names}
    value = next((known[field] for field in _VALUE_FIELDS if field in known), None)
    name_field = next((known[field] for field in _METRIC_FIELDS if field in known), None)
    return (name_field, value) if name_field is not None and value is not None else None


def split_of(text: str) -> str | None:
    """The prefix for the names of a record with this label; None if the label says nothing."""
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
    """The name with its split in front; counters and names that contain a split stay unchanged."""
    if not split or is_counter_field(name):
        return name
    if split in _TRAIN_LABELS or split in _EVAL_LABELS or split == "epoch":
        words = set(_LABEL_SEPARATORS.split(name.lower()))
        if split in words or words & (_EVAL_LABELS | _TRAIN_LABELS):
            return name
    return f"{split}/{name}"

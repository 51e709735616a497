"""What a column means, told from its name: people call the same thing by a hundred names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Role(StrEnum):
    """What a column holds."""

    STEP = "step"
    INNER = "inner"
    """A counter that begins anew every epoch: a batch, a share of the epoch done."""
    EPOCH = "epoch"
    LOSS = "loss"
    NORM = "norm"
    RATE = "rate"
    SCALE = "scale"
    SKIPPED = "skipped"
    """Updates left out because the loss scale was too high."""
    PERPLEXITY = "perplexity"
    ERROR = "error"
    ACCURACY = "accuracy"
    REWARD = "reward"
    SPEED = "speed"
    """Steps, samples or tokens a second."""
    SECONDS = "seconds"
    """Time for a step."""
    MEMORY = "memory"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name says."""

    role: Role
    held_out: bool = False
    """Measured on data that is not trained on."""
    part: str = ""
    """For a loss that is one term of several: which; empty for the whole."""
    test: bool = False
    """Held out for the very end, and often measured only there."""


_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_APART = re.compile(r"[^0-9a-z%一-鿿]+")
_GLUED = re.compile(r"^(train|training|val|valid|eval|test|dev|lm|total|avg|mean|running|gen|disc)(loss|acc|accuracy)$")
_CHINESE = (("验证", " val "), ("测试", " test "), ("训练", " train "), ("损失", " loss "), ("学习率", " lr "),
            ("梯度范数", " grad norm "), ("准确率", " accuracy "), ("轮", " epoch "), ("步", " step "))  # fmt: skip

_HELD_OUT = frozenset({"eval", "val", "valid", "validation", "dev", "evaluation", "holdout", "heldout", "test", "vali"})
_TEST = frozenset({"test"})
_TRAIN = frozenset({"train", "training", "trn"})
_COUNTS = frozenset({"step", "steps", "iteration", "iterations", "iter", "iters", "it", "update", "updates"})
_STEPS = frozenset({"timestep", "timesteps", "itr", "itrs"}) | _COUNTS
_INNER = frozenset({"batch", "minibatch", "progress", "percent", "%", "batches"})
_EPOCHS = frozenset({"epoch", "epochs", "ep"})
_FILLER = frozenset(
    {"global", "num", "number", "n", "total", "current", "cur", "trainer", "optimizer", "the", "of", "idx", "index"}
    | {"counter", "count", "log", "charts", "metrics", "metric", "id", "no", "model"}
)
_WHOLE = frozenset(
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
_BOOSTED = frozenset({"l1", "l2"})
"""Errors as LightGBM calls them, when nothing else is in the name: elsewhere these are penalties."""
_ACCURACIES = frozenset({"acc", "accuracy", "top1", "top5", "f1", "map", "auc", "miou", "iou", "dice", "bleu", "map50"})
_REWARDS = frozenset({"reward", "rewards", "return", "returns", "rew", "score", "winrate"})
_PERPLEXITIES = frozenset({"perplexity", "ppl"})


@lru_cache(maxsize=4096)
def words_of(name: str) -> tuple[str, ...]:
    """A column's name as plain words: `run 7 - valLoss__MIN` gives `val loss min`.

    >>> words_of("proud-sun-7 - train/loss_epoch")
    ('train', 'loss', 'epoch')
    """
    name = name.strip().rsplit(" - ", 1)[-1]
    for theirs, ours in _CHINESE:
        name = name.replace(theirs, ours)
    spaced = _APART.sub(" ", _CAMEL.sub(" ", name).lower()).split()
    found: list[str] = []
    for word in spaced:
        glued = _GLUED.match(word)
        found += [glued[1], glued[2]] if glued else [word]
    return tuple(found)


@lru_cache(maxsize=4096)
def meaning(name: str) -> Meaning:
    """What a column of this name holds.

    >>> meaning("val/loss").role, meaning("val/loss").held_out
    (<Role.LOSS: 'loss'>, True)
    """
    words = words_of(name)
    said = frozenset(words)
    held_out = bool(said & _HELD_OUT) and not said & _TRAIN
    role, part = _role(words, said)
    return Meaning(role, held_out, part, bool(said & _TEST))


def _role(words: tuple[str, ...], said: frozenset[str]) -> tuple[Role, str]:
    for told in (_counter, _machine):
        role = told(words, said)
        if role is not None:
            return role, ""
    if said & _LOSSES and not said & _NOT_A_LOSS:
        left = [word for word in words if word not in _LOSSES | _WHOLE | _HELD_OUT | _TRAIN]
        return Role.LOSS, " ".join(left)
    if said & {"min", "max", "std"} and not said & _REWARDS:
        return Role.OTHER, ""
    for role, known in (
        (Role.PERPLEXITY, _PERPLEXITIES),
        (Role.REWARD, _REWARDS),
        (Role.ACCURACY, _ACCURACIES),
        (Role.ERROR, _ERRORS),
    ):
        if said & known:
            return role, ""
    boosted = said & _BOOSTED and said <= _BOOSTED | _TRAIN | _HELD_OUT | {"s", "0", "1"}
    return (Role.ERROR if boosted else Role.OTHER), ""


def _machine(words: tuple[str, ...], said: frozenset[str]) -> Role | None:
    """Norms, rates, scales, and what the machine does."""
    whole = "".join(words)
    if said & {"min", "max"} and whole.endswith(("min", "max")):
        return Role.OTHER
    plain = said <= {"norm"} | _FILLER | _TRAIN  # of what, is not said: nearly always of the gradients
    if "gnorm" in said or ("norm" in said and (plain or said & _GRADIENTS)) or "gradnorm" in whole:
        return Role.OTHER if len(said - _FILLER) > 4 else Role.NORM
    if said & {"skipped", "overflow", "overflows"}:
        return Role.SKIPPED
    if "lossscale" in whole or "gradscale" in whole or "scalerscale" in whole or whole in ("scale", "ampscale"):
        return Role.SCALE
    if "lr" in said or "learningrate" in whole:
        return Role.RATE
    return _resource(words, said)


def _resource(words: tuple[str, ...], said: frozenset[str]) -> Role | None:
    if said & {"memory", "mem", "vram", "rss"}:
        return Role.MEMORY
    if said & {"wps", "tps", "fps", "ups", "throughput", "tflops", "speed"} or (
        said & {"per", "s"} and said & {"second", "sec", "s"} and said & {"samples", "tokens", "steps", "it", "tok"}
    ):
        return Role.SPEED
    if said & {"time", "runtime", "elapsed", "eta", "duration", "ms", "seconds", "wall", "timestamp", "date"}:
        return Role.SECONDS if said & {"step", "iteration", "iter", "batch", "per"} else Role.OTHER
    return None


def _counter(words: tuple[str, ...], said: frozenset[str]) -> Role | None:
    bare = said - _FILLER - _TRAIN - _HELD_OUT
    if said & {"timesteps", "timestep"}:
        bare -= {"time"}
    if not bare:
        return None
    if bare <= _STEPS:
        return Role.STEP
    if bare <= _EPOCHS:
        return Role.EPOCH
    if bare <= _INNER | _EPOCHS | _STEPS and bare & _INNER:
        return Role.INNER
    return None

"""Recipe errors: all problems of a recipe in one message, with line, expected value and the most likely key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_SHOWN = 5
"""Problems listed in one message."""
_MAX_LENGTH = 60
"""Characters of a wrong value that are shown."""

KeyPath = tuple[str, ...]
"""A key with the keys above it: ("optimizer", "lr")."""


class RecipeError(ValueError):
    """A recipe that cannot be run; the message says where, why and what to do."""


@dataclass(frozen=True, slots=True)
class RecipeProblem:
    """One problem, at one key."""

    path: KeyPath
    message: str


@dataclass(frozen=True, slots=True)
class RecipeOrigin:
    """Where the values of a recipe come from: lines of its file, and overrides."""

    source: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """Line numbers of the keys in the file."""
    overrides: dict[KeyPath, str] = field(default_factory=dict)
    """`key=value` arguments as typed, by the key they set."""

    def locate(self, path: KeyPath) -> str:
        """Where a key was set (override or line), and the key itself."""
        key = ".".join(path)
        if path[:1] == ("alarms",) and any(by[:1] == path[:1] for by in self.overrides):
            return "command line, alarms"  # as typed it may hold a token
        if override := self.overrides.get(path):
            return f"command line, {shortened(override)}"
        below = [override for by, override in self.overrides.items() if by[: len(path)] == path]
        if path not in self.lines and below:
            return f"command line, {shortened(below[0])}: {key}"
        for length in range(len(path), 0, -1):
            if override := self.overrides.get(path[:length]):
                return f"command line, {shortened(override)}: {key}"
            if line := self.lines.get(path[:length]):
                return f"line {line}: {key}"
        return key


def raise_problems(origin: RecipeOrigin, problems: Sequence[RecipeProblem]) -> None:
    """Raise one RecipeError that lists the problems, if there are any."""
    lines = [f"{origin.locate(problem.path)}: {problem.message}" for problem in problems[:MAX_SHOWN]]
    if len(problems) == 1:
        raise RecipeError(f"{origin.source}, {lines[0]}")
    if len(problems) > MAX_SHOWN:
        lines.append(f"and {len(problems) - MAX_SHOWN} more")
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise RecipeError(f"{origin.source} has {len(problems)} problems:\n{listed}")


def format_value(value: Any) -> str:
    """A value as it would be written in a recipe, shortened when it is long."""
    if isinstance(value, dict):
        return "keys and values" if value else "{}"
    try:
        return shortened(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def shortened(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else text[:_MAX_LENGTH] + "..."


_SYNONYMS = {
    "optimizer.lr": "learning_rate rate max_lr peak_lr base_lr",
    "optimizer.name": "optim opt optimiser",
    "optimizer.weight_decay": "wd decay",
    "batch.size": "batch_size per_device_train_batch_size train_batch_size micro_batch_size bs",
    "batch.accumulate": "gradient_accumulation_steps accumulation_steps accumulate_grad_batches grad_accum",
    "steps": "max_steps num_steps total_steps iterations max_iters train_steps updates",
    "epochs": "max_epochs num_train_epochs num_epochs",
    "schedule.name": "lr_scheduler lr_scheduler_type scheduler",
    "schedule.warmup": "warmup_steps warmup_ratio warmup_iters warmup",
    "schedule.min_lr_ratio": "min_lr floor",
    "data.context": "seq_len seq_length sequence_length block_size max_length max_seq_len max_seq_length",
    "data.path": "dataset_path data_path data_dir train_file files",
    "data.workers": "num_workers dataloader_num_workers",
    "data.packing": "pack packed",
    "protection.clip": "grad_clip max_grad_norm gradient_clip_val gradient_clipping clip_grad_norm",
    "protection.snapshot_memory": "ring",
    "precision.compute": "dtype bf16 fp16 amp mixed_precision torch_dtype",
    "speed.compile": "torch_compile",
    "speed.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "speed.attention": "attn_implementation attn",
    "parallel.strategy": "how fsdp ddp zero zero_stage sharding",
    "checkpoints.every": "save_steps save_every checkpoint_every save_interval",
    "evaluation.every": "eval_steps eval_every eval_interval",
    "evaluation.batches": "eval_iters eval_batches",
    "log.every": "logging_steps log_every log_interval",
    "run_dir": "output_dir out_dir save_dir checkpoint_dir logdir",
    "seed": "random_seed manual_seed",
    "model.factory": "model.name model.class model.type model._target_",
}
"""What other trainers call our keys."""
_BY_SYNONYM = {synonym: key for key, synonyms in _SYNONYMS.items() for synonym in synonyms.split()}


def similar_key(key: str, known: Iterable[str]) -> str | None:
    """The key of `known` most likely meant by `key`; both dotted.

    Tried in order: close spelling in the same section, another trainer's name, the same name in another section,
    distant spelling.
    """
    known = list(known)
    above, _, last = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == above}
    if near := difflib.get_close_matches(last, siblings, 1, 0.75):
        return siblings[near[0]]
    if (synonym := _BY_SYNONYM.get(key.lower()) or _BY_SYNONYM.get(last.lower())) in known:
        return synonym
    if same := [other for other in known if other.rpartition(".")[2] == last and other != key]:
        return same[0]
    if near := difflib.get_close_matches(last, siblings, 1, 0.55) or difflib.get_close_matches(key, known, 1, 0.75):
        return siblings.get(near[0], near[0])
    return None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similarly spelt of `known`, if any is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), 1, 0.5)), None)

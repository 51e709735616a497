"""Steps per epoch, total steps and effective batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.data.corpus import TrainingData, open_data
from surefoot.plan.page import PageSection, format_count
from surefoot.plan.plan_error import PlanError
from surefoot.plan.text_lengths import TextLengths
from surefoot.train.factories import call_factory
from surefoot.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the data; `about` if its length was estimated from a part of the texts."""

    samples: int
    tokens: float | None
    steps: int
    about: bool = False


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The length of a run; None where it is not known."""

    effective_batch: int
    """Samples per update, over all ranks."""
    tokens_per_update: int | None
    epoch: Epoch | None
    total: int
    total_how: str

    @property
    def tokens(self) -> float | None:
        """Tokens of the whole run."""
        return None if self.tokens_per_update is None else float(self.total) * self.tokens_per_update

    @property
    def samples(self) -> int:
        return self.total * self.effective_batch


def epoch_of(recipe: Recipe, ranks: int, data: TrainingData | None, lengths: TextLengths | None) -> Epoch | None:
    """From the opened data, as its loader counts, or from the measured tokens per byte of texts."""
    if data is not None:
        steps = math.ceil(len(data.train_loader) / recipe.batch.accumulate)
        return Epoch(data.samples, data.tokens, steps)
    if lengths is None:
        return None
    tokens = lengths.tokens_in_all * (1 - recipe.data.held_out * (not recipe.data.held_out_path))
    samples = max(1, int(tokens / recipe.data.context))
    steps = math.ceil(samples / (recipe.batch.size * recipe.batch.accumulate * ranks))
    return Epoch(samples, tokens, steps, about=True)


def count_steps(recipe: Recipe, ranks: int, epoch: Epoch | None, tokens: float | None) -> StepCounts:
    """From the length of an epoch, or from a number of tokens to train on."""
    samples_per_update = recipe.batch.size * recipe.batch.accumulate * ranks
    is_language = recipe.data.kind != "own"
    per_update = samples_per_update * recipe.data.context if is_language else None
    if tokens is not None and per_update is None:
        raise PlanError("--tokens: the data of this recipe is not tokens; set steps or epochs instead")
    if tokens is not None and per_update is not None:
        total, how = math.ceil(tokens / per_update), f"{format_count(tokens)} tokens / tokens per update"
    elif recipe.steps is not None:
        total, how = recipe.steps, "steps of the recipe"
    elif epoch is None:
        raise PlanError("steps: how long to train is not known; give --tokens, or set steps")
    else:
        epochs = recipe.epochs or 1
        total, how = max(1, round(epochs * epoch.steps)), f"{epochs:g} epochs x steps per epoch"
    return StepCounts(samples_per_update, per_update, epoch, total, how)


def open_recipe_data(recipe: Recipe, ranks: int) -> TrainingData:
    """The data as rank 0 of `ranks` will see it."""
    spec, custom = recipe.data, {}
    if spec.kind == "own" and spec.dataset is not None:
        custom["dataset"] = call_factory("data.dataset", spec.dataset)
    spec = spec.model_copy(update={"workers": 0})
    return open_data(spec, seed=recipe.seed, rank=0, world_size=ranks, batch_size=recipe.batch.size, **custom)


def steps_section(counts: StepCounts, recipe: Recipe, ranks: int) -> PageSection:
    """The counts as rows."""
    section = PageSection("steps", "Steps")
    batch, context = recipe.batch, recipe.data.context
    how = f"samples: batch.size {batch.size} x accumulate {batch.accumulate} x {ranks} GPU{'s' * (ranks > 1)}"
    samples, per_update = counts.effective_batch, counts.tokens_per_update
    section.add("effective_batch", "effective batch", samples, f"{samples:,}", how)
    if per_update is not None:
        how = f"effective batch x data.context {context:,}"
        section.add("tokens_per_update", "tokens per update", per_update, format_count(per_update), how)
    if (epoch := counts.epoch) is not None:
        tokens = f", {format_count(epoch.tokens)} tokens" if epoch.tokens else ""
        how = f"{epoch.samples:,} samples{tokens} / effective batch"
        how += ", estimated from a part of the texts" if epoch.about else ""
        section.add("steps_per_epoch", "steps per epoch", epoch.steps, f"{epoch.steps:,}", how)
    section.add("total_steps", "total steps", counts.total, f"{counts.total:,}", counts.total_how)
    if epoch is not None:
        epochs = counts.total / epoch.steps
        section.add("epochs", "epochs", epochs, f"{epochs:.3g}", "total steps / steps per epoch")
    if (total := counts.tokens) is not None:
        section.add("tokens", "tokens in total", total, format_count(total), "total steps x tokens per update")
    return section

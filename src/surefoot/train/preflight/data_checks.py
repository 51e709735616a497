"""Data checks, answered over the samples that the trial drew."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surefoot.train.preflight.data_stats import ColumnStats, DataStats
from surefoot.train.preflight.report import CheckItem, failed, first_few, ok, skipped, warning
from surefoot.train.preflight.trial import ShortRun

_LARGE = 1e4
"""Inputs beyond this are not normalised."""
_MANY, _TOO_MANY = 0.01, 0.5
"""Fractions of duplicate or empty samples that are worth a warning, and that fail."""
_FEW_SAMPLES = 20
_LOST_MARKS = ("lost", "left out", "no UTF-8")
_SHARED_MARK = "also trained on"
"""What notes of `surefoot.data` contain when texts are cut or dropped, and when they are in both splits."""


def items(trial: ShortRun) -> Iterator[CheckItem]:
    stats = trial.train_data
    if not stats.samples:
        yield skipped("data", "the batches hold no tensors to look at")
        return
    yield _ranges(trial, stats)
    yield _targets(stats)
    yield _duplicates(stats)
    yield _unreadable(trial)
    yield _held_out(trial)


def _ranges(trial: ShortRun, stats: DataStats) -> CheckItem:
    name, vocab = "data: ranges", trial.facts.vocab
    columns = stats.columns
    ranges = ", ".join(f"{key} {_format_range(column)}" for key, column in columns.items())
    message = f"{stats.samples} samples: {ranges}"
    nonfinite = [f"{key} in {column.nonfinite} samples" for key, column in columns.items() if column.nonfinite]
    if nonfinite:
        return failed(name, f"values that are not finite: {first_few(nonfinite)}", "Clean or drop these samples.")
    token_columns = [key for key in ("inputs", "targets") if key in columns and not columns[key].is_float]
    outside = [key for key in token_columns if vocab and (columns[key].high >= vocab or columns[key].low < 0)]
    if outside:
        fix = "Raise model.vocab so that all tokens fit, or look for wrong tokens in the data."
        return failed(name, f"{message}; the model's vocabulary is {vocab}, so {first_few(outside)} do not fit", fix)
    constant = [key for key, column in columns.items() if column.low == column.high and key != stats.target_column]
    if constant and stats.samples > 1:
        return warning(name, f"{message}; always the same value: {first_few(constant)}", "Check how the data is read.")
    large = [key for key, column in columns.items() if column.is_float and max(-column.low, column.high) > _LARGE]
    if large:
        return warning(name, f"{message}; very large: {first_few(large)}", "Scale inputs to a std of about 1.")
    return ok(name, message)


def _format_range(column: ColumnStats) -> str:
    if column.low > column.high:
        return "without a value that counts"
    form = ".3g" if column.is_float else ".0f"
    return f"{column.low:{form}} to {column.high:{form}}"


def _targets(stats: DataStats) -> CheckItem:
    name = "data: targets and lengths"
    if stats.lengths:
        return _lengths(name, np.array(stats.lengths))
    if not stats.labels:
        return skipped(name, "the batches have no integer targets")
    label, count = stats.labels.most_common(1)[0]
    share = count / stats.labels.total()
    message = f"{len(stats.labels)} labels in {stats.labels.total()} samples, the most common ({label}) in {share:.0%}"
    if len(stats.labels) == 1 and count >= _FEW_SAMPLES:
        return failed(name, f"all {count} samples have the label {label}", "Check how the labels are read.")
    if share > 0.95:
        return warning(name, message, "Weight the rare labels; else a constant prediction looks good.")
    return ok(name, message, labels=len(stats.labels))


def _lengths(name: str, lengths: np.ndarray) -> CheckItem:
    empty = int((lengths == 0).sum())
    values = {"shortest": int(lengths.min()), "median": float(np.median(lengths)), "longest": int(lengths.max())}
    message = f"{values['shortest']} to {values['longest']} targets per sample, median {values['median']:g}"
    if values["shortest"] == values["longest"]:
        message = f"{values['longest']} targets in every sample"
    values["empty"] = empty
    if not empty:
        return ok(name, message, **values)
    fix = "Samples whose targets are all -100 teach nothing: check the masks, data.context and the chat roles."
    make = failed if empty > _TOO_MANY * len(lengths) else warning
    return make(name, f"{empty} of {len(lengths)} samples have no target that counts; {message}", fix, **values)


def _duplicates(stats: DataStats) -> CheckItem:
    name = "data: duplicates"
    duplicates = stats.samples - len(stats.input_counts)
    share = duplicates / stats.samples
    # Only for labels: two windows of text may well begin alike and end differently.
    conflicts = sum(len(targets) > 1 for targets in stats.targets_by_input.values()) if stats.labels else 0
    values = {"duplicates": duplicates, "share": share, "contradictions": conflicts}
    message = f"{duplicates} of {stats.samples} samples are duplicates"
    if conflicts:
        fix = "One input with several targets cannot be learned: clean the labels."
        return warning(name, f"{conflicts} inputs occur with different targets; {message}", fix, **values)
    if share > _MANY:
        make = failed if share > _TOO_MANY else warning
        fix = "Remove duplicates: samples that are seen more often are memorised."
        return make(name, f"{message} ({share:.0%})", fix, **values)
    return ok(name, message, **values)


def _unreadable(trial: ShortRun) -> CheckItem:
    name, unreadable = "data: unreadable or cut", trial.facts.unreadable
    lost = [note for note in trial.facts.notes if any(mark in note for mark in _LOST_MARKS)]
    if unreadable:
        message = f"{len(unreadable)} samples cannot be read: {first_few(map(str, unreadable), 3)}"
        return warning(name, message, "Repair or remove them.")
    if lost:
        return warning(name, "; ".join(lost), "Raise data.context or repair the texts, unless this is intended.")
    return ok(name, "; ".join(["none", *trial.facts.notes]))


def _held_out(trial: ShortRun) -> CheckItem:
    name, eval_data = "data: held out", trial.eval_data
    if eval_data is None and trial.facts.eval_batches:
        return skipped(name, "the trial ended before its evaluation")
    if eval_data is None or not eval_data.samples:
        return warning(name, "no data is held out", "Set data.held_out; without it overfitting goes unnoticed.")
    notes = [note for note in trial.facts.notes if _SHARED_MARK in note]
    shared = sum(count for key, count in eval_data.input_counts.items() if key in trial.train_data.input_counts)
    if shared or notes:
        fix = "Samples in both splits make the eval loss meaningless: remove duplicates before splitting."
        message = notes[0] if notes else f"{shared} of {eval_data.samples} held-out samples are also trained on"
        return failed(name, message, fix, shared=shared)
    message = f"none of {eval_data.samples} held-out samples is among the {trial.train_data.samples} trained on"
    return ok(name, message, shared=0)

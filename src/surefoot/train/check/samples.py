"""Is the data what it should be: answered over the samples that the trial drew."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surefoot.train.check.item import Item, failed, ok, skipped, some, warning
from surefoot.train.check.seen import Column, Seen
from surefoot.train.check.trial import Trial

_LARGE = 1e4
"""Inputs beyond this are not scaled as networks like them."""
_MANY, _MOST = 0.01, 0.5
"""Shares of copies or empty samples that are worth a word, and that are too many."""
_FEW = 20
_LOST = ("lost", "left out", "no UTF-8")
_SHARED = "also trained on"
"""What the data says of itself when texts are not read in full, and when they are on both sides."""


def answers(trial: Trial) -> Iterator[Item]:
    seen = trial.seen
    if not seen.samples:
        yield skipped("data", "the batches hold no tensors that could be looked at")
        return
    yield _ranges(trial, seen)
    yield _targets(seen)
    yield _copies(seen)
    yield _readable(trial)
    yield _apart(trial)


def _ranges(trial: Trial, seen: Seen) -> Item:
    name, vocab = "data: ranges", trial.facts.vocab
    words = ", ".join(f"{key} {_range(column)}" for key, column in seen.columns.items())
    found = f"{seen.samples} samples: {words}"
    bad = [f"{key} in {column.nonfinite} samples" for key, column in seen.columns.items() if column.nonfinite]
    if bad:
        return failed(name, f"values that are not finite: {some(bad)}", "Clean these samples, or leave them out.")
    whole = [key for key in ("inputs", "targets") if key in seen.columns and not seen.columns[key].real]
    outside = [key for key in whole if vocab and (seen.columns[key].high >= vocab or seen.columns[key].low < 0)]
    if outside:
        way = "Give the model a vocabulary that holds them all (model.vocab), or look for wrong tokens in the data."
        return failed(name, f"{found}; the model's vocabulary is {vocab}, so {some(outside)} do not fit", way)
    same = [key for key, column in seen.columns.items() if column.low == column.high and key != seen.targets]
    if same and seen.samples > 1:
        return warning(name, f"{found}; always the same value: {some(same)}", "See whether the data is read rightly.")
    large = [key for key, column in seen.columns.items() if column.real and max(-column.low, column.high) > _LARGE]
    if large:
        return warning(name, f"{found}; very large: {some(large)}", "Scale inputs to a spread of about 1.")
    return ok(name, found)


def _range(column: Column) -> str:
    if column.low > column.high:
        return "with no value that counts"
    form = ".3g" if column.real else ".0f"
    return f"{column.low:{form}} to {column.high:{form}}"


def _targets(seen: Seen) -> Item:
    name = "data: targets and lengths"
    if seen.lengths:
        return _lengths(name, np.array(seen.lengths))
    if not seen.classes:
        return skipped(name, "the batches name no targets of whole numbers")
    label, many = seen.classes.most_common(1)[0]
    share = many / seen.classes.total()
    found = f"{len(seen.classes)} labels in {seen.classes.total()} samples, the most common ({label}) in {share:.0%}"
    if len(seen.classes) == 1 and many >= _FEW:
        return failed(name, f"all {many} samples have the label {label}", "See whether the labels are read rightly.")
    if share > 0.95:
        return warning(name, found, "Weigh the rare labels, or a model that always says the same looks good.")
    return ok(name, found, labels=len(seen.classes))


def _lengths(name: str, lengths: np.ndarray) -> Item:
    empty = int((lengths == 0).sum())
    figures = {"shortest": int(lengths.min()), "median": float(np.median(lengths)), "longest": int(lengths.max())}
    found = f"{figures['shortest']} to {figures['longest']} targets a sample, half have {figures['median']:g} or more"
    if figures["shortest"] == figures["longest"]:
        found = f"{figures['longest']} targets in every sample"
    figures["empty"] = empty
    if not empty:
        return ok(name, found, **figures)
    way = "Samples whose targets are all -100 teach nothing: check the masks, data.context and the roles of chats."
    make = failed if empty > _MOST * len(lengths) else warning
    return make(name, f"{empty} of {len(lengths)} samples have no target that counts; {found}", way, **figures)


def _copies(seen: Seen) -> Item:
    name = "data: duplicates"
    again = seen.samples - len(seen.contents)
    share = again / seen.samples
    # Of texts two windows may well begin alike and end differently; what has one label has one.
    unlike = sum(len(each) > 1 for each in seen.wholes.values()) if seen.classes else 0
    figures = {"duplicates": again, "share": share, "contradictions": unlike}
    if unlike:
        way = "The same input with other targets cannot be learnt: clean the labels."
        return warning(name, f"{unlike} inputs came with different targets; {again} samples are copies", way, **figures)
    if share > _MANY:
        make = failed if share > _MOST else warning
        way = "Remove copies: what is seen more often is learnt by heart."
        return make(name, f"{again} of {seen.samples} samples are copies of another ({share:.0%})", way, **figures)
    return ok(name, f"{again} of {seen.samples} samples are copies of another", **figures)


def _readable(trial: Trial) -> Item:
    name, bad = "data: unreadable or cut", trial.facts.unreadable
    lost = [note for note in trial.facts.notes if any(word in note for word in _LOST)]
    if bad:
        return warning(name, f"{len(bad)} cannot be read: {some(map(str, bad), 3)}", "Repair or remove them.")
    if lost:
        return warning(name, "; ".join(lost), "Raise data.context or repair the texts, unless it is meant so.")
    return ok(name, "; ".join(["nothing was", *trial.facts.notes]))


def _apart(trial: Trial) -> Item:
    name, held = "data: held out", trial.held_out
    if held is None and trial.facts.held_out_batches:
        return skipped(name, "the trial ended before it was looked at")
    if held is None or not held.samples:
        return warning(name, "no data is held out", "Set data.held_out, or overfitting will not be seen.")
    copied = [note for note in trial.facts.notes if _SHARED in note]
    both = sum(many for key, many in held.contents.items() if key in trial.seen.contents)
    if both or copied:
        way = "Samples must not be on both sides, or the held-out loss tells nothing: remove copies first."
        found = copied[0] if copied else f"{both} of {held.samples} held-out samples are also trained on"
        return failed(name, found, way, shared=both)
    return ok(name, f"none of {held.samples} held-out samples was among {trial.seen.samples} trained on", shared=0)

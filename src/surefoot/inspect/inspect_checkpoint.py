"""Diagnoses a checkpoint: measures every tensor once and runs every check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.inspect import checkpoint_folder, safetensors_file, torch_contents, torch_file
from surefoot.inspect.checkpoint_finding import CheckpointFinding, list_names, make_finding
from surefoot.inspect.contents import CheckpointContents, StoredTensor
from surefoot.inspect.optimizer_checks import (
    OPTIMIZER_CHECKS,
    ParamStateStats,
    name_param_states,
    note_step_counters,
)
from surefoot.inspect.tensor_stats import TensorRole, TensorStats, role_of, tensor_stats
from surefoot.inspect.weight_checks import WEIGHT_CHECKS, MeasuredWeight, norms_at_init
from surefoot.logs.log_diagnosis import LogDiagnosis, PathLike, RunHealth, UnreadableInput
from surefoot.records import Cause, Pattern

ProgressCounter = Callable[[int, int], None]
"""Called with the bytes done so far and the total."""


def is_checkpoint_file(head: bytes) -> bool:
    """Whether a file's first bytes are those of a safetensors file, a torch.save file or another pickle."""
    return safetensors_file.is_safetensors(head) or torch_file.is_torch_file(head)


def is_checkpoint_folder(path: PathLike) -> bool:
    """Whether a folder directly contains weights."""
    return checkpoint_folder.is_checkpoint(Path(path))


def folder_has_log(path: PathLike) -> bool:
    """Whether a folder also contains a log, which says more than the weights."""
    return checkpoint_folder.has_log(Path(path))


def find_weights(path: PathLike) -> Path | None:
    """The first weights file directly in a folder."""
    return checkpoint_folder.weights(Path(path))


def diagnose_checkpoint(path: PathLike, progress: ProgressCounter | None = None) -> LogDiagnosis:
    """Diagnose a checkpoint file or folder; raises `UnreadableInput` for what cannot or must not be loaded."""
    path = Path(path)
    try:
        contents = checkpoint_folder.read(path) if path.is_dir() else _read_file(path)
        return diagnose_contents(path, contents, progress)
    except OSError as error:
        raise UnreadableInput(f"{path} cannot be read: {error.strerror or error}") from None


def _read_file(path: Path) -> CheckpointContents:
    with path.open("rb") as stream:
        head = stream.read(1 << 16)
    if not head:
        raise UnreadableInput(f"{path} is empty: the save was interrupted. Use an earlier checkpoint")
    if safetensors_file.is_safetensors(head):
        return safetensors_file.read_safetensors(path)
    if not torch_file.is_torch_file(head):
        raise UnreadableInput(f"{path} is neither a safetensors file nor a torch.save file")
    loaded, notes = torch_file.load_tolerant(path)
    contents = torch_contents.find_contents(loaded)
    contents.notes += notes
    return contents


def diagnose_contents(path: Path, contents: CheckpointContents, progress: ProgressCounter | None) -> LogDiagnosis:
    """Measure every tensor once, run every check, and report failures before warnings."""
    measurer = _Measurer(contents, path, progress)
    weights = [MeasuredWeight(tensor, role_of(tensor), measurer.measure(tensor)) for tensor in contents.weights]
    state_stats: ParamStateStats = [
        (param, {name: measurer.measure(tensor) for name, tensor in param.tensors.items()})
        for param in contents.optimizer_state
    ]
    if not weights and not state_stats:
        return LogDiagnosis(
            verdict=RunHealth.UNKNOWN,
            sentence="The checkpoint contains no floating-point tensor, so there is nothing to check.",
            last_step=contents.step,
            source=_source(path, contents, weights),
            notes=tuple(contents.notes),
        )
    name_param_states(contents)
    note_step_counters(contents)
    if contents.step is None and contents.epoch is not None:
        contents.step = contents.epoch
        contents.notes.append(f"the checkpoint stores no step; {contents.epoch} is its epoch")
    findings = [_file_damage(path, contents, measurer)]
    findings += [check(weights) for check in WEIGHT_CHECKS]
    findings.append(norms_at_init(weights, contents.counters))
    findings += [check(contents, state_stats) for check in OPTIMIZER_CHECKS]
    findings.append(_stored_nan_loss(contents))
    troubles = sorted(filter(None, findings), key=lambda finding: finding.verdict is not RunHealth.FAILED)
    notes = [*contents.notes, *_remarks(weights)]
    if troubles:
        notes = [f"also: {finding.sentence}" for finding in troubles[1:]] + notes
    return LogDiagnosis(
        verdict=troubles[0].verdict if troubles else RunHealth.HEALTHY,
        pattern=troubles[0].pattern if troubles else Pattern.NONE,
        sentence=troubles[0].sentence if troubles else _healthy_sentence(weights, state_stats),
        last_step=contents.step,
        causes=tuple(finding.cause for finding in troubles),
        source=_source(path, contents, weights),
        notes=tuple(dict.fromkeys(notes)),
    )


class _Measurer:
    """Measures tensors and reports the bytes done so far."""

    def __init__(self, contents: CheckpointContents, path: Path, progress: ProgressCounter | None) -> None:
        archive_bytes = path.stat().st_size if contents.format == "torch" and path.is_file() else 0
        tensor_bytes = sum(tensor.nbytes for tensor in contents.weights)
        tensor_bytes += sum(tensor.nbytes for param in contents.optimizer_state for tensor in param.tensors.values())
        self._total = tensor_bytes + archive_bytes
        self._done = 0
        self._progress = progress

    def add_bytes(self, size: int) -> None:
        self._done = min(self._done + size, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def measure(self, tensor: StoredTensor) -> TensorStats:
        stats = tensor_stats(tensor)
        self.add_bytes(tensor.nbytes)
        return stats


def _file_damage(path: Path, contents: CheckpointContents, measurer: _Measurer) -> CheckpointFinding | None:
    """Missing files and wrong checksums; a flipped bit shows in nothing else."""
    damage = list(contents.damage)
    if contents.format == "torch":
        wrong, total = torch_file.verify_checksums(path, measurer.add_bytes)
        if 0 < wrong < total:
            damage.append(
                f"{wrong:,} of {total:,} parts of the file do not match their checksum: bits changed since the save"
            )
        elif wrong:
            contents.notes.append("the file was saved without checksums, so changed bits cannot be detected")
    if not damage:
        return None
    return make_finding(
        RunHealth.FAILED,
        f"The checkpoint is damaged: {damage[0]}.",
        Cause.WEIGHTS_DAMAGED,
        confidence=0.95,
        evidence=damage,
        advice=["Copy or download it again, and compare.", "If this is the original, use an earlier checkpoint."],
    )


def _stored_nan_loss(contents: CheckpointContents) -> CheckpointFinding | None:
    names = [name for name, value in contents.losses.items() if math.isnan(value)]
    if not names:
        return None
    return make_finding(
        RunHealth.WARNING,
        f"The checkpoint stores {names[0]} = NaN: the loss was NaN when it was saved.",
        Cause.UNKNOWN,
        confidence=0.6,
        advice=["Use an earlier checkpoint, and diagnose the log of the run: surefoot diagnose LOG."],
        pattern=Pattern.NONFINITE,
    )


def _healthy_sentence(weights: list[MeasuredWeight], state_stats: ParamStateStats) -> str:
    numbers = sum(weight.stats.count for weight in weights)
    numbers += sum(stats.count for _, by_name in state_stats for stats in by_name.values())
    tensors = len(weights) + sum(len(by_name) for _, by_name in state_stats)
    optimizer = ", optimizer state included" if weights and state_stats else ""
    return f"All {tensors:,} tensors ({numbers:,} numbers{optimizer}) are finite and of plausible size."


def _remarks(weights: list[MeasuredWeight]) -> list[str]:
    """Facts worth knowing that are no trouble."""
    remarks = [_summary(weights)] if weights else []
    dtypes = Counter(weight.tensor.dtype for weight in weights if weight.role is not TensorRole.BUFFER)
    if len(dtypes) > 1:
        remarks.append("dtypes: " + ", ".join(f"{count} tensors {name}" for name, count in dtypes.most_common()))
    embeddings = [weight for weight in weights if weight.role is TensorRole.EMBEDDING and weight.stats.zero_rows]
    remarks += [
        f"{weight.name}: {weight.stats.zero_rows:,} of {weight.stats.rows:,} rows are zero (padding, unused entries)"
        for weight in embeddings[:3]
    ]
    masks = [weight.name for weight in weights if weight.stats.is_mask]
    if masks:
        remarks.append(f"masks, where -Inf is intended: {list_names(masks)}")
    return remarks


def _trained(weights: list[MeasuredWeight]) -> list[MeasuredWeight]:
    untrained = (TensorRole.BUFFER, TensorRole.RUNNING_STAT)
    return [weight for weight in weights if weight.role not in untrained and not weight.stats.is_mask]


def _summary(weights: list[MeasuredWeight]) -> str:
    trained = _trained(weights)
    largest = max(trained or weights, key=lambda weight: weight.stats.norm)
    size = sum(weight.tensor.nbytes for weight in weights)
    params = sum(weight.tensor.numel for weight in trained)
    return (
        f"{len(weights):,} tensors, {params:,} parameters, {size / 1e6:,.1f} MB;"
        f" the largest norm is {largest.stats.norm:.4g} in {largest.name}"
    )


def _source(path: Path, contents: CheckpointContents, weights: list[MeasuredWeight]) -> dict[str, Any]:
    trained = _trained(weights)
    largest = max(trained, key=lambda weight: weight.stats.norm, default=None)
    return {
        "path": str(path),
        "format": contents.format,
        "points": len(weights),
        "columns": {},
        "skipped": dict(contents.skipped),
        "tensors": len(weights),
        "parameters": sum(weight.tensor.numel for weight in trained),
        "bytes": sum(weight.tensor.nbytes for weight in weights),
        "largest_norm": None if largest is None else {"tensor": largest.name, "norm": largest.stats.norm},
    }

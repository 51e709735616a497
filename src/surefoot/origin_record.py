"""Where a non-finite value came from, in numbers and words: what `surefoot.locate` returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from surefoot.records import Cause


class OriginKind(StrEnum):
    """What an operation did to make a non-finite value."""

    NONE = "none"
    """Loss and gradients are finite."""
    BATCH = "batch"
    WEIGHTS = "weights"
    BUFFER = "buffer"
    SOFTMAX_MASKED = "softmax_masked"
    ATTENTION_ZERO = "attention_zero"
    LOG_OF_ZERO = "log_of_zero"
    LOG_OF_NEGATIVE = "log_of_negative"
    DIVISION_BY_ZERO = "division_by_zero"
    ZERO_VARIANCE = "zero_variance"
    SQRT_AT_ZERO = "sqrt_at_zero"
    SQRT_OF_NEGATIVE = "sqrt_of_negative"
    NORM_AT_ZERO = "norm_at_zero"
    EXP_OVERFLOW = "exp_overflow"
    SQUARE_OVERFLOW = "square_overflow"
    FLOAT16_OVERFLOW = "float16_overflow"
    OVERFLOW = "overflow"
    EMPTY_MEAN = "empty_mean"
    INFINITE_SLOPE = "infinite_slope"
    TENSOR = "tensor"
    """A tensor from outside the step was non-finite, which is neither of the batch nor of the model."""
    CONSTANT = "constant"
    LARGE_SAMPLE = "large_sample"
    """Everything is finite; a few samples make the gradients far larger than the others do."""
    INVALID = "invalid"
    """NaN came out, in a way that has no name of its own."""


SENTENCES: dict[OriginKind, tuple[Cause, str]] = {
    OriginKind.NONE: (Cause.UNKNOWN, "loss and gradients are finite"),
    OriginKind.BATCH: (Cause.BAD_BATCH, "the batch itself contains non-finite values"),
    OriginKind.WEIGHTS: (Cause.WEIGHTS_DAMAGED, "the weights themselves are not finite"),
    OriginKind.BUFFER: (Cause.WEIGHTS_DAMAGED, "a buffer of the model is not finite"),
    OriginKind.SOFTMAX_MASKED: (Cause.ATTENTION_MASK, "softmax over a row that is -inf throughout: all is masked"),
    OriginKind.ATTENTION_ZERO: (Cause.ATTENTION_MASK, "a row of attention weights is 0 throughout: 0/0"),
    OriginKind.LOG_OF_ZERO: (Cause.LOG_OF_ZERO, "log of 0"),
    OriginKind.LOG_OF_NEGATIVE: (Cause.LOG_OF_ZERO, "log of a negative value"),
    OriginKind.DIVISION_BY_ZERO: (Cause.LOG_OF_ZERO, "division by 0"),
    OriginKind.ZERO_VARIANCE: (Cause.ZERO_VARIANCE, "normalisation of values without variance"),
    OriginKind.SQRT_AT_ZERO: (Cause.LOG_OF_ZERO, "the derivative of a root at 0 is infinite"),
    OriginKind.SQRT_OF_NEGATIVE: (Cause.LOG_OF_ZERO, "root of a negative value"),
    OriginKind.NORM_AT_ZERO: (Cause.LOG_OF_ZERO, "the derivative of a norm at 0 is not finite"),
    OriginKind.EXP_OVERFLOW: (Cause.PRECISION_OVERFLOW, "exp overflows"),
    OriginKind.SQUARE_OVERFLOW: (Cause.PRECISION_OVERFLOW, "a power overflows"),
    OriginKind.FLOAT16_OVERFLOW: (Cause.PRECISION_OVERFLOW, "float16 overflows above 65504"),
    OriginKind.OVERFLOW: (Cause.PRECISION_OVERFLOW, "finite values overflow"),
    OriginKind.EMPTY_MEAN: (Cause.LABELS, "mean over nothing: no target counts in this batch"),
    OriginKind.INFINITE_SLOPE: (Cause.LOG_OF_ZERO, "the derivative is infinite at the edge of its domain"),
    OriginKind.TENSOR: (Cause.UNKNOWN, "a tensor that is neither of the batch nor of the model was non-finite before"),
    OriginKind.CONSTANT: (Cause.LOG_OF_ZERO, "the code sets an infinite value, as for a mask, and it reaches the loss"),
    OriginKind.LARGE_SAMPLE: (Cause.BAD_BATCH, "a few samples make the gradients far larger than the others do"),
    OriginKind.INVALID: (Cause.UNKNOWN, "no valid result, as of 0 * inf or inf - inf,"),
}
"""The cause that each kind points to, and what it means."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Shape, dtype and values of a tensor that went into an operation or came out of it."""

    shape: tuple[int, ...]
    dtype: str
    min: float
    """Smallest finite value; NaN where there is none."""
    max: float
    nans: int = 0
    infs: int = 0
    """Infinite values of either sign."""
    zeros: int = 0

    def __str__(self) -> str:
        bad = [f"{count} {word}" for count, word in ((self.nans, "NaN"), (self.infs, "inf")) if count]
        values = "no finite value" if math.isnan(self.min) else f"{self.min:.4g} to {self.max:.4g}"
        return f"{self.dtype}{list(self.shape)} {', '.join([values, *bad])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first module and operation that made a non-finite value which reached the loss or a gradient."""

    kind: OriginKind
    operation: str = ""
    """The function as the model calls it, such as `cross_entropy`; empty where no operation is to blame."""
    aten: str = ""
    """The operation inside it that was the first to be non-finite."""
    module: str = ""
    """Its name in the model; empty for the model itself, and for code outside it, such as the loss."""
    module_type: str = ""
    """The module's class; empty outside the model."""
    tensor: str = ""
    """The tensor of the batch or the model that was non-finite already."""
    backward: bool = False
    """The loss was finite: the value was made in the backward pass of the operation."""
    file: str = ""
    line: int = 0
    code: str = ""
    """The line of the model's code that calls the operation."""
    inputs: tuple[TensorRange, ...] = ()
    outputs: tuple[TensorRange, ...] = ()
    microbatch: int = 0
    """Which batch of an accumulated step."""
    num_microbatches: int = 1
    samples: tuple[int, ...] = ()
    """Places in the batch of the samples that make the value non-finite; empty where none is to blame alone."""
    samples_checked: bool = False
    """The samples were looked for."""
    dataset_samples: tuple[int, ...] = ()
    """Their numbers in the data set, where the loader knows them."""
    sources: tuple[str, ...] = ()
    """Where these come from, as file and line; empty where the data set does not know."""
    banned: bool = False
    """They will not be trained on again."""
    forwards: int = 0
    """Forward passes that were run."""
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.kind is not OriginKind.NONE

    @property
    def cause(self) -> Cause:
        if self.kind is OriginKind.SOFTMAX_MASKED and "cross_entropy" in self.operation:
            return Cause.LOG_OF_ZERO
        return SENTENCES[self.kind][0]

    @property
    def reason(self) -> str:
        """One sentence: what, where in the model, where in its code, with which values."""
        text = SENTENCES[self.kind][1]
        if not self:
            return text
        if not self.operation:
            text += f": {self.tensor}" if self.tensor else ""
        else:
            text += f" in {'the backward pass of ' if self.backward else ''}{self.operation}"
        if self.module_type:
            text += f", in {self.module or 'the model'} ({self.module_type})"
        if self.file:
            text += f", at {self.file}:{self.line}"
        if self.code:
            text += f": {self.code}"
        if self.num_microbatches > 1:
            text += f"; micro-batch {self.microbatch + 1} of {self.num_microbatches}"
        if self.samples:
            text += f"; {samples_text(self.samples)} of the batch"
        if self.dataset_samples:
            listed = ", ".join(map(str, self.dataset_samples[:8]))
            sources = "; ".join(source for source in self.sources[:8] if source)
            text += f", {listed} in the data set" + (f" ({sources})" if sources else "")
            text += "; banned from here on" if self.banned else f"; to leave that out, call loader.ban([{listed}])"
        return text

    def __str__(self) -> str:
        lines = [self.reason]
        lines += [f"  input:  {value}" for value in self.inputs]
        lines += [f"  output: {value}" for value in self.outputs]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"cause": self.cause.value, "reason": self.reason}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Origin:
        """The origin that `as_json` has written; what this version does not know is left out."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        kinds = {kind.value: kind for kind in OriginKind}
        known["kind"] = kinds.get(str(values.get("kind")), OriginKind.INVALID)
        for name in ("samples", "dataset_samples", "sources"):
            known[name] = tuple(known.get(name) or ())
        for name in ("inputs", "outputs"):
            known[name] = tuple(_range_from_json(part) for part in known.get(name) or ())
        return cls(**known)


def _range_from_json(values: Mapping[str, Any]) -> TensorRange:
    known = {f.name: values[f.name] for f in fields(TensorRange) if f.name in values}
    known["shape"] = tuple(known["shape"])
    for name in ("min", "max"):
        known[name] = math.nan if known.get(name) is None else float(known[name])
    return TensorRange(**known)


def samples_text(samples: Iterable[int]) -> str:
    """Such as "samples 3, 17"; at most eight of them."""
    places = [*samples]
    shown = ", ".join(str(i) for i in places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
    return f"sample{'s' if len(places) > 1 else ''} {shown}"

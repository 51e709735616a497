"""Rules that explain how a run crashed; these cover the training code, its data and its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from surefoot.judge.cause_catalog import BFLOAT16, CAUSES, LOWER
from surefoot.records import Cause


class CrashKind(StrEnum):
    """What ended a run."""

    OUT_OF_MEMORY = "out_of_memory"
    LABELS = "labels"
    INDEX_OUT_OF_RANGE = "index_out_of_range"
    DEVICE_ASSERT = "device_assert"
    LOADER_MEMORY = "loader_memory"
    LOADER_WORKER = "loader_worker"
    DISK_FULL = "disk_full"
    LOSS_SCALE = "loss_scale"
    ANOMALY = "anomaly"
    NAN_DATA = "nan_data"
    NAN_LOSS = "nan_loss"
    NO_GRADIENT = "no_gradient"
    SECOND_BACKWARD = "second_backward"
    IN_PLACE = "in_place"
    DEVICE_MISMATCH = "device_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    STATE_DICT = "state_dict"
    SHAPE = "shape"
    DRIVER = "driver"
    XID = "xid"
    ILLEGAL_MEMORY = "illegal_memory"
    LIBRARY = "library"
    CUDA = "cuda"
    HOST_MEMORY = "host_memory"
    MISSING_FILE = "missing_file"
    PERMISSION = "permission"
    IMPORT = "import"
    DATA_FORMAT = "data_format"
    NCCL_TIMEOUT = "nccl_timeout"
    NCCL = "nccl"
    RENDEZVOUS = "rendezvous"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    TERMINATED = "terminated"
    KILLED = "killed"
    CHILD_FAILED = "child_failed"
    EXCEPTION = "exception"
    """No rule matches it."""


@dataclass(frozen=True, slots=True)
class CrashRule:
    """A known kind of crash: how to recognise and explain it."""

    kind: CrashKind
    cause: Cause
    pattern: re.Pattern[str]
    sentence: str
    """May contain the pattern's group names in braces."""
    advice: tuple[str, ...]
    tier: int = 0
    """0 for a root cause, 1 for the consequence of a fault elsewhere, 2 for a stop from outside."""
    with_remedies: bool = False
    """Append the general remedies of the cause to the advice."""

    def all_advice(self) -> tuple[str, ...]:
        return self.advice + (CAUSES[self.cause].remedies if self.with_remedies else ())


def crash_rule(
    kind: CrashKind, cause: Cause, pattern: str, sentence: str, *advice: str, tier: int = 0, remedies: bool = False
) -> CrashRule:
    return CrashRule(kind, cause, re.compile(pattern, re.M), sentence, advice, tier, remedies)


LAUNCH_BLOCKING = "Run it again with CUDALAUNCH_BLOCKING=1, so that the line named is the one that failed."

TRAINING_RULES: tuple[CrashRule, ...] = (
    crash_rule(
        CrashKind.OUT_OF_MEMORY,
        Cause.OUT_OF_MEMORY,
        r"(?:(?:CUDA|HIP|XPU|NPU|MPS backend)(?: error:)? out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED"
        r"|OOM when allocating"
        r"|ResourceExhaustedError|ALLOC_FAILED|cudaErrorMemoryAllocation)",
        "The device ran out of memory.",
        remedies=True,
    ),
    crash_rule(
        CrashKind.LABELS,
        Cause.LABELS,
        r"(?:Assertion `t >= 0 && t < n_classes` failed|cur_target >= 0 && cur_target < n_classes"
        r"|Target -?\d+ is out of bounds"
        r"|ClassNLLCriterion|nll_loss.*Assertion)",
        "A label is outside the classes that the model knows.",
        "Check that labels run from 0 to the number of classes less one, and that the model has that many outputs.",
        "Mark what is not to be learned with -100 (ignore_index), not with -1 or the padding token.",
        "Run one batch on the CPU: the message there names the label.",
    ),
    crash_rule(
        CrashKind.INDEX_OUT_OF_RANGE,
        Cause.LABELS,
        r"(?:srcIndex < srcSelectDimSize|Assertion `index >= -sizes\[i\] && index < sizes\[i\]"
        r"|Assertion `idx_dim >= 0 && idx_dim < index_size|IndexError: index out of range in self"
        r"|indexSelect.*Assertion"
        r"|vectorized_gather_kernel.*Assertion)",
        "An index is outside the table that it looks up: a token, a position or a label.",
        "Compare the largest token with the embedding's size; after adding tokens call resize_token_embeddings.",
        "Compare the longest sequence with the number of positions the model has.",
        "Run one batch on the CPU: the message there names the index.",
    ),
    crash_rule(
        CrashKind.DEVICE_ASSERT,
        Cause.LABELS,
        r"(?:device-side assert triggered|Assertion `[^`\n]*` failed)",
        "An assertion on the device failed: most often a label or a token outside its range.",
        "Check the range of labels and tokens against the number of classes and the size of the vocabulary.",
        "Run one batch on the CPU, where the message names the line and the value.",
        LAUNCH_BLOCKING,
    ),
    crash_rule(
        CrashKind.LOADER_MEMORY,
        Cause.OUT_OF_MEMORY,
        r"(?:DataLoader worker \(pid[^)]*\) is killed by signal: (?:Bus error|Killed)"
        r"|insufficient shared memory|Bus error"
        r"|unable to (?:open|write to|mmap|resize) (?:shared memory )?(?:object|file)? ?<?/?torch_"
        r"|No space left on device.*shm)",
        "A worker of the data loader was killed: shared memory ran out.",
        "Give the container more shared memory: `docker run --shm-size=16g`, or --ipc=host.",
        "Take fewer workers, or a smaller prefetch_factor.",
        "Call torch.multiprocessing.set_sharing_strategy('file_system') where shared memory cannot be raised.",
    ),
    crash_rule(
        CrashKind.LOADER_WORKER,
        Cause.UNKNOWN,
        r"DataLoader worker \(pid\(?s?\)?[^)]*\)* (?:is killed by signal|exited unexpectedly)",
        "A worker of the data loader died.",
        "Run with num_workers=0: the exception then shows where it happens.",
        "Watch the memory of the host: the kernel kills workers when it runs out.",
        tier=1,
    ),
    crash_rule(
        CrashKind.DISK_FULL,
        Cause.UNKNOWN,
        r"(?:No space left on device|Errno 28|Disk quota exceeded|Errno 122|PytorchStreamWriter failed writing file"
        r"|unexpected pos \d+ vs \d+|inline_container.*(?:write|enforce fail))",
        "The disk is full: a file could not be written.",
        "Make room, and keep fewer checkpoints (save_total_limit, or delete old ones after each save).",
        "Do not trust the last checkpoint: it was cut off. Resume from the one before.",
        "Look at `df -h` and `df -i` for the folder written to, and at /tmp.",
    ),
    crash_rule(
        CrashKind.LOSS_SCALE,
        Cause.PRECISION_OVERFLOW,
        r"(?:Minimum loss scale reached|[Cc]urrent loss scale already at minimum|Cannot decrease scale anymore"
        r"|loss scal(?:e|ing) .{0,30}(?:too small|at minimum))",
        "The loss scale fell to its minimum: gradients overflow however small it is, so the loss is NaN or Inf"
        " already.",
        BFLOAT16,
        "Look for the step at which the scale began to halve: what happened there is the reason, not the scale.",
        LOWER,
        remedies=True,
    ),
    crash_rule(
        CrashKind.ANOMALY,
        Cause.LOG_OF_ZERO,
        r"Function '?(?P<function>\w+)'? returned (?:nan|inf|infinite) values in its (?P<output>\d+)\w* output",
        "Backward through {function} gave NaN in its output {output}: anomaly detection stopped there.",
        "Look at the forward line that the message names, above the error: its input is at the edge of what"
        " {function} can take.",
        remedies=True,
    ),
    crash_rule(
        CrashKind.NAN_DATA,
        Cause.BAD_BATCH,
        r"Input (?:X |y )?contains (?:NaN|infinity)",
        "The data itself holds NaN or Inf.",
        "Find the samples that hold them, and leave them out or fill them in.",
        "Check what made them: a division by a spread of zero, a logarithm of zero, an empty field.",
    ),
    crash_rule(
        CrashKind.NAN_LOSS,
        Cause.UNKNOWN,
        r"(?:The loss returned in `?training_step`? is (?P<value>\S+?)\.?$|Loss is (?:nan|NaN|inf"
        r"|infinite)[^\n]*(?:stop|exit)"
        r"|(?:ValueError|RuntimeError|FloatingPointError|AssertionError|Exception|SystemExit)\b.{0,80}"
        r"(?i:\bnan\b|non-?finite|\binf\b|infinity|diverged)|[Ll]oss (?:is|became|diverged)[^\n]{0,20}(?:nan"
        r"|NaN|inf)\b[^\n]*"
        r"|NaN[^\n]{0,40}(?:detected|found)[^\n]{0,40}(?:stop|abort|exit|terminat)|(?:stop|abort"
        r"|terminat)[^\n]{0,40}\bNaN\b)",
        "The run was stopped because the loss was no longer a number.",
        "Find the step where it began: look at the norm, the rate and the batch just before it.",
        "Run the last batches again under torch.autograd.set_detect_anomaly(True).",
        LOWER,
        BFLOAT16,
    ),
    crash_rule(
        CrashKind.NO_GRADIENT,
        Cause.NOT_UPDATING,
        r"element 0 of tensors does not require grad and does not have a grad_fn",
        "The loss does not depend on anything that is trained.",
        "Check that something requires a gradient: adapters added, layers not all frozen.",
        "With gradient checkpointing on a frozen model call enable_input_require_grads().",
        "Check for .detach(), .item(), torch.no_grad() or argmax between the model and the loss.",
    ),
    crash_rule(
        CrashKind.SECOND_BACKWARD,
        Cause.UNKNOWN,
        r"Trying to backward through the graph a second time",
        "Backward ran twice through the same graph.",
        "Detach what is carried from step to step: hidden states, running losses.",
        "Call backward once on the sum of the losses.",
    ),
    crash_rule(
        CrashKind.IN_PLACE,
        Cause.UNKNOWN,
        r"one of the variables needed for gradient computation has been modified by an inplace operation",
        "A tensor that backward needs was changed in place.",
        "Replace +=, .add_() and relu(inplace=True) on it by operations that make a new tensor.",
        "Run under torch.autograd.set_detect_anomaly(True), which names the line.",
        "Step each optimizer only after all the backwards that use its weights.",
    ),
    crash_rule(
        CrashKind.DEVICE_MISMATCH,
        Cause.UNKNOWN,
        r"(?:Expected all tensors to be on the same device.*"
        r"|Input type \([\w.]+\) and weight type \([\w.]+\) should be the same"
        r"|indices should be either on cpu or on the same device.*|is on (?:cpu|cuda:\d+), but expected.*)$",
        "Tensors on different devices met.",
        "Move the model and every tensor of the batch to the same device.",
        "Register constants of a module as buffers, so that they move along with it.",
    ),
    crash_rule(
        CrashKind.DTYPE_MISMATCH,
        Cause.UNKNOWN,
        r"(?:expected (?:m1 and m2 to have the same dtype|scalar type \w+ but found \w+)"
        r"|mat1 and mat2 must have the same dtype"
        r"|Found dtype \w+ but expected \w+|Input type \(\w+\) and bias type|not implemented for 'Half'|got .* dtype|"
        r"Attempting to unscale FP16 gradients)",
        "Tensors of different number formats met.",
        "Run forward under torch.autocast, or cast the inputs to the weights' dtype.",
        "With autocast keep the weights in float32: float16 weights cannot be unscaled.",
        "Class labels are int64, targets of a regression float32.",
    ),
    crash_rule(
        CrashKind.STATE_DICT,
        Cause.UNKNOWN,
        r"(?:Error\(s\) in loading state_dict for (?P<model>\w+)|size mismatch for (?P<weight>[\w.]+):)",
        "A checkpoint does not fit the model.",
        "Compare the settings the checkpoint was made with: width, layers, vocabulary, classes.",
        "Names with `module.` or `_orig_mod.` in front come from DataParallel and torch.compile: strip them.",
        "Load with strict=False only if the missing weights are meant to be new.",
    ),
    crash_rule(
        CrashKind.SHAPE,
        Cause.UNKNOWN,
        r"(?:mat1 and mat2 shapes cannot be multiplied \((?P<shapes>[^)]*)\)|The size of tensor a .* must match"
        r"|shape '[^']*' is invalid for input of size|The expanded size of the tensor|Sizes of tensors must match"
        r"|size mismatch|stack expects each tensor to be equal size|Expected input batch_size .* to match target"
        r"|Given groups=\d+, weight of size|expected (?:input|\d+D)|Incompatible shapes"
        r"|shapes? .* (?:not aligned|do not match)"
        r"|could not broadcast|Trying to resize storage)",
        "Shapes do not fit together.",
        "Print the shapes just before the line named, for the batch that failed.",
        "Check the last batch of an epoch: drop_last=True leaves an odd one out.",
        "Check padding and truncation: every sample of a batch has to have the same length.",
    ),
)

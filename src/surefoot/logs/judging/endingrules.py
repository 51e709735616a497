"""What the last words of a run mean: one rule for each known way to die, the specific ones before the general."""

from __future__ import annotations

import re
from dataclasses import dataclass

from surefoot.judge.cause_catalog import BFLOAT16, CAUSES, LOWER
from surefoot.records import Cause


@dataclass(frozen=True, slots=True)
class CrashRule:
    """A way to die, and how it is told from others."""

    kind: str
    cause: Cause
    pattern: re.Pattern[str]
    sentence: str
    """With the names of the pattern's groups in braces."""
    advice: tuple[str, ...]
    tier: int = 0
    """0 for what goes wrong by itself, 1 for what follows from a fault elsewhere, 2 for a stop from outside."""
    with_remedies: bool = False
    """What helps against the cause in general stands behind the advice."""

    def all_advice(self) -> tuple[str, ...]:
        return self.advice + (CAUSES[self.cause].remedies if self.with_remedies else ())


def _rule(
    kind: str, cause: Cause, pattern: str, sentence: str, *advice: str, tier: int = 0, remedies: bool = False
) -> CrashRule:
    return CrashRule(kind, cause, re.compile(pattern, re.M), sentence, advice, tier, remedies)


_BLOCKING = "Run it again with CUDA_LAUNCH_BLOCKING=1, so that the line named is the one that failed."
_MACHINE = "Look into `dmesg` and `nvidia-smi -q` for Xid and ECC errors; take the machine out if there are any."
_RESUME = "Start again from the last checkpoint."
_EVERY_RANK = (
    "Look at the output of every rank: the one that stopped first has the reason, the others only waited for it."
)

RULES: tuple[CrashRule, ...] = (
    _rule(
        "out_of_memory",
        Cause.OUT_OF_MEMORY,
        r"(?:(?:CUDA|HIP|XPU|NPU|MPS backend)(?: error:)? out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED"
        r"|OOM when allocating"
        r"|ResourceExhaustedError|ALLOC_FAILED|cudaErrorMemoryAllocation)",
        "The device ran out of memory.",
        remedies=True,
    ),
    _rule(
        "labels",
        Cause.LABELS,
        r"(?:Assertion `t >= 0 && t < n_classes` failed|cur_target >= 0 && cur_target < n_classes"
        r"|Target -?\d+ is out of bounds"
        r"|ClassNLLCriterion|nll_loss.*Assertion)",
        "A label is outside the classes that the model knows.",
        "Check that labels run from 0 to the number of classes less one, and that the model has that many outputs.",
        "Mark what is not to be learned with -100 (ignore_index), not with -1 or the padding token.",
        "Run one batch on the CPU: the message there names the label.",
    ),
    _rule(
        "index_out_of_range",
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
    _rule(
        "device_assert",
        Cause.LABELS,
        r"(?:device-side assert triggered|Assertion `[^`\n]*` failed)",
        "An assertion on the device failed: most often a label or a token outside its range.",
        "Check the range of labels and tokens against the number of classes and the size of the vocabulary.",
        "Run one batch on the CPU, where the message names the line and the value.",
        _BLOCKING,
    ),
    _rule(
        "loader_memory",
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
    _rule(
        "loader_worker",
        Cause.UNKNOWN,
        r"DataLoader worker \(pid\(?s?\)?[^)]*\)* (?:is killed by signal|exited unexpectedly)",
        "A worker of the data loader died.",
        "Run with num_workers=0: the exception then shows where it happens.",
        "Watch the memory of the host: the kernel kills workers when it runs out.",
        tier=1,
    ),
    _rule(
        "disk_full",
        Cause.UNKNOWN,
        r"(?:No space left on device|Errno 28|Disk quota exceeded|Errno 122|PytorchStreamWriter failed writing file"
        r"|unexpected pos \d+ vs \d+|inline_container.*(?:write|enforce fail))",
        "The disk is full: a file could not be written.",
        "Make room, and keep fewer checkpoints (save_total_limit, or delete old ones after each save).",
        "Do not trust the last checkpoint: it was cut off. Resume from the one before.",
        "Look at `df -h` and `df -i` for the folder written to, and at /tmp.",
    ),
    _rule(
        "loss_scale",
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
    _rule(
        "anomaly",
        Cause.LOG_OF_ZERO,
        r"Function '?(?P<function>\w+)'? returned (?:nan|inf|infinite) values in its (?P<output>\d+)\w* output",
        "Backward through {function} gave NaN in its output {output}: anomaly detection stopped there.",
        "Look at the forward line that the message names, above the error: its input is at the edge of what"
        " {function} can take.",
        remedies=True,
    ),
    _rule(
        "nan_data",
        Cause.BAD_BATCH,
        r"Input (?:X |y )?contains (?:NaN|infinity)",
        "The data itself holds NaN or Inf.",
        "Find the samples that hold them, and leave them out or fill them in.",
        "Check what made them: a division by a spread of zero, a logarithm of zero, an empty field.",
    ),
    _rule(
        "nan_loss",
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
    _rule(
        "no_gradient",
        Cause.NOT_UPDATING,
        r"element 0 of tensors does not require grad and does not have a grad_fn",
        "The loss does not depend on anything that is trained.",
        "Check that something requires a gradient: adapters added, layers not all frozen.",
        "With gradient checkpointing on a frozen model call enable_input_require_grads().",
        "Check for .detach(), .item(), torch.no_grad() or argmax between the model and the loss.",
    ),
    _rule(
        "second_backward",
        Cause.UNKNOWN,
        r"Trying to backward through the graph a second time",
        "Backward ran twice through the same graph.",
        "Detach what is carried from step to step: hidden states, running losses.",
        "Call backward once on the sum of the losses.",
    ),
    _rule(
        "in_place",
        Cause.UNKNOWN,
        r"one of the variables needed for gradient computation has been modified by an inplace operation",
        "A tensor that backward needs was changed in place.",
        "Replace +=, .add_() and relu(inplace=True) on it by operations that make a new tensor.",
        "Run under torch.autograd.set_detect_anomaly(True), which names the line.",
        "Step each optimizer only after all the backwards that use its weights.",
    ),
    _rule(
        "device_mismatch",
        Cause.UNKNOWN,
        r"(?:Expected all tensors to be on the same device.*"
        r"|Input type \([\w.]+\) and weight type \([\w.]+\) should be the same"
        r"|indices should be either on cpu or on the same device.*|is on (?:cpu|cuda:\d+), but expected.*)$",
        "Tensors on different devices met.",
        "Move the model and every tensor of the batch to the same device.",
        "Register constants of a module as buffers, so that they move along with it.",
    ),
    _rule(
        "dtype_mismatch",
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
    _rule(
        "state_dict",
        Cause.UNKNOWN,
        r"(?:Error\(s\) in loading state_dict for (?P<model>\w+)|size mismatch for (?P<weight>[\w.]+):)",
        "A checkpoint does not fit the model.",
        "Compare the settings the checkpoint was made with: width, layers, vocabulary, classes.",
        "Names with `module.` or `_orig_mod.` in front come from DataParallel and torch.compile: strip them.",
        "Load with strict=False only if the missing weights are meant to be new.",
    ),
    _rule(
        "shape",
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
    _rule(
        "driver",
        Cause.UNKNOWN,
        r"(?:CUDA driver version is insufficient|no kernel image is available for execution|Found no NVIDIA driver"
        r"|forward compatibility was attempted|NVML: Driver/library version mismatch|CUDA (?:unknown"
        r"|initialization) error"
        r"|not compiled with CUDA enabled|CUDA capability sm_\d+ is not compatible|No CUDA GPUs are available"
        r"|libcud\w+\.so[^\n]*cannot open|undefined symbol)",
        "CUDA, its driver and the installed PyTorch do not fit together, or no device is visible.",
        "Compare `nvidia-smi` with torch.version.cuda, and install a build of PyTorch for that driver.",
        "Check CUDA_VISIBLE_DEVICES, and that the container was started with the devices.",
    ),
    _rule(
        "xid",
        Cause.TRANSIENT,
        r"(?:\bXid\b[^\n]*?: (?P<xid>\d+)|uncorrectable (?:ECC|NVLink) error|double bit ECC|fallen off the bus"
        r"|cudaErrorECCUncorrectable)",
        "The device reported a fault of its own.",
        _MACHINE,
        _RESUME,
        "Run a burn-in (dcgmi diag -r 3) before the machine trains again.",
    ),
    _rule(
        "illegal_memory",
        Cause.UNKNOWN,
        r"(?:an illegal memory access was encountered|misaligned address|unspecified launch failure|illegal instruction"
        r"|Segmentation fault|SIGSEGV|Signal 11)",
        "A kernel read or wrote memory that is not its own.",
        _BLOCKING,
        "Check indices and shapes that reach custom kernels, and turn such kernels off one at a time.",
        _MACHINE,
    ),
    _rule(
        "library",
        Cause.UNKNOWN,
        r"(?:CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+|cuDNN error|CUSOLVER_STATUS_\w+|CUFFT\w+ERROR)",
        "A CUDA library failed; most often memory is full, or an index before it was out of range.",
        _BLOCKING,
        "Run one batch on the CPU: labels and tokens out of range show there by name.",
        "Leave memory free: a smaller batch.",
    ),
    _rule(
        "cuda",
        Cause.UNKNOWN,
        r"(?:CUDA error: (?P<what>[^\n]*)|cudaError\w+)",
        "CUDA failed.",
        _BLOCKING,
        _MACHINE,
    ),
    _rule(
        "host_memory",
        Cause.OUT_OF_MEMORY,
        r"(?:DefaultCPUAllocator: (?:can't|not enough)|MemoryError|Cannot allocate memory|Errno 12\b|oom-kill"
        r"|Out of memory: Kill"
        r"|Detected \d+ oom[-_]kill|std::bad_alloc|OOMKilled|OUT_OF_ME)",
        "The host ran out of memory (RAM, not the device's).",
        "Take fewer loader workers, and do not hold the whole data set in each of them: memory-map it.",
        "Check for lists that grow every step: store loss.item(), not the loss.",
        "Ask for more memory, or load checkpoints with mmap=True and one rank after the other.",
    ),
    _rule(
        "missing_file",
        Cause.UNKNOWN,
        r"(?:FileNotFoundError|No such file or directory|can't open file|does not exist: |\bNotFoundError|"
        r"is not a local folder and is not a valid model identifier|RepositoryNotFoundError)",
        "A file is missing.",
        "Check the path that is named: relative paths start from the folder the run was started in.",
        "On a cluster check that the disk is mounted on every machine.",
    ),
    _rule(
        "permission",
        Cause.UNKNOWN,
        r"(?:PermissionError|Permission denied|Errno 13\b|Read-only file system|GatedRepoError"
        r"|401 Client Error|403 Client)",
        "Something may not be read or written by this user.",
        "Check the owner and the mode of the path that is named, and log in where a service asks for it.",
    ),
    _rule(
        "import",
        Cause.UNKNOWN,
        r"(?:ModuleNotFoundError: No module named '?(?P<module>[\w.]+)|ImportError: )",
        "A module could not be imported.",
        "Install it into the environment the run uses (`python -m pip install ...`), and check which python that is.",
        "If it is installed, compare its version with what the code was written for.",
    ),
    _rule(
        "data_format",
        Cause.BAD_BATCH,
        r"(?:JSONDecodeError|UnicodeDecodeError|ArrowInvalid|UnidentifiedImageError|DatasetGenerationError"
        r"|PytorchStreamReader failed|UnpicklingError|image file is truncated|EOFError: Ran out of input|ParserError"
        r"|SafetensorError|BadZipFile|zlib\.error|pad_token|chat_template|is not the correct format)",
        "A piece of the data, a tokenizer or a checkpoint could not be read.",
        "Open the file that is named by hand: it is cut off, empty, or of another format.",
        "Download or write it again, and check its size against the original.",
    ),
    _rule(
        "nccl_timeout",
        Cause.RANK_FAULT,
        r"(?:Watchdog caught collective operation timeout|collective operation timeout"
        r"|ran for (?P<ms>\d+) milliseconds before"
        r" timing out|Timed out waiting .*(?:ranks|clients|store)|monitoredBarrier|NCCL (?:operation"
        r"|communicator).*(?:timed? ?out|aborted)"
        r"|wait timeout after \d+ms)",
        "One rank did not come to a collective that the others waited in.",
        _EVERY_RANK,
        "Check that all ranks take the same number of steps and the same branches: uneven data, an evaluation"
        " or a save on one rank only.",
        "Run with TORCH_DISTRIBUTED_DEBUG=DETAIL and TORCH_NCCL_TRACE_BUFFER_SIZE=20000 to see which rank was missing.",
        "Raise the timeout (init_process_group(timeout=...)) if one rank has slow work to do, such as tokenising.",
        tier=1,
    ),
    _rule(
        "nccl",
        Cause.RANK_FAULT,
        r"(?:NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclRemoteError"
        r"|unhandled (?:system|cuda) error"
        r"|NCCL WARN.*(?:failed|error)|ProcessGroupNCCL.*error)",
        "NCCL failed between the ranks.",
        "Run with NCCL_DEBUG=INFO: the WARN lines name the reason.",
        "Check the network interface (NCCL_SOCKET_IFNAME), shared memory (--shm-size) and that every rank has a"
        " device of its own.",
        _EVERY_RANK,
        tier=1,
    ),
    _rule(
        "rendezvous",
        Cause.RANK_FAULT,
        r"(?:Rendezvous\w*Error|EADDRINUSE|[Aa]ddress already in use|Connection (?:reset|refused"
        r"|closed) by peer|Connection refused"
        r"|Broken pipe|DistNetworkError|DistStoreError|failed to connect to|The client socket has failed|Socket Timeout"
        r"|ConnectionResetError|BrokenPipeError|TCPStore)",
        "The ranks could not reach each other, or one of them was gone.",
        _EVERY_RANK,
        "Check MASTER_ADDR and MASTER_PORT: the port free, the address reachable from every machine.",
        tier=1,
    ),
    _rule(
        "time_limit",
        Cause.UNKNOWN,
        r"(?:DUE TO TIME LIMIT|[Tt]ime limit (?:reached|exceeded)|walltime .* exceeded)",
        "The scheduler ended the run at its time limit; nothing is wrong with the run.",
        _RESUME,
        "Ask for more time, or save shortly before the limit (SLURM: --signal=B:USR1@300).",
        tier=2,
    ),
    _rule(
        "preempted",
        Cause.UNKNOWN,
        r"(?:DUE TO PREEMPTION|[Pp]reempt(?:ed|ion)\b|CANCELLED AT|spot instance|DUE TO NODE FAILURE"
        r"|JOB \d+ .*CANCELLED)",
        "The scheduler took the run down; nothing is wrong with the run.",
        _RESUME,
        "Save often enough that little is lost, and let the job requeue itself.",
        tier=2,
    ),
    _rule(
        "interrupted",
        Cause.UNKNOWN,
        r"(?:KeyboardInterrupt|SIGINT|\^C\b)",
        "Somebody stopped the run by hand; nothing is wrong with the run.",
        _RESUME,
        tier=2,
    ),
    _rule(
        "terminated",
        Cause.UNKNOWN,
        r"(?:SIGTERM|Signal 15|exitcode ?:? ?-15|SignalException|SIGHUP|signal 15|Terminated\s*$|exit code 143)",
        "The run was told to stop from outside (SIGTERM): the scheduler, the launcher or another rank.",
        "Look at the scheduler's log and at the other ranks' output for who stopped it.",
        _RESUME,
        tier=2,
    ),
    _rule(
        "killed",
        Cause.OUT_OF_MEMORY,
        r"(?:^\s*(?:\S+: line \d+:\s+\d+ )?Killed\b|SIGKILL|Signal 9\b|signal 9\b|exit ?code ?:?=? ?-9\b"
        r"|exit(?:ed with|) (?:code|status):? 137"
        r"|exitcode: 137|Exited with exit code 137|code 137\b)",
        "The run was killed (signal 9), most often by the kernel because the host ran out of memory.",
        "Look at `dmesg -T | grep -i oom`, or the scheduler's record of memory used.",
        "Take fewer loader workers, and do not hold the whole data set in each of them: memory-map it.",
        "Ask for more memory, or load checkpoints with mmap=True and one rank after the other.",
        tier=1,
    ),
)

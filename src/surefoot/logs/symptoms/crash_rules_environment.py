"""Crash rules for the environment: driver, device, host memory, files, NCCL and the scheduler."""

from __future__ import annotations

from surefoot.logs.symptoms.crash_rules import LAUNCH_BLOCKING, TRAINING_RULES, CrashKind, CrashRule, crash_rule
from surefoot.records import Cause

_CHECK_HARDWARE = "Look into `dmesg` and `nvidia-smi -q` for Xid and ECC errors; take the machine out if there are any."
_RESUME = "Start again from the last checkpoint."
_CHECK_EVERY_RANK = (
    "Look at the output of every rank: the one that stopped first has the reason, the others only waited for it."
)

ENVIRONMENT_RULES: tuple[CrashRule, ...] = (
    crash_rule(
        CrashKind.DRIVER,
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
    crash_rule(
        CrashKind.XID,
        Cause.TRANSIENT,
        r"(?:\bXid\b[^\n]*?: (?P<xid>\d+)|uncorrectable (?:ECC|NVLink) error|double bit ECC|fallen off the bus"
        r"|cudaErrorECCUncorrectable)",
        "The device reported a fault of its own.",
        _CHECK_HARDWARE,
        _RESUME,
        "Run a burn-in (dcgmi diag -r 3) before the machine trains again.",
    ),
    crash_rule(
        CrashKind.ILLEGAL_MEMORY,
        Cause.UNKNOWN,
        r"(?:an illegal memory access was encountered|misaligned address|unspecified launch failure|illegal instruction"
        r"|Segmentation fault|SIGSEGV|Signal 11)",
        "A kernel read or wrote memory that is not its own.",
        LAUNCH_BLOCKING,
        "Check indices and shapes that reach custom kernels, and turn such kernels off one at a time.",
        _CHECK_HARDWARE,
    ),
    crash_rule(
        CrashKind.LIBRARY,
        Cause.UNKNOWN,
        r"(?:CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+|cuDNN error|CUSOLVER_STATUS_\w+|CUFFT\w+ERROR)",
        "A CUDA library failed; most often memory is full, or an index before it was out of range.",
        LAUNCH_BLOCKING,
        "Run one batch on the CPU: labels and tokens out of range show there by name.",
        "Leave memory free: a smaller batch.",
    ),
    crash_rule(
        CrashKind.CUDA,
        Cause.UNKNOWN,
        r"(?:CUDA error: (?P<what>[^\n]*)|cudaError\w+)",
        "CUDA failed.",
        LAUNCH_BLOCKING,
        _CHECK_HARDWARE,
    ),
    crash_rule(
        CrashKind.HOST_MEMORY,
        Cause.OUT_OF_MEMORY,
        r"(?:DefaultCPUAllocator: (?:can't|not enough)|MemoryError|Cannot allocate memory|Errno 12\b|oom-kill"
        r"|Out of memory: Kill"
        r"|Detected \d+ oom[-_]kill|std::bad_alloc|OOMKilled|OUT_OF_ME)",
        "The host ran out of memory (RAM, not the device's).",
        "Take fewer loader workers, and do not hold the whole data set in each of them: memory-map it.",
        "Check for lists that grow every step: store loss.item(), not the loss.",
        "Ask for more memory, or load checkpoints with mmap=True and one rank after the other.",
    ),
    crash_rule(
        CrashKind.MISSING_FILE,
        Cause.UNKNOWN,
        r"(?:FileNotFoundError|No such file or directory|can't open file|does not exist: |\bNotFoundError|"
        r"is not a local folder and is not a valid model identifier|RepositoryNotFoundError)",
        "A file is missing.",
        "Check the path that is named: relative paths start from the folder the run was started in.",
        "On a cluster check that the disk is mounted on every machine.",
    ),
    crash_rule(
        CrashKind.PERMISSION,
        Cause.UNKNOWN,
        r"(?:PermissionError|Permission denied|Errno 13\b|Read-only file system|GatedRepoError"
        r"|401 Client Error|403 Client)",
        "Something may not be read or written by this user.",
        "Check the owner and the mode of the path that is named, and log in where a service asks for it.",
    ),
    crash_rule(
        CrashKind.IMPORT,
        Cause.UNKNOWN,
        r"(?:ModuleNotFoundError: No module named '?(?P<module>[\w.]+)|ImportError: )",
        "A module could not be imported.",
        "Install it into the environment the run uses (`python -m pip install ...`), and check which python that is.",
        "If it is installed, compare its version with what the code was written for.",
    ),
    crash_rule(
        CrashKind.DATA_FORMAT,
        Cause.BAD_BATCH,
        r"(?:JSONDecodeError|UnicodeDecodeError|ArrowInvalid|UnidentifiedImageError|DatasetGenerationError"
        r"|PytorchStreamReader failed|UnpicklingError|image file is truncated|EOFError: Ran out of input|ParserError"
        r"|SafetensorError|BadZipFile|zlib\.error|pad_token|chat_template|is not the correct format)",
        "A piece of the data, a tokenizer or a checkpoint could not be read.",
        "Open the file that is named by hand: it is cut off, empty, or of another format.",
        "Download or write it again, and check its size against the original.",
    ),
    crash_rule(
        CrashKind.NCCL_TIMEOUT,
        Cause.RANK_FAULT,
        r"(?:Watchdog caught collective operation timeout|collective operation timeout"
        r"|ran for (?P<ms>\d+) milliseconds before"
        r" timing out|Timed out waiting .*(?:ranks|clients|store)|monitoredBarrier|NCCL (?:operation"
        r"|communicator).*(?:timed? ?out|aborted)"
        r"|wait timeout after \d+ms)",
        "One rank did not come to a collective that the others waited in.",
        _CHECK_EVERY_RANK,
        "Check that all ranks take the same number of steps and the same branches: uneven data, an evaluation"
        " or a save on one rank only.",
        "Run with TORCH_DISTRIBUTED_DEBUG=DETAIL and TORCH_NCCL_TRACE_BUFFER_SIZE=20000 to see which rank was missing.",
        "Raise the timeout (init_process_group(timeout=...)) if one rank has slow work to do, such as tokenising.",
        tier=1,
    ),
    crash_rule(
        CrashKind.NCCL,
        Cause.RANK_FAULT,
        r"(?:NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclRemoteError"
        r"|unhandled (?:system|cuda) error"
        r"|NCCL WARN.*(?:failed|error)|ProcessGroupNCCL.*error)",
        "NCCL failed between the ranks.",
        "Run with NCCL_DEBUG=INFO: the WARN lines name the reason.",
        "Check the network interface (NCCL_SOCKET_IFNAME), shared memory (--shm-size) and that every rank has a"
        " device of its own.",
        _CHECK_EVERY_RANK,
        tier=1,
    ),
    crash_rule(
        CrashKind.RENDEZVOUS,
        Cause.RANK_FAULT,
        r"(?:Rendezvous\w*Error|EADDRINUSE|[Aa]ddress already in use|Connection (?:reset|refused"
        r"|closed) by peer|Connection refused"
        r"|Broken pipe|DistNetworkError|DistStoreError|failed to connect to|The client socket has failed|Socket Timeout"
        r"|ConnectionResetError|BrokenPipeError|TCPStore)",
        "The ranks could not reach each other, or one of them was gone.",
        _CHECK_EVERY_RANK,
        "Check MASTER_ADDR and MASTER_PORT: the port free, the address reachable from every machine.",
        tier=1,
    ),
    crash_rule(
        CrashKind.TIME_LIMIT,
        Cause.UNKNOWN,
        r"(?:DUE TO TIME LIMIT|[Tt]ime limit (?:reached|exceeded)|walltime .* exceeded)",
        "The scheduler ended the run at its time limit; nothing is wrong with the run.",
        _RESUME,
        "Ask for more time, or save shortly before the limit (SLURM: --signal=B:USR1@300).",
        tier=2,
    ),
    crash_rule(
        CrashKind.PREEMPTED,
        Cause.UNKNOWN,
        r"(?:DUE TO PREEMPTION|[Pp]reempt(?:ed|ion)\b|CANCELLED AT|spot instance|DUE TO NODE FAILURE"
        r"|JOB \d+ .*CANCELLED)",
        "The scheduler took the run down; nothing is wrong with the run.",
        _RESUME,
        "Save often enough that little is lost, and let the job requeue itself.",
        tier=2,
    ),
    crash_rule(
        CrashKind.INTERRUPTED,
        Cause.UNKNOWN,
        r"(?:KeyboardInterrupt|SIGINT|\^C\b)",
        "Somebody stopped the run by hand; nothing is wrong with the run.",
        _RESUME,
        tier=2,
    ),
    crash_rule(
        CrashKind.TERMINATED,
        Cause.UNKNOWN,
        r"(?:SIGTERM|Signal 15|exitcode ?:? ?-15|SignalException|SIGHUP|signal 15|Terminated\s*$|exit code 143)",
        "The run was stopped from outside (SIGTERM): the scheduler, the launcher or another rank.",
        "Look at the scheduler's log and at the other ranks' output for who stopped it.",
        _RESUME,
        tier=2,
    ),
    crash_rule(
        CrashKind.KILLED,
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

RULES = (*TRAINING_RULES, *ENVIRONMENT_RULES)
"""In the order they are tried: specific rules before general ones."""

"""The exception at the end of a log: its kind, numbers, evidence and advice."""
# ruff: noqa: E501 - error messages are long

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.logs.symptoms.crash import Crash, find_crash
from surefoot.records import Cause

FRAMES = (
    "Traceback (most recent call last):\n"
    '  File "/home/me/train.py", line 88, in <module>\n    main()\n'
    '  File "/home/me/train.py", line 61, in main\n    loss = model(x)\n'
    '  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1511, in _call_impl\n'
    "    return forward_call(*args)\n"
)
NEW_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 812.81 MiB is free. Process 12 has 78.33 GiB memory in use. Of the allocated memory 66.00 GiB is allocated"
    " by PyTorch, and 8.50 GiB is reserved by PyTorch but unallocated."
)
OLD_MEMORY = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 3.21 GiB already"
    " allocated; 2.02 MiB free; 3.50 GiB reserved in total by PyTorch)"
)
TIMEOUT = (
    "[rank3]:[E1101 12:00:00.1 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=1234, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds"
    " before timing out."
)
ASSERT = (
    "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [3,0,0]"
    " Assertion `t >= 0 && t < n_classes` failed.\n"
)
CHILD = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\ntrain.py FAILED\n-----\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2024-01-01_12:00:00\n  host      : node7\n"
    "  rank      : 5 (local_rank: 5)\n  exitcode  : {code} (pid: 77)\n  error_file: <N/A>\n  traceback : {trace}\n====="
)

ENDINGS = {
    "new words for device memory": (FRAMES + NEW_MEMORY, "out_of_memory", Cause.OUT_OF_MEMORY),
    "old words for device memory": (FRAMES + OLD_MEMORY, "out_of_memory", Cause.OUT_OF_MEMORY),
    "XLA memory": ("jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 16106127360 bytes.", "out_of_memory", Cause.OUT_OF_MEMORY),
    "TensorFlow memory": (FRAMES + "ResourceExhaustedError: OOM when allocating tensor with shape[32,4096]", "out_of_memory", Cause.OUT_OF_MEMORY),
    "CPU memory": (FRAMES + "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", "host_memory", Cause.OUT_OF_MEMORY),
    "killer of SLURM": ("slurmstepd: error: Detected 1 oom-kill event(s) in step 123.batch cgroup.", "host_memory", Cause.OUT_OF_MEMORY),
    "killed": ("loading data\nKilled", "killed", Cause.OUT_OF_MEMORY),
    "killed in a script": ("run.sh: line 12: 12345 Killed                  python train.py", "killed", Cause.OUT_OF_MEMORY),
    "137": ("srun: error: node1: task 0: Exited with exit code 137", "killed", Cause.OUT_OF_MEMORY),
    "killed child": (CHILD.format(code=-9, trace="Signal 9 (SIGKILL) received by PID 77"), "killed", Cause.OUT_OF_MEMORY),
    "failed child": (CHILD.format(code=1, trace="To enable traceback see: https://example.org"), "child_failed", Cause.RANK_FAULT),
    "collective": (TIMEOUT, "nccl_timeout", Cause.RANK_FAULT),
    "NCCL": (FRAMES + "torch.distributed.DistBackendError: NCCL error in: x.cpp:1275, unhandled system error", "nccl", Cause.RANK_FAULT),
    "port": (FRAMES + "RuntimeError: The server socket has failed to listen. errno: 98 - Address already in use", "rendezvous", Cause.RANK_FAULT),
    "gone": (FRAMES + "RuntimeError: [1] is setting up NCCL communicator: Connection reset by peer", "rendezvous", Cause.RANK_FAULT),
    "label on the device": (ASSERT + FRAMES + "RuntimeError: CUDA error: device-side assert triggered", "labels", Cause.LABELS),
    "label on the host": (FRAMES + "IndexError: Target 10 is out of bounds.", "labels", Cause.LABELS),
    "token": (FRAMES + "IndexError: index out of range in self", "index_out_of_range", Cause.LABELS),
    "assertion": (FRAMES + "RuntimeError: CUDA error: device-side assert triggered", "device_assert", Cause.LABELS),
    "shared memory": (FRAMES + "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Bus error.", "loader_memory", Cause.OUT_OF_MEMORY),
    "worker": (FRAMES + "RuntimeError: DataLoader worker (pid(s) 1234, 1235) exited unexpectedly", "loader_worker", Cause.UNKNOWN),
    "missing file": (FRAMES + "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'", "missing_file", Cause.UNKNOWN),
    "permission": (FRAMES + "PermissionError: [Errno 13] Permission denied: '/data'", "permission", Cause.UNKNOWN),
    "disk": (FRAMES + "OSError: [Errno 28] No space left on device", "disk_full", Cause.UNKNOWN),
    "disk while saving": (FRAMES + "RuntimeError: [enforce fail at inline_container.cc:424] . unexpected pos 64 vs 0", "disk_full", Cause.UNKNOWN),
    "shapes": (FRAMES + "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 256x10)", "shape", Cause.UNKNOWN),
    "expanded": (FRAMES + "RuntimeError: The expanded size of the tensor (514) must match the existing size (512)", "shape", Cause.UNKNOWN),
    "checkpoint": (FRAMES + "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for lm_head.weight", "state_dict", Cause.UNKNOWN),
    "dtype": (FRAMES + "RuntimeError: expected scalar type Half but found Float", "dtype_mismatch", Cause.UNKNOWN),
    "devices": (FRAMES + "RuntimeError: Expected all tensors to be on the same device, but found at least two devices", "device_mismatch", Cause.UNKNOWN),
    "Xid": ("NVRM: Xid (PCI:0000:1f:00): 79, pid=123, GPU has fallen off the bus.", "xid", Cause.TRANSIENT),
    "ECC": (FRAMES + "RuntimeError: CUDA error: uncorrectable ECC error encountered", "xid", Cause.TRANSIENT),
    "illegal access": (FRAMES + "RuntimeError: CUDA error: an illegal memory access was encountered", "illegal_memory", Cause.UNKNOWN),
    "cuBLAS": (FRAMES + "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", "library", Cause.UNKNOWN),
    "anomaly": (FRAMES + "RuntimeError: Function 'LogBackward0' returned nan values in its 0th output.", "anomaly", Cause.LOG_OF_ZERO),
    "Lightning's NaN": (FRAMES + "ValueError: The loss returned in `training_step` is nan.", "nan_loss", Cause.UNKNOWN),
    "own NaN": ("Loss is nan, stopping training", "nan_loss", Cause.UNKNOWN),
    "fairseq's scale": (FRAMES + "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.", "loss_scale", Cause.PRECISION_OVERFLOW),
    "DeepSpeed's scale": (FRAMES + "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "loss_scale", Cause.PRECISION_OVERFLOW),
    "no gradient": (FRAMES + "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", "no_gradient", Cause.NOT_UPDATING),
    "in place": (FRAMES + "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation", "in_place", Cause.UNKNOWN),
    "import": (FRAMES + "ModuleNotFoundError: No module named 'flash_attn'", "import", Cause.UNKNOWN),
    "driver": (FRAMES + "RuntimeError: The NVIDIA driver on your system is too old: CUDA driver version is insufficient", "driver", Cause.UNKNOWN),
    "JSON": (FRAMES + "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "data_format", Cause.BAD_BATCH),
    "the user's own": (FRAMES + "KeyError: 'input_ids'", "exception", Cause.UNKNOWN),
}  # fmt: skip
STOPS = {
    "by hand": (FRAMES + "KeyboardInterrupt", "interrupted"),
    "time": ("slurmstepd: error: *** JOB 123 ON node1 CANCELLED AT 2024-01-01T00:00:00 DUE TO TIME LIMIT ***", "time_limit"),
    "pre-emption": ("slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2024-01-01T00:00:00 DUE TO PREEMPTION ***", "preempted"),
    "terminated": ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15", "terminated"),
}  # fmt: skip


def ending_of(text: str) -> Crash:
    ending = find_crash(text)
    assert ending is not None
    return ending


@pytest.mark.parametrize("how", ENDINGS)
def test_crash_reason_is_named(how: str) -> None:
    text, kind, cause = ENDINGS[how]
    ending = ending_of("step 10 done\n" + text + "\n")
    assert (ending.kind, ending.cause, ending.is_fault) == (kind, cause, True)
    assert ending.sentence.endswith(".")
    assert ending.evidence
    assert ending.advice
    assert ending.line in text


@pytest.mark.parametrize("how", STOPS)
def test_external_termination_is_no_fault_of_the_run(how: str) -> None:
    text, kind = STOPS[how]
    ending = ending_of(text)
    assert (ending.kind, ending.is_fault) == (kind, False)


def test_out_of_memory_is_reported_with_sizes() -> None:
    ending = ending_of(FRAMES + NEW_MEMORY)
    assert "2.00 GiB was requested, 813 MiB of 79.15 GiB was free" in ending.sentence
    assert "expandable_segments" in ending.advice[0]
    assert "8.50 GiB" in ending.advice[0]


def test_memory_of_other_processes_is_reported() -> None:
    assert "nvidia-smi" in ending_of(FRAMES + OLD_MEMORY).advice[0]


def test_single_huge_allocation_is_reported() -> None:
    text = NEW_MEMORY.replace("allocate 2.00 GiB", "allocate 64.00 GiB")
    assert "check its shape" in ending_of(text).advice[0]


def test_timeout_is_reported_with_collective_rank_and_seconds() -> None:
    ending = ending_of(TIMEOUT)
    assert "600 seconds" in ending.sentence
    assert any("ALLREDUCE, number 1234; rank 3" in line for line in ending.evidence)


def test_line_of_user_code_is_named() -> None:
    assert any("/home/me/train.py:61 in main" in line for line in ending_of(FRAMES + "KeyError: 'x'").evidence)


def test_root_cause_of_the_launcher_is_reported() -> None:
    text = FRAMES + "KeyError: 'x'\n" + CHILD.format(code=1, trace="none")
    assert any("rank 5 on node7" in line and "exit code 1" in line for line in ending_of(text).evidence)


@pytest.mark.parametrize("root", [FRAMES + NEW_MEMORY, FRAMES + "KeyError: 'x'"])
def test_follow_up_errors_are_not_taken_for_the_cause(root: str) -> None:
    """One rank fails, the others wait until the watchdog times out, and the launcher kills them."""
    labelled = "\n".join(f"[rank1]: {line}" for line in root.split("\n"))
    others = f"{TIMEOUT}\nsrun: error: node1: task 0: Exited with exit code 137\n"
    kind = ending_of(root).kind
    assert ending_of(labelled + "\n" + others).kind == kind
    assert ending_of(others + labelled + "\n").kind == kind
    assert any("Rank 1" in line for line in ending_of(labelled + "\n" + others).evidence)


def test_last_exception_of_a_chain_is_used() -> None:
    text = FRAMES + "KeyError: 'x'\n\nDuring handling of the above exception, another exception occurred:\n\n" + FRAMES
    assert "AttributeError" in ending_of(text + "AttributeError: y").sentence


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Training complete\nwandb: Synced 5 files",
        "x.py:3: UserWarning: Error in the colour of the plot\n  warnings.warn('failed')\nsaved to out/model.pt",
        "2024-01-01 INFO no error so far",
        FRAMES + "OSError: [Errno 28] No space left on device\n" + "Processing another file of the archive now\n" * 60,
    ],
)
def test_run_without_a_final_exception_has_no_crash_reason(text: str) -> None:
    assert find_crash(text) is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([text for text, *_ in ENDINGS.values()]), max_size=4),
    st.integers(0, 900),
    st.integers(0, 900),
)
def test_cut_and_spliced_tracebacks_never_crash(parts: list[str], start: int, stop: int) -> None:
    text = "\n".join(parts)
    for piece in (text[start:], text[:stop], text[start:] + text[:stop]):
        ending = find_crash(piece)
        assert ending is None or (ending.sentence and "{" not in ending.sentence)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=2000))
def test_any_text_is_accepted(text: str) -> None:
    find_crash(text)

"""The GPUs of a plan: how many, their memory, speed and links, from text such as 8x80GB or 16xH100."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from surefoot.plan.plan_error import PlanError

_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+"
GPUS_EXAMPLE = "such as 8x80GB, 8xH100 or H100"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, from its data sheet: dense TFLOP/s, bytes per second to another GPU of the node in one direction."""

    name: str
    memory: float
    bfloat16: float
    """0 where the hardware cannot."""
    float16: float
    tf32: float
    float32: float
    link: float

    def peak(self, compute: str) -> float:
        """FLOP/s of matrix products in this type; what the hardware lacks runs at float32's speed."""
        return 1e12 * (getattr(self, compute) or self.float32)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", 16e9, 0, 65, 0, 8.1, 16e9),
        Gpu("V100-16GB", 16e9, 0, 125, 0, 15.7, 150e9),
        Gpu("V100-32GB", 32e9, 0, 125, 0, 15.7, 150e9),
        Gpu("L4", 24e9, 121, 121, 60, 30.3, 32e9),
        Gpu("A10", 24e9, 125, 125, 62.5, 31.2, 32e9),
        Gpu("RTX3090", 24e9, 71, 71, 35.6, 35.6, 32e9),
        Gpu("RTX4090", 24e9, 165, 165, 82.6, 82.6, 32e9),
        Gpu("A100-40GB", 40e9, 312, 312, 156, 19.5, 300e9),
        Gpu("L40S", 48e9, 362, 362, 183, 91.6, 32e9),
        Gpu("A100-80GB", 80e9, 312, 312, 156, 19.5, 300e9),
        Gpu("H100", 80e9, 989, 989, 494, 67, 450e9),
        Gpu("H200", 141e9, 989, 989, 494, 67, 450e9),
        Gpu("B200", 180e9, 2250, 2250, 1125, 80, 900e9),
    )
}
_ALIASES = {"A100": "A100-80GB", "V100": "V100-16GB", "3090": "RTX3090", "4090": "RTX4090"}
_BY_MEMORY = ("T4", "A10", "V100-32GB", "A100-40GB", "L40S", "A100-80GB", "H200", "B200")
"""What a GPU named only by its memory is taken for: the first with that much."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """All GPUs of a run, in nodes that are joined by a network."""

    gpus: int
    gpu: Gpu
    assumed: bool = False
    """Only the memory was given; the kind of GPU is a guess."""
    per_node: int = 8
    network: float = 50e9
    """Bytes per second to another node, per GPU."""

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the slowest link that a collective over all GPUs crosses."""
        return self.gpu.link if self.nodes == 1 else min(self.gpu.link, self.network)


def parse_count(name: str, text: str) -> float:
    """A positive number such as 7e9, 7B or 1.5T."""
    match = re.fullmatch(rf"({_NUMBER})\s*([KMGBT]?)", text.strip().replace("_", ""), re.IGNORECASE)
    value = float(match[1]) * _SUFFIXES[match[2].upper()] if match else 0.0
    if not 0 < value < float("inf"):
        raise PlanError(f"{name} {text}: expected a number above 0, such as 7e9, 7B or 1.5T")
    return value


def parse_bytes(name: str, text: str) -> float:
    """A size such as 80GB or 40GiB."""
    match = re.fullmatch(rf"({_NUMBER})\s*([KMGT]i?B)(?:/s)?", text.strip(), re.IGNORECASE)
    value = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 0 < value < float("inf"):
        raise PlanError(f"{name} {text}: expected a size, such as 80GB or 40GiB")
    return value


def parse_gpus(text: str) -> Cluster:
    """From COUNTxMEMORY, COUNTxNAME, or one of both without a count."""
    match = re.fullmatch(r"(?:([0-9]+)\s*[xX])?\s*(.*)", text.strip())
    number, kind = (int(match[1] or 1), match[2]) if match else (0, "")
    if number < 1 or not kind:
        raise PlanError(f"--gpus {text}: expected a number of GPUs and their memory or name, {GPUS_EXAMPLE}")
    gpu, assumed = _find_gpu(text, kind)
    return Cluster(number, gpu, assumed)


def local_gpu() -> Cluster | None:
    """The GPU of this machine that a run on one GPU would use, if there is one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    words = properties.name.upper().replace(" ", "")
    name = next((name for name in (*GPUS, *_ALIASES) if name.upper() in words), None)
    memory = float(properties.total_memory)
    if name is None:
        return Cluster(1, _by_memory(memory), assumed=True)
    return Cluster(1, replace(GPUS[_ALIASES.get(name, name)], memory=memory))


def _by_memory(memory: float) -> Gpu:
    name = next((name for name in _BY_MEMORY if GPUS[name].memory >= 0.95 * memory), _BY_MEMORY[-1])
    return replace(GPUS[name], memory=memory)


def _find_gpu(text: str, kind: str) -> tuple[Gpu, bool]:
    wanted = kind.upper().replace(" ", "").replace("GIB", "GB")
    names = {name.upper(): name for name in (*GPUS, *_ALIASES)}
    if name := names.get(wanted):
        return GPUS[_ALIASES.get(name, name)], False
    if re.fullmatch(rf"({_NUMBER})\s*[KMGT]i?B", kind, re.IGNORECASE):
        return _by_memory(parse_bytes("--gpus", kind)), True
    raise PlanError(
        f"--gpus {text}: {kind} is neither a memory size, such as 80GB, nor one of {', '.join(GPUS)}. "
        f"Write a number of GPUs and their memory or name, {GPUS_EXAMPLE}"
    )

"""What a line of console text is about, told by a look: rows, code, settings, an update left out."""

from __future__ import annotations

import re
from collections.abc import Iterator

LOSS_WORDS = ("loss", "nll", "ppl", "perplex", "损失", "elbo")
ROW_WORDS = (
    *LOSS_WORDS, "step", "iter", "epoch", "reward", "acc", "lr", "norm", "update", "round", "batch", "error", "learning",
    "cost", "objective", "return", "score", "mse", "mae", "l1", "l2", "eval", "valid", "test", "scale", "%|",
    "轮", "步", "误差",
)  # fmt: skip
"""A line without any of them holds no row."""
_CODE = re.compile(
    r"^\s*(?:import |from \S+ import|def |class |for .* in .*:|if .*:\s*(?:#.*)?$|while .*:|return\b|print\(|#|//|@\w|"
    r"try:|with .*:\s*$|elif |else:|assert |raise |self\.\w|async |lambda )|\b[fF][\"'].*\{|Namespace\(|"
    r"\{[A-Za-z_][\w.]*:[.\d]*[a-z]\}"
)
_OVERFLOW = re.compile(r"(?i)overflow.*(?:skip|ignor|reduc|setting)")
_SCALE_TO = re.compile(r"(?i)(?:reducing|scale|setting)[a-z ]* to:?\s*([\d.]+(?:e[+-]?\d+)?)")
_SCALE = re.compile(r"(?i)loss[ _]scale[: =]+([\d.]+(?:e[+-]?\d+)?)")
_RANK = re.compile(r"(?i)rank\s*(\d+)")
_FACT = re.compile(
    r"(?i)(?<![A-Za-z0-9_])['\"]?(fp16|bf16|amp|batch_size|train_batch_size|per_device_train_batch_size|micro_batch_size"
    r"|global_batch_size|max_steps|max_iters|train_iters|num_train_epochs|num_epochs|epochs|learning_rate|max_lr|lr"
    r"|grad_clip|clip_grad|max_grad_norm|gradient_clip_val|gradient_clipping|clip_norm|vocab_size|num_classes|num_labels"
    r"|dtype|precision|mixed_precision)['\"]?\s*(?:[:=]|\.{3,})\s*['\"]?([\w.+-]+)"
)


def is_code(line: str) -> bool:
    """Source code, or a template of a line: what stands in it happened to nobody."""
    return _CODE.search(line) is not None


def find_settings(line: str) -> Iterator[tuple[str, float | str]]:
    """Settings that a line tells, by name."""
    for match in _FACT.finditer(line):
        try:
            yield match[1].lower(), float(match[2])
        except ValueError:
            yield match[1].lower(), match[2]


class OverflowCounter:
    """Updates left out because gradients overflowed, as DeepSpeed, apex and fairseq tell of them."""

    def __init__(self) -> None:
        self._count = 0.0
        self._rank = ""

    def parse(self, line: str) -> dict[str, float] | None:
        """How many there were, and the loss scale that follows; nothing in it for a rank that only says it too."""
        if ("verflow" not in line and "OVERFLOW" not in line) or not _OVERFLOW.search(line):
            return None
        rank = _RANK.search(line)
        self._rank = self._rank or (rank[1] if rank else "")
        if rank and rank[1] != self._rank:
            return {}
        self._count += 1
        row = {"overflow": self._count}
        found = _SCALE_TO.search(line)
        if found is None or "hysteresis" in found[0]:
            found = _SCALE.search(line)
        if found and found[1].rstrip(".").count(".") < 2:
            row["loss scale"] = float(found[1].rstrip("."))
        return row

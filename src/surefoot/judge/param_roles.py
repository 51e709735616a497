"""The role of a tensor, read from its name and its module's class, and the cause that a problem there points to.

A wrong hint costs more than none: a name that does not say what it is stays `Role.OTHER`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from surefoot.records import Cause


class Role(StrEnum):
    """What a tensor does in the model."""

    VISION = "vision"
    PROJECTION = "projection"
    """Between two parts of a model, such as vision and language."""
    LANGUAGE = "language"
    ATTENTION = "attention"
    NORM = "norm"
    EMBEDDING = "embedding"
    HEAD = "head"
    """The last layer, and what belongs to the loss."""
    RECURRENT = "recurrent"
    CONVOLUTION = "convolution"
    OTHER = "other"


class GradProblem(StrEnum):
    """What is wrong with a tensor or its gradient."""

    EXPLODING = "exploding"
    VANISHING = "vanishing"
    NONFINITE = "nonfinite"
    OSCILLATING = "oscillating"


def _words(pattern: str) -> re.Pattern[str]:
    """Matches whole words in a name such as `post_attention_layernorm`."""
    return re.compile(rf"(?:^|_)(?:{pattern})(?:_|$)")


def _whole(pattern: str) -> re.Pattern[str]:
    """Matches only a whole piece of a name: `key`, but not `key_points`."""
    return re.compile(rf"^(?:{pattern})$")


KINDS: tuple[tuple[Role, re.Pattern[str]], ...] = (
    (Role.NORM, re.compile(r"Norm(?![a-z])")),
    (Role.RECURRENT, re.compile(r"LSTM|GRU|RNN")),
    (Role.ATTENTION, re.compile(r"Attention|Attn")),
    (Role.EMBEDDING, re.compile(r"Embed")),
    (Role.HEAD, re.compile(r"Head$")),
    (Role.CONVOLUTION, re.compile(r"Conv(?:Transpose)?[123]d")),  # GPT-2's Conv1D, with a large D, is a linear layer
)
"""Roles by the module's class."""

NAMES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    (Role.NORM, _words(r"[a-z]*norms?|ln|lnf|bn|gn|normali[sz]ation")),
    (Role.ATTENTION, _words(r"[a-z]*(?:attn|attention)s?|w?qkv|mha")),
    (Role.ATTENTION, _whole(r"[qkvo]_proj|to_k?[qkv]|w[qkv]|query|key|query_key_value|in_proj_(?:weight|bias)")),
    (Role.HEAD, _words(r"heads?|classifier|logits?|unembed(?:ding)?|predictions|loss|criterion")),
    (Role.HEAD, _whole(r"cls|score|embed_out|output_layer|proj_out|qa_outputs")),
    (Role.EMBEDDING, _words(r"embed(?:s|dings?)?|emb|wte|wpe")),
    (Role.EMBEDDING, _whole(r"(?:cls|class|mask|dist|register|query)_tokens?|pos|positions?|place|conv_proj")),
    (Role.RECURRENT, _words(r"lstm|gru|rnn|recurrent|(?:weight|bias)_(?:ih|hh|hr)")),
    (Role.CONVOLUTION, _words(r"[a-z]*conv[sd]?|convolution|depthwise|pointwise")),
)
"""Roles by one piece of the name, in snake case and without digits; the first match counts."""

ALONE = re.compile(r"(?:model\.)*(?:(?:backbone\.)?fc|out|output)\.(?:weight|bias)")
"""Names of a last layer at the top of the model: ResNet's `fc`, LLaMA's `output`."""

PARTS: tuple[tuple[Role, re.Pattern[str]], ...] = (
    (
        Role.PROJECTION,
        re.compile(
            r"(?:^|[._])(?:projector|merger|connector|resampler|aligner|abstractor|q_?former)(?:[._]|$)"
            r"|(?:^|\.)(?:visual|vision|image|audio|text|language|modality|multi_modal|mm)_proj(?:ection)?(?:\.|$)"
            r"|^(?:model\.)*proj(?:ection)?(?:\.|$)|(?:^|\.)visual\.proj$"
        ),
    ),
    (
        Role.VISION,
        re.compile(
            r"(?:^|[._])(?:vision|visual|images?|img|pixels?|patch|vit|deit|beit|swin|resnet|convnext|dino(?:v\d)?|siglip)"
            r"(?:[._]|$)|(?:^|\.)conv_proj\.|(?:^|\.)layer[1-4]\.\d+\.(?:conv\d|bn\d|downsample)\."
        ),
    ),
    (
        Role.LANGUAGE,
        re.compile(
            r"(?:^|[._])(?:language|text|lm|llm|llama|gpt\d?|[a-z]*bert|wte|wpe)(?:[._]|$)"
            r"|(?:^|\.)(?:embed_tokens|tok_embeddings|token_embeddings?|word_embeddings?|ln_f|cls\.predictions)\."
            r"|(?:^|\.)h\.\d+\.|(?:^|\.)block\.\d+\.layer\.\d+\."
            r"|(?:^|\.)model\.layers\.\d+\.(?:self_attn|mlp|input_layernorm|post_attention_layernorm)\."
            r"|\.(?:gate_proj|up_proj|down_proj|gate_up_proj)(?:\.|$)"
        ),
    ),
)
"""Patterns of the parts of a model; in this order, because a merger may live in the vision tower."""

WRAPPERS = frozenset(
    {"module", "base_model", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Pieces that DDP, torch.compile, PEFT and others add to a name."""


def role_of(name: str, kind: str = "") -> Role:
    """The narrowest role that a parameter's name and its module's class show: attention rather than vision.

    >>> role_of("vision_tower.encoder.layers.0.self_attn.q_proj.weight")
    <Role.ATTENTION: 'attention'>
    """
    by_class = next((role for role, pattern in KINDS if pattern.search(kind)), None)
    if by_class is Role.NORM or by_class is Role.RECURRENT or by_class is Role.ATTENTION:
        return by_class
    path = _path(name)
    return _role_by_name(path) or by_class or _part(path)


def part_of(name: str) -> Role:
    """The part of a model that a parameter belongs to: vision, projection, language, or other.

    >>> part_of("vision_tower.encoder.layers.0.self_attn.q_proj.weight")
    <Role.VISION: 'vision'>
    """
    return _part(_path(name))


def language_part(names: Sequence[str]) -> list[int]:
    """The indices of the tensors of the language part, in a model that has a vision part or a projection, too."""
    parts = [part_of(name) for name in names]
    several = Role.VISION in parts or Role.PROJECTION in parts
    return [k for k, part in enumerate(parts) if part is Role.LANGUAGE] if several else []


def _path(name: str) -> list[str]:
    return [piece for piece in name.split(".") if piece not in WRAPPERS]


def _part(path: list[str]) -> Role:
    name = ".".join(path).lower()
    return next((role for role, pattern in PARTS if pattern.search(name)), Role.OTHER)


def _role_by_name(path: list[str]) -> Role | None:
    """The role in the last piece of a name that shows one.

    What stands above a numbered block holds many layers and says nothing about this one.
    """
    if ALONE.fullmatch(".".join(path)):
        return Role.HEAD
    for place in range(len(path) - 1, -1, -1):
        if path[place].isdigit():
            if place < len(path) - 2:
                return None
            continue
        piece = re.sub(r"\d", "", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path[place])).lower()
        for role, pattern in NAMES:
            if pattern.search(piece):
                return role
    return None


ROLE_CAUSES: Mapping[tuple[Role, GradProblem], tuple[Cause, str]] = MappingProxyType(
    {
        (Role.VISION, GradProblem.EXPLODING): (
            Cause.INPUT_SCALE,
            "The vision encoder explodes: images are not normalised (to [-1, 1] or [0, 1]), or all black or white.",
        ),
        (Role.PROJECTION, GradProblem.VANISHING): (
            Cause.INITIALISATION,
            "The projection layer vanishes: its dimensions do not match, or its initialisation is too small.",
        ),
        (Role.LANGUAGE, GradProblem.OSCILLATING): (
            Cause.ATTENTION_MASK,
            "The language model oscillates: sequence lengths vary too much, or padding or mask is wrong.",
        ),
        (Role.ATTENTION, GradProblem.NONFINITE): (
            Cause.ATTENTION_MASK,
            "Attention is not finite: a mask leaves a row with nothing to attend to, or the sequence is too long.",
        ),
        (Role.NORM, GradProblem.NONFINITE): (
            Cause.ZERO_VARIANCE,
            "A norm is not finite: its input had zero variance.",
        ),
        (Role.HEAD, GradProblem.NONFINITE): (
            Cause.LOG_OF_ZERO,
            "The head or the loss is not finite: it took the log of zero, or divided by zero.",
        ),
    }
)
"""The cause that a problem in a role points to, with a sentence that says so."""


def cause_of_role(role: Role, trouble: GradProblem) -> tuple[Cause, str] | None:
    """The cause that a problem in a role or part points to, and a sentence that says so."""
    return ROLE_CAUSES.get((role, trouble))


def hint_of_part(names: Sequence[str], share: float, trouble: GradProblem) -> tuple[Cause, str] | None:
    """What it points to that a problem is in one part of a model alone; `share` is the fraction of all tensors that
    have it. Where most have it, it is not about a part."""
    parts = {part_of(name) for name in names}
    return cause_of_role(parts.pop(), trouble) if len(parts) == 1 and 2 * share <= 1 else None


SOFTMAX_HINT = "A softmax is not finite: a row of its input is -inf throughout, as where a mask hides everything."

ARITHMETIC = ("Linear", "Conv", "Embedding", "Bilinear", "LSTM", "GRU", "RNN")
"""Modules that only multiply and add: with finite inputs and weights, they overflow."""


def cause_at_module(module: str, kind: str, *, inputs: bool, weights: bool) -> tuple[Cause, str]:
    """The cause of a non-finite value that first appeared in a module, and a sentence that says so.

    `kind` is the module's class; `inputs` and `weights` say whether those were non-finite already.

    >>> cause_at_module("blocks.0.attention", "Attention", inputs=False, weights=False)[0]
    <Cause.ATTENTION_MASK: 'attention_mask'>
    """
    where = f"{module} ({kind})" if module else f"the model ({kind})"
    if inputs:
        return Cause.BAD_BATCH, "the model's input was already non-finite"
    if weights:
        return Cause.WEIGHTS_DAMAGED, f"the weights of {where} are not finite"
    if not kind:
        zero = "it took the log of zero, or divided by zero"
        return Cause.LOG_OF_ZERO, f"the model's output was finite, but the loss was not: {zero}"
    if kind.startswith(ARITHMETIC):
        return Cause.PRECISION_OVERFLOW, f"finite values went into {where} and overflowed there"
    softmax = (Cause.ATTENTION_MASK, SOFTMAX_HINT) if "Softmax" in kind else None
    known = softmax or cause_of_role(role_of(module, kind), GradProblem.NONFINITE)
    if known is None:
        return Cause.UNKNOWN, f"finite values went into {where}, and non-finite ones came out"
    return known[0], f"{known[1]} It began in {where}."

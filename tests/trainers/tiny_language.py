"""Tiny language models, a tokenizer and data for trainers of transformers and TRL; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

WORDS = 32
CONFIG: dict[str, Any] = {
    "vocab_size": WORDS + 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": WORDS,
    "eos_token_id": WORDS + 1,
    "bos_token_id": WORDS + 1,
}


def language_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def reward_model(seed: int = 0) -> LlamaForSequenceClassification:
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(LlamaConfig(**CONFIG, num_labels=1))


def tokenizer() -> PreTrainedTokenizerFast:
    """Words are w0, w1, ..."""
    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<pad>": WORDS, "<end>": WORDS + 1, "<unk>": WORDS + 2}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def counting(start: int, length: int, stride: int = 3) -> str:
    """A text that can be learnt: words that count upwards in strides."""
    return " ".join(f"w{(start + stride * i) % WORDS}" for i in range(length))


def token_rows(count: int, length: int = 10, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """The same kind of text as token numbers, for the plain Trainer."""
    starts = torch.randint(0, WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    ids = (starts + 3 * torch.arange(length)) % WORDS
    return [{"input_ids": row, "labels": row} for row in ids]

"""Small data of every kind, and helpers to open it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.corpus import TrainingData, open_data
from surefoot.train.recipe.schema import DataSection


def opened(kind: str = "text", /, *, batch_size: int = 4, rank: int = 0, world: int = 1, **fields: Any) -> TrainingData:
    options = {
        name: fields.pop(name) for name in ("dataset", "collate", "cache", "segments", "pin_memory") if name in fields
    }
    if "held_out_set" in fields:
        options["eval_dataset"] = fields.pop("held_out_set")
    for name in ("path", "held_out_path"):
        if name in fields:
            fields[name] = [
                str(entry) for entry in (fields[name] if isinstance(fields[name], list) else [fields[name]])
            ]
    spec = DataSection(kind=kind, **{"context": 8, **fields})  # pyright: ignore[reportArgumentType]
    return open_data(spec, seed=3, batch_size=batch_size, rank=rank, world_size=world, **options)


def write_texts(folder: Path, count: int = 20) -> Path:
    """Distinct texts of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        words = " ".join(f"w{i}x{j}" for j in range(5 + i * 7 % 11))
        (folder / f"text-{i:03}.txt").write_text(words, encoding="utf-8")
    return folder


def write_tokens(path: Path, count: int = 1000, dtype: str = "uint16", vocab: int = 500) -> Path:
    np.random.default_rng(0).integers(0, vocab, count).astype(dtype).tofile(path)
    return path


def write_chats(path: Path, count: int = 20) -> Path:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"it is {i}" * (1 + i % 3)},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """Train and save a small Hugging Face tokenizer with an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the assistant says it is so", "the user says what it is"] * 5, trainer)
    tokenizer.enable_truncation(4)  # some saved tokenizers have this set; texts must not be truncated by it
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def counted_targets(batch: dict[str, Any]) -> list[int]:
    """The targets that are not ignored, as one list."""
    targets = batch["targets"].flatten()
    return targets[targets != -100].tolist()

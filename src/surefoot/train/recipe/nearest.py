"""The key that was meant: near in spelling, the same word in another section, or another trainer's word for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ELSEWHERE = {
    "optimizer.lr": "learning_rate rate max_lr peak_lr base_lr",
    "optimizer.name": "optim opt optimiser",
    "optimizer.weight_decay": "wd decay",
    "batch.size": "batch_size per_device_train_batch_size train_batch_size micro_batch_size bs",
    "batch.accumulate": "gradient_accumulation_steps accumulation_steps accumulate_grad_batches grad_accum",
    "steps": "max_steps num_steps total_steps iterations max_iters train_steps updates",
    "epochs": "max_epochs num_train_epochs num_epochs",
    "schedule.name": "lr_scheduler lr_scheduler_type scheduler",
    "schedule.warmup": "warmup_steps warmup_ratio warmup_iters warmup",
    "schedule.floor": "min_lr min_lr_ratio",
    "data.context": "seq_len seq_length sequence_length block_size max_length max_seq_len max_seq_length",
    "data.path": "dataset_path data_path data_dir train_file files",
    "data.workers": "num_workers dataloader_num_workers",
    "data.packing": "pack packed",
    "protection.clip": "grad_clip max_grad_norm gradient_clip_val gradient_clipping clip_grad_norm",
    "precision.compute": "dtype bf16 fp16 amp mixed_precision torch_dtype",
    "speed.compile": "torch_compile",
    "speed.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "speed.attention": "attn_implementation attn",
    "parallel.how": "strategy fsdp ddp zero zero_stage sharding",
    "checkpoints.every": "save_steps save_every checkpoint_every save_interval",
    "evaluation.every": "eval_steps eval_every eval_interval",
    "evaluation.batches": "eval_iters eval_batches",
    "log.every": "logging_steps log_every log_interval",
    "run_dir": "output_dir out_dir save_dir checkpoint_dir logdir",
    "seed": "random_seed manual_seed",
    "model.factory": "model.name model.class model.type model._target_",
}
"""What others call our keys."""
_OURS = {word: ours for ours, words in _ELSEWHERE.items() for word in words.split()}


def meant(key: str, known: Iterable[str]) -> str | None:
    """The key of `known` that someone who wrote `key` had in mind; both with the keys above them, joined by dots."""
    known = list(known)
    above, _, last = key.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == above}
    if near := difflib.get_close_matches(last, siblings, 1, 0.75):
        return siblings[near[0]]
    if (ours := _OURS.get(key.lower()) or _OURS.get(last.lower())) in known:
        return ours
    if same := [each for each in known if each.rpartition(".")[2] == last and each != key]:
        return same[0]
    if near := difflib.get_close_matches(last, siblings, 1, 0.55) or difflib.get_close_matches(key, known, 1, 0.75):
        return siblings.get(near[0], near[0])
    return None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is spelt most like `word`, if any is."""
    return next(iter(difflib.get_close_matches(word, list(known), 1, 0.5)), None)

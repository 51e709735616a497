"""surefoot in the Hugging Face Trainer: one callback; clipping, accumulation and checkpoints stay with the Trainer.

python examples/hf_trainer.py [RUN_DIR]
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import surefoot
from surefoot.integrations.hf import SurefootCallback

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/hf_trainer"


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
)
rows = [{"inputs_embeds": torch.randn(16, 32), "labels": torch.randint(0, 64, (16,))} for _ in range(160)]
rows[77]["inputs_embeds"][0, 0] = float("nan")
arguments = TrainingArguments(
    output_dir=run_dir + "/trainer",
    use_cpu=True,
    bf16=True,
    max_grad_norm=1.0,
    num_train_epochs=1,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model, arguments, train_dataset=rows, callbacks=[SurefootCallback(run_dir)]).train()

run = surefoot.read(run_dir)
print(f"{run.scalars.rows} attempted updates, verdicts {run.scalars['verdict'].tolist()}")
print(*(f"update {e['step']}: {e['action']}, {e['reason']}" for e in run.events if e["kind"] == "decision"), sep="\n")
print(f"all weights finite: {all(bool(p.isfinite().all()) for p in model.parameters())}")

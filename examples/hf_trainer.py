"""surefoot in the Hugging Face Trainer as a callback; clipping and accumulation stay with the Trainer.

python examples/hf_trainer.py [RUN_DIR]
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import surefoot

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/hf_trainer"


class Surefoot(TrainerCallback):
    """Attaches once the optimizer exists, and watches the loss in a forward hook."""

    def on_train_begin(self, args, state, control, *, model, optimizer, **_):
        self.guard = surefoot.attach(model, optimizer, run_dir=run_dir)
        self.hook = model.register_forward_hook(self.watch, with_kwargs=True)

    def watch(self, model, args, batch, output):
        if model.training:
            self.guard.watch(output.loss, batch)

    def on_train_end(self, args, state, control, **_):
        self.hook.remove()
        self.guard.close()


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
Trainer(model, arguments, train_dataset=rows, callbacks=[Surefoot()]).train()

run = surefoot.read(run_dir)
print(f"{run.scalars.rows} attempted updates, verdicts {run.scalars['verdict'].tolist()}")
print(*(f"update {e['step']}: {e['action']}, {e['reason']}" for e in run.events if e["kind"] == "decision"), sep="\n")
print(f"all weights finite: {all(bool(p.isfinite().all()) for p in model.parameters())}")

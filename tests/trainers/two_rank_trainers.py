"""Two ranks: the Trainer of transformers with DDP, and a loop on Accelerate with FSDP2; started by torchrun.

two_rank_trainers.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tiny_language import language_model, token_rows
from transformers import Trainer, TrainerCallback, TrainingArguments

import surefoot
from surefoot.integrations.accelerate import attach
from surefoot.integrations.hf import SurefootCallback
from surefoot.measure.layout import to_local

folder = Path(sys.argv[1])
torch.set_num_threads(1)


class Damage(TrainerCallback):
    """Multiplies all weights before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 140:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(30.0)


def train(name: str, callbacks: list[Any], steps: int) -> tuple[Any, float]:
    arguments = TrainingArguments(
        output_dir=str(folder / name / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=1e-2,
        save_steps=50,
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        language_model(), arguments, train_dataset=token_rows(1600), eval_dataset=token_rows(16), callbacks=callbacks
    )
    trainer.train()
    return trainer, float(trainer.evaluate()["eval_loss"])


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def sharded(name: str, bad_step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train with FSDP2; with a `bad_step`, rank 1 has a NaN in its loss there. Returns weights around that step."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = language_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    guard = attach(accelerator, model, optimizer, run_dir=folder / name)
    rows = token_rows(160, seed=accelerator.process_index)
    around = []
    for step in range(20):
        ids = torch.stack([row["input_ids"] for row in rows[8 * step : 8 * step + 8]])
        loss = model(input_ids=ids, labels=ids).loss
        if step == bad_step and accelerator.process_index == 1:
            loss = loss * float("nan")
        if step in (bad_step, bad_step + 1):
            around.append([to_local(p.detach()).clone() for p in model.parameters()])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return around[0], around[1]


bare, early_loss = train("bare", [], 30)
guarded, _ = train("guarded", [SurefootCallback(folder / "guarded" / "run")], 30)
damaged, damaged_loss = train("damaged", [Damage(), SurefootCallback(folder / "damaged" / "run")], 200)
rank = guarded.args.process_index
results = {
    "same": same(bare.model, guarded.model),
    "losses": [early_loss, damaged_loss],
    "steps": [damaged.state.global_step, damaged.lr_scheduler.get_last_lr()[0]],
}
before, after = sharded("sharded", bad_step=10)
results["refused"] = all(map(torch.equal, before, after))
if rank == 0:
    run = surefoot.read(folder / "damaged" / "run")
    results["events"] = [event.get("name") for event in run.events if event["kind"] == "note"]
    results["verdicts"] = surefoot.read(folder / "sharded").scalars["verdict"].tolist()
(folder / f"results-{rank}.json").write_text(json.dumps(results))

"""Trains with the Trainer of transformers and writes down the data of each step; may be killed by itself on the way.

python killed_hf_trainer.py FOLDER [KILL_AT_STEP]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_language import language_model, token_rows
from transformers import Trainer, TrainerCallback, TrainingArguments

from surefoot.integrations.hf import SurefootCallback

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
torch.set_num_threads(1)


class Data(TrainerCallback):
    """Writes the first tokens of each step's batch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert callback._step_fn is not None
        assert callback._step_fn.batch is not None
        with (folder / "data.txt").open("a") as file:
            print(state.global_step, callback._step_fn.batch["inputs"]["input_ids"][:, 0].tolist(), file=file)
        if state.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


callback = SurefootCallback(folder / "run")
arguments = TrainingArguments(
    output_dir=str(folder / "trainer"),
    use_cpu=True,
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=1e-2,
    save_steps=8,
    report_to="none",
    logging_strategy="no",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(language_model(), arguments, train_dataset=token_rows(80), callbacks=[callback, Data()])
trainer.train(resume_from_checkpoint=any((folder / "trainer").glob("checkpoint-*")))
torch.save(trainer.model.state_dict(), folder / "weights.pt")

"""SurefootCallback in TRL's trainers, which compute their losses themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.records import JudgedBy, Verdict

WHY = "trl is not installed: pip install 'surefoot[hf]'"
trl = pytest.importorskip("trl", reason=WHY)
datasets = pytest.importorskip("datasets", reason=WHY)
peft = pytest.importorskip("peft", reason=WHY)
SurefootCallback = pytest.importorskip("surefoot.integrations.hf", reason=WHY, exc_type=ImportError).SurefootCallback
tiny = pytest.importorskip("tiny_language", reason=WHY, exc_type=ImportError)
transformers = pytest.importorskip("transformers", reason=WHY)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
UPDATES, BAD_STEP = 10, 6
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "max_steps": UPDATES,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "gradient_checkpointing": False,
}


def sft(net, out: Path, callbacks, **options):
    rows = datasets.Dataset.from_dict({"text": [tiny.counting(i, 8) for i in range(96)]})
    arguments = trl.SFTConfig(output_dir=str(out), max_length=16, **COMMON, **options)
    return trl.SFTTrainer(net, arguments, train_dataset=rows, processing_class=tiny.tokenizer(), callbacks=callbacks)


def sft_packed(net, out: Path, callbacks):
    return sft(net, out, callbacks, gradient_accumulation_steps=2)


def sft_lora(net, out: Path, callbacks):
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return sft(peft.get_peft_model(net, lora), out, callbacks)


def pairs():
    return datasets.Dataset.from_dict(
        {
            "prompt": [tiny.counting(i, 4) for i in range(64)],
            "chosen": [" " + tiny.counting(i + 12, 4) for i in range(64)],
            "rejected": [" " + tiny.counting(i + 5, 4, 7) for i in range(64)],
        }
    )


def dpo(net, out: Path, callbacks):
    arguments = trl.DPOConfig(output_dir=str(out), max_length=16, **COMMON)
    return trl.DPOTrainer(
        net,
        ref_model=tiny.language_model(),
        args=arguments,
        train_dataset=pairs(),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
    )


def reward(net, out: Path, callbacks):
    rows = pairs().remove_columns("prompt")
    arguments = trl.RewardConfig(output_dir=str(out), max_length=16, **COMMON)
    return trl.RewardTrainer(net, arguments, train_dataset=rows, processing_class=tiny.tokenizer(), callbacks=callbacks)


def even_words(completions: list[str], **_: Any) -> list[float]:
    """Reward words with an even number."""
    words = [[w for w in text.split() if w.startswith("w")] for text in completions]
    return [sum(int(w[1:]) % 2 == 0 for w in ws) / max(len(ws), 1) for ws in words]


def grpo(net, out: Path, callbacks, **options: Any):
    rows = datasets.Dataset.from_dict({"prompt": [tiny.counting(i, 4) for i in range(32)]})
    arguments = trl.GRPOConfig(
        output_dir=str(out), max_completion_length=8, **{**COMMON, "num_generations": 4, **options}
    )
    return trl.GRPOTrainer(
        net,
        reward_funcs=even_words,
        args=arguments,
        train_dataset=rows,
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
    )


TRAINERS = {
    "SFT": (sft, tiny.language_model),
    "SFT, accumulated": (sft_packed, tiny.language_model),
    "SFT with LoRA": (sft_lora, tiny.language_model),
    "DPO": (dpo, tiny.language_model),
    "Reward": (reward, tiny.reward_model),
    "GRPO": (grpo, tiny.language_model),
}


class NanStep(transformers.TrainerCallback):
    """Makes one update's loss NaN, by a weight that is NaN during the forward pass only."""

    def __init__(self) -> None:
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []
        self.schedule: list[tuple[int, int]] = []

    def on_step_begin(self, args, state, control, model=None, **_):
        self.hook = None
        if state.global_step == BAD_STEP:
            self.before = [t.clone() for t in model.state_dict().values()]
            head = model.get_input_embeddings()
            self.hook = head.register_forward_hook(
                lambda module, inputs, output: output * math.nan if torch.is_grad_enabled() else output
            )

    def on_step_end(self, args, state, control, model=None, lr_scheduler=None, **_):
        self.schedule.append((state.global_step, lr_scheduler.last_epoch))
        if self.hook is not None:
            self.hook.remove()
            self.after = [t.clone() for t in model.state_dict().values()]


@pytest.mark.parametrize("name", TRAINERS)
def test_healthy_run_is_unchanged_and_its_losses_are_recorded(tmp_path, name):
    make, model = TRAINERS[name]
    nets = []
    for callbacks in ([], [SurefootCallback(run_dir=tmp_path / "run")]):
        torch.manual_seed(0)
        trainer = make(model(), tmp_path / "trainer", callbacks)
        trainer.train()
        nets.append(trainer.model)
    states = [net.state_dict().values() for net in nets]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    run = surefoot.read(tmp_path / "run")
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert run.scalars["loss"].tolist() == pytest.approx(logged, rel=1e-3, abs=2e-4)
    assert set(run.scalars["verdict"].tolist()) == {Verdict.APPLIED}
    assert not [e for e in run.events if e.get("name") in ("degraded", "no_backward")]
    if name == "GRPO":
        rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
        assert run.scalars["judged_by"].tolist() == [JudgedBy.PROGRESS] * UPDATES
        assert run.scalars["progress"].tolist() == pytest.approx(
            [loss - r for loss, r in zip(logged, rewards, strict=True)], abs=1e-3
        )


@pytest.mark.parametrize("name", ["SFT", "SFT with LoRA", "DPO", "Reward"])
def test_nan_update_leaves_weights_bit_identical_and_counters_in_step(tmp_path, name):
    make, model = TRAINERS[name]
    fault = NanStep()
    trainer = make(model(), tmp_path / "trainer", [SurefootCallback(run_dir=tmp_path / "run"), fault])
    trainer.train()
    assert fault.before
    assert all(map(torch.equal, fault.before, fault.after))
    assert fault.schedule == [(i, i) for i in range(1, UPDATES + 1)]
    verdicts = surefoot.read(tmp_path / "run").scalars["verdict"].tolist()
    assert [i for i, verdict in enumerate(verdicts) if verdict != Verdict.APPLIED] == [BAD_STEP]


def test_grpo_drops_its_rollouts_with_a_rewind(tmp_path):
    """After a rewind no rollout of the policy that was undone is trained on."""
    callback = SurefootCallback(run_dir=tmp_path / "run")
    buffered: list[bool] = []

    class Rewind(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                callback._rewound(1, 0)
                buffered.append(trainer._buffered_inputs is None)

    trainer = grpo(
        tiny.language_model(), tmp_path / "trainer", [callback, Rewind()], steps_per_generation=8, max_steps=5
    )
    trainer.train()
    assert buffered == [True]
    assert trainer.state.global_step == 5


def test_trials_leave_no_trace_in_the_trainers_metrics(tmp_path):
    """The step_fn computes the loss of the kept batch again; TRL's own metrics and counters do not see it."""
    callback = SurefootCallback(run_dir=tmp_path / "run")
    seen: list[tuple[float, float]] = []

    class Again(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            step_fn = callback._step_fn
            before = {mode: dict(values) for mode, values in trainer._metrics.items()}, trainer._total_train_tokens
            with torch.no_grad():
                first, second = (float(step_fn(trainer.model, step_fn.batch)) for _ in range(2))
            after = {mode: dict(values) for mode, values in trainer._metrics.items()}, trainer._total_train_tokens
            assert before == after
            seen.append((first, second))

    trainer = sft(tiny.language_model(), tmp_path / "trainer", [callback, Again()])
    trainer.train()
    assert len(seen) == UPDATES
    assert all(first == second for first, second in seen)


@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_with_damaged_weights_goes_back_to_what_earned_rewards(tmp_path, seed):
    """The loss says nothing there; by the reward the damage is seen, and the run goes back to just before it."""

    class Damage(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            if state.global_step == 100:
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(torch.randn_like(p))

    trainer = grpo(
        tiny.language_model(seed),
        tmp_path / "trainer",
        [SurefootCallback(run_dir=tmp_path / "run"), Damage()],
        seed=seed,
        max_steps=150,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        num_generations=8,
    )
    trainer.train()
    rewards = torch.tensor([line["reward"] for line in trainer.state.log_history if "reward" in line])
    rewinds = [e["values"] for e in surefoot.read(tmp_path / "run").events if e.get("name") == "rewound"]
    assert rewinds
    assert all(60 <= rewind["step"] <= 100 for rewind in rewinds)
    assert rewards[-20:].mean() > rewards[80:100].mean() - 0.1

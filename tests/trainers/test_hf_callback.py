"""SurefootCallback in the Trainer of transformers: in step with its counters, schedule, checkpoints and callbacks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.guard.validate import Misuse
from surefoot.records import Verdict

WHY = "transformers is not installed: pip install 'surefoot[hf]'"
transformers = pytest.importorskip("transformers", reason=WHY)
SurefootCallback = pytest.importorskip("surefoot.integrations.hf", reason=WHY, exc_type=ImportError).SurefootCallback
tiny = pytest.importorskip("tiny_language", reason=WHY, exc_type=ImportError)
language_model, token_rows = tiny.language_model, tiny.token_rows

UPDATES = 40
BAD_STEP = 7


class Record(transformers.TrainerCallback):
    """What the Trainer said of itself at each step, and whether it ended as it should."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.ended = 0

    def on_step_end(self, args, state, control, lr_scheduler=None, **_):
        assert lr_scheduler.last_epoch == state.global_step
        self.rates.append(lr_scheduler.get_last_lr()[0])

    def on_train_end(self, args, state, control, **_):
        self.ended += 1


class Damage(transformers.TrainerCallback):
    """Multiplies all weights before a step."""

    def __init__(self, at: int, factor: float = 30.0) -> None:
        self.at, self.factor = at, factor

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == self.at:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(self.factor)


class RateFault(transformers.TrainerCallback):
    """A rate that is far too large for six steps."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        if self.at <= state.global_step < self.at + 6:
            for group in optimizer.param_groups:
                group["lr"] = 3.0


FAULTS = {"weights": Damage, "rate": RateFault}


def trainer_for(net, rows, out: Path, callbacks=(), **options: Any):
    arguments = transformers.TrainingArguments(
        output_dir=str(out / "trainer"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "logging_strategy": "no",
            "train_sampling_strategy": "sequential",
            **options,
        },
    )
    return transformers.Trainer(net, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=list(callbacks))


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "epochs and evaluation": {"num_train_epochs": 2, "eval_strategy": "epoch"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_healthy_run_is_unchanged_and_its_losses_are_recorded(tmp_path, setting):
    bare, guarded = language_model(), language_model()
    options = {**SETTINGS[setting], "logging_strategy": "steps", "logging_steps": 1}
    rows = token_rows(48)
    trainer_for(bare, rows, tmp_path, **options).train()
    trainer = trainer_for(guarded, rows, tmp_path, [SurefootCallback(run_dir=tmp_path / "run")], **options)
    trainer.train()
    assert same(bare, guarded)
    run = surefoot.read(tmp_path / "run")
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert run.scalars["loss"].tolist() == pytest.approx(logged, rel=1e-3)
    assert set(run.scalars["verdict"].tolist()) == {Verdict.APPLIED}
    assert run.scalars["samples"].tolist() == [48 / (len(logged) / options.get("num_train_epochs", 1))] * len(logged)
    evaluated = [value for value in run.scalars["eval_loss"].tolist() if value == value]
    assert len(evaluated) == (1 if "eval_strategy" in options else 0)  # the last is reported after the last step
    assert "backward" not in vars(trainer.accelerator)
    assert "compute_loss" not in vars(trainer)


def test_compute_loss_func_works(tmp_path):
    bare, guarded = language_model(), language_model()

    def half_loss(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1)) / 2

    for net, callbacks in ((bare, []), (guarded, [SurefootCallback(run_dir=tmp_path / "run")])):
        trainer = trainer_for(net, token_rows(48), tmp_path, callbacks)
        trainer.compute_loss_func = half_loss
        trainer.train()
    assert same(bare, guarded)
    assert surefoot.read(tmp_path / "run").scalars["loss"][0] < 2.5


def bad_rows(net, count: int = 4 * UPDATES):
    """Rows of which one has a NaN in its input."""
    embed = net.get_input_embeddings()
    rows = [{"inputs_embeds": embed(r["input_ids"]).detach(), "labels": r["labels"]} for r in token_rows(count)]
    rows[4 * BAD_STEP + 1]["inputs_embeds"] = rows[4 * BAD_STEP + 1]["inputs_embeds"] * float("nan")
    return rows


def test_bad_batch_leaves_weights_and_schedule_in_step(tmp_path):
    """Weights and optimizer are as if the batch had not been there; counters and schedule go on."""
    guarded, skipped = language_model(), language_model()
    rows, record = bad_rows(language_model()), Record()
    options = {"lr_scheduler_type": "constant"}
    callback = SurefootCallback(run_dir=tmp_path / "run")
    trainer = trainer_for(guarded, rows, tmp_path, [callback, record], **options)
    trainer.train()
    del rows[4 * BAD_STEP : 4 * BAD_STEP + 4]
    reference = trainer_for(skipped, rows, tmp_path, **options)
    reference.train()
    assert same(guarded, skipped)
    for p, q in zip(guarded.parameters(), skipped.parameters(), strict=True):
        states = trainer.optimizer.state.get(p, {}), reference.optimizer.state.get(q, {})  # none for the embedding
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert trainer.state.global_step == len(record.rates) == UPDATES
    assert callback.guard.step == UPDATES - 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_fault_is_rewound_and_the_schedule_still_ends_at_zero(tmp_path, seed, fault):
    losses = {}
    for name, faults in (("healthy", []), ("damaged", [FAULTS[fault](140)])):
        callback, record = SurefootCallback(run_dir=tmp_path / name), Record()
        trainer = trainer_for(
            language_model(seed),
            token_rows(800, seed=seed),
            tmp_path / name,
            [*faults, callback, record],
            save_strategy="steps",
            save_steps=20,
        )
        trainer.train()
        losses[name] = trainer.evaluate()["eval_loss"]
        assert trainer.state.global_step == 200
        assert record.rates[-1] == 0.0
    assert losses["damaged"] < 1.15 * losses["healthy"] + 0.05
    events = surefoot.read(tmp_path / "damaged").events
    assert [e for e in events if e.get("name") == "rewound"]
    for path in (tmp_path / "damaged" / "trainer").glob("checkpoint-*"):
        weights = transformers.LlamaForCausalLM.from_pretrained(path)
        largest = max(p.detach().abs().max().item() for p in weights.parameters())
        assert largest < 15 or path.name.endswith("-doubted"), path


def test_resumed_run_goes_on_as_if_it_had_never_ended(tmp_path):
    """Same weights as an uninterrupted run, and the guard knows what it knew."""
    options = {"save_strategy": "steps", "save_steps": 20, "max_steps": UPDATES}
    rows = token_rows(4 * UPDATES)
    through = language_model()
    trainer_for(through, rows, tmp_path / "through", **options).train()

    class End(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            raise KeyboardInterrupt

    first = SurefootCallback(run_dir=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        trainer_for(language_model(), rows, tmp_path, [first, End()], **options).train()
    history = first.guard.history
    first.guard.close()

    resumed = language_model(seed=5)
    callback = SurefootCallback(run_dir=tmp_path / "run")
    known: list[tuple[int, Any]] = []

    class Known(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            known.append((callback.guard.step, callback.guard.history))

    trainer_for(resumed, rows, tmp_path, [callback, Known()], **options).train(resume_from_checkpoint=True)
    assert known == [(20, history)]
    assert callback.guard.step == UPDATES
    assert same(through, resumed)
    assert surefoot.read(tmp_path / "run").scalars["step"].tolist() == list(range(UPDATES))


def test_killed_run_goes_on_at_the_same_data(tmp_path):
    """Killed with SIGKILL in its second epoch and started again: same batches, same weights as if never killed."""
    script = Path(__file__).parent / "killed_hf_trainer.py"

    def start(name: str, *kill_at: str) -> subprocess.Popen[bytes]:
        (tmp_path / name).mkdir(exist_ok=True)
        return subprocess.Popen([sys.executable, str(script), str(tmp_path / name), *kill_at], stderr=subprocess.PIPE)

    processes = [start("through"), start("killed", "29")]
    assert [p.communicate(timeout=200) and p.returncode for p in processes] == [0, -signal.SIGKILL]
    again = start("killed")
    again.communicate(timeout=200)
    assert again.returncode == 0
    through, killed = ((tmp_path / name / "data.txt").read_text().splitlines() for name in ("through", "killed"))
    assert killed == through[:29] + through[24:]  # the last checkpoint is of step 24
    weights = [torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("through", "killed")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    rows = surefoot.read(tmp_path / "killed" / "run").scalars
    assert rows["step"].tolist()[-16:] == list(range(24, 40))


def test_stop_ends_training_cleanly_and_the_next_train_works(tmp_path):
    rows = [row | {"inputs_embeds": row["inputs_embeds"] * float("nan")} for row in bad_rows(language_model())]
    net, record = language_model(), Record()
    callback = SurefootCallback(run_dir=tmp_path / "run", policy=surefoot.Policy(max_consecutive_vetoes=2))
    trainer = trainer_for(net, rows, tmp_path, [callback, record], save_strategy="steps", save_steps=1000)
    trainer.train()
    assert "2 updates in a row were refused" in callback.stop_reason
    assert record.ended == 1
    assert trainer.state.global_step < 12
    assert same(net, language_model())
    (saved,) = (tmp_path / "trainer").glob("checkpoint-*")
    assert saved.name == f"checkpoint-{trainer.state.global_step}"

    trainer.train_dataset = token_rows(48)
    trainer.train()
    assert callback.stop_reason is None
    assert record.ended == 2
    assert not same(net, language_model())


@pytest.mark.parametrize("policy", ["protect", "observe"])
def test_saves_wait_until_the_run_is_healthy(tmp_path, policy):
    """Right after a refused update no checkpoint is written; it is made up for, at the latest with the next one. Where
    surefoot only observes, nothing waits."""
    rows = bad_rows(language_model())
    callback = SurefootCallback(run_dir=tmp_path / "run", policy=policy)
    options = {"save_strategy": "steps", "save_steps": BAD_STEP + 1, "max_steps": UPDATES // 2}
    trainer_for(language_model(), rows, tmp_path, [callback], **options).train()
    saved = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "trainer").glob("checkpoint-*"))
    if policy == "observe":
        assert saved == [8, 16, 20]
        return
    assert BAD_STEP + 1 not in saved
    assert BAD_STEP + 1 < saved[0] <= 2 * (BAD_STEP + 1)
    state = json.loads((tmp_path / "trainer" / f"checkpoint-{saved[0]}" / "trainer_state.json").read_text())
    assert "surefoot" in state["stateful_callbacks"]


def test_best_model_and_early_stopping_go_on_working(tmp_path):
    options = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 5,
        "eval_steps": 5,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "learning_rate": 0.0,
    }
    states = []
    for name, callbacks in (("bare", []), ("guarded", [SurefootCallback(run_dir=tmp_path / "run")])):
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2)
        trainer = trainer_for(language_model(), token_rows(200), tmp_path / name, [*callbacks, stopping], **options)
        trainer.train()
        states.append((trainer.state.global_step, trainer.state.best_global_step, trainer.state.best_metric))
    assert states[0] == states[1]
    assert states[0][0] == 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": True}, "resume as the Trainer does"),
        ({"scheduler": None}, "leave scheduler= out"),
        ({"polcy": "observe"}, "Did you mean policy="),
    ],
)
def test_wrong_options_are_one_clear_sentence(tmp_path, options, message):
    with pytest.raises(Misuse, match=message):
        SurefootCallback(run_dir=tmp_path, **options)


def test_two_callbacks_are_one_clear_sentence(tmp_path):
    callbacks = [SurefootCallback(run_dir=tmp_path / name) for name in "ab"]
    with pytest.raises(Misuse, match="has two of them"):
        trainer_for(language_model(), token_rows(8), tmp_path, callbacks).train()

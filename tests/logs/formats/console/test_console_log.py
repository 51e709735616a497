"""Console output of many trainers: rows are found, and nothing else is taken for a row."""
# ruff: noqa: E501, RUF001 - log lines are long, and some are Chinese

from __future__ import annotations

import contextlib
import gzip
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.logs.formats.console.console_log import ConsoleParser, fits, read
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable


def table_of(tmp_path: Path, text: str | bytes) -> LogTable:
    path = tmp_path / "some.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with LogSource.open(path) as source:
        return read(source)


def values(table: LogTable, name: str) -> list[float]:
    assert name in table.columns, f"{name} is not among {list(table.columns)}"
    return table.columns[name].values.tolist()


def rows(count: int, line: str) -> str:
    """Lines with {n} and {loss} filled in."""
    return "".join(line.format(n=n, loss=4 - 0.01 * n) + "\n" for n in range(1, count + 1))


ONE_LINE = {
    "nanoGPT": ("iter {n}: loss {loss:.4f}, time 12.30ms, mfu 1.50%", "iter", "loss"),
    "Megatron": (
        " iteration {n:8d}/     500 | consumed samples: 640 | elapsed time per iteration (ms): 12.3 | learning rate: 1.0E-04 | lm loss: {loss:.6E} | loss scale: 65536.0 | grad norm: 0.3 | number of skipped iterations: 0 | number of nan iterations: 0 |",
        "iteration",
        "lm loss",
    ),
    "LightGBM": ("[{n}]\ttraining's l2: {loss:.6f}\tvalid_0's l2: 4.1", "step", "training's l2"),
    "Hugging Face": ("{{'loss': {loss:.4f}, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': {n}.5}}", "epoch", "loss"),
    "Hugging Face with strings": ("{{'loss': '{loss:.4f}', 'learning_rate': '5e-05', 'epoch': '{n}.5'}}", "epoch", "loss"),
    "fairseq": ("| epoch 001:     {n} / 100 loss={loss:.3f}, ppl=41.2, wps=100, gnorm=1.2, loss_scale=128", "step", "loss"),
    "fairseq JSON": (
        '2021-01-01 12:00:00 | INFO | train_inner | {{"epoch": 1, "update": 0.1, "loss": "{loss:.3f}", "num_updates": "{n}"}}',
        "num_updates",
        "loss",
    ),
    "PyTorch example": ("Train Epoch: {n} [640/60000 (1%)]\tLoss: {loss:.6f}", "Epoch", "Loss"),
    "ImageNet example": ("Epoch: [{n}][  10/5005]\tTime  0.3 ( 0.5)\tLoss {loss:.4e} (7.0e+00)\tAcc@1   0.00 (  0.12)", "Epoch", "Loss"),
    "TF Estimator": ("INFO:tensorflow:loss = {loss:.5f}, step = {n} (3.2 sec)", "step", "loss"),
    "Detectron2": (
        "[06/01 12:00:00 d2.utils.events]:  eta: 0:10:00  iter: {n}  total_loss: {loss:.3f}  loss_cls: 0.5  lr: 0.0001  max_mem: 3000M",
        "iter",
        "total_loss",
    ),
    "mmdetection": (
        "2021-01-01 12:00:00,123 - mmdet - INFO - Epoch [{n}][50/7330]\tlr: 1.9e-03, eta: 1 day, 2:00:00, time: 0.3, loss: {loss:.3f}",
        "Epoch",
        "loss",
    ),
    "timm": ("Train: {n} [  50/100 (50%)]  Loss: {loss:.3f} (6.95)  Time: 0.5s,  200.0/s  LR: 1.0e-05", "epoch", "Loss"),
    "minimind": ("Epoch:[1/1]({n}/39695), loss: {loss:.4f}, aux_loss: 0.0, lr: 0.0005, epoch_time: 130.0min", "step", "loss"),
    "torchtune": ("1|{n}|Loss: {loss:.4f}:  10%|█         | {n}/100 [00:01<00:10]", "step", "Loss"),
    "epoch and loss": ("epoch {n} loss={loss:.3f}", "epoch", "loss"),
    "the other way round": ("loss={loss:.3f} epoch {n}", "epoch", "loss"),
    "glued": ("epoch{n} loss: {loss:.3f}", "epoch", "loss"),
    "both losses": ("Epoch {n}/100, Train Loss: {loss:.3f}, Val Loss: 0.6, LR: 1e-4", "Epoch", "Train Loss"),
    "bars between": ("[Step {n}/100] Loss: {loss:.4f} | Global Tokens/s: 2.6K | GPU Mem (GB): 12.80", "Step", "Loss"),
    "llm.c": ("step {n:4d}/19560 | loss {loss:.4f} (+nanz)| norm 15.3 (+nanz)| lr 4.29e-07 | 2400 ms | 218000 tok/s", "step", "loss"),
    "llama.cpp": ("train_opt_callback: iter= {n:5d} sample=5/2000 sched=0.01 loss={loss:.3f} dt=00:00:01", "iter", "loss"),
    "GAN example": ("[{n}/200][10/1583] Loss_D: {loss:.4f} Loss_G: 3.2 D(x): 0.8 D(G(z)): 0.1 / 0.05", "epoch", "Loss_D"),
    "tensor": ("step {n}: loss: tensor({loss:.4f}, device='cuda:0', grad_fn=<NllLossBackward0>)", "step", "loss"),
    "log prefix": ("[2024-01-02 03:04:05,678][trainer.py:42][INFO] - step {n} | loss {loss:.4f}", "step", "loss"),
    "colours": ("\x1b[32mstep {n}\x1b[0m \x1b[1mloss\x1b[0m: {loss:.4f}", "step", "loss"),
    "semicolons": ("step:{n};loss:{loss:.4f};lr:1e-4", "step", "loss"),
    "Chinese": ("第{n}轮 训练损失：{loss:.4f}，验证损失：0.6，学习率：1e-4", "epoch", "训练损失"),
    "thousands": ("step {n}: tokens 1,234,567 loss {loss:.4f}", "step", "loss"),
    "PaddlePaddle": ("[2021/03/30 12:00:00] ppocr INFO: epoch: [1/500], global_step: {n}, lr: 0.001, loss: {loss:.6f}", "global_step", "loss"),
    "Lightning bar": ("Epoch {n}:  50%|█████     | 10/20 [00:01<00:01, 9.5it/s, v_num=3, train_loss={loss:.3f}]", "Epoch", "train_loss"),
}  # fmt: skip


@pytest.mark.parametrize("style", ONE_LINE)
def test_one_row_per_line_is_read_for_every_trainer(tmp_path: Path, style: str) -> None:
    line, counter, loss = ONE_LINE[style]
    table = table_of(tmp_path, rows(60, line))
    assert values(table, counter)[:3] == [1, 2, 3] or style in ("Hugging Face", "Hugging Face with strings")
    assert values(table, loss) == pytest.approx([4 - 0.01 * n for n in range(1, 61)], abs=0.006)
    assert len(values(table, counter)) == table.records == 60
    assert table.skipped == {}


@pytest.mark.parametrize("style", ONE_LINE)
def test_incremental_reading_gives_the_same_rows(tmp_path: Path, style: str) -> None:
    text = rows(60, ONE_LINE[style][0])
    together = table_of(tmp_path, text)
    following = ConsoleParser()
    slowly = [row for line in text.splitlines(keepends=True) for row in following.feed(line)] + following.finish()
    for name, column in together.columns.items():
        assert [row[name] for row in slowly if name in row] == pytest.approx(column.values.tolist(), nan_ok=True)


def test_numbers_in_the_line_prefix_are_ignored(tmp_path: Path) -> None:
    table = table_of(tmp_path, rows(5, ONE_LINE["log prefix"][0]))
    assert set(table.columns) == {"step", "loss"}


def test_units_are_parsed(tmp_path: Path) -> None:
    table = table_of(
        tmp_path, "step 1 loss 2.5 speed: 1.5K acc: 98.5% time 12ms\nstep 2 loss 2.4 speed: 2M acc: 99% time 12ms\n"
    )
    assert values(table, "speed") == [1500, 2e6]
    assert values(table, "acc") == [98.5, 99]


def test_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    table = table_of(tmp_path, "step 1 loss nan\nstep 2 loss inf\nstep 3 loss -inf\nstep 4 loss NaN\n")
    losses = values(table, "loss")
    assert math.isnan(losses[0])
    assert math.isnan(losses[3])
    assert losses[1:3] == [math.inf, -math.inf]


def test_decimal_commas(tmp_path: Path) -> None:
    table = table_of(tmp_path, "Epoche 1 epoch: 1 loss: 0,532\nEpoche 2 epoch: 2 loss: 0,41\n")
    assert values(table, "loss") == [0.532, 0.41]


def test_evaluation_and_training_are_separate_columns(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3\n"
        "Train Epoch: 1 [1280/60000 (2%)]\tLoss: 2.2\n"
        "\nTest set: Average loss: 0.05, Accuracy: 9800/10000 (98%)\n\n"
        "Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.1\n"
        "\nTest set: Average loss: 0.04, Accuracy: 9900/10000 (99%)\n",
    )
    assert values(table, "Loss") == [2.3, 2.2, 2.1]
    assert values(table, "eval Average loss") == [0.05, 0.04]
    assert values(table, "eval Accuracy") == [0.98, 0.99]
    assert values(table, "step") == [640, 1280, 1280, 60640, 60640]


@pytest.mark.parametrize(
    "line",
    [
        "Validation: epoch {n} loss {loss:.3f}",
        "[val] epoch {n} loss {loss:.3f}",
        "eval | epoch {n} | loss {loss:.3f}",
        "epoch {n} | valid on 'valid' subset | loss {loss:.3f} | ppl 300.1",
        " validation loss at iteration {n} | loss: {loss:.3f} | lm loss PPL: 1.6E+05 |",
        "INFO:tensorflow:Saving dict for global step {n}: accuracy = .85, loss = {loss:.3f}",
        "Epoch(val) [{n}][10/10]    loss: {loss:.3f}",
    ],
)
def test_start_of_the_line_names_the_split(tmp_path: Path, line: str) -> None:
    table = table_of(tmp_path, rows(4, line))
    assert values(table, "eval loss") == pytest.approx([3.99, 3.98, 3.97, 3.96])
    assert "loss" not in table.columns


def test_two_phases_on_one_line(tmp_path: Path) -> None:
    table = table_of(tmp_path, rows(3, "Epoch {n} Train: loss {loss:.3f} acc 0.8 | Val: loss 0.6 acc 0.7"))
    assert values(table, "loss") == pytest.approx([3.99, 3.98, 3.97])
    assert values(table, "eval loss") == [0.6] * 3


def test_epoch_on_an_earlier_line_applies_to_later_rows(tmp_path: Path) -> None:
    text = "".join(
        f"Epoch {n}/2\n----------\ntrain Loss: 0.{n} Acc: 0.8\nval Loss: 0.5{n} Acc: 0.9\n\n" for n in (0, 1, 2)
    )
    table = table_of(tmp_path, text)
    assert values(table, "train Loss") == [0.0, 0.1, 0.2]
    assert values(table, "val Loss") == [0.50, 0.51, 0.52]
    assert values(table, "Epoch") == [0, 0, 1, 1, 2, 2]
    assert values(table, "eval Acc") == [0.9] * 3


@pytest.mark.parametrize("full_twice", [False, True])
def test_only_the_last_state_of_a_keras_bar_is_a_row(full_twice: bool, tmp_path: Path) -> None:
    text = ""
    for epoch in range(1, 6):
        text += f"Epoch {epoch}/5\n"
        for batch in range(10, 101 if full_twice else 100, 10):
            text += f"\r {batch}/100 [==>...........] - ETA: 3s - loss: 9.9{batch} - acc: 0.1"
        text += f"\r100/100 [==============] - 3s 30ms/step - loss: 0.{epoch} - acc: 0.9 - val_loss: 0.4{epoch}\n"
    table = table_of(tmp_path, text)
    assert values(table, "loss") == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert values(table, "val_loss") == [0.41, 0.42, 0.43, 0.44, 0.45]
    assert values(table, "Epoch") == [1, 2, 3, 4, 5]


def test_keras_bar_with_backspaces_is_read_if_nothing_else_is_there(tmp_path: Path) -> None:
    states = [f"{batch:3d}/100 [====>.........] - ETA: 3s - loss: {3 - batch / 100:.4f}" for batch in range(1, 100)]
    table = table_of(tmp_path, "Epoch 1/1\n" + ("\b" * 60).join(states))
    assert values(table, "loss") == pytest.approx([3 - batch / 100 for batch in range(1, 100)])
    assert values(table, "step")[-1] == 99


def test_states_of_a_tqdm_bar_are_rows_and_repeats_are_not(tmp_path: Path) -> None:
    states = [
        f"\r {n:3d}%|██▎       | {n}/100 [00:0{n % 10}<00:30, 9.5it/s, loss={5 - n / 50:.2f}]" for n in range(1, 101)
    ]
    table = table_of(tmp_path, "".join(state * 2 for state in states) + "\n")
    assert values(table, "step") == list(range(1, 101))
    assert values(table, "loss")[0] == 4.98


def test_step_counts_on_over_one_bar_per_epoch(tmp_path: Path) -> None:
    bar = [f"\r{n * 10:3d}%|██▎       | {n}/10 [00:01<00:30, 9.5it/s, loss=0.{n}]" for n in range(1, 11)]
    table = table_of(tmp_path, "\n".join("".join(bar) for _ in range(3)))
    assert values(table, "step") == list(range(1, 31))


def test_very_long_bar_is_read(tmp_path: Path) -> None:
    states = (f"\r  3%|▎         | {n}/30000 [00:01<00:30,  9.5it/s, loss=0.5, lr=1e-4]" for n in range(1, 30001))
    table = table_of(tmp_path, "".join(states))
    assert values(table, "step")[-1] == 30000
    assert table.records == 30000


def test_bar_gives_the_step_of_dictionaries_between_its_states(tmp_path: Path) -> None:
    text = "".join(
        f"\r {n}%|▎         | {n * 10}/1000 [00:01<00:30,  9.5it/s]\n{{'loss': 1.{n}, 'learning_rate': 5e-05, 'epoch': 0.{n}1}}\n"
        for n in range(1, 10)
    )
    assert values(table_of(tmp_path, text), "step") == [n * 10 for n in range(1, 10)]


def test_loss_scale_of_skipped_updates_is_read(tmp_path: Path) -> None:
    text = "".join(
        f"[2024-01-01 12:00:00,000] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank {rank} Skipping"
        f" step. Attempted loss scale: {2**n}, reducing to {2 ** (n - 1)}\n"
        for n in (16, 15, 14)
        for rank in (0, 1)
    )
    table = table_of(tmp_path, text)
    assert values(table, "loss scale") == [32768, 16384, 8192]
    assert values(table, "overflow") == [1, 2, 3]


def test_fairseq_overflow_messages_are_read(tmp_path: Path) -> None:
    table = table_of(tmp_path, "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 64.0\n")
    assert values(table, "loss scale") == [64]


def test_tables_with_a_heading(tmp_path: Path) -> None:
    bar = "100%|██████████| 8/8 [00:02<00:00,  3.2it/s]"
    text = ""
    for epoch in (1, 2, 3):
        text += "\n      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
        text += f"\r        {epoch}/3      2.1G      1.9       1.4       1.2        23        640:  50%|█████     | 4/8 [00:01<00:01]"
        text += f"\r        {epoch}/3      2.1G      1.{epoch}       1.4       1.2        23        640: {bar}\n"
        text += "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|██████████| 2/2\n"
        text += "                   all        128        929       0.64      0.537      0.605      0.446\n"
    table = table_of(tmp_path, text)
    assert values(table, "Epoch") == [1, 2, 3]
    assert values(table, "box_loss") == [1.1, 1.2, 1.3]
    assert values(table, "GPU_mem")[0] == 2.1e9


def test_tables_of_skorch_and_fastai(tmp_path: Path) -> None:
    text = "  epoch    train_loss    valid_loss     dur\n-------  ------------  ------------  ------\n"
    text += "".join(f"      {n}        0.{n}        0.8{n}  0.0{n}\n" for n in range(1, 6))
    table = table_of(tmp_path, text)
    assert values(table, "train_loss") == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert values(table, "epoch") == [1, 2, 3, 4, 5]


def test_tables_of_spacy(tmp_path: Path) -> None:
    heading = (
        "E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  SCORE \n---  ------  ------------  --------  ------  ------\n"
    )
    table = table_of(
        tmp_path,
        heading + "".join(f"  0  {n * 200:6d}          0.50     {50 - n}.21   70.00    0.70\n" for n in range(9)),
    )
    assert values(table, "step") == [n * 200.0 for n in range(9)]
    assert values(table, "LOSS NER")[:2] == [50.21, 49.21]


def test_tables_with_bars(tmp_path: Path) -> None:
    text = "| epoch | loss | acc |\n|---|---|---|\n" + "".join(f"| {n} | 0.{n} | 0.9 |\n" for n in range(1, 5))
    assert values(table_of(tmp_path, text), "loss") == [0.1, 0.2, 0.3, 0.4]


def test_one_metric_per_line(tmp_path: Path) -> None:
    text = "".join(
        f"[batch={n}/100]:\n\t Train time/batch: {n - 1}\n\t Train loss/train/total: 3.{n}\nsaved\n"
        for n in range(1, 6)
    )
    table = table_of(tmp_path, text)
    assert values(table, "Train loss/train/total") == [3.1, 3.2, 3.3, 3.4, 3.5]
    assert values(table, "step") == [1, 2, 3, 4, 5]


def test_boxes_of_names_and_numbers(tmp_path: Path) -> None:
    text = "".join(
        "---------------------------------\n| rollout/           |          |\n"
        f"|    ep_rew_mean     | 2{n}.5     |\n| time/              |          |\n|    total_timesteps | {n}000     |\n"
        f"| train/             |          |\n|    loss            | 0.{n}     |\n---------------------------------\n"
        for n in range(1, 5)
    )
    table = table_of(tmp_path, text)
    assert values(table, "loss") == [0.1, 0.2, 0.3, 0.4]
    assert values(table, "total_timesteps") == [1000, 2000, 3000, 4000]


def test_results_of_an_evaluation_below_a_heading(tmp_path: Path) -> None:
    text = rows(3, "INFO:tensorflow:loss = {loss:.5f}, step = {n} (3.2 sec)")
    text += "INFO:tensorflow:***** Eval results *****\nINFO:tensorflow:  eval_accuracy = 0.85\nINFO:tensorflow:  loss = 0.72\n"
    table = table_of(tmp_path, text)
    assert len(values(table, "loss")) == 3
    assert values(table, "eval loss") == [0.72]


def test_code_and_settings_before_the_log_are_no_rows(tmp_path: Path) -> None:
    text = (
        "import torch\nlearning_rate = 0.1\nbatch_size = 32\nmax_iters = 500 # steps\nbest_loss = 1e9\n"
        "for epoch in range(10):\n    loss = 0.0\n    print(f'epoch {epoch} loss {loss:.3f}')\n"
        "Namespace(lr=0.1, epoch=0, loss_weight=1.0)\ntraining:\n  epochs: 20\n  loss_weight: 0.5\n  vocab_size: 50257\n"
    )
    table = table_of(tmp_path, text + rows(3, "step {n} loss {loss:.3f}"))
    assert table.records == 3
    assert set(table.columns) == {"step", "loss"}
    assert table.settings["learning_rate"] == 0.1
    assert table.settings["vocab_size"] == 50257


def test_other_output_is_no_row(tmp_path: Path) -> None:
    text = (
        "Loading checkpoint shards: 100%|██████████| 7/7 [00:01<00:00]\nnumber of parameters: 24.63M\n"
        "Epoch 00003: val_loss improved from 0.53 to 0.41, saving model to x.h5\n"
        "wandb: Run data is saved in /home/me/run-20240912_103026-rj6dis43\nTraining complete. Best loss: 6.1e-04\n"
    )
    assert table_of(tmp_path, text).records == 0


def test_log_of_the_pytorch_quickstart(tmp_path: Path) -> None:
    text = "".join(
        f"Epoch {epoch}\n-------------------------------\n"
        + "".join(f"loss: {2 - epoch / 5 - batch / 100:>7f}  [{batch * 6400:>5d}/60000]\n" for batch in range(4))
        + f"Test Error: \n Accuracy: 64.{epoch}%, Avg loss: 1.0{epoch} \n\n"
        for epoch in (1, 2, 3)
    )
    table = table_of(tmp_path, text)
    assert len(values(table, "loss")) == 12
    assert values(table, "step")[:4] == [0, 6400, 12800, 19200]
    assert values(table, "step")[-2] == 139200
    assert values(table, "eval Avg loss") == [1.01, 1.02, 1.03]


@pytest.mark.parametrize(
    ("line", "counter", "name"),
    [
        ("[1,  {n}000] loss: {loss:.3f}", "batch", "loss"),
        ("[{n}]\ttrain-rmse:{loss:.3f}\teval-rmse:0.6", "step", "train-rmse"),
        (" {n}: 500.2, {loss:.3f} avg loss, 0.001000 rate, 5.1 seconds, 64 images", "step", "avg loss"),
        ("epoch:{n} train_loss/val_loss: {loss:.3f}/0.5", "epoch", "train_loss"),
        ("completed step: {n}, seconds: 3.2, total_weights: 4, loss: {loss:.3f}", "step", "loss"),
    ],
)
def test_unusual_formats(tmp_path: Path, line: str, counter: str, name: str) -> None:
    table = table_of(tmp_path, rows(4, line))
    assert values(table, name) == pytest.approx([3.99, 3.98, 3.97, 3.96])
    assert len(values(table, counter)) == 4


def test_one_rank_of_many_is_kept(tmp_path: Path) -> None:
    text = "".join(f"[rank{rank}]: step {n} loss 0.{n}{rank}\n" for n in range(1, 6) for rank in (1, 0, 2, 3))
    table = table_of(tmp_path, text)
    assert values(table, "step") == [1, 2, 3, 4, 5]
    assert table.skipped == {"lines repeated by other ranks": 15}


@pytest.mark.parametrize("label", ["{rank}: ", "[1,{rank}]<stdout>:", "[Rank {rank}] ", "rank={rank} "])
def test_task_labels_are_ranks(tmp_path: Path, label: str) -> None:
    text = "".join(f"{label.format(rank=rank)}iteration {n} loss 0.{n}\n" for n in range(1, 6) for rank in (0, 1))
    assert values(table_of(tmp_path, text), "loss") == [0.1, 0.2, 0.3, 0.4, 0.5]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
def test_encodings_and_line_endings(tmp_path: Path, encoding: str) -> None:
    text = rows(30, "Epoch {n}/30 – loss: {loss:.3f}").replace("\n", "\r\n")
    assert len(values(table_of(tmp_path, text.encode(encoding)), "loss")) == 30


def test_gb18030_encoding(tmp_path: Path) -> None:
    text = rows(30, "第{n}轮 损失：{loss:.3f}")
    assert len(values(table_of(tmp_path, text.encode("gb18030")), "损失")) == 30


def test_block_of_nul_bytes_is_skipped(tmp_path: Path) -> None:
    text = rows(5, "step {n} loss {loss:.3f}").encode()
    assert table_of(tmp_path, text + bytes(5000) + text.replace(b"step ", b"step 1")).records == 10


def test_compressed_log_is_read(tmp_path: Path) -> None:
    assert table_of(tmp_path, gzip.compress(rows(5, "step {n} loss {loss:.3f}").encode())).records == 5


def test_tail_is_the_text_after_the_last_row(tmp_path: Path) -> None:
    row = rows(3, "step {n} loss {loss:.3f}")
    survived = "Traceback (most recent call last):\n  File x\nOSError: again\n"
    assert table_of(tmp_path, row + survived + row.replace("step ", "step 1")).tail == ""
    assert table_of(tmp_path, row + survived).tail.endswith("OSError: again")
    assert table_of(tmp_path, survived).tail.endswith("OSError: again")


def test_long_tail_keeps_its_start_and_end(tmp_path: Path) -> None:
    text = rows(3, "step {n} loss {loss:.3f}") + "the first words\n" + "in the middle\n" * 20000 + "the last words\n"
    ending = table_of(tmp_path, text).tail
    assert ending.startswith("the first words")
    assert ending.rstrip().endswith("the last words")
    assert len(ending) <= 1 << 16


def test_unfinished_last_line_is_read(tmp_path: Path) -> None:
    assert table_of(tmp_path, rows(3, "step {n} loss {loss:.3f}").rstrip()).records == 3


def test_follow_gives_a_row_as_soon_as_its_line_is_complete() -> None:
    following = ConsoleParser()
    assert following.feed("step 1 loss 0.5\nstep 2 lo") == [{"step": 1, "loss": 0.5}]
    assert following.feed("ss 0.4") == []
    assert following.feed("\nTraceback") == [{"step": 2, "loss": 0.4}]
    assert following.tail.strip() == "Traceback"


def test_text_and_binary_data_are_distinguished() -> None:
    assert fits(b"step 1 loss 0.5\n")
    assert fits("损失：0.5\n".encode())
    assert not fits(bytes(range(256)) * 20)
    assert not fits(b"")
    assert not fits(b"\0\0\0\0")


SPLICES = [line.format(n=7, loss=1.5) for line, _, _ in ONE_LINE.values()] + [
    "Epoch 3/10", "100/100 [=====>....] - ETA: 3s - loss: 0.3", "  epoch  train_loss  valid_loss", "  1  0.5  0.4",
    "***** Eval results *****", "  loss = 0.7", "[deepspeed] OVERFLOW! Rank 0 Skipping step.", "|  loss | 0.5 |", "\r", "\b", "\0",
    "1.2.3.4:5", "1e", "+", "nan inf -", "loss: 1e999", "step 99999999999999999999 loss 1", "loss=1,2,3", "epoch 0/0 loss 1", "0/0",
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(SPLICES), max_size=12),
    st.integers(0, 400),
    st.integers(0, 400),
    st.sampled_from(["\n", "", " "]),
)
def test_cut_and_spliced_logs_are_read(parts: list[str], start: int, stop: int, joint: str) -> None:
    text = joint.join(parts)
    following = ConsoleParser()
    for piece in (text[:start], text[start : start + stop], text * 3):
        for row in following.feed(piece):
            assert all(isinstance(value, float) for value in row.values())
    following.finish()
    assert len(following.tail) >= 0


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=4000))
def test_any_bytes_are_read_or_refused_with_a_message(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    with contextlib.suppress(UnreadableInput):
        table_of(tmp_path_factory.mktemp("log"), data)


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet="loss step:=0123456789.,|/[](){}%-+e\n\r\t nan'\"", max_size=600))
def test_text_that_is_nearly_a_log_is_read(text: str) -> None:
    following = ConsoleParser()
    following.feed(text * 4)
    following.finish()

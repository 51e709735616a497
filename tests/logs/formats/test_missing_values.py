"""Records without values are padding; a NaN loss in a real record is a failure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.formats import detect
from surefoot.logs.log_diagnosis import RunHealth

NAN = math.nan
FALL = [round(2 + 8 * math.exp(-k / 15) + 0.02 * math.cos(k * 2.4), 4) for k in range(80)]
ROWS = [(k, loss, 0.1, 1.0 + 0.1 * math.sin(k)) for k, loss in enumerate(FALL)]
HEAD = "step,loss,lr,grad_norm"
Rows = Sequence[Sequence[object]]
Write = Callable[..., str]


def verdict(path: Path, text: str) -> RunHealth:
    path.write_text(text)
    return diagnose(path).verdict


def table(rows: Rows, head: str = HEAD) -> str:
    return head + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)


def records(rows: Rows, head: str = HEAD) -> str:
    return "".join(json.dumps(dict(zip(head.split(","), row, strict=True))) + "\n" for row in rows)


EMPTY = (NAN,) * 4
AHEAD = [(80 + k, NAN, NAN, NAN) for k in range(20)]
PADDED: dict[str, Rows] = {
    "at the end": [*ROWS, *[EMPTY] * 20],
    "at the start": [*[EMPTY] * 10, *ROWS],
    "occasionally": [row for k, filled in enumerate(ROWS) for row in ((filled, EMPTY) if k % 7 == 3 else (filled,))],
    "every other": [row for filled in ROWS for row in (filled, EMPTY)],
    "steps written ahead": [*ROWS, *AHEAD],
}


@pytest.mark.parametrize("write", [table, records])
@pytest.mark.parametrize("where", PADDED)
def test_records_without_numbers_are_padding(tmp_path: Path, where: str, write: Write) -> None:
    assert verdict(tmp_path / "log", write(PADDED[where])) is RunHealth.HEALTHY


@pytest.mark.parametrize("index", ["", "index", "Unnamed: 0"])
def test_padding_with_a_running_index_is_padding(tmp_path: Path, index: str) -> None:
    rows = [(k, *row) for k, row in enumerate([*ROWS, *[EMPTY] * 20])]
    assert verdict(tmp_path / "log.csv", table(rows, f"{index},{HEAD}")) is RunHealth.HEALTHY


def test_empty_cells_are_padding(tmp_path: Path) -> None:
    assert verdict(tmp_path / "a.csv", table([*ROWS, *[("",) * 4] * 20])) is RunHealth.HEALTHY
    assert verdict(tmp_path / "b.csv", table([*ROWS, *((80 + k, "", "", "") for k in range(20))])) is RunHealth.HEALTHY
    nothing = dict.fromkeys(HEAD.split(","))
    assert verdict(tmp_path / "c.jsonl", records(ROWS) + (json.dumps(nothing) + "\n") * 20) is RunHealth.HEALTHY


def test_padded_arrays_are_healthy() -> None:
    columns = list(zip(*PADDED["at the end"], strict=True))
    assert diagnose(dict(zip(HEAD.split(","), columns, strict=True))).verdict is RunHealth.HEALTHY


def test_padding_is_noted(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(table(PADDED["at the end"]))
    assert "20 records without any number were left out as padding" in diagnose(tmp_path / "log.csv").notes


FAILED: dict[str, tuple[str, Rows]] = {
    "loss alone": (HEAD, [*ROWS, *((80 + k, NAN, 0.1, 1.0) for k in range(20))]),
    "loss and norm": (HEAD, [*ROWS, *((80 + k, NAN, 0.1, NAN) for k in range(20))]),
    "all but the step": ("step,loss,grad_norm", [*((r[0], r[1], r[3]) for r in ROWS), *((80, NAN, NAN),) * 20]),
    "all but step and time": (
        "step,loss,grad_norm,time",
        [*((r[0], r[1], r[3], 10 * r[0]) for r in ROWS), *((80 + k, NAN, NAN, 800 + 10 * k) for k in range(20))],
    ),
    "failed, then padded": (HEAD, [*ROWS, *((80 + k, NAN, 0.1, NAN) for k in range(5)), *[EMPTY] * 20]),
    "from the first record on": ("step,loss,lr", [(k, NAN, 0.1) for k in range(40)]),
}


@pytest.mark.parametrize("write", [table, records])
@pytest.mark.parametrize("what", FAILED)
def test_nan_loss_in_a_real_record_is_a_failure(tmp_path: Path, what: str, write: Callable[..., str]) -> None:
    head, rows = FAILED[what]
    assert verdict(tmp_path / "log", write(rows, head)) is RunHealth.FAILED


def test_plain_list_of_losses_has_no_padding() -> None:
    assert diagnose([*FALL, *[NAN] * 20]).verdict is RunHealth.FAILED


def test_missing_losses_while_the_run_continues_are_a_failure(tmp_path: Path) -> None:
    rows = [*ROWS, *((80 + k, "", 0.1, 1.0) for k in range(20))]
    assert verdict(tmp_path / "log.csv", table(rows)) is RunHealth.FAILED


def padded(every: int, rows: int = 400) -> str:
    """A CSV file with a record of NaN in every column after every n-th row."""
    lines = ["loss,grad_norm"]
    for row in range(rows):
        lines.append(f"{5 - row / 100},1.0")
        if row % every == every // 2:
            lines.append("nan,nan")
    return "\n".join(lines) + "\n"


def test_nan_records_at_regular_intervals_are_padding(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(padded(50))
    (table,) = detect.read_log(tmp_path / "log.csv")
    assert np.isfinite(table.columns["loss"].values).all()
    assert len(table.columns["loss"]) == 400


def test_nan_records_that_repeat_a_step_are_padding(tmp_path: Path) -> None:
    rows = [f"{step},{3 - step / 100}\n" + (f"{step},nan\n" if step in (7, 30, 31, 90) else "") for step in range(100)]
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(rows))
    (table,) = detect.read_log(tmp_path / "log.csv")
    assert len(table.columns["loss"]) == 100


def test_nan_records_to_the_end_are_a_failure(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(padded(50) + "nan,nan\n" * 10)
    assert diagnose(tmp_path / "log.csv").verdict == "failed"

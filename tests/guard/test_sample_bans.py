"""A sample that breaks updates is banned, through rewinds, kills and resumes, until it is lifted."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import banned_run
import pytest
from banned_run import BATCH, ROWS, order, step_fn, train
from torch import nn
from typer.testing import CliRunner

import surefoot
from surefoot.cli import app
from surefoot.data import make_loader
from surefoot.journal.ban_list import BANS_JSON, read_bans
from surefoot.logs.diagnose_log import diagnose

EPOCH = ROWS // BATCH


def bans_in(run_dir: Path) -> list[dict[str, Any]]:
    return [e for e in surefoot.read(run_dir).events if e["kind"] == "note" and e["name"] == "banned"]


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["data", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_row_is_banned_and_named(tmp_path: Path, num_workers: int) -> None:
    bad = order()[50]
    seen = train(tmp_path, (bad,), 2 * EPOCH, num_workers=num_workers)
    assert seen.count(bad) == 1
    (event,) = bans_in(tmp_path)
    assert (event["values"]["samples"], event["values"]["sources"]) == ([bad], [f"table.csv:{bad + 1}"])
    assert f"{bad} (table.csv:{bad + 1})" in event["detail"]
    shown = json.dumps(diagnose(tmp_path).as_json())
    assert f"banned sample {bad} (table.csv:{bad + 1})" in shown
    code, text = command(tmp_path)
    assert code == 0
    assert f"table.csv:{bad + 1}" in text
    assert "-refuse" in text
    (listed,) = json.loads(command(tmp_path, "--json")[1])["bans"]
    assert (listed["sample"], listed["by"], listed["step"]) == (bad, "surefoot", 12)
    assert listed["incident"].endswith("-refuse")


def test_killed_and_resumed_from_before_the_ban_it_still_holds_until_it_is_lifted(tmp_path: Path) -> None:
    run, bad = tmp_path / "run", order()[70]  # in batch 17: the checkpoint of step 10 knows nothing of it
    script = [sys.executable, banned_run.__file__, str(run), str(bad), "19"]
    killed = subprocess.run(script, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert killed.returncode == -9
    assert read_bans(run).samples == set()  # killed before the numbers of the batch were read
    killed = subprocess.run([*script[:-1], "22"], check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert read_bans(run).samples == {bad}
    seen = train(run, (bad,), 2 * EPOCH)
    assert seen
    assert bad not in seen
    assert command(run, "--lift", bad)[0] == 0
    assert read_bans(run).samples == set()
    assert bad in train(run, (), 2 * EPOCH)  # repaired


def test_bans_by_hand_and_bad_requests(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, (), 5)
    assert command(run, "--ban", "7,9", "--ban", "11")[0] == 0
    seen = train(run, (), 2 * EPOCH)
    assert len(seen) > ROWS
    assert not {7, 9, 11} & set(seen[ROWS // 2 :])
    assert command(run, "--lift", "all")[0] == 0
    assert command(run)[1].startswith(f"No sample of {ROWS} is banned.")
    for arguments, words in (
        (("--lift", "8"), "sample 8 is not banned"),
        (("--lift", "x"), "takes sample numbers such as 17, or all"),
        (("--ban", "-3"), "takes sample numbers"),
        (("--ban", "400"), "numbered from 0"),
        (("--ban", "3", "--lift", "3"), "name it once"),
    ):
        code, text = command(run, *arguments)
        assert code == 2
        assert words in text
        assert "Traceback" not in text
    assert command(tmp_path)[0] == command(tmp_path / "none")[0] == 2


def test_a_live_run_refuses_changes_and_lists(tmp_path: Path) -> None:
    codes: list[tuple[int, str]] = []

    def listener(event: Any) -> None:
        if event.kind == "note" and event.name == "banned":
            codes.extend([command(tmp_path, "--lift", "all"), command(tmp_path)])

    train(tmp_path, (order()[20],), 20, listener=listener)
    (refused, words), (listed, _) = codes
    assert (refused, listed) == (2, 0)
    assert "only while the run is not training" in words
    assert len(read_bans(tmp_path).samples) == 1


def test_never_more_than_a_small_share(tmp_path: Path) -> None:
    bad = tuple(order()[at] for at in range(10, 400, 40))
    train(tmp_path, bad, EPOCH, policy=surefoot.Policy(max_banned_fraction=0.005))
    assert len(read_bans(tmp_path).samples) == 2
    notes = [e["detail"] for e in surefoot.read(tmp_path).events if e.get("name") == "bans"]
    assert len([note for note in notes if "no others will be" in note]) == 1


@pytest.mark.parametrize(
    "options", [{"policy": "observe", "resume": False}, {"policy": surefoot.Policy(max_banned_fraction=0)}]
)
def test_switched_off_nothing_is_banned(tmp_path: Path, options: dict[str, Any]) -> None:
    bad = order()[20]
    assert train(tmp_path, (bad,), 2 * EPOCH, **options).count(bad) == 2
    assert not (tmp_path / BANS_JSON).exists()


def test_a_ban_by_the_loop_is_kept_too(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = surefoot_optimizer(model)
    loader = make_loader(banned_run.Rows(), BATCH, seed=3)
    with surefoot.attach(model, optimizer, run_dir=tmp_path, loader=loader, step_fn=step_fn):
        loader.ban([5, 6])
        loader.lift(6)
    (ban,) = read_bans(tmp_path).bans
    assert (ban.sample, ban.by, ban.source) == (5, "loop", "table.csv:6")
    assert 5 not in train(tmp_path, (), EPOCH)


def test_bans_that_would_leave_no_batch_are_not_applied(tmp_path: Path) -> None:
    train(tmp_path, (), 3, rows=100, resume=False)
    assert command(tmp_path, "--ban", ",".join(map(str, range(100))))[0] == 0
    assert len(train(tmp_path, (), 25, rows=100, resume=False)) == 100
    notes = [e["detail"] for e in surefoot.read(tmp_path).events if e.get("name") == "bans"]
    assert any("are not applied: " in note and "no batch at all" in note for note in notes)


def test_a_loader_keeps_no_guard_alive_and_can_be_copied(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    loader = make_loader(banned_run.Rows(), BATCH, seed=3)
    guard = surefoot.attach(model, surefoot_optimizer(model), run_dir=tmp_path, loader=loader, step_fn=step_fn)
    assert copy.deepcopy(loader.bans_changed) is not None
    copy.copy(loader).ban(3)
    gone = weakref.ref(guard)
    guard.close()
    del guard, model
    gc.collect()
    assert gone() is None
    loader.ban(5)


def surefoot_optimizer(model: nn.Module) -> Any:
    from torch.optim import SGD

    return SGD(model.parameters(), lr=0.01)


def test_a_damaged_file_and_other_data_are_said_and_training_goes_on(tmp_path: Path) -> None:
    train(tmp_path / "damaged", (), 3)
    (tmp_path / "damaged" / BANS_JSON).write_text('{"schema": 1, "bans": [{"sample": "x"}], "lifted": []}')
    code, text = command(tmp_path / "damaged")
    assert code == 2
    assert "a ban has no sample number" in text
    assert train(tmp_path / "damaged", (), 3)
    assert (tmp_path / "damaged" / f"{BANS_JSON}.damaged").exists()

    train(tmp_path / "other", (), 3, resume=False)
    command(tmp_path / "other", "--ban", "1")
    assert 1 in train(tmp_path / "other", (), 25, rows=100, resume=False)
    notes = [e["detail"] for e in surefoot.read(tmp_path / "other").events if e.get("name") == "bans"]
    assert any("of a data set with 400 samples" in note for note in notes)


def test_a_healthy_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    assert train(tmp_path / "with", (), EPOCH) == order()
    assert not (tmp_path / "with" / BANS_JSON).exists()


def test_two_ranks_ban_the_same_samples_at_the_same_batch(two_processes: Any) -> None:
    results = two_processes(Path(__file__).parent / "two_banned.py")
    first, second = (result["seen"] for result in results)
    assert [result["banned"] for result in results] == [[123], [123]]
    assert len(first) == len(second)
    came = [sample for step in zip(first, second, strict=True) for part in step for sample in part]
    assert came.count(123) == 1
    # No sample came twice in an epoch, and none was left out: the ranks moved together.
    assert sorted(came) == sorted([*range(ROWS), *(sample for sample in range(ROWS) if sample != 123)])

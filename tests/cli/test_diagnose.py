"""`surefoot diagnose` on the command line."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from surefoot.cli import app
from surefoot.logs.log_diagnosis import UnreadableInput

command = importlib.import_module("surefoot.cli.diagnose")  # `from surefoot.cli import diagnose` is the function

LOSSES = np.round(2 + 8 * np.exp(-np.arange(80) / 15) + 0.02 * np.cos(np.arange(80) * 2.4), 4)


def run(*arguments: str | Path, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)], input=given)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    path.write_text("".join(json.dumps({"step": k, "loss": loss}) + "\n" for k, loss in enumerate(LOSSES)))
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.csv"
    losses = [*LOSSES[:60].tolist(), *["nan"] * 20]
    path.write_text("iteration,train loss\n" + "".join(f"{k},{loss}\n" for k, loss in enumerate(losses)))
    return path


def test_failed_run_exits_with_1_and_healthy_run_with_0(good: Path, bad: Path) -> None:
    failed, healthy = run(bad), run(good)
    assert failed.exit_code == 1
    assert failed.stdout.startswith("FAILED  ")
    assert "step 60" in failed.stdout.splitlines()[0]
    assert healthy.exit_code == 0
    assert healthy.stdout.startswith("HEALTHY  ")
    assert failed.stderr == healthy.stderr == ""


@pytest.mark.parametrize(("old", "new"), [("--rate", "--lr"), ("--norm", "--grad-norm")])
def test_old_spellings_of_columns_are_accepted(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss,own\n" + "".join(f"{k},{loss},0.1\n" for k, loss in enumerate(LOSSES)))
    diagnoses = [json.loads(run(path, option, "own", "--json").stdout) for option in (old, new)]
    assert diagnoses[0] == diagnoses[1]
    assert "own" in diagnoses[0]["source"]["columns"].values()


def test_too_short_log_exits_with_0(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("step,loss\n1,2.0\n2,1.9\n")
    result = run(tmp_path / "short.csv")
    assert result.exit_code == 0
    assert result.stdout.startswith("UNKNOWN")


def test_json_is_one_object_or_a_list_for_several_logs(good: Path, bad: Path) -> None:
    diagnosis = json.loads(run(bad, "--json").stdout)
    assert (diagnosis["verdict"], diagnosis["pattern"], diagnosis["onset_step"], diagnosis["last_step"]) == (
        "failed",
        "nonfinite",
        60,
        79,
    )
    assert diagnosis["causes"][0].keys() == {"cause", "confidence", "evidence", "advice"}
    assert diagnosis["source"]["format"] == "csv"
    both = run(good, bad, "--json")
    assert [entry["verdict"] for entry in json.loads(both.stdout)] == ["healthy", "failed"]
    assert both.exit_code == 1


def test_several_logs_end_with_a_table(good: Path, bad: Path) -> None:
    table = run(good, bad).stdout.partition("2 logs\n")[2].splitlines()
    assert [line.split()[0] for line in table if line[0] != " "] == ["HEALTHY", "FAILED"]


def test_pipe_is_read() -> None:
    text = "".join(f"step {k}: loss {loss:.4f}\n" for k, loss in enumerate(LOSSES))
    result = run("-", given=text)
    assert result.exit_code == 0
    assert result.stdout.startswith("HEALTHY")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.log"], "nowhere.log does not exist"),
        (["GOOD", "--loss", "los"], "Did you mean 'loss'"),
        (["GOOD", "--plot", "x.txt"], "the file name must end in .png"),
        (["GOOD", "--compare"], "--compare takes two finished logs"),
        (["GOOD", "GOOD", "--follow"], "--follow takes one log"),
        (["GOOD", "--follow", "--on", "tuesday"], "Use failed or warning"),
        ([], "PATH"),
    ],
)
def test_bad_usage_exits_with_2_and_one_message(arguments: list[str], message: str, good: Path) -> None:
    result = run(*(word.replace("GOOD", str(good)) for word in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_unwritable_page_does_not_suppress_the_diagnosis(good: Path) -> None:
    result = run(good, "--html", good / "x.html")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert result.stdout.startswith("HEALTHY")


def test_unreadable_log_does_not_hide_the_others(good: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere.log", good)
    assert result.exit_code == 2
    assert "nowhere.log does not exist" in result.stderr
    assert "HEALTHY" in result.stdout
    diagnosis = json.loads(run(tmp_path / "nowhere.log", good, "--json").stdout)
    assert [entry["verdict"] for entry in diagnosis] == ["unknown", "healthy"]


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("n,wert,lossy\n" + "".join(f"{k},{loss},1\n" for k, loss in enumerate(LOSSES)))
    diagnosis = json.loads(run(path, "--loss", "wert", "--step", "n", "--json").stdout)
    assert diagnosis["verdict"] == "healthy"
    assert diagnosis["source"]["columns"]["loss"] == "wert"


def test_plots_and_pages_are_written(good: Path, bad: Path, tmp_path: Path) -> None:
    result = run(bad, "--plot", tmp_path / "out" / "run.png", "--html", tmp_path / "out" / "run.html", "--json")
    assert json.loads(result.stdout)["verdict"] == "failed"
    assert "plot written to" in result.stderr
    assert (tmp_path / "out" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "FAILED" in (tmp_path / "out" / "run.html").read_text(encoding="utf-8")
    run(good, bad, "--html", tmp_path / "all.html")
    assert (tmp_path / "all-1.html").exists()
    assert (tmp_path / "all-2.html").exists()


def test_two_logs_are_compared(good: Path, bad: Path, tmp_path: Path) -> None:
    result = run("--compare", good, bad, "--html", tmp_path / "both.html", "--plot", tmp_path / "both.png")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].startswith("A and B are level at step 59")
    assert "B failed at 60" in " ".join(result.stdout.split())
    assert (tmp_path / "both.html").exists()
    assert (tmp_path / "both.png").exists()
    diagnosis = json.loads(run("--compare", good, bad, "--json").stdout)
    assert diagnosis["a"]["verdict"] == "healthy"
    assert diagnosis["b"]["verdict"] == "failed"


def test_internal_error_is_one_line_without_traceback(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh no")

    monkeypatch.setattr(command, "diagnose_file", broken)
    result = run(good)
    assert result.exit_code == 2
    assert "ZeroDivisionError: oh no" in result.stderr
    assert "Please report it" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_interrupt_exits_with_130_and_no_output(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "diagnose_file", stopped)
    result = run(good)
    assert result.exit_code == 130
    assert result.output == ""


def test_error_message_with_an_undecodable_file_name() -> None:
    def unreadable() -> int:
        raise UnreadableInput("\udcff.log is not there")

    assert command.with_exit_code(unreadable) == 2


PIECES = [
    b"step,loss\n",
    b"1,2.5\n",
    b'{"step": 1, "loss": NaN}\n',
    b"step 3 loss 1e999\n",
    b"{'loss': 2.1, 'epoch': 0.1}\n",
]


@given(pieces=st.lists(st.one_of(st.binary(max_size=30), st.sampled_from(PIECES)), max_size=20))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_a_diagnosis_or_one_message(pieces: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "any").write_bytes(b"".join(pieces))
    result = run(tmp_path / "any", "--json")
    assert result.exit_code in (0, 1, 2)
    assert "Please report" not in result.stderr
    if result.exit_code == 2:
        assert len(result.stderr.splitlines()) == 1
    else:
        json.loads(result.stdout)


def test_example_dead_run_is_diagnosed_as_failed(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "dead_run.py"
    log = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True).stdout
    diagnosis = json.loads(run("-", "--json", given=log).stdout)
    assert diagnosis["verdict"] == "failed"
    assert {"learning_rate", "exploding_gradient"} & {entry["cause"] for entry in diagnosis["causes"][:2]}


# -- in a separate process

SUREFOOT = [sys.executable, "-m", "surefoot", "diagnose"]


def test_piped_output_is_plain_ascii_in_an_ascii_terminal(bad: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1"}
    done = subprocess.run([*SUREFOOT, bad], capture_output=True, env=env, check=False)
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert b"\x1b" not in done.stdout


def test_closed_stdout_is_no_error(bad: Path) -> None:
    process = subprocess.Popen([*SUREFOOT, bad], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()


def test_follow_exits_with_1_when_the_run_dies(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {k} loss {loss}\n" for k, loss in enumerate(LOSSES)))
    process = subprocess.Popen([*SUREFOOT, "--follow", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with path.open("a") as log:
        for step in range(80, 92):
            log.write(f"step {step} loss nan\n")
            log.flush()
            time.sleep(0.02)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "FAILED" in out.splitlines()[0]
    assert "What to do" in out
    assert err == ""


def test_follow_ends_with_the_pipe() -> None:
    text = "".join(f"step {k} loss {loss}\n" for k, loss in enumerate(LOSSES))
    done = subprocess.run([*SUREFOOT, "-f", "-", "--json"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "healthy"


@pytest.mark.skipif(sys.platform == "win32", reason="signals as Unix has them")
def test_follow_ends_cleanly_on_ctrl_c(good: Path, tmp_path: Path) -> None:
    late = tmp_path / "late.log"
    process = subprocess.Popen([*SUREFOOT, "--follow", late], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "waiting for it" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "")


@pytest.mark.parametrize("option", ["--html", "--plot"])
def test_input_log_is_never_replaced_by_its_page_or_plot(bad: Path, option: str) -> None:
    log = bad.rename(bad.with_suffix(".png"))  # a suffix that a picture may have
    before = log.read_bytes()
    (log.parent / "link.png").symlink_to(log)
    for target in (log, log.parent / "link.png"):
        for force in ([], ["--force"]):
            result = run(log, option, target, *force)
            assert result.exit_code == 2
            assert "is the input file, which is never replaced" in result.stderr
            assert len(result.stderr.splitlines()) == 1
            assert log.read_bytes() == before
    assert run("--compare", log, log, option, log, "--force").exit_code == 2
    assert log.read_bytes() == before


def test_input_log_redirected_to_stdin_is_not_replaced(bad: Path) -> None:
    command = [sys.executable, "-m", "surefoot", "diagnose", "-", "--html", str(bad), "--force"]
    with bad.open("rb") as log:
        done = subprocess.run(command, stdin=log, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert bad.read_text().startswith("iteration,train loss")


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_foreign_files_are_replaced_only_with_force(good: Path, tmp_path: Path, suffix: str) -> None:
    option, target = {"html": "--html", "png": "--plot"}[suffix], tmp_path / f"mine.{suffix}"
    target.write_text("my own work")
    result = run(good, option, target)
    assert result.exit_code == 2
    assert f"{target} already exists and surefoot did not write it. Name another file, or pass --force" in (
        result.stderr.replace("\n", " ")
    )
    assert result.stdout == ""  # refused before a long log is read
    assert target.read_text() == "my own work"
    assert run(good, option, target, "--force").exit_code == 0
    assert run(good, option, target).exit_code == 0  # an earlier output of surefoot
    assert target.read_bytes() != b"my own work"


@pytest.mark.parametrize("option", ["--html", "--plot"])
def test_device_or_link_to_one_is_not_replaced(good: Path, tmp_path: Path, option: str) -> None:
    link = tmp_path / "null.png"
    link.symlink_to("/dev/null")
    result = run(good, option, link, "--force")
    assert result.exit_code == 2
    assert "is a device, which is never replaced" in result.stderr
    assert link.is_symlink()


def test_page_and_plot_need_two_files(good: Path, tmp_path: Path) -> None:
    result = run(good, "--html", tmp_path / "a.png", "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "Name two files" in result.stderr


def test_follow_reports_failed_for_a_loss_that_stays_high_after_a_jump() -> None:
    losses = [*(2.2 + 7.8 * np.exp(-np.arange(5000) / 900)), *(6.5 + 4.5 * np.exp(-np.arange(72) / 20))]
    noise = np.random.default_rng(0).normal(0, 0.02, len(losses))
    log = "".join(f"step {k} loss {loss:.4f}\n" for k, loss in enumerate(losses * np.exp(noise)))
    done = subprocess.run([*SUREFOOT, "--follow", "-"], input=log, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "HEALTHY" not in done.stdout

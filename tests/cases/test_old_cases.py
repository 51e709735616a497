"""A run that is attached with old cases names those like its incident, and tries what helped there first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from incident_run import case, step_fn, train

import surefoot
from surefoot.cases.case_library import write_library
from surefoot.logs.diagnose_log import diagnose
from surefoot.sinks.narrator import EventNarrator


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in surefoot.read(run_dir).events if event["kind"] == kind]


def branches(run_dir: Path) -> list[str]:
    trial = next(event for event in events(run_dir, "trial") if event["values"].get("branches"))
    return [branch["branch"] for branch in trial["values"]["branches"]]


def test_similar_cases_are_shown_and_their_remedy_is_tried_first(tmp_path: Path) -> None:
    library = tmp_path / "library.jsonl"
    write_library(library, [case(best="clip"), case(run="useless", helped=False, best="skip")])
    model = train(tmp_path / "with", step_fn=step_fn, cases=library)
    plain = train(tmp_path / "without", step_fn=step_fn)
    assert branches(tmp_path / "with")[:3] == ["nothing", "replay", "clip"]
    assert branches(tmp_path / "without")[2] != "clip"
    assert sorted(branches(tmp_path / "with")) == sorted(branches(tmp_path / "without"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    diagnosis = next(event for event in events(tmp_path / "with", "diagnosis") if event["cause"] == "learning_rate")
    assert [found["run"] for found in diagnosis["similar_cases"]] == ["old", "useless"]
    lines: list[str] = []
    narrator = EventNarrator(lambda step, label, text, style: lines.append(text))
    for event in surefoot.read(tmp_path / "with").events:
        narrator.on_event(event)
    sentence = "similar: old, step 150, learning rate in mlp/AdamW: clip helped (loss 0.5 before, 0.4 after)"
    assert sentence in lines
    assert sentence in json.dumps(diagnose(tmp_path / "with").as_json())


def test_runs_can_be_compared_with_runs(tmp_path: Path) -> None:
    train(tmp_path / "runs" / "first")
    train(tmp_path / "runs" / "second", cases=tmp_path / "runs")
    similar = [event["similar_cases"] for event in events(tmp_path / "runs" / "second", "diagnosis")]
    assert [found["run"] for found in next(filter(None, similar))] == ["first"]


@pytest.mark.parametrize("content", [None, "no library", ""])
def test_cases_that_cannot_be_read_are_a_warning(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "library.jsonl"
    if content is not None:
        library.write_text(content + "\n")
    train(tmp_path / "run", fault="", steps=5, cases=library)
    (note,) = [event for event in events(tmp_path / "run", "note") if event["name"] == "cases"]
    assert ("no old cases are known" in note["detail"]) is (content != "")
    assert ("no old cases are known" in caplog.text) is (content != "")
    assert surefoot.read(tmp_path / "run").scalars.rows == 5


def test_a_wrong_argument_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cases= takes a folder with runs or a case library, not int"):
        train(tmp_path, fault="", steps=1, cases=3)


def test_all_ranks_try_the_same_branch_first(two_processes: Any) -> None:
    first, second = two_processes(Path(__file__).parent / "two_ranks_cases.py")
    assert first["weights"] == second["weights"]
    assert branches(Path(first["run"]))[:3] == ["nothing", "replay", "clip"]

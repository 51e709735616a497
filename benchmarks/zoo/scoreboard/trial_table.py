"""What trials found in the runs under surefoot, by planted cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import surefoot
from benchmarks.zoo.jobs import SUREFOOT, JobResult, ZooJob
from benchmarks.zoo.scenario import Scenario
from benchmarks.zoo.scoreboard.scores import journal_report
from surefoot.records import Cause
from surefoot.trials.conclusion import TrialEvent, TrialResult

TRIALS = (
    "Trials under surefoot, by planted cause: in what the run first differed from the replay of its steps (none: the "
    "replay goes wrong in the same way; restart: the run was tried from its initial state), which branch it continued "
    "from (nothing: it was left alone), and, where the "
    "trial names causes, whether the planted one is among them."
)
_HEALTHY = "none: healthy"
_HEAD = (
    "planted cause",
    "trials",
    "differs from its replay",
    "continued from",
    "cause right",
    "seconds: median, worst",
)


def trial_rows(
    scenarios: Sequence[Scenario], results: Mapping[tuple[str, str], JobResult], folder: Path
) -> Iterator[Sequence[str]]:
    """The head of the table, and a row for each planted cause in whose runs there were trials."""
    yield _HEAD
    by_cause: dict[str, list[tuple[Scenario, Mapping[str, Any]]]] = {}
    for scenario in scenarios:
        if (scenario.id, SUREFOOT) in results and scenario.settings.ranks == 1:
            events = surefoot.read(ZooJob(scenario.id, SUREFOOT, str(folder)).run_dir).events
            found = [(scenario, e["values"]) for e in events if e["kind"] == "trial" and "best" in e["values"]]
            by_cause.setdefault(scenario.cause or _HEALTHY, []).extend(found)
    for cause, trials in sorted(by_cause.items()):
        if trials:
            yield cause, *_cells(trials)


def first_causes(scenarios: Sequence[Scenario], results: Mapping[tuple[str, str], JobResult], folder: Path) -> str:
    """In how many harmful runs the first cause that surefoot named was right, where trials ran and where none did."""
    right, count = Counter[bool](), Counter[bool]()
    for scenario in scenarios:
        if not scenario.harmful or (scenario.id, SUREFOOT) not in results:
            continue
        run_dir = ZooJob(scenario.id, SUREFOOT, str(folder)).run_dir
        kinds = ((e["kind"], e.get("result")) for e in surefoot.read(run_dir).events)
        tried = any(kind == TrialEvent.kind and result != TrialResult.NOT_RUN for kind, result in kinds)
        count[tried] += 1
        right[tried] += scenario.is_right_cause(journal_report(run_dir, scenario).cause)
    shares = [f"{right[tried]} of {count[tried]}" for tried in (True, False)]
    return f"First cause right, with step_fn: {shares[0]} where trials ran, {shares[1]} where none did."


def _cells(trials: Sequence[tuple[Scenario, Mapping[str, Any]]]) -> Iterator[str]:
    named = [(scenario, values["causes"]) for scenario, values in trials if values["causes"]]
    right = sum(any(scenario.is_right_cause(Cause(cause)) for cause in causes) for scenario, causes in named)
    seconds = sorted(values["seconds"] for _, values in trials)
    yield str(len(trials))
    for name in ("deviation", "best"):
        counts = Counter(str(values.get(name, "restart")) for _, values in trials)
        yield ", ".join(f"{value} {count}" for value, count in counts.most_common())
    yield f"{right} of {len(named)}" if named else "-"
    yield f"{seconds[len(seconds) // 2]:.2f}, {seconds[-1]:.2f}"

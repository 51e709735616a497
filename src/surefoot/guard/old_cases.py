"""Old cases that are like a new incident: named in its diagnosis, and their remedy is tried first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from surefoot.cases.case_library import NoCases, load_cases
from surefoot.cases.case_record import Case
from surefoot.cases.model_family import phase_of
from surefoot.cases.similarity import NewIncident, as_event_field, most_similar, remedies_that_helped
from surefoot.records import Diagnosis, Event
from surefoot.trials.branches import BranchId, branch_of_remedy

log = logging.getLogger("surefoot")
READ_SECONDS = 5.0
"""How long attach reads old cases at most."""


class OldCases:
    """The cases that a run was attached with."""

    def __init__(self, cases: Sequence[Case], *, family: str, optimizer: str) -> None:
        self._cases, self._family, self._optimizer = cases, family, optimizer
        self.first_branch: BranchId | None = None
        """The branch that stands for what helped in the case most like the incident diagnosed last."""

    def annotate(self, events: Sequence[Event]) -> list[Event]:
        """The events of a row, with similar cases in the first diagnosis among them."""
        causes = [event.cause.value for event in events if isinstance(event, Diagnosis)]
        annotated: list[Event] = []
        for event in events:
            if causes and isinstance(event, Diagnosis):
                event, causes = self._with_similar(event, causes), []
            annotated.append(event)
        return annotated

    def _with_similar(self, diagnosis: Diagnosis, causes: Sequence[str]) -> Diagnosis:
        findings = diagnosis.evidence.get("findings", ())
        incident = NewIncident(
            causes=causes,
            findings=[str(getattr(kind, "value", kind)) for kind in findings],
            family=self._family,
            optimizer=self._optimizer,
            phase=phase_of(diagnosis.step),
        )
        similar = most_similar(self._cases, incident)
        branches = (branch_of_remedy(remedy) for remedy in remedies_that_helped(similar))
        self.first_branch = next((branch for branch in branches if branch is not None), None)
        return replace(diagnosis, similar_cases=as_event_field(similar)) if similar else diagnosis


def read_old_cases(path: Path, run_dir: Path, *, family: str, optimizer: str) -> tuple[OldCases | None, str]:
    """The cases of a folder or a library, without those of this run, and a sentence about them; never raises."""
    try:
        library = load_cases(path, seconds=READ_SECONDS, skip=run_dir)
    except (NoCases, OSError) as error:
        return None, f"no old cases are known: {error}"
    except Exception as error:  # of a damaged file that nobody thought of: training goes on
        return None, f"no old cases are known: {type(error).__name__}: {error}"
    for note in library.notes:
        log.info("surefoot: cases: %s", note)
    left_out = f"; {len(library.notes)} remarks, the first: {library.notes[0]}" if library.notes else ""
    text = f"{len(library.cases)} old cases were read from {path}{left_out}"
    return OldCases(library.cases, family=family, optimizer=optimizer), text

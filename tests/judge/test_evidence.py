"""Evidence of findings round-trips through the journal and through a saved incident."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest

from surefoot.judge.evidence import Evidence, LrDropped, LrRaised, MomentumRaised
from surefoot.judge.incident import finding_state, load_finding
from surefoot.records import Cause, Finding

VALUES = {"float": 1.5, "int": 2, "bool": True, "str": "mlp", "list[str]": ["mlp.weight"], "Cause": Cause.LABELS}


def kinds_of(evidence: type[Evidence]) -> Iterator[type[Evidence]]:
    for kind in evidence.__subclasses__():
        yield kind
        yield from kinds_of(kind)


@pytest.mark.parametrize("kind", list(kinds_of(Evidence)), ids=lambda kind: kind.__name__)
def test_evidence_round_trips(kind: type[Evidence]) -> None:
    values: dict[str, Any] = {f.name: VALUES[str(f.type)] for f in fields(kind) if f.default is MISSING}
    evidence = kind(**values)
    assert evidence.as_dict() == values, "defaults are left out of the journal"
    for detector in kind.kinds:
        finding = Finding(step=1, attempt=1, detector=detector, evidence=evidence.as_dict())
        assert kind.read(finding) == evidence
        assert kind.read(load_finding(json.loads(json.dumps(finding_state(finding))))) == evidence


def test_one_detector_may_have_several_kinds_of_evidence() -> None:
    (detector,) = LrRaised.kinds
    dropped = LrDropped(lr=1e-5, before=1e-3, early=False)
    finding = Finding(step=1, attempt=1, detector=detector, evidence=dropped.as_dict())
    assert LrDropped.read(finding) == dropped
    assert LrRaised.read(finding) is None
    assert MomentumRaised.read(finding) is None

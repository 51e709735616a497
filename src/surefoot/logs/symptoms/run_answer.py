"""The answer for a surefoot run: what the run itself tells comes before what its curves show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.judge.cause_catalog import CAUSES
from surefoot.logs.log_diagnosis import LogDiagnosis, RankedCause, RunHealth
from surefoot.records import Cause, Pattern
from surefoot.story.incident_block import incident_sentence
from surefoot.story.incident_story import IncidentLevel, IncidentStory
from surefoot.story.run_story import RunStory, RunVerdict

SUDDEN_PATTERNS = frozenset({Pattern.NONFINITE, Pattern.JUMP, Pattern.EXPONENTIAL, Pattern.OSCILLATING})
SUDDEN_PATTERNS |= frozenset({Pattern.COLLAPSE_TO_ZERO, Pattern.RECOVERED_SPIKE})
"""Patterns with an onset; for others only an incident that led to an action can be the cause."""
MAX_STEPS_EARLIER = 20
"""Steps by which an incident may precede the onset found in the curves, as a rewind shifts steps."""
MAX_CAUSES = 4


def with_story(diagnosis: LogDiagnosis, story: RunStory) -> LogDiagnosis:
    """Put what the run itself told first: its main incident, or one it suspected where the curves show trouble."""
    main = story.main
    if main is None or not _explains(main, story, diagnosis):
        answer = _with_suspected(diagnosis, story)
    else:
        shown = f"in the curves: {diagnosis.sentence}"
        failed = story.health is RunVerdict.FAILED or diagnosis.verdict is RunHealth.FAILED
        answer = replace(
            diagnosis,
            verdict=RunHealth.FAILED if failed else RunHealth.WARNING,
            sentence=incident_sentence(main, others=_others(story)),
            onset_step=main.step,
            causes=_merge_causes(main, diagnosis.causes),
            notes=(*diagnosis.notes, shown) if diagnosis.sentence else diagnosis.notes,
        )
    return replace(answer, story=story, notes=(f"the run: {story.headline}", *answer.notes))


def _explains(main: IncidentStory, story: RunStory, diagnosis: LogDiagnosis) -> bool:
    """Whether the run's main incident is the answer, and not trouble that only its curves show."""
    if diagnosis.verdict is RunHealth.FAILED and story.health is not RunVerdict.FAILED:
        later = diagnosis.onset_step is not None and diagnosis.onset_step > main.last_step + MAX_STEPS_EARLIER
        return not later and diagnosis.pattern in SUDDEN_PATTERNS
    only_refused = main.level is IncidentLevel.REFUSED
    return not only_refused or diagnosis.pattern is Pattern.NONE or diagnosis.pattern in SUDDEN_PATTERNS


def _others(story: RunStory) -> int:
    done = (IncidentLevel.REFUSED, IncidentLevel.ACTED, IncidentLevel.STOPPED)
    return sum(incident.level in done for incident in story.incidents) - 1


def _with_suspected(diagnosis: LogDiagnosis, story: RunStory) -> LogDiagnosis:
    """Incidents that passed without an action: mentioned in a healthy run, the cause of trouble that began there."""
    known = [i for i in story.incidents if i.first_cause is not None and i.first_cause.cause is not Cause.UNKNOWN]
    if diagnosis.verdict is RunHealth.HEALTHY:
        return _note_passed(diagnosis, known) if known else diagnosis
    if not diagnosis.is_trouble:
        return diagnosis
    decided = [i for i in known if i.actions or diagnosis.pattern in SUDDEN_PATTERNS]
    onset = diagnosis.onset_step
    after = [i for i in decided if onset is None or i.last_step >= onset - MAX_STEPS_EARLIER]
    if not after:
        return diagnosis
    nearest = min(after, key=lambda incident: abs(incident.step - (onset or 0)))
    near = onset is None or abs(nearest.step - onset) <= MAX_STEPS_EARLIER
    return replace(
        diagnosis,
        causes=_merge_causes(nearest, diagnosis.causes),
        onset_step=nearest.step if near else onset,
    )


def _note_passed(diagnosis: LogDiagnosis, incidents: Sequence[IncidentStory]) -> LogDiagnosis:
    """No action was needed: the run stays healthy, and the sentence mentions the diagnosis."""
    named = [(incident, incident.first_cause) for incident in incidents if incident.first_cause is not None]
    incident, cause = max(named, key=lambda pair: pair[1].confidence)
    words = f"; what it diagnosed on the way ({cause.cause} at step {incident.step:,}) passed."
    return replace(diagnosis, sentence=diagnosis.sentence.removesuffix(", and nothing stands out.").rstrip(".") + words)


def _merge_causes(incident: IncidentStory, others: Sequence[RankedCause]) -> tuple[RankedCause, ...]:
    """The run's causes, each with the log's evidence; then the log's other causes with lower confidence."""
    causes: dict[Cause, RankedCause] = {}
    named = [c for c in incident.causes if c.cause is not Cause.UNKNOWN]
    for named_cause in named:
        cause = named_cause.cause
        same = next((other for other in others if other.cause is cause), None)
        more = same.evidence if same else others[0].evidence if others and not causes else ()
        evidence = tuple(dict.fromkeys((*named_cause.evidence, *more)))
        advice = tuple(dict.fromkeys((*named_cause.advice, *(same.advice if same else CAUSES[cause].remedies))))
        causes[cause] = RankedCause(cause=cause, confidence=named_cause.confidence, evidence=evidence, advice=advice)
    least = min((ranked.confidence for ranked in causes.values()), default=1.0)
    added = [
        replace(other, confidence=min(0.5 * other.confidence, least)) for other in others if other.cause not in causes
    ]
    if not named:  # the run does not know, so what the curves show leads
        return tuple(others)[:MAX_CAUSES]
    return (*causes.values(), *added)[:MAX_CAUSES]

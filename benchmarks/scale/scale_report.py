"""The tables of `surefoot bench scale`: every scenario with all loops side by side, and what they come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.scale.loops import BARE, SUREFOOT
from benchmarks.scale.scale_scenario import TWIN, ScaleScenario
from benchmarks.scale.scale_trainer import ScaleResult
from benchmarks.scale.sizes import ScaleSize

CURED = 1.03
"""Ended at most 3 % above the fault-free run."""
REGRET = 1.02
"""Ended more than 2 % above the bare run: worse than doing nothing."""
NOT_RUN = "-"


@dataclass(frozen=True, slots=True)
class ScaleBoard:
    """All results, and their scores."""

    scenarios: Sequence[ScaleScenario]
    loops: Sequence[str]
    results: Mapping[tuple[str, str], ScaleResult]
    size: ScaleSize
    seconds: float | None = None
    """Wall time of the call that trained them."""

    @property
    def faults(self) -> list[ScaleScenario]:
        return [s for s in self.scenarios if not s.healthy]

    @property
    def controls(self) -> list[ScaleScenario]:
        return [s for s in self.scenarios if s.healthy]

    @property
    def errors(self) -> list[ScaleResult]:
        """Runs that ended with an exception other than surefoot's own stop."""
        return [result for result in self.results.values() if result.error]

    def ratio(self, scenario: ScaleScenario, loop: str) -> float | None:
        """Final loss relative to the fault-free bare run, or for a healthy change to the same run bare."""
        base = self.results.get((scenario.name if scenario.healthy else TWIN, BARE))
        result = self.results.get((scenario.name, loop))
        if result is None or base is None or base.loss is None:
            return None
        return math.inf if result.loss is None else result.loss / base.loss

    def regret(self, scenario: ScaleScenario, loop: str) -> float | None:
        """Final loss relative to the same run bare; 1 where both are broken."""
        ratio, bare = self.ratio(scenario, loop), self.ratio(scenario, BARE)
        if ratio is None or bare is None:
            return None
        return ratio / bare if math.isfinite(bare) else 1.0 if math.isinf(ratio) else 0.0

    def is_harmful(self, scenario: ScaleScenario) -> bool:
        """Whether the bare run ended more than 3 % above the fault-free one."""
        bare = self.ratio(scenario, BARE)
        return bare is not None and bare > CURED

    def worse_than_bare(self, loop: str) -> list[tuple[ScaleScenario, float]]:
        """Scenarios, harmful or healthy, in which a loop did harm."""
        regrets = [(scenario, self.regret(scenario, loop)) for scenario in self.scenarios]
        return [(scenario, regret) for scenario, regret in regrets if regret is not None and regret > REGRET]

    def as_markdown(self) -> str:
        """Both tables and the summary."""
        return "\n".join([*self._fault_table(), "", *self._control_table(), "", *self._summary()])

    # -- the tables

    def _fault_table(self) -> Iterator[str]:
        if not self.faults:
            return
        yield "Final eval loss relative to the fault-free bare run; (c) can be cured from within the loop."
        yield ""
        yield f"| fault | {' | '.join(self.loops)} | seen after | first cause | surefoot did | seconds |"
        yield f"|---|{'---|' * (len(self.loops) + 4)}"
        for scenario in self.faults:
            result = self.results.get((scenario.name, SUREFOOT))
            name = f"{scenario.name} (c)" if scenario.curable else scenario.name
            cells = [self._cell(scenario, loop) for loop in self.loops]
            yield f"| {name} | {' | '.join([*cells, *self._seen_and_done(scenario, result)])} |"

    def _control_table(self) -> Iterator[str]:
        if not self.controls:
            return
        yield "Final eval loss of healthy runs relative to the same run bare, and interventions in brackets."
        yield ""
        yield f"| healthy run | {' | '.join(self.loops)} | surefoot did | seconds |"
        yield f"|---|{'---|' * (len(self.loops) + 2)}"
        for scenario in self.controls:
            result = self.results.get((scenario.name, SUREFOOT))
            cells = [self._cell(scenario, loop, acted=loop != BARE) for loop in self.loops]
            yield f"| {scenario.name} | {' | '.join([*cells, *self._seen_and_done(scenario, result)[2:]])} |"

    def _cell(self, scenario: ScaleScenario, loop: str, *, acted: bool = False) -> str:
        ratio, result = self.ratio(scenario, loop), self.results.get((scenario.name, loop))
        if ratio is None or result is None:
            return NOT_RUN
        if result.error:
            return "error"
        text = "broken" if math.isinf(ratio) else f"{ratio:.3f}"
        if acted:
            text += f" ({result.acted + result.acted_before})"
        return text if result.stopped is None else f"{text}, stopped at {result.stopped}"

    @staticmethod
    def _seen_and_done(scenario: ScaleScenario, result: ScaleResult | None) -> list[str]:
        if result is None:
            return [NOT_RUN] * 4
        seen = "no" if result.seen_after is None else str(result.seen_after)
        mark = "" if result.cause in scenario.causes else " (wrong)"
        cause = f"{result.cause}{mark}" if result.cause else "none"
        return [seen, cause, " ".join(result.actions) or "nothing", f"{result.seconds:.1f}"]

    # -- the summary

    def _summary(self) -> Iterator[str]:
        curable = [s for s in self.faults if s.curable]
        for loop in self.loops:
            cured = f"{self._share_cured(curable, loop)} of the curable faults"
            harmful = (
                f"{self._share_cured([s for s in curable if self.is_harmful(s)], loop)} of those that harm the bare run"
            )
            yield f"- Within 3 % of fault-free, {loop}: {cured}, {harmful}."
        for loop in self.loops[1:]:
            worse = [f"{s.name} ({regret:.2f})" for s, regret in self.worse_than_bare(loop)]
            yield f"- More than 2 % above the bare run, {loop}: {', '.join(worse) or 'none'}."
        for loop in self.loops[1:]:
            interventions = self._false_interventions(loop)
            yield f"- Interventions (clipping counts) where nothing was wrong, {loop}: {interventions}."
        yield from self._detection()
        for error in self.errors:
            yield f"- {error.scenario}, {error.loop} ended with an error: {error.error}"
        took = "" if self.seconds is None else f"; this call took {self.seconds:.0f} s"
        yield f"- {self.size.name}, {self.size.updates} updates a run{took}."

    def _share_cured(self, scenarios: Sequence[ScaleScenario], loop: str) -> str:
        ratios = [ratio for s in scenarios if (ratio := self.ratio(s, loop)) is not None]
        return f"{sum(ratio <= CURED for ratio in ratios)} of {len(ratios)}"

    def _false_interventions(self, loop: str) -> str:
        """In the healthy runs; of surefoot also those before the onset of a fault, which the others have in common."""
        runs = self.scenarios if loop == SUREFOOT else self.controls
        results = [(s, self.results[s.name, loop]) for s in runs if (s.name, loop) in self.results]
        counts = {s.name: result.acted_before + (result.acted if s.healthy else 0) for s, result in results}
        names = [f"{name} ({count})" for name, count in counts.items() if count]
        listed = f": {', '.join(names)}" if names and loop == SUREFOOT else ""
        return f"{sum(counts.values())} updates in {len(names)} of {len(counts)} runs{listed}"

    def _detection(self) -> Iterator[str]:
        pairs = [(s, self.results[s.name, SUREFOOT]) for s in self.faults if (s.name, SUREFOOT) in self.results]
        harmful = [(s, result) for s, result in pairs if self.is_harmful(s)]
        seen = [result.seen_after for _, result in harmful if result.seen_after is not None]
        right = sum(result.cause in s.causes for s, result in harmful)
        delay = f", {statistics.median(seen):.0f} updates after the onset (median)" if seen else ""
        yield f"- surefoot saw {len(seen)} of {len(harmful)} harmful faults{delay}; first cause right in {right}."
        times = {loop: self._median_ms(loop) for loop in (BARE, SUREFOOT)}
        if not any(map(math.isnan, times.values())):
            spent = ", ".join(f"{loop} {ms:.1f} ms" for loop, ms in times.items())
            yield f"- Time per update in healthy runs, median: {spent}."

    def _median_ms(self, loop: str) -> float:
        times = [r.ms_per_update for s in self.controls if (r := self.results.get((s.name, loop))) is not None]
        return statistics.median(times) if times else math.nan

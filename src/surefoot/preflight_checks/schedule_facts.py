"""Facts about the schedule, as it will be over the whole run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, sure
from surefoot.preflight_checks.loop_probe import PreflightContext

MAX_STEPS = 20_000
LOW = 0.002
"""Fraction of the peak at which a rate teaches next to nothing."""


def whole_schedule(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Step the scheduler once per update, and look at the rates."""
    total, scheduler = c.settings.total_steps, c.settings.scheduler
    if scheduler is None or not total or total > MAX_STEPS:
        return
    rates: list[float] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(total):
                rates.append(float(c.optimizers[0].param_groups[0]["lr"]))
                scheduler.step()
    except ValueError as error:
        yield sure(
            Cause.SCHEDULE,
            f"the schedule ends after {len(rates)} of {total} updates",
            f"{type(scheduler).__name__}.step() raises: {error}",
            f"Create it for {total} updates.",
        )
        return
    except TypeError:
        return  # one that wants a number, such as ReduceLROnPlateau
    finally:
        c.trainer.restore()
    peak = max(rates)
    fix = "Plot it over all updates; step once per update if it counts updates, once per epoch if it counts epochs."
    if peak == 0:
        yield sure(Cause.SCHEDULE, "the learning rate is 0 in the whole run", f"in all {total} updates", fix)
        return
    low = [i for i, rate in enumerate(rates) if rate < LOW * peak and i > rates.index(peak)]
    if low and low[0] < 0.75 * total:
        again = max(rates[low[0] :]) > 0.1 * peak
        make = doubtful if again or low[0] > 0.5 * total else sure
        yield make(
            Cause.SCHEDULE,
            "the learning rate rises again after it had ended" if again else "the learning rate ends too early",
            f"it is below 0.2 % of its peak {peak:.3g} from update {low[0]} of {total} on",
            fix,
            ends=low[0],
            total=total,
        )
    elif rates.index(peak) > 0.5 * total:
        yield doubtful(
            Cause.SCHEDULE,
            "the learning rate still rises in the second half of the run",
            f"its peak is at update {rates.index(peak)} of {total}",
            fix,
        )


FACTS = (whole_schedule,)

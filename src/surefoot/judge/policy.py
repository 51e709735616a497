"""The figures a policy is made of, all in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a run is protected; every figure that decides over an update stands here.

    >>> Policy(limit=5).limit
    5
    """

    observe: bool = False
    """Only watch, and tell what would have been done."""
    outlandish: float = 100.0
    """A finite update is refused when its norm is above this many times the largest one accepted lately, and above
    every one accepted so far. Far from anything a healthy run does: what is merely large is for clipping."""
    warmup: int = 20
    """Accepted updates before a finite one can be refused."""
    fade: float = 0.999
    """What is left of the recent largest norm after each step: half of it after 693 steps."""
    limit: int = 20
    """Refused updates in a row after which the run is stopped."""
    overflow_limit: int = 60
    """Overflows of the loss scale in a row after which the run is stopped: 2^16 has been halved to 2^-44 by then."""
    weights_every: int = 100
    """Steps between two looks at the weights themselves."""
    machine_every: float = 5.0
    """Seconds between two readings of memory and utilisation; 0 reads them at every step."""

    def __post_init__(self) -> None:
        wrong = [
            name
            for name in ("outlandish", "warmup", "limit", "overflow_limit", "weights_every")
            if not getattr(self, name) >= 1
        ]
        if wrong:
            raise ValueError(f"Policy: {', '.join(wrong)} must be at least 1.")
        if not self.machine_every >= 0.0:
            raise ValueError("Policy: machine_every must be at least 0.")
        if not 0.0 < self.fade <= 1.0:
            raise ValueError("Policy: fade must be above 0 and at most 1.")

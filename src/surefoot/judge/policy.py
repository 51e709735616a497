"""`Policy`: how a run is protected, with every number that decides about an update."""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.journal.policy_aliases import DERIVED_POLICY, ignore_derived
from surefoot.judge.thresholds import SETTLED_UPDATES, Thresholds


@ignore_derived(DERIVED_POLICY)
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a run is protected; every number that decides about an update is a field here.

    >>> Policy(max_consecutive_vetoes=5).max_consecutive_vetoes
    5
    """

    observe: bool = False
    """Only watch, and report what would have been done."""
    max_norm_ratio: float = 100.0
    """A finite update is refused when its norm is above this many times the largest one accepted recently, and above
    every one accepted so far. No healthy run comes near it; gradients that are merely large are for clipping."""
    warmup: int = 20
    """Accepted updates before a finite one can be refused."""
    max_consecutive_vetoes: int = 20
    """Refused updates in a row after which the run is stopped; three times as many overflows of the loss scale
    stop it too."""
    max_failed_actions: int = 3
    """Actions in a row that did not help, after which the run is stopped; progress resets the count."""
    max_actions: int = 50
    """Actions in the whole run after which it is stopped."""
    healthy_steps_to_confirm: int = 20
    """Healthy updates after which an action counts as having helped."""
    relax_after: int = 100
    """Healthy updates after which overrides (lower lr, tighter clip) are relaxed; twice as many after relaxing too
    early."""
    healthy_steps_to_trust: int = 10
    """Healthy updates that must follow a state before it counts as good."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """From which values on detectors report something."""
    weights_every: int = 100
    """Steps between two checks of the weights themselves."""
    system_every: float = 5.0
    """Seconds between two readings of memory and utilisation; 0 reads them at every step."""
    snapshot_every: int | None = None
    """Updates between two snapshots in memory that a run can rewind to; None (default) chooses 5 to 50, as few as
    `snapshot_time_share` allows."""
    snapshot_time_share: float = 0.002
    """The share of the time of training that taking snapshots may cost, where their interval is chosen."""
    max_snapshots: int = 8
    """Snapshots kept at most, the older the further apart; fewer than 2 are of no use."""
    snapshot_reach: int = 150
    """How many attempts back the oldest snapshot may lie: some trouble shows only long after it began."""

    trial_seconds: float = 10.0
    """With `step_fn=`: the longest time one trial may take; 0 runs none."""

    max_banned_fraction: float = 0.01
    """Samples that break updates are banned from the data, up to this fraction of it, but always one; 0 bans none."""

    save_every: int = 1000
    """Steps between two checkpoints on disk, when `resume=` asks for checkpoints."""
    save_seconds: float = 3600.0
    """The longest time between two checkpoints on disk."""
    probe_every: int = 1
    """With `step_fn=`: every so many checkpoints the last batch is saved with its loss, which costs one forward pass;
    0 saves none."""
    cautious_after_crash: bool = False
    """After a crash, resume with half the learning rate and gradients clipped at 0.5 until `relax_after` healthy
    updates have been made."""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in AT_LEAST_ONE}
        wrong = [name for name, value in given.items() if value is not None and not value >= 1]
        if wrong:
            raise ValueError(f"Policy: {', '.join(wrong)} must be at least 1.")
        if not self.max_snapshots >= 2:
            raise ValueError(
                "Policy: max_snapshots must be at least 2; attach(..., snapshot_memory=False) keeps no snapshots."
            )
        if not 0.0 < self.snapshot_time_share <= 1.0:
            raise ValueError("Policy: snapshot_time_share must be above 0 and at most 1.")
        if not 0.0 <= self.max_banned_fraction <= 1.0:
            raise ValueError("Policy: max_banned_fraction must be at least 0 and at most 1.")
        if not self.probe_every >= 0:
            raise ValueError("Policy: probe_every must be at least 0.")
        if not self.system_every >= 0.0:
            raise ValueError("Policy: system_every must be at least 0.")

    @property
    def norm_max_decay(self) -> float:
        """Factor applied to the recent largest norm after each step: it halves in 693 steps."""
        return 1 - 1 / SETTLED_UPDATES

    @property
    def max_vetoes_waiting(self) -> int:
        """Refused updates in a row after which a run is stopped that was rewound because its eval loss was harmed, and
        waits for the harmful data to be over."""
        return 10 * self.max_consecutive_vetoes

    @property
    def max_consecutive_overflows(self) -> int:
        """Overflows of the loss scale in a row after which the run is stopped: by then 2^16 has been halved to
        2^-44."""
        return 3 * self.max_consecutive_vetoes


AT_LEAST_ONE = (
    "max_norm_ratio",
    "warmup",
    "max_consecutive_vetoes",
    "max_failed_actions",
    "max_actions",
    "healthy_steps_to_confirm",
    "relax_after",
    "healthy_steps_to_trust",
    "weights_every",
    "snapshot_every",
    "snapshot_reach",
    "save_every",
    "save_seconds",
)
"""Fields that make no sense below 1."""

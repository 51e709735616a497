"""Every figure that the judge goes by, in one place: the scale, by which all rules measure how long and how much;
`Sight`, from when on something is worth a word; and `Policy`, how a run is protected. The last two may be set."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

# -- the scale: how long

AGAIN = 3
"""Times, one after the other or among a few, after which something is no accident."""
FEW = 5
"""The last few rows or looks: most of them, or the middle one, tell how things are now."""
WHILE = 16
"""Rows that are still being judged, and no part of what is normal; their mean shows what single ones hide."""
STRETCH = 32
"""Rows over which a slow change shows, and in which what just happened can still be told from what came later."""
LONG = 64
"""Rows that tell what is normal, and after which something that did not come again is over."""
PATIENCE = 100
"""Updates by which a run should have begun to learn."""
UNDER_WAY = 4
"""Updates that may have been made, but not judged, when what was decided comes into force: two, and two more where loss
scales overflow, for that a step was left out is known only when the next backward begins."""
KEPT = 100
"""Losses, norms and clips of a run that are always at hand."""
LATE = 1000
"""Updates from which on nothing is owed to how a run began."""

# -- the scale: how much

CLEARLY = 1.5
"""Times what it was: clearly more, and no longer what comes and goes."""
DOUBLE = 2.0
"""Times what it was: it stands out."""
MANIFOLD = 4.0
"""Times what it was: nothing ordinary explains it."""
HUGE = 10.0
"""Times what it was: of another kind altogether."""

NOTHING = 0.02
"""Share of a whole that is next to nothing..."""
SMALL = 0.1
"""... that is small..."""
PART = 0.2
"""... and that is a good part of it."""

ALIKE = 0.5
"""How far two factors that ought to be one may lie apart, as logarithms: single batches scatter."""
MICRO_BATCHES = 300
"""That somebody may have forgotten to divide by; a loss times more than this was divided by next to nothing."""
ROUNDING = 1e5
"""Times smaller than that of the other tensors: what is left of a gradient of zero after rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From when on something in the numbers is worth a word."""

    window: int = LONG
    """Accepted values that tell what is normal."""
    least: int = WHILE
    """Accepted values before anything is compared with them."""
    jump: float = MANIFOLD
    """A norm that is this many times the largest accepted lately is a jump."""
    leap: float = HUGE
    """The same, twice before long, or before held-out data tells of harm: then it is no accident."""
    huge: float = 60.0
    """The same, once, with a loss that leaps too: that was no ordinary batch, and it has landed."""
    far: float = 8.0
    """Deviations above normal at which a single loss is a jump..."""
    above: float = CLEARLY
    """... if it is also this many times the largest accepted lately."""
    lasting: int = FEW
    """Steps after which something is no spike any more: it stays."""
    usual: int = AGAIN
    """Spikes within the window, above which they are what this run is like."""
    raised: float = 4.0
    """Deviations above normal from which the middle one of the last few losses says that the level has risen."""
    creeping: float = 1.5
    """The same for their mean over a while, which sees less and takes longer."""
    lost: float = DOUBLE
    """A level this many times that of the first losses, and the highest lately: what was learnt is lost."""
    growing: float = 3.0
    """How much a loss or norm must grow, in steps each larger than the one before, to be called growth."""
    faster: float = 5.0
    """A rate, the time a momentum remembers, or an update at its rate that is this many times what it usually was."""
    beside: float = 0.5
    """How far, in spreads of the inputs, the mean of a batch lies from the usual one for the batch to be another..."""
    wider: float = CLEARLY
    """... or how many times wider or narrower its values are spread."""
    moved: float = PART
    """How far, in the same measure, the mean of the batches of a while has moved, for the data to drift."""
    unclipped: float = DOUBLE
    """How many times the norm that a loop used to clip to it now hands over, for its clipping to be lost."""
    worse: float = 0.05
    """Share by which the loss on held-out data is above its best, twice, for it to have risen."""
    astray: float = PART
    """Share by which the loss on held-out data is above its best, twice: if training has left its course too, that does
    harm."""
    slow_rise: float = SMALL
    """Share by which the mean of a stretch of losses is above the lowest such mean, for it to have risen slowly."""
    slower: float = 20.0
    """A rate that falls to one part in this many, from one step to the next, is as good as off."""
    explodes: float = 100.0
    """A layer's gradient norm above this, and above ten times its own past; ten times this is severe."""
    vanishes: float = 1e-8
    """A layer's gradient norm below this..."""
    fades: float = 30.0
    """... or one that has become this many times smaller than it was."""
    dead: float = 0.4
    """Rise of the share of gradient values that are zero."""
    hushed: float = SMALL
    """The same for a tensor that is only said to have grown more silent."""
    rounded: float = 0.4
    """Rise of the share of weights that a whole step leaves exactly as they were: updates are rounded away."""
    still: float = 16.0
    """An update that has become this many times smaller, at the same rate: the weights hardly move."""
    scale_falls: float = 64.0
    """A loss scale that has fallen to one part in this many."""
    streak: int = 8
    """Overflows in a row."""
    repeats: float = PART
    """Losses that differ, from one round of batches to the next, by less than this share of what chance used to do."""
    rhythm: int = AGAIN
    """Spikes at equal distances that make a rhythm."""
    clipped_often: float = 1 - SMALL
    """Share of the last 100 updates that were clipped above which the threshold is too low."""
    slowdown: float = 3.0
    """A step that takes this many times as long as usual."""
    waits: float = 0.25
    """Share of a step spent waiting for data."""
    idle: float = 0.6
    """Utilisation under which a device counts as idling..."""
    idle_seconds: float = 600.0
    """... and for how long, without a break, before that is worth a word."""
    leak: float = 1.05
    """Growth of memory over all readings, nearly without a pause, that is no coming and going any more."""

    @property
    def slow_window(self) -> int:
        """Accepted values that tell what is normal where a change may come so slowly that it must not become so."""
        return 4 * self.window

    def __post_init__(self) -> None:
        wrong = [f.name for f in fields(self) if not getattr(self, f.name) > 0]
        if wrong:
            raise ValueError(f"Sight: {', '.join(wrong)} must be above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a run is protected; every figure that decides over an update stands here.

    >>> Policy(max_consecutive_vetoes=5).max_consecutive_vetoes
    5
    """

    observe: bool = False
    """Only watch, and tell what would have been done."""
    max_norm_ratio: float = 100.0
    """A finite update is refused when its norm is above this many times the largest one accepted lately, and above
    every one accepted so far. Far from anything a healthy run does: what is merely large is for clipping."""
    warmup: int = 20
    """Accepted updates before a finite one can be refused."""
    norm_max_decay: float = 0.999
    """What is left of the recent largest norm after each step: half of it after 693 steps."""
    max_consecutive_vetoes: int = 20
    """Refused updates in a row after which the run is stopped."""
    max_vetoes_waiting: int = 200
    """The same while a run, back from data that did harm by its held-out loss, waits for such data to be over."""
    max_consecutive_overflows: int = 60
    """Overflows of the loss scale in a row after which the run is stopped: 2^16 has been halved to 2^-44 by then."""
    max_failed_actions: int = 3
    """Actions in a row that did not help, after which the run is stopped; progress resets the count."""
    max_actions: int = 50
    """Actions in the whole run after which it is stopped."""
    healthy_steps_to_confirm: int = 20
    """Healthy updates after which an action has helped."""
    relax_after: int = 100
    """Healthy updates after which what was asked of the steps is taken back; twice as many if that was too early."""
    norm_ceiling: float = 3.0
    """While a restraint is in force: updates above this many times the largest accepted norm are refused."""
    tight_ceiling: float = CLEARLY
    """The same while such data may still come: both for norms, and for how far losses lay above the middle."""
    healthy_steps_to_trust: int = 10
    """Healthy updates that must follow a state before it counts as good."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """What is worth a word."""
    weights_every: int = 100
    """Steps between two looks at the weights themselves."""
    system_every: float = 5.0
    """Seconds between two readings of memory and utilisation; 0 reads them at every step."""
    snapshot_every: int = 50
    """Steps between two states kept in memory, to go back to."""
    max_snapshots: int = 4
    """States kept at most; two are the least that is of use."""
    snapshot_reach: int = 150
    """Attempts that the oldest of them may lie back: some trouble tells only long after it began."""

    save_every: int = 1000
    """Steps between two checkpoints on disk, when `resume=` asks for any."""
    save_seconds: float = 3600.0
    """The longest time between two of them."""
    probe_every: int = 1
    """Where `step_fn=` is given: every so many checkpoints the last batch is saved with its loss, which costs the
    training one forward pass; 0 saves none."""
    cautious_after_crash: bool = False
    """After a crash resume with half the rate and gradients clipped at 0.5, until `loosen_after` updates went well."""

    def __post_init__(self) -> None:
        wrong = [name for name in AT_LEAST_ONE if not getattr(self, name) >= 1]
        if wrong:
            raise ValueError(f"Policy: {', '.join(wrong)} must be at least 1.")
        if not self.max_snapshots >= 2:
            raise ValueError(
                "Policy: max_snapshots must be at least 2; attach(..., snapshot_memory=False) keeps no states at all."
            )
        if not self.probe_every >= 0:
            raise ValueError("Policy: probe_every must be at least 0.")
        if not self.system_every >= 0.0:
            raise ValueError("Policy: machine_every must be at least 0.")
        if not 0.0 < self.norm_max_decay <= 1.0:
            raise ValueError("Policy: norm_max_decay must be above 0 and at most 1.")


AT_LEAST_ONE = (
    "max_norm_ratio",
    "warmup",
    "max_consecutive_vetoes",
    "max_vetoes_waiting",
    "max_consecutive_overflows",
    "max_failed_actions",
    "max_actions",
    "healthy_steps_to_confirm",
    "relax_after",
    "norm_ceiling",
    "tight_ceiling",
    "healthy_steps_to_trust",
    "weights_every",
    "snapshot_every",
    "snapshot_reach",
    "save_every",
    "save_seconds",
)
"""Figures of a policy that make no sense below one."""

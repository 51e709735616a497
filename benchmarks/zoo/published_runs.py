"""Losses and norms that public training runs published: real trouble and real noise, each with its source.

The numbers were read in the source itself, and nothing between them is filled in. Each run is preceded by 100 synthetic
steps, so that baselines can form; `rows` says how.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from surefoot.judge.history import History
from surefoot.records import NAN, StepMetrics

PRELUDE_STEPS = 100
"""Synthetic steps before the first published one."""
SLOPE = 0.02
"""Relative fall of the loss over the synthetic steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """The published steps of one run; `onset` and `spike` count from the first of them."""

    name: str
    source: str
    about: str
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """All NaN where none were published; a single NaN was published as such."""
    every: int
    """Steps between two published ones."""
    onset: int
    """The first published sign; in a healthy run the first step that looks like one."""
    spike: int
    """Where the trouble is undisputed; in a healthy run the step that looks worst."""
    healthy: bool = False
    """Nothing is wrong with the run."""
    noise: tuple[float, float] = (0.01, 0.08)
    """Relative noise of loss and norm in the synthetic steps; slightly above that of the 176 B run."""

    @property
    def has_norms(self) -> bool:
        """Whether norms were published."""
        return not all(math.isnan(norm) for norm in self.norms)


def rows(run: PublishedRun) -> list[StepMetrics]:
    """The synthetic steps, then the published ones, one row each, however many steps lie between them in the run.

    Synthetic step k has the loss L (1 + 0.02 (1 - k/100)) exp(a g) and the norm N exp(b h). L and N are the first
    published values, a and b the run's noise, and g and h are normal, cut at 2, drawn by `random.Random` with the run's
    name as its seed.
    """
    rng, history = random.Random(run.name), History()
    a, b = run.noise
    pairs: list[tuple[float, float]] = []
    for k in range(PRELUDE_STEPS):
        g, h = (max(-2.0, min(2.0, rng.gauss(0.0, 1.0))) for _ in range(2))
        loss = run.losses[0] * (1 + SLOPE * (1 - k / PRELUDE_STEPS)) * math.exp(a * g)
        pairs.append((loss, run.norms[0] * math.exp(b * h) if run.has_norms else NAN))
    pairs += zip(run.losses, run.norms, strict=True)
    metrics: list[StepMetrics] = []
    for k, (loss, norm) in enumerate(pairs):
        d1, d2 = history.add(loss, norm)
        metrics.append(StepMetrics(step=k, attempt=k, time=float(k), loss=loss, loss_d1=d1, loss_d2=d2, norm=norm))
    return metrics


def rule_inputs(run: PublishedRun) -> list[tuple[float, float, float]]:
    """Loss, norm and lr of each row, as rules take them; a constant norm of 1 where none was published, and a NaN lr,
    which is never published."""
    return [(row.loss, row.norm if run.has_norms else 1.0, NAN) for row in rows(run)]


def _no_norms(steps: int) -> tuple[float, ...]:
    return (NAN,) * steps


_BIGSCIENCE = "https://github.com/bigscience-workshop/bigscience/blob/master/train"

PUBLISHED_RUNS = (
    PublishedRun(
        name="bigscience_176b",
        source=f"{_BIGSCIENCE}/tr11-176B-ml/chronicles.md",
        about="Steps 31214 to 31222: the norm leads the loss by four steps. The run was itself again 30 steps later.",
        losses=(2.198845, 2.220424, 2.595213, 2.241558, 2.345279, 5.098124, 3.492029, 3.213059, 2.804948),
        norms=(0.242, 0.947, 2.390, 15.886, 145.119, 960.351, 353.201, 379.330, 650.246),
        every=1,
        onset=1,
        spike=5,
    ),
    PublishedRun(
        name="bigscience_104b",
        source=f"{_BIGSCIENCE}/tr8-104B-wide/chronicles.md",
        about="Steps 6900 to 6940 of the second try, norms as printed: a rise that ends in NaN some time later. The "
        "wide model had 58 B parameters by mistake.",
        losses=(6.365808, 6.598378, 7.314456, 9.121927, 10.23865),
        norms=(95313.572, 84678.880, 122716.232, 283384.130, 42359.376),
        every=10,
        onset=2,
        spike=3,
    ),
    PublishedRun(
        name="bigscience_104b_later",
        source=f"{_BIGSCIENCE}/tr8-104B-wide/chronicles.md",
        about="Steps 11446 to 11448 of the eleventh try, norms as printed: the norm is twentyfold one step before the "
        "loss leaps.",
        losses=(3.062589, 3.114286, 7.712340),
        norms=(12952.562, 262623.331, 254699.302),
        every=1,
        onset=1,
        spike=2,
    ),
    PublishedRun(
        name="bigscience_13b",
        source=f"{_BIGSCIENCE}/tr1-13B-base/chronicles.md",
        about="Steps 29020 to 29090: the loss leaps between two prints while the loss scale falls from 65536 to 8192; "
        "the norm was not measured. It took some 500 steps to come back by itself.",
        losses=(2.775923, 2.772822, 2.768131, 7.343709, 8.715872, 7.654131, 7.192470, 6.849044),
        norms=_no_norms(8),
        every=10,
        onset=3,
        spike=3,
    ),
    PublishedRun(
        name="translation_convolutions",
        source="https://github.com/facebookresearch/fairseq/issues/41",
        about="Convolutions, English to French, at a rate of 1.25: the norm explodes while the loss still falls.",
        losses=(9.57, 8.61, 7.50, 6.87, 10405.01, 4773454961.36, 7746569234820.15),
        norms=(2.0540, 1.7149, 2.7501, 100615.8788, 1500459828271.3960, 37459419138681.4219, math.inf),
        every=1000,
        onset=3,
        spike=4,
        noise=(0.03, 0.1),
    ),
    PublishedRun(
        name="gpt2_float16",
        source="https://github.com/karpathy/nanoGPT/issues/215",
        about="GPT-2 in float16, steps 2920 to 3060: NaN from one print to the next, and the run goes on.",
        losses=(3.9883, 3.9408, 3.9994, 4.0977, 4.1535, 3.9453, 3.8993, 3.8853, 4.2490, *(NAN,) * 6),
        norms=_no_norms(15),
        every=10,
        onset=9,
        spike=9,
        noise=(0.025, 0.1),
    ),
    PublishedRun(
        name="growing_norm",
        source="https://github.com/ironjr/grokfast/issues/9",
        about="Gradients that feed on a filter of themselves: the norm grows by half from print to print and ends "
        "infinite, while the loss hardly moves. The number of steps between the prints is unknown.",
        losses=(11.6752, 11.4293, 11.3192, 11.2486, 11.111, 11.2352, 11.3782, 11.2332, 11.3905, 11.2784),
        norms=(
            3789384056832.0,
            5675928780800.0,
            8501688532992.0,
            12734252974080.0,
            19073997996032.0,
            28569986138112.0,
            42793548382208.0,
            64098310029312.0,
            96009648603136.0,
            143808037650432.0,
        ),
        every=1,
        onset=1,
        spike=6,
        noise=(0.015, 0.08),
    ),
    PublishedRun(
        name="detector_resnet101",
        source="https://github.com/tensorflow/models/issues/3868",
        about="Faster R-CNN, steps 435 to 442: from 0.06 to 5e19 in one step, and growing.",
        losses=(
            0.0630,
            0.1628,
            0.0577,
            54059178029467303936.0,
            432537635714800549888.0,
            2106942657570782838784.0,
            7774169971762292326400.0,
            25262924095336287830016.0,
        ),
        norms=_no_norms(8),
        every=1,
        onset=3,
        spike=3,
        noise=(0.3, 0.1),
    ),
    PublishedRun(
        name="detector_resnet50",
        source="https://github.com/tensorflow/models/issues/8423",
        about="Faster R-CNN, steps 376 to 381 and 408 to 415: a noisy loss, then 25237 in one step.",
        losses=(
            *(0.3663, 0.2678, 0.3992, 0.4918, 0.2143, 1.0149),
            *(0.1442, 25237.8984, 75835.2812, 28575.1914, 134869.8906, 437442.4062, 212268.4531, 1216893.1250),
        ),
        norms=_no_norms(14),
        every=1,
        onset=7,
        spike=7,
        noise=(0.3, 0.1),
    ),
    PublishedRun(
        name="adapter_mlx",
        source="https://github.com/ml-explore/mlx-examples/issues/620",
        about="A LoRA of a 7 B model, steps 25 to 200: the loss goes up fourfold and stays.",
        losses=(1.593, 1.406, 3.316, 6.437, 5.478, 4.857, 4.874, 4.604),
        norms=_no_norms(8),
        every=25,
        onset=2,
        spike=3,
        noise=(0.05, 0.1),
    ),
    PublishedRun(
        name="adapter_4b",
        source="https://github.com/paiml/entrenar/issues/274",
        about="A QLoRA of a 4 B model, steps 110 to 385: it learns fast, then climbs back towards chance.",
        losses=(3.80, 2.39, 1.43, 5.82, 7.05, 10.03),
        norms=(24.4, 7.1, 7.7, 15.6, 15.3, 70.7),
        every=55,
        onset=3,
        spike=3,
        noise=(0.05, 0.2),
    ),
    PublishedRun(
        name="bigscience_176b_at_work",
        source=f"{_BIGSCIENCE}/tr11-176B-ml/chronicles.md",
        about="Steps 42780 to 42784: a device became slow, and neither loss nor norm took notice.",
        losses=(2.117073, 2.116946, 2.110646, 2.124820, 2.127643),
        norms=(0.150, 0.140, 0.144, 0.135, 0.127),
        every=1,
        onset=3,
        spike=3,
        healthy=True,
    ),
    PublishedRun(
        name="adapter_with_norm_peaks",
        source="https://github.com/modal-labs/llm-finetuning/pull/82",
        about="A fine-tuning in the test log of a merged change: for six prints the norm is up to seven times as high "
        "while the loss stays, and it is on its way back. The number of steps between the prints is unknown.",
        losses=(
            *(0.0923, 0.0981, 0.0879, 0.0962, 0.0832, 0.0875, 0.0781),
            *(0.0787, 0.1008, 0.087, 0.0938, 0.1106, 0.0756),
        ),
        norms=(
            *(2.383980345174379, 2.0199484401564374, 1.8279883501331209, 2.103906981071679, 2.2033871606840623),
            *(2.0279166877466186, 2.3443314141978884, 10.746351508635772, 7.212365770700587, 14.958441912749135),
            *(6.688664607990031, 3.9138025429871117, 3.056258619540342),
        ),
        every=1,
        onset=7,
        spike=9,
        healthy=True,
        noise=(0.08, 0.1),
    ),
    PublishedRun(
        name="small_bump",
        source="https://github.com/pytorch/torchtitan/pull/3393",
        about="A run in the test log of a merged change, steps 14 to 21: one loss an eighth above the last, then lower "
        "than before.",
        losses=(3.24405, 3.10680, 3.05047, 3.14459, 3.54399, 3.01032, 2.89959, 3.00867),
        norms=(0.8319, 0.8587, 0.5443, 0.5303, 0.7675, 0.7197, 0.9573, 0.6348),
        every=1,
        onset=4,
        spike=4,
        healthy=True,
        noise=(0.05, 0.2),
    ),
    PublishedRun(
        name="classifier_small_batches",
        source="https://github.com/ThilinaRajapakse/simpletransformers/issues/12",
        about="A text classifier, the loss of each small batch from 1325 to 1333: the next one undoes every leap. Its "
        "end is not published; by its numbers it is healthy.",
        losses=(0.813926, 0.495253, 0.877046, 0.935980, 1.029763, 0.401378, 0.995074, 1.740216, 0.489634),
        norms=_no_norms(9),
        every=1,
        onset=7,
        spike=7,
        healthy=True,
        noise=(0.35, 0.1),
    ),
    PublishedRun(
        name="post_training_small_batches",
        source="https://github.com/howardhsu/BERT-for-RRC-ABSA/issues/2",
        about="BERT trained further on reviews, the loss of single batches from step 23400 to 24100: it swings by a "
        "factor of two and goes nowhere bad. Its end is not published; by its numbers it is healthy.",
        losses=(
            *(1.117658, 1.289947, 1.296999, 1.051140, 1.439625, 0.884657, 1.163339, 1.378097, 1.190969, 1.233999),
            *(1.124069, 1.473860, 1.483228, 2.123017, 1.340707),
        ),
        norms=_no_norms(15),
        every=50,
        onset=13,
        spike=13,
        healthy=True,
        noise=(0.2, 0.1),
    ),
)
"""Eleven runs in trouble and five that only look like it."""

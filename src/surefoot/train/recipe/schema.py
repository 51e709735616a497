"""The schema of a recipe. Each section configures one part of the engine; the descriptions are the help texts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)


NAME_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""The form of module:name."""


class Factory(BaseModel):
    """An object made by calling `factory` with the other keys as arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    factory: str = Field(
        pattern=NAME_PATTERN, description="module:name of what makes it; the other keys are its arguments."
    )

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _as_factory(value: Any) -> Any:
    return {"factory": value} if isinstance(value, str) else value


FactoryField = Annotated[Factory, BeforeValidator(_as_factory)]
"""`package.module:factory`, or a mapping with `factory` and its arguments."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


TextList = Annotated[list[str], BeforeValidator(_as_list)]
"""A list of text; a single one needs no brackets."""


def _as_places(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


Places = Annotated[list[str | dict[str, Any]], BeforeValidator(_as_places)]
"""Where something is sent: names or addresses, or mappings with `to`."""


class DataSection(Section):
    """The training data."""

    kind: Literal["library", "text", "tokens", "chat", "own"] = Field(
        default="library",
        description="library: Python's own source; text: files and folders of text; tokens: files of token ids, of "
        "any size; chat: JSONL of conversations; own: `dataset` makes it.",
    )
    path: TextList = Field(
        default=[],
        description="Files, folders or patterns, for text (of a .jsonl the field `text` of each line), tokens, chat.",
    )
    held_out_path: TextList = Field(
        default=[], description="The same for eval data; without it a fraction is held out."
    )
    held_out: float = Field(
        default=0.05, ge=0, lt=1, description="Fraction held out for evaluation, when no path is given."
    )
    dataset: FactoryField | None = Field(
        default=None, description="kind own: makes a map-style dataset (__len__ and __getitem__)."
    )
    held_out_dataset: FactoryField | None = Field(default=None, description="kind own: the same for eval data.")
    collate: str | None = Field(
        default=None, pattern=NAME_PATTERN, description="kind own: module:name of the function that makes a batch."
    )
    tokenizer: str = Field(default="bytes", description="bytes, or a folder or tokenizer.json of Hugging Face.")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = Field(
        default="uint16", description="kind tokens: type of the token ids in the files."
    )
    vocab: int | None = Field(default=None, ge=1, description="kind tokens: number of different tokens.")
    context: int = Field(default=256, ge=2, description="Tokens per sample.")
    packing: bool = Field(
        default=True, description="Pack several texts into one sample; else one text per sample, padded."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Use at most this many bytes (text), tokens, or samples (chat)."
    )
    shuffle: bool = True
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="Loader processes per rank. auto: one for each core but one, up to 4, with kind own; else 0.",
    )
    prefetch: int = Field(default=2, ge=1, description="Batches each worker reads ahead.")
    bad_samples: int = Field(default=100, ge=0, description="Unreadable samples to skip before the run stops.")


class BatchSection(Section):
    """Samples per update: size x accumulate x ranks."""

    size: int = Field(default=32, ge=1, description="Samples in one forward pass, on each rank.")
    accumulate: int = Field(default=1, ge=1, description="Micro-batches whose gradients make one update.")


_ADAM = {"weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"weight_decay": 0.0, "momentum": 0.9},
    "lars": {"weight_decay": 0.0, "momentum": 0.9},
    "adam": _ADAM,
    "nadam": _ADAM,
    "radam": _ADAM,
    "adamax": _ADAM,
    "adamw": _ADAM | {"weight_decay": 0.1},
    "lamb": _ADAM | {"weight_decay": 0.1, "eps": 1e-6},
    "muon": _ADAM | {"weight_decay": 0.1, "momentum": 0.95},
}
"""Defaults by optimizer; all others use the defaults of their class."""


class OptimizerSection(Section):
    """The optimizer, from torch or pytorch_optimizer."""

    name: str = Field(
        default="adamw",
        description="sgd, adam, adamw, muon, lamb, lars, any other class of torch.optim, or module:Class.",
    )
    lr: float = Field(default=5e-4, gt=0, description="Peak learning rate.")
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="For matrices only: norms, biases and gains are not decayed. By default 0.1 where it is decoupled "
        "(adamw, lamb, muon), else 0.",
    )
    betas: tuple[float, float] | None = Field(
        default=None, description="For Adam and its variants; by default 0.9 and 0.95."
    )
    momentum: float | None = Field(
        default=None, ge=0, lt=1, description="For SGD and LARS, by default 0.9; for Muon 0.95."
    )
    eps: float | None = Field(default=None, gt=0, description="For Adam and its variants, by default 1e-8; LAMB 1e-6.")
    fused: bool | None = Field(default=None, description="One kernel for all updates; by default where torch has it.")
    scale_with_batch: Literal["no", "linear", "sqrt"] = Field(
        default="no", description="Scale the lr with the effective batch, relative to `base_batch`."
    )
    base_batch: int | None = Field(default=None, ge=1, description="The effective batch that `lr` was tuned for.")
    options: dict[str, Any] = Field(default={}, description="Further arguments of the optimizer's class.")

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        defaults = OPTIMIZER_DEFAULTS.get(str(values.get("name", "adamw")).lower(), {})
        return defaults | {key: value for key, value in values.items() if value is not None or key not in defaults}

    @model_validator(mode="after")
    def _needs_base_batch(self) -> OptimizerSection:
        if self.scale_with_batch != "no" and self.base_batch is None:
            raise ValueError(
                f"scale_with_batch: {self.scale_with_batch} needs base_batch, the effective batch that lr was tuned for"
            )
        return self


class ScheduleSection(Section):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine", "restarts", "polynomial", "step"] = "cosine"
    warmup: float = Field(default=0.05, ge=0, description="Below 1 a fraction of the run, else updates.")
    start: float = Field(default=0.0, ge=0, description="The lr at the start of the warmup.")
    min_lr_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Final lr as a fraction of the peak; not for constant and step.",
    )
    cycles: int = Field(default=4, ge=1, description="restarts: number of cosine cycles.")
    power: float = Field(default=1.0, gt=0, description="polynomial: 1 is linear, 0.5 falls late.")
    every: float = Field(default=0.3, gt=0, description="step: interval; below 1 a fraction of the run, else updates.")
    factor: float = Field(default=0.1, gt=0, le=1, description="step: the lr is multiplied by this.")


class PrecisionSection(Section):
    """The type the model computes in; weights and moments stay in float32."""

    compute: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    keep_float32: TextList = Field(
        default=[], description="Names or classes of modules, patterns allowed, that always compute in float32."
    )
    init_scale: float = Field(default=65536.0, gt=0, description="float16: initial loss scale.")
    growth_interval: int = Field(
        default=2000, ge=1, description="float16: updates without overflow before the scale is doubled."
    )


class SpeedSection(Section):
    """Speed and determinism."""

    compile: bool = Field(default=False, description="Use torch.compile; the first steps take longer.")
    checkpoint_activations: int = Field(
        default=0,
        ge=0,
        description="0: keep all activations; 1: recompute every block in backward; n: every n-th block.",
    )
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    deterministic: bool = Field(
        default=False, description="Bitwise reproducible, at some cost; else the fastest kernels."
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of each process; by default torch's choice."
    )


class ParallelSection(Section):
    """How the model is distributed over the ranks of torchrun; not used with one rank."""

    strategy: Literal["data", "zero1", "zero2", "zero3"] = Field(
        default="data",
        description="data: full copies; zero1: shard the optimizer; zero2: gradients too; zero3: weights too.",
    )
    timeout: float = Field(
        default=600.0, gt=0, description="Seconds after which a rank that does not answer counts as lost."
    )


class ProtectionSection(Section):
    """What surefoot does for the run."""

    mode: Literal["protect", "observe", "off"] = Field(
        default="protect", description="observe: only report what protect would do; off: do not watch or save the run."
    )
    clip: float | Literal["adaptive"] | None = Field(
        default=1.0, description="Maximum gradient norm, adaptive, or null for no clipping."
    )
    snapshot_memory: str | bool | None = Field(
        default=None, description='Memory for snapshots to rewind to, such as "8GB"; false: none.'
    )
    cases: str | None = Field(
        default=None, description="Folder of earlier runs, or a case library, to compare incidents with."
    )
    policy: dict[str, Any] = Field(default={}, description="Fields of surefoot.Policy, such as snapshot_every: 20.")


class CheckpointsSection(Section):
    """When the run is saved."""

    every: int = Field(default=1000, ge=1, description="Updates between two checkpoints.")
    seconds: float = Field(default=3600.0, gt=0, description="Longest time between two checkpoints.")
    cautious_after_crash: bool = Field(
        default=False, description="After a crash continue with half the lr until the run is healthy again."
    )


class EvaluationSection(Section):
    """The loss on held-out data during training."""

    every: int = Field(default=500, ge=0, description="Updates between two evaluations; 0: never.")
    batches: int = Field(default=20, ge=1, description="Batches per evaluation.")


class LogSection(Section):
    """Where progress is reported."""

    every: int = Field(default=100, ge=1, description="Updates between two progress lines without a terminal.")
    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    project: str = Field(default="surefoot", description="Weights & Biases project.")
    sinks: Places = Field(
        default=[],
        description="Further sinks, fed behind the training: tensorboard, wandb, mlflow or trackio, or keys and values "
        "such as {to: tensorboard, every: 10, layers: true}.",
    )


class SampleSection(Section):
    """Text to generate at the end; only for surefoot's own language models."""

    prompt: str = ""
    tokens: int = Field(default=0, ge=0, description="Tokens to generate; 0: none.")
    temperature: float = Field(default=0.8, ge=0)


class Recipe(Section):
    """Everything that defines a run."""

    name: str = Field(default="run", min_length=1, description="Name of the run.")
    run_dir: str | None = Field(default=None, description="Folder of the run; by default runs/NAME.")
    seed: int = Field(default=0, ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    steps: int | None = Field(default=None, ge=1, description="Updates in total.")
    epochs: float | None = Field(default=None, gt=0, description="Passes over the data, instead of steps.")
    model: FactoryField
    loss: FactoryField = Field(
        default=Factory(factory="surefoot.models:next_token"),
        description="module:name of (model, batch) -> mean loss, or -> (sum, count), to be weighted by count.",
    )
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    speed: SpeedSection = SpeedSection()
    parallel: ParallelSection = ParallelSection()
    protection: ProtectionSection = ProtectionSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    evaluation: EvaluationSection = EvaluationSection()
    log: LogSection = LogSection()
    alarms: Places = Field(
        default=[],
        description="Who hears of what happens: https://... (gets JSON), an address that apprise knows, or keys and "
        "values such as {to: https://..., levels: [crash, stop]}. By default those in SUREFOOT_ALARMS.",
    )
    sample: SampleSection = SampleSection()

"""What may stand in a recipe. Each section is the hand-over to one part of the engine, and its words are the help."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Unknown keys are refused, and nothing is changed after it was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)


NAMED = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""What a module:name looks like."""


class Made(BaseModel):
    """Something of the user's own or of ours, made by calling `factory` with the other keys of the section."""

    model_config = ConfigDict(extra="allow", frozen=True)

    factory: str = Field(pattern=NAMED, description="module:name of what makes it; the other keys are its arguments.")

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _made(value: Any) -> Any:
    return {"factory": value} if isinstance(value, str) else value


Making = Annotated[Made, BeforeValidator(_made)]
"""`package.module:factory`, or a mapping with `factory` and its arguments."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_listed)]
"""A list of text; one alone needs no brackets."""


class Data(Section):
    """Where the samples come from."""

    kind: Literal["library", "text", "tokens", "chat", "own"] = Field(
        default="library",
        description="library: Python's own source; text: files and folders of text; tokens: files of token numbers, "
        "however large; chat: JSONL of conversations; own: `dataset` makes it.",
    )
    path: Names = Field(
        default=[], description="Files, folders or patterns; for text (of a .jsonl each line's `text`), tokens, chat."
    )
    held_out_path: Names = Field(default=[], description="The same for held-out data; else a share is held out.")
    held_out: float = Field(
        default=0.05, ge=0, lt=1, description="Share held out to evaluate on, when no path is given."
    )
    dataset: Making | None = Field(
        default=None, description="kind own: makes a dataset with a length and samples by number."
    )
    held_out_dataset: Making | None = Field(default=None, description="kind own: the held-out one.")
    collate: str | None = Field(
        default=None, pattern=NAMED, description="module:name of what makes a batch of samples; kind own."
    )
    tokenizer: str = Field(default="bytes", description="bytes, or a folder or tokenizer.json of Hugging Face.")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = Field(default="uint16", description="kind tokens.")
    vocab: int | None = Field(default=None, ge=1, description="kind tokens: how many different ones there are.")
    context: int = Field(default=256, ge=2, description="Tokens a sample has for the model to read.")
    packing: bool = Field(
        default=True, description="Several texts in one sample, up to its length; else one each, padded."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Use so many bytes (text) or tokens, or samples (chat) at most."
    )
    shuffle: bool = True
    workers: int = Field(default=0, ge=0, description="Processes that read ahead, for each rank; 4 to 8 for slow data.")
    prefetch: int = Field(default=2, ge=1, description="Batches each worker reads ahead.")
    bad_samples: int = Field(
        default=100, ge=0, description="Samples that may turn out unreadable before the run stops."
    )


class Batch(Section):
    """How many samples make an update: size x accumulate x ranks."""

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
"""What is taken where a recipe says nothing; other optimizers bring defaults of their own."""


class Optimizer(Section):
    """The optimizer, of torch or pytorch_optimizer."""

    name: str = Field(
        default="adamw",
        description="sgd, adam, adamw, muon, lamb, lars, any other class of torch.optim, or module:Class.",
    )
    lr: float = Field(default=5e-4, gt=0, description="The peak rate.")
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="For matrices only: norms, biases and gains are left alone. By default 0.1 where it is decoupled "
        "(adamw, lamb, muon), else 0.",
    )
    betas: tuple[float, float] | None = Field(
        default=None, description="For Adam and its kind; by default 0.9 and 0.95."
    )
    momentum: float | None = Field(
        default=None, ge=0, lt=1, description="For SGD and LARS, by default 0.9; for Muon 0.95."
    )
    eps: float | None = Field(default=None, gt=0, description="For Adam and its kind, by default 1e-8; LAMB 1e-6.")
    fused: bool | None = Field(default=None, description="One kernel for all; by default wherever torch can.")
    scale_with_batch: Literal["no", "linear", "sqrt"] = Field(
        default="no", description="Raise the rate with the effective batch, from `base_batch` on."
    )
    base_batch: int | None = Field(default=None, ge=1, description="The effective batch that `lr` was meant for.")
    options: dict[str, Any] = Field(default={}, description="Further arguments of the optimizer's class.")

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        own = OPTIMIZER_DEFAULTS.get(str(given.get("name", "adamw")).lower(), {})
        return own | {key: value for key, value in given.items() if value is not None or key not in own}

    @model_validator(mode="after")
    def _knows_its_batch(self) -> Optimizer:
        if self.scale_with_batch != "no" and self.base_batch is None:
            raise ValueError(
                f"scale_with_batch: {self.scale_with_batch} needs base_batch, the effective batch that lr was meant for"
            )
        return self


class Schedule(Section):
    """The rate over the run."""

    name: Literal["constant", "linear", "cosine", "restarts", "polynomial", "step"] = "cosine"
    warmup: float = Field(default=0.05, ge=0, description="Below 1 a share of the run, else updates.")
    start: float = Field(default=0.0, ge=0, description="The rate that the warmup begins with.")
    floor: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="What is left at the end, as a share of the peak; not for constant and step.",
    )
    cycles: int = Field(default=4, ge=1, description="restarts: how often the cosine begins anew.")
    power: float = Field(default=1.0, gt=0, description="polynomial: 1 is a line, 0.5 falls late.")
    every: float = Field(default=0.3, gt=0, description="step: below 1 a share of the run, else updates.")
    factor: float = Field(default=0.1, gt=0, le=1, description="step: what the rate is multiplied with.")


class Precision(Section):
    """The numbers the model computes with; weights and moments stay in float32."""

    compute: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    keep_float32: Names = Field(
        default=[], description="Names or classes of modules, patterns allowed, that compute in float32 in any case."
    )
    first_scale: float = Field(default=65536.0, gt=0, description="float16: the loss scale to begin with.")
    grow_every: int = Field(default=2000, ge=1, description="float16: good updates before it is doubled.")


class Speed(Section):
    """What makes it faster, or provably the same each time."""

    compile: bool = Field(default=False, description="Let torch fuse operations; the first steps take longer.")
    checkpoint_activations: int = Field(
        default=0, ge=0, description="0: keep all; 1: compute every block again in backward; n: every n-th."
    )
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    deterministic: bool = Field(
        default=False, description="The same bits each time, at some cost; else the fastest kernels."
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of each process; by default torch's choice."
    )


class Parallel(Section):
    """How the model is spread over the processes of torchrun; one process needs none of it."""

    how: Literal["data", "zero1", "zero2", "zero3"] = Field(
        default="data",
        description="data: whole copies; zero1: optimizer sharded; zero2: gradients too; zero3: weights too.",
    )
    timeout: float = Field(
        default=600.0, gt=0, description="Seconds after which a rank that does not answer is given up."
    )


class Protection(Section):
    """What surefoot does for the run."""

    policy: Literal["protect", "observe", "off"] = "protect"
    clip: float | Literal["adaptive"] | None = Field(default=1.0, description="Global norm, adaptive, or null.")
    ring: str | bool | None = Field(
        default=None, description='Memory for states to go back to, such as "8GB"; false: none.'
    )
    figures: dict[str, Any] = Field(
        default={}, description="Other figures of surefoot.Policy, such as snapshot_every: 20."
    )


class Checkpoints(Section):
    """When the run is saved."""

    every: int = Field(default=1000, ge=1, description="Updates between two.")
    seconds: float = Field(default=3600.0, gt=0, description="The longest time between two.")
    careful: bool = Field(default=False, description="After a crash go on with half the rate until things went well.")


class Evaluation(Section):
    """The loss on held-out data, now and then."""

    every: int = Field(default=500, ge=0, description="Updates between two; 0 never.")
    batches: int = Field(default=20, ge=1, description="Batches of one.")


class Log(Section):
    """What is told, and to whom."""

    every: int = Field(default=100, ge=1, description="Updates between two lines where there is no terminal.")
    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    project: str = Field(default="surefoot", description="The project of Weights & Biases.")


class Sample(Section):
    """Text the model writes when it is done; only for language models of ours."""

    prompt: str = ""
    tokens: int = Field(default=0, ge=0, description="0 writes none.")
    temperature: float = Field(default=0.8, ge=0)


class Recipe(Section):
    """Everything a run is made of."""

    name: str = Field(default="run", min_length=1, description="What the run is called.")
    run_dir: str | None = Field(default=None, description="Where everything is kept; runs/NAME by default.")
    seed: int = Field(default=0, ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    steps: int | None = Field(default=None, ge=1, description="Updates in all.")
    epochs: float | None = Field(default=None, gt=0, description="Or rounds through the data.")
    model: Making
    loss: Making = Field(
        default=Made(factory="surefoot.models:next_token"),
        description="module:name of (model, batch) -> mean loss, or a pair (sum, count) to be weighed by count.",
    )
    data: Data = Data()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    speed: Speed = Speed()
    parallel: Parallel = Parallel()
    protection: Protection = Protection()
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation = Evaluation()
    log: Log = Log()
    sample: Sample = Sample()

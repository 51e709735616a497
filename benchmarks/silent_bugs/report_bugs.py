"""The half of the bugs that is reported: written before it was run, and nothing is tuned on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.silent_bugs import loops, tasks
from benchmarks.silent_bugs.loops import Loop
from benchmarks.silent_bugs.small_models import (
    Embedder,
    LoraLinear,
    MaskedEncoder,
    SequenceRegressor,
    TokenDecoder,
    TorchDecoder,
    TwoHeads,
    VariationalAutoEncoder,
    with_lora,
)
from benchmarks.zoo.models import Captioner, convolutional, mlp
from surefoot.records import Cause

bug = partial(loops.bug, loops.Half.REPORT)
TAXONOMY = "Humbatova et al., Taxonomy of Real Faults in Deep Learning Systems, ICSE 2020"
DEEP_CHECKER = "TheDeepChecker, Ben Braiek and Khomh, TOSEM 2023"
UMLAUT = "UMLAUT, Schoop et al., CHI 2021"
TRAIN_CHECK = "TrainCheck, Jiang et al., OSDI 2025"


@bug("text", Cause.LOSS_FUNCTION, source=f"{TAXONOMY}: wrong activation for the last layer")
def double_sigmoid() -> Loop:
    """Sigmoid in the model, and again in the loss with logits."""
    loop = tasks.text_loop()
    loop.step_fn = lambda m, b: F.binary_cross_entropy_with_logits(
        m(b["tokens"], b["mask"]).sigmoid(), F.one_hot(b["labels"], 3).float()
    )
    return loop


@bug(
    "conv", Cause.LOSS_FUNCTION, source="Islam et al., A Comprehensive Study on Deep Learning Bug Characteristics, 2019"
)
def nll_of_raw_outputs() -> Loop:
    """nll_loss without log_softmax."""
    loop = tasks.image_loop()
    loop.step_fn = lambda m, b: F.nll_loss(m(b[0]), b[1])
    return loop


@bug("conv", Cause.LOSS_FUNCTION, Cause.LEAK, source="https://github.com/Lackel/DPN/issues/1")
def softmax_over_the_batch() -> Loop:
    """log_softmax over dimension 0."""
    loop = tasks.image_loop()
    loop.step_fn = lambda m, b: F.nll_loss(F.log_softmax(m(b[0]), dim=0), b[1])
    return loop


@bug("decoder", Cause.LABELS, source="https://github.com/huggingface/transformers/issues/47394")
def labels_shifted_twice() -> Loop:
    """Labels are shifted in the data and in the loss."""
    loop = tasks.decoder_loop(TorchDecoder())
    loop.batches = tasks.several(lambda: tasks.sequences(16, 14, 24))
    loop.step_fn = lambda m, b: F.cross_entropy(m(b)[:, :-2].flatten(0, 1), b[:, 2:].flatten())
    return loop


class CentredConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@bug("series", Cause.LEAK, source="Kapoor and Narayanan, Leakage and the Reproducibility Crisis, Patterns 2023")
def centred_convolution() -> Loop:
    """A convolution that is not causal predicts the next value."""
    loop = tasks.recurrent_loop(CentredConvolution())
    loop.batches = [x.transpose(1, 2).contiguous() for x in loop.batches]
    loop.step_fn = lambda m, x: F.mse_loss(m(x[..., :-1]), x[..., 1:])
    return loop


@bug("regression", Cause.PRECISION_UNDERFLOW, source="https://github.com/pytorch/ao/pull/1124")
def bfloat16_adamw() -> Loop:
    """AdamW at 1e-6 on weights of bfloat16."""
    model = mlp([12, 32, 32, 1], nn.ReLU).bfloat16()
    loop = tasks.regression_loop(model, optimizer=tasks.adamw(model, 1e-6))
    loop.step_fn = lambda m, b: F.mse_loss(m(b[0].bfloat16()).squeeze(-1).float(), b[1])
    return loop


@bug("vision-language", Cause.PADDING, source="https://github.com/01-ai/Yi/issues/110")
def caption_padding_in_loss() -> Loop:
    """Padding of captions is predicted."""
    loop = tasks.caption_loop()
    loop.batches = [(image, tasks.padded(caption, shortest=3)[0]) for image, caption in loop.batches]
    return loop


@bug("conv", Cause.LEARNING_RATE, source=f"{UMLAUT}: learning rate too high")
def sgd_rate_too_high() -> Loop:
    """SGD at 20."""
    model = convolutional()
    return tasks.image_loop(model, optimizer=tasks.sgd(model, 20.0))


@bug("recurrent", Cause.LEARNING_RATE, source=f"{DEEP_CHECKER}: slow loss decrease")
def adam_rate_too_low() -> Loop:
    """AdamW at 1e-9."""
    model = SequenceRegressor()
    return tasks.recurrent_loop(model, optimizer=tasks.adamw(model, 1e-9))


class CaptionerWithoutGradient(Captioner):
    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.vision(image).relu()
        n = caption.shape[1] + 1
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        return self.language(caption, mask, self.projector(seen)[:, None])[:, 1:]


@bug("vision-language", Cause.DETACHED, source="https://github.com/bboylyg/NAD/issues/8")
def vision_without_gradient() -> Loop:
    """The vision part runs under no_grad, though the optimizer holds it."""
    return tasks.caption_loop(CaptionerWithoutGradient())


class PlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 16), nn.Linear(16, 48)
        self.scales = {"code": torch.ones(16, requires_grad=True)}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu() * self.scales["code"])


@bug("autoencoder", Cause.UNREGISTERED, source="https://github.com/pytorch/pytorch/issues/632")
def weights_in_a_dict() -> Loop:
    """A weight in a plain dict."""
    return tasks.autoencoder_loop(PlainTensor())


@bug("multi-output", Cause.UNREGISTERED, source=f"{TRAIN_CHECK}; {TAXONOMY}: parameters not passed to the optimizer")
def head_not_in_optimizer() -> Loop:
    """The optimizer was given the trunk and one of two heads."""
    model = TwoHeads()
    held = [*model.trunk.parameters(), *model.kind.parameters()]
    return tasks.two_head_loop(model, optimizer=torch.optim.AdamW(held, lr=2e-3))


@bug("conv", Cause.SYMMETRY, Cause.INITIALISATION, Cause.DEAD_UNITS, source=f"{DEEP_CHECKER}: zero initialisation")
def zero_initialisation() -> Loop:
    """All weights are zero."""
    model = nn.Sequential(nn.Flatten(), mlp([64, 32, 32, 10], nn.ReLU))
    for p in model.parameters():
        nn.init.zeros_(p)
    return tasks.image_loop(model)


class AlwaysDropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x.flatten(1)).relu(), 0.3))


@bug("conv", Cause.MODE, source="https://github.com/pytorch/vision/issues/7103")
def dropout_always_on() -> Loop:
    """F.dropout without training=self.training."""
    return tasks.image_loop(AlwaysDropped())


@bug("tabular", Cause.LEAK, source="Kaufman et al., Leakage in Data Mining, TKDD 2012")
def label_among_features() -> Loop:
    """One feature is 1 for one class and 0 for others."""
    loop = tasks.two_head_loop(mlp([12, 32, 4], nn.ReLU))
    for x, kind, _ in loop.batches:
        x[:, 4] = (kind == 2).float()
    loop.step_fn = lambda m, b: F.cross_entropy(m(b[0]), b[1])
    return loop


@bug("masked LM", Cause.LOSS_FUNCTION, source=f"{TAXONOMY}: wrong tensor shape; PyTorch forum, view and transpose")
def view_for_transpose() -> Loop:
    """view(n, classes, length) in place of transpose(1, 2)."""
    loop = tasks.masked_loop()
    loop.step_fn = lambda m, b: F.cross_entropy(m(b[0], b[2]).view(16, 24, 14), b[1])
    return loop


@bug("contrastive", Cause.COLLAPSE, source="https://github.com/PatrickHua/SimSiam/issues/50")
def positives_only() -> Loop:
    """The loss pulls pairs together and nothing apart."""
    model = Embedder(norm=False)
    loop = tasks.contrastive_loop(model, optimizer=tasks.sgd(model, 0.05))
    loop.step_fn = lambda m, v: (m(v[0]) - m(v[1])).square().sum(-1).mean()
    return loop


@bug("conv", Cause.REPEATED_DATA, source="https://github.com/pytorch/pytorch/issues/5059")
def same_numbers_in_workers() -> Loop:
    """Four workers make the same random samples."""
    loop = tasks.image_loop()
    loop.batches = [batch for batch in loop.batches[:8] for _ in range(4)]
    return loop


@bug("tabular", Cause.LEAK, source="Kapoor and Narayanan, Leakage and the Reproducibility Crisis, Patterns 2023")
def held_out_trained_on() -> Loop:
    """The held-out batches are among those trained on."""
    loop = tasks.regression_loop()
    loop.eval_batches = [loop.batches[2], loop.batches[5]]
    return loop


@bug("masked LM", Cause.LABELS, source="https://github.com/huggingface/transformers/issues/8977")
def all_labels_ignored() -> Loop:
    """Every label is -100."""
    loop = tasks.masked_loop()
    loop.batches = [(tokens, torch.full_like(labels, -100), mask) for tokens, labels, mask in loop.batches]
    return loop


@bug("tabular", Cause.INPUT_SCALE, Cause.LEARNING_RATE, source=f"{UMLAUT}; {DEEP_CHECKER}: unscaled features")
def raw_units() -> Loop:
    """Features in their own units: years, euros, fractions."""
    loop = tasks.regression_loop()
    units = torch.tensor([1.0, 2000.0, 5e4, 0.01] * 3)
    loop.batches = [(x * units, y) for x, y in loop.batches]
    return loop


@bug("lora", Cause.DEAD_UNITS, Cause.SYMMETRY, Cause.INITIALISATION, source="Hu et al., LoRA, 2021: initialisation")
def both_adapters_zero() -> Loop:
    """Both low-rank matrices start at zero, so that neither gets a gradient."""
    model = with_lora(TokenDecoder())
    for module in model.modules():
        if isinstance(module, LoraLinear):
            nn.init.zeros_(module.lora_a)
    held = [p for p in model.parameters() if p.requires_grad]
    return tasks.decoder_loop(model, optimizer=torch.optim.AdamW(held, lr=2e-3))


@bug(
    "deep",
    Cause.INITIALISATION,
    Cause.VANISHING_GRADIENT,
    Cause.EXPLODING_GRADIENT,
    source=f"{DEEP_CHECKER}: saturated activations; {TAXONOMY}: wrong weights initialisation",
)
def saturated_tanh() -> Loop:
    """Weights that are twenty times too large before tanh."""
    model = mlp([12, 32, 32, 32, 1], nn.Tanh)
    for p in model.parameters():
        p.data.mul_(20)
    return tasks.regression_loop(model)


@bug("decoder", Cause.SCHEDULE, Cause.LEARNING_RATE, source="https://github.com/crowsonkb/k-diffusion/issues/50")
def schedule_stays_at_zero() -> Loop:
    """A warmup with integer division never leaves zero."""
    loop = tasks.decoder_loop()
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: float(min(step // 1000, 1)))
    loop.total_steps = 900
    return loop


class Reinitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp([12, 32, 32], nn.ReLU)
        self.head = nn.Linear(32, 1)
        self.start = {name: p.detach().clone() for name, p in self.head.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for name, p in self.head.named_parameters():
                p.copy_(self.start[name])
        return self.head(self.body(x).relu())


@bug("regression", Cause.WEIGHTS_OVERWRITTEN, source=f"{TRAIN_CHECK}: weights overwritten by a stale copy")
def head_reset_in_forward() -> Loop:
    """The head is set to its first values in every forward pass."""
    return tasks.regression_loop(Reinitialised())


@bug("conv", Cause.OPTIMIZER_SETTINGS, source=f"{TAXONOMY}: wrong optimiser configuration")
def eps_of_one() -> Loop:
    """Adam with an eps of 1."""
    model = convolutional()
    return tasks.image_loop(model, optimizer=tasks.adamw(model, 1e-3, eps=1.0))


@bug("recurrent", Cause.REGULARISATION, source=f"{UMLAUT}: high dropout rate")
def dropout_on_outputs() -> Loop:
    """Dropout after the last layer."""
    return tasks.recurrent_loop(nn.Sequential(SequenceRegressor(), nn.Dropout(0.5)))


class MaskForgotten(MaskedEncoder):
    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(tokens, None)


@bug("masked LM", Cause.PADDING, Cause.ATTENTION_MASK, source="https://github.com/namiyousef/argument-mining/issues/30")
def padding_mask_forgotten() -> Loop:
    """The encoder takes the padding mask and does not use it."""
    return tasks.masked_loop(MaskForgotten())


@bug("regression", Cause.MOMENTUM, Cause.LEARNING_RATE, source=f"{TAXONOMY}: wrong optimiser configuration")
def momentum_of_0_999() -> Loop:
    """SGD with a momentum of 0.999."""
    model = mlp([12, 32, 32, 1], nn.ReLU)
    return tasks.regression_loop(model, optimizer=tasks.sgd(model, 0.05, momentum=0.999))


@bug("conv", Cause.FROZEN, source=f"{TAXONOMY}: layers frozen by mistake; {TRAIN_CHECK}")
def last_layer_frozen() -> Loop:
    """The output layer is frozen, in place of the first."""
    model = convolutional()
    model.get_submodule("9").requires_grad_(False)
    return tasks.image_loop(model)


@bug("autoencoder", Cause.LOSS_FUNCTION, source=f"{TAXONOMY}: wrong loss function calculation")
def divergence_subtracted() -> Loop:
    """A variational autoencoder whose divergence term has the wrong sign."""
    loop = tasks.autoencoder_loop(VariationalAutoEncoder())

    def step_fn(model: nn.Module, x: Any) -> Tensor:
        out, mean, log_var = model(x)
        return F.mse_loss(out, x) + 0.1 * (1 + log_var - mean.square() - log_var.exp()).mean()

    loop.step_fn = step_fn
    return loop


@bug("conv", Cause.LABELS, source=f"{TAXONOMY}: wrong labels; {UMLAUT}")
def labels_of_other_images() -> Loop:
    """Images were shuffled without their labels."""
    loop = tasks.image_loop()
    loop.batches = [(x, y[torch.randperm(len(y))]) for x, y in loop.batches]
    return loop


@bug("conv", Cause.LOSS_FUNCTION, Cause.LEARNING_RATE, source="https://github.com/jax-ml/jax/pull/3113")
def summed_loss() -> Loop:
    """The loss is summed over the batch, at a rate for its mean."""
    model = convolutional()
    loop = tasks.image_loop(model, optimizer=tasks.sgd(model, 0.2))
    loop.step_fn = lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum")
    return loop


class BatchMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last((x - x.mean(0)) / (x.var(0) + 1e-5).sqrt())


@bug("regression", Cause.LEAK, source=f"{TAXONOMY}: wrong tensor dimension")
def normalised_over_samples() -> Loop:
    """A layer norm written by hand takes its mean over dimension 0."""
    return tasks.regression_loop(BatchMean())

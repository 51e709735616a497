"""The half of the bugs that checks may be tuned on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.silent_bugs import loops, tasks
from benchmarks.silent_bugs.loops import Loop
from benchmarks.silent_bugs.small_models import (
    SequenceRegressor,
    Siamese,
    TextClassifier,
    TokenDecoder,
    TorchDecoder,
    TwoHeads,
    with_lora,
)
from benchmarks.silent_bugs.tasks import next_token
from benchmarks.zoo.models import convolutional, mlp
from surefoot.records import Cause

bug = partial(loops.bug, loops.Half.TUNING)
TAXONOMY = "Humbatova et al., Taxonomy of Real Faults in Deep Learning Systems, ICSE 2020"
DEEP_CHECKER = "TheDeepChecker, Ben Braiek and Khomh, TOSEM 2023"
UMLAUT = "UMLAUT, Schoop et al., CHI 2021"
TRAIN_CHECK = "TrainCheck, Jiang et al., OSDI 2025"


@bug("conv", Cause.LOSS_FUNCTION, source="https://github.com/tflearn/tflearn/pull/562")
def double_softmax() -> Loop:
    """Softmax in the model, and again in cross_entropy."""
    return tasks.image_loop(nn.Sequential(convolutional(), nn.Softmax(-1)))


@bug("regression", Cause.LOSS_FUNCTION, source="https://github.com/pytorch/pytorch/issues/16045")
def broadcast_loss() -> Loop:
    """Outputs of shape (n, 1) against targets of shape (n,)."""
    loop = tasks.regression_loop()
    loop.step_fn = lambda m, b: (m(b[0]) - b[1]).square().mean()
    return loop


@bug("decoder", Cause.LEAK, Cause.ATTENTION_MASK, source="https://github.com/huggingface/transformers/issues/48745")
def no_causal_mask() -> Loop:
    """A decoder that sees the tokens it should predict."""
    return tasks.decoder_loop(TokenDecoder(look_ahead=True))


@bug("decoder", Cause.LABELS, source="https://github.com/huggingface/transformers/issues/32944")
def labels_not_shifted() -> Loop:
    """The target of each position is the token that is given there."""
    loop = tasks.decoder_loop()
    loop.step_fn = lambda m, b: F.cross_entropy(m(b).flatten(0, 1), b.flatten())
    return loop


@bug("decoder", Cause.PADDING, source="https://github.com/allenai/open-instruct/issues/632")
def padding_in_loss() -> Loop:
    """Padding is predicted like any token."""
    loop = tasks.decoder_loop()
    loop.batches = tasks.several(lambda: tasks.padded(tasks.sequences())[0])
    return loop


@bug("decoder", Cause.LEARNING_RATE, source=f"{TAXONOMY}: suboptimal learning rate")
def rate_too_high() -> Loop:
    """AdamW at 0.3 from the first step."""
    model = TokenDecoder()
    return tasks.decoder_loop(model, optimizer=tasks.adamw(model, 0.3))


@bug("regression", Cause.LEARNING_RATE, source=f"{UMLAUT}: learning rate too low")
def rate_too_low() -> Loop:
    """SGD at 1e-8."""
    model = mlp([12, 32, 32, 1], nn.ReLU)
    return tasks.regression_loop(model, optimizer=tasks.sgd(model, 1e-8))


@bug("decoder", Cause.PRECISION_UNDERFLOW, source="https://github.com/tensorflow/tensorflow/issues/58138")
def bfloat16_updates() -> Loop:
    """Weights of bfloat16 at a rate that they round away."""
    model = TokenDecoder().bfloat16()
    loop = tasks.decoder_loop(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    loop.step_fn = lambda m, b: next_token(m(b).float(), b)
    return loop


@bug("autoencoder", Cause.DETACHED, source="https://github.com/lucidrains/CoCa-pytorch/issues/6")
def detached_encoder() -> Loop:
    """The code is detached, so that only the decoder is trained."""
    loop = tasks.autoencoder_loop()

    def forward(x: Tensor) -> Tensor:
        return loop.model.get_submodule("decoder")(loop.model.get_submodule("encoder")(x).detach())

    setattr(loop.model, "forward", forward)
    return loop


class ListOfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 1)
        self.middle = [nn.Linear(32, 32) for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for layer in self.middle:
            x = layer(x).relu()
        return self.last(x)


@bug("regression", Cause.UNREGISTERED, source="https://github.com/pytorch/pytorch/issues/59925")
def layers_in_a_list() -> Loop:
    """Layers in a plain Python list."""
    return tasks.regression_loop(ListOfLayers())


@bug("conv", Cause.UNREGISTERED, source="https://github.com/microsoft/nni/issues/4521")
def optimizer_of_another_copy() -> Loop:
    """The optimizer was created before the model was replaced."""
    return tasks.image_loop(convolutional(), optimizer=tasks.adamw(convolutional()))


@bug("regression", Cause.SYMMETRY, Cause.INITIALISATION, source=f"{DEEP_CHECKER}: unbroken symmetry")
def constant_initialisation() -> Loop:
    """All weights are 0.05."""
    model = mlp([12, 32, 32, 1], nn.ReLU)
    for p in model.parameters():
        nn.init.constant_(p, 0.05)
    return tasks.regression_loop(model)


@bug("conv", Cause.DATA_ORDER, source=f"{TAXONOMY}: data not shuffled; {DEEP_CHECKER}")
def sorted_by_class() -> Loop:
    """Batches are cut from data sorted by class."""
    loop = tasks.image_loop()
    x, y = (torch.cat(parts) for parts in zip(*loop.batches, strict=True))
    order = y.argsort()
    loop.batches = list(zip(x[order].split(24), y[order].split(24), strict=True))
    return loop


@bug("regression", Cause.LEAK, source="Kaufman et al., Leakage in Data Mining, TKDD 2012")
def target_among_features() -> Loop:
    """The eighth feature is the target, rescaled."""
    loop = tasks.regression_loop()
    for x, y in loop.batches:
        x[:, 7] = 3 * y - 1
    return loop


@bug("conv", Cause.MODE, source="https://github.com/ThilinaRajapakse/simpletransformers/issues/739")
def evaluation_mode() -> Loop:
    """model.eval() is not undone after an evaluation."""
    model = nn.Sequential(convolutional(), nn.Dropout(0.2))
    loop = tasks.image_loop(model)
    model.eval()
    return loop


@bug("decoder", Cause.LEAK, source="https://github.com/IBM/TabFormer/pull/14")
def attention_over_the_batch() -> Loop:
    """batch_first is missing, so that attention mixes samples."""
    return _tokens_of_14(TorchDecoder(batch_first=False))


def _tokens_of_14(model: nn.Module) -> Loop:
    loop = tasks.decoder_loop(model)
    loop.batches = tasks.several(lambda: tasks.sequences(16, 14, 24))
    return loop


@bug("contrastive", Cause.COLLAPSE, source="https://github.com/PatrickHua/SimSiam/issues/39")
def no_stop_gradient() -> Loop:
    """SimSiam without a stop-gradient."""
    model = Siamese(stop_gradient=False)

    def step_fn(model: nn.Module, views: Any) -> Tensor:
        pa, pb, za, zb = model(*views)
        return -(F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean()) / 2

    return tasks.make(model, tasks.several(tasks.two_views), step_fn, tasks.sgd(model, 0.1))


@bug("regression", Cause.LOSS_FUNCTION, source=f"{TAXONOMY}: wrong loss function calculation")
def wrong_sign() -> Loop:
    """The loss is negated."""
    loop = tasks.regression_loop()
    loop.step_fn = lambda m, b: -F.mse_loss(m(b[0]).squeeze(-1), b[1])
    return loop


@bug("conv", Cause.REPEATED_DATA, source=f"{UMLAUT}; Karpathy, A Recipe for Training Neural Networks, 2019")
def same_batch_again() -> Loop:
    """next(iter(loader)) gives the same batch each time."""
    loop = tasks.image_loop()
    loop.batches = [loop.batches[0]] * len(loop.batches)
    return loop


@bug("conv", Cause.INPUT_SCALE, Cause.LEARNING_RATE, source=f"{UMLAUT}: input not normalised; {DEEP_CHECKER}")
def pixels_up_to_255() -> Loop:
    """Images are not scaled."""
    model = nn.Sequential(nn.Flatten(), mlp([64, 32, 32, 10], nn.ReLU))
    loop = tasks.image_loop(model)
    loop.batches = [((x - x.min()) / (x.max() - x.min()) * 255, y) for x, y in loop.batches]
    return loop


@bug("multi-output", Cause.DETACHED, source=f"{TAXONOMY}: wrong loss function calculation")
def head_without_loss() -> Loop:
    """The loss of the second head is not added."""
    loop = tasks.two_head_loop(TwoHeads())
    loop.step_fn = lambda m, b: F.cross_entropy(m(b[0])[0], b[1])
    return loop


@bug(
    "lora",
    Cause.DETACHED,
    Cause.FROZEN,
    Cause.UNREGISTERED,
    source="https://github.com/huggingface/transformers/issues/26098",
)
def adapters_frozen() -> Loop:
    """The adapters are frozen together with the base; only the head is trained."""
    model = with_lora(TokenDecoder())
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("core.blocks.0") and "lora" in name)
    held = [p for name, p in model.named_parameters() if "lora" in name and "blocks.1" in name]
    head = model.core.head.requires_grad_(True)
    return tasks.decoder_loop(model, optimizer=torch.optim.AdamW([*held, *head.parameters()], lr=2e-3))


@bug("deep", Cause.VANISHING_GRADIENT, source=f"{DEEP_CHECKER}: vanishing gradient")
def deep_sigmoid() -> Loop:
    """Ten layers with sigmoid and small weights."""
    model = mlp([12, *[24] * 10, 1], nn.Sigmoid)
    return tasks.regression_loop(model)


@bug("conv", Cause.DEAD_UNITS, source=f"{DEEP_CHECKER}: dead ReLU; {UMLAUT}")
def dead_relus() -> Loop:
    """Biases of -30 before ReLU."""
    model = nn.Sequential(nn.Flatten(), mlp([64, 48, 48, 10], nn.ReLU))
    nn.init.constant_(model.get_submodule("1.2").bias, -30.0)  # pyright: ignore[reportArgumentType]
    return tasks.image_loop(model)


@bug("text", Cause.PADDING, source="https://github.com/EleutherAI/gpt-neo/pull/45")
def pooling_over_padding() -> Loop:
    """The mean over the sequence includes padding."""
    return tasks.text_loop(TextClassifier(uses_mask=False))


@bug("regression", Cause.REGULARISATION, source=f"{TAXONOMY}: wrong selection of regularisation")
def decay_outweighs() -> Loop:
    """Weight decay of 3 in SGD."""
    model = mlp([12, 32, 32, 1], nn.ReLU)
    return tasks.regression_loop(model, optimizer=tasks.sgd(model, 0.02, weight_decay=3.0))


@bug("conv", Cause.SCHEDULE, source="https://github.com/ivadomed/ivadomed/pull/55")
def stepped_per_batch() -> Loop:
    """A schedule of 30 epochs is stepped at every batch."""
    loop = tasks.image_loop()
    loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=10, gamma=0.1)
    loop.total_steps = 30 * 32
    return loop


@bug("decoder", Cause.CLIPPING, source=f"{TAXONOMY}: wrong gradient clipping")
def clipped_to_nothing() -> Loop:
    """Gradients are clipped at 1e-4 with SGD."""
    model = TokenDecoder()
    return tasks.decoder_loop(model, optimizer=tasks.sgd(model), clip=1e-4)


@bug("recurrent", Cause.ACCUMULATION, source=f"{TAXONOMY}: missing zero_grad; {TRAIN_CHECK}")
def gradients_not_zeroed() -> Loop:
    """zero_grad is missing."""

    def update(loop: Loop, loss: Tensor) -> None:
        loss.backward()
        loop.optimizer.step()

    return tasks.recurrent_loop(update=update)


@bug("recurrent", Cause.LEAK, source="Kapoor and Narayanan, Leakage and the Reproducibility Crisis, Patterns 2023")
def reads_both_ways() -> Loop:
    """A bidirectional network predicts the next value."""
    return tasks.recurrent_loop(SequenceRegressor(nn.LSTM, both_ways=True))

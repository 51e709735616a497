"""Faults in the weights or the optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor, nn

from benchmarks.zoo.scenario import fault
from benchmarks.zoo.training import ZooRun
from surefoot.records import Cause


def _once(run: ZooRun, at: int, damage: Callable[[Generator], None]) -> None:
    """Damage something before the forward pass of one step; gets a generator for its randomness."""

    def hook(step: int) -> None:
        if step == at:
            with torch.no_grad():
                damage(torch.Generator().manual_seed(run.settings.seed * 65_537 + step))

    run.before_step(hook)


def _blur(tensor: Tensor, strength: float, rng: Generator) -> None:
    """Add noise of `strength` times the tensor's own RMS."""
    size = tensor.square().mean().sqrt()
    tensor.add_(torch.randn(tensor.shape, generator=rng) * size, alpha=strength)


# -- the optimizer's state


def _state(run: ZooRun, *names: str) -> Iterator[Tensor]:
    """The optimizer's tensors of these names, parameter after parameter."""
    for param in run.model.parameters():
        yield from (run.optimizer.state[param][name] for name in names if name in run.optimizer.state[param])


@fault(
    Cause.OPTIMIZER_STATE,
    on={"decoder": ".!!", "memory": ".!!"},
    strengths={"decoder": (1, 15, 40), "memory": (1, 25, 40)},
)
def moments_damaged(run: ZooRun, at: int, strength: float) -> None:
    """The optimizer's second moments shrink to a ten-thousandth, at one step or at several in a row."""

    def shrink(step: int) -> None:
        for moment in _state(run, "exp_avg_sq") if at <= step < at + strength else ():
            moment.mul_(1e-4)

    run.before_step(shrink)


@fault(
    Cause.OPTIMIZER_STATE,
    on={"convolution": ".!!", "vision_language": ".!!"},
    strengths={"convolution": (5, 100, 1000), "vision_language": (1, 30, 1000)},
)
def momentum_damaged(run: ZooRun, at: int, strength: float) -> None:
    """Noise, a multiple of its own size, is added to the optimizer's momentum, once."""

    def blur(rng: Generator) -> None:
        for moment in _state(run, "exp_avg", "momentum_buffer"):
            _blur(moment, strength, rng)

    _once(run, at, blur)


# -- damaged weights


@fault(Cause.WEIGHTS_DAMAGED, on={"recurrent": ".!!", "memory": ".!!"}, strengths=(1, 100, 200))
def bit_flip(run: ZooRun, at: int, strength: float) -> None:
    """The highest exponent bit flips in one or more weights, which become astronomical, once."""

    def flip(rng: Generator) -> None:
        weight = max(run.model.parameters(), key=Tensor.numel).view(-1)
        places = torch.randperm(weight.numel(), generator=rng)[: int(strength)]
        weight.view(torch.int32)[places] ^= 1 << 30

    _once(run, at, flip)


@fault(
    Cause.WEIGHTS_DAMAGED,
    on={"convolution": ".!!", "autoencoder": ".!!"},
    strengths={"convolution": (0.2, 3, 10), "autoencoder": (0.2, 1, 10)},
    precision="bfloat16",
    optimizer=torch.optim.RAdam,
    lr=0.01,
)
def weights_blurred(run: ZooRun, at: int, strength: float) -> None:
    """Noise, a multiple of their own size, is added to the weights, once."""

    def blur(rng: Generator) -> None:
        for param in run.model.parameters():
            _blur(param, strength, rng)

    _once(run, at, blur)


@fault(
    Cause.WEIGHTS_DAMAGED,
    on={"decoder": "..!", "encoder": ".!!"},
    strengths={"decoder": (10, 1e4, 1e25), "encoder": (2, 100, 1e25)},
    onset=395,
    steps=420,
)
def embedding_spike(run: ZooRun, at: int, strength: float) -> None:
    """One row of the embedding becomes huge, once."""

    def spike(_rng: Generator) -> None:
        next(module for module in run.model.modules() if isinstance(module, nn.Embedding)).weight[3].mul_(strength)

    _once(run, at, spike)


@fault(
    Cause.VANISHING_GRADIENT,
    on={"plain": ".!!", "autoencoder": ".!!"},
    strengths={"plain": (0.9, 0.4, 0.01), "autoencoder": (0.6, 0.1, 0.01)},
    precision="bfloat16",
)
def vanishing(run: ZooRun, at: int, strength: float) -> None:
    """The weights of the middle layers shrink, so that little or no gradient reaches the first layers."""

    def shrink(_rng: Generator) -> None:
        layers = [module for module in run.model.modules() if isinstance(module, nn.Linear)]
        for layer in layers[1:-1]:
            layer.weight.mul_(strength)

    _once(run, at, shrink)


@fault(
    Cause.DEAD_UNITS,
    on={"convolution": ".!!", "vision_language": ".!!"},
    strengths={"convolution": (0.3, 3, 20), "vision_language": (1, 5, 20)},
    optimizer=torch.optim.Adagrad,
    lr=0.03,
)
def dead_units(run: ZooRun, at: int, strength: float) -> None:
    """Biases before ReLUs drop so far that some or all of the units are dead."""

    def lower_biases(_rng: Generator) -> None:
        for module in run.model.modules():
            if isinstance(module, nn.Sequential):
                for layer, following in itertools.pairwise(module):
                    if isinstance(following, nn.ReLU):
                        layer.get_parameter("bias").sub_(strength)

    _once(run, at, lower_biases)


# -- weights that were wrong from the start, or do not move


@fault(
    Cause.INITIALISATION,
    on={"recurrent": ".!!", "autoencoder": ".!!"},
    strengths={"recurrent": (1.5, 10, 30), "autoencoder": (1.03, 3, 10)},
    onset=0,
    curable=False,
)
def bad_initialisation(run: ZooRun, at: int, strength: float) -> None:
    """All weights start out too large."""

    def scale_up(_rng: Generator) -> None:
        for param in run.model.parameters():
            param.mul_(strength)

    _once(run, at, scale_up)


@fault(
    Cause.NOT_UPDATING,
    on={"plain": "!!!", "encoder": "!!!"},
    strengths={"plain": (0.06, 0.3, 1.0), "encoder": (0.03, 0.3, 1.0)},
    curable=False,
    steps=420,
)
def frozen(run: ZooRun, at: int, strength: float) -> None:
    """A share of the parameters, the first ones first, no longer requires gradients."""
    params = list(run.model.parameters())
    frozen_params = params[: min(round(strength * len(params)), len(params) - 1)]

    def freeze(step: int) -> None:
        for param in frozen_params if step >= at else ():
            param.requires_grad_(False)

    run.before_step(freeze)


@fault(
    Cause.NOT_UPDATING,
    on={"decoder": ".!!", "vision_language": ".!!"},
    strengths={"decoder": (0.03, 0.8, 0.95), "vision_language": (0.03, 0.6, 0.9)},
    onset=0,
    curable=False,
)
def forgotten_parameters(run: ZooRun, at: int, strength: float) -> None:
    """The optimizer was never given a share of the parameters, the last ones first."""
    params = list(run.model.parameters())
    build = run.settings.optimizer or run.family.optimizer
    run.optimizer = build(params[: len(params) - round(strength * len(params))], run.base_lr)

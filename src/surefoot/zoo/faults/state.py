"""What is wrong with the weights or with the optimizer's state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor, nn

from surefoot.records import Cause
from surefoot.zoo.run import Run
from surefoot.zoo.scenario import fault


def _once(run: Run, at: int, damage: Callable[[], None]) -> None:
    """Do the damage before the forward pass of one step."""

    def hook(step: int) -> None:
        if step == at:
            with torch.no_grad():
                damage()

    run.before_step(hook)


def _rng(run: Run, at: int) -> Generator:
    return torch.Generator().manual_seed(run.settings.seed * 65_537 + at)


def _state(run: Run, *names: str) -> Iterator[Tensor]:
    """The optimizer's tensors of these names, parameter after parameter."""
    for param in run.model.parameters():
        yield from (run.optimizer.state[param][name] for name in names if name in run.optimizer.state[param])


@fault(Cause.OPTIMIZER_STATE, on={"decoder": "!!!", "autoencoder": "!!!"}, strengths=(1e-2, 1e-4, 0.0))
def moments_damaged(run: Run, at: int, strength: float) -> None:
    """The optimizer's second moments are shrunk, once."""

    def shrink() -> None:
        for moment in _state(run, "exp_avg_sq", "square_avg"):
            moment.mul_(strength)

    _once(run, at, shrink)


@fault(Cause.OPTIMIZER_STATE, on={"convolution": "!!!", "vision_language": "!!!"}, strengths=(10.0, 100.0, 1000.0))
def momentum_damaged(run: Run, at: int, strength: float) -> None:
    """Noise, so many times as large as itself, gets into the optimizer's momentum, once."""

    def blur() -> None:
        rng = _rng(run, at)
        for moment in _state(run, "exp_avg", "momentum_buffer"):
            size = moment.square().mean().sqrt()
            moment.add_(torch.randn(moment.shape, generator=rng) * size, alpha=strength)

    _once(run, at, blur)


@fault(
    Cause.WEIGHTS_DAMAGED,
    on={"recurrent": "!!!", "vision_language": "!!!"},
    strengths=(24, 25, 30),
)
def bit_flip(run: Run, at: int, strength: float) -> None:
    """The same bit flips in eight weights, once; bit 30 makes a weight of ordinary size astronomical."""

    def flip() -> None:
        weight = max(run.model.parameters(), key=Tensor.numel).view(-1)
        places = torch.randperm(weight.numel(), generator=_rng(run, at))[:8]
        weight.view(torch.int32)[places] ^= 1 << int(strength)

    _once(run, at, flip)


@fault(Cause.WEIGHTS_DAMAGED, on={"convolution": "!!!", "memory": "!!!"}, strengths=(0.3, 1.0, 4.0))
def weights_blurred(run: Run, at: int, strength: float) -> None:
    """Noise, so many times as large as themselves, gets into the weights, once."""

    def blur() -> None:
        rng = _rng(run, at)
        for param in run.model.parameters():
            size = param.square().mean().sqrt()
            param.add_(torch.randn(param.shape, generator=rng) * size, alpha=strength)

    _once(run, at, blur)


@fault(
    Cause.INITIALISATION,
    on={"plain": "!!!", "autoencoder": "!!!"},
    strengths=(1.5, 3.0, 10.0),
    onset=0,
    curable=False,
)
def bad_initialisation(run: Run, at: int, strength: float) -> None:
    """The weights of every layer start out so many times too large."""

    def enlarge() -> None:
        for param in run.model.parameters():
            param.mul_(strength)

    _once(run, at, enlarge)


@fault(
    Cause.VANISHING_GRADIENT,
    on={"plain": "!!!", "autoencoder": "!!!"},
    strengths=(0.5, 0.1, 0.01),
)
def vanishing(run: Run, at: int, strength: float) -> None:
    """The weights of the middle layers shrink, so that no gradient comes through to the first."""

    def shrink() -> None:
        layers = [module for module in run.model.modules() if isinstance(module, nn.Linear)]
        for layer in layers[1:-1]:
            layer.weight.mul_(strength)

    _once(run, at, shrink)


@fault(Cause.DEAD_UNITS, on={"plain": "!!!", "vision_language": "!!!"}, strengths=(0.5, 2.0, 20.0))
def dead_units(run: Run, at: int, strength: float) -> None:
    """Biases before ReLUs fall so far below zero that the units fall silent."""

    def silence() -> None:
        for module in run.model.modules():
            if isinstance(module, nn.Sequential):
                for layer, after in itertools.pairwise(module):
                    if isinstance(after, nn.ReLU):
                        layer.bias.sub_(strength)

    _once(run, at, silence)


@fault(Cause.NOT_UPDATING, on={"decoder": "!!!", "residual": "!!!"}, strengths=(0.3, 0.6, 1.0), curable=False)
def frozen(run: Run, at: int, strength: float) -> None:
    """A share of the parameters, from the input on, no longer asks for gradients."""
    params = list(run.model.parameters())
    some = params[: min(round(strength * len(params)), len(params) - 1)]

    def freeze(step: int) -> None:
        if step >= at:
            for param in some:
                param.requires_grad_(False)

    run.before_step(freeze)


@fault(
    Cause.NOT_UPDATING,
    on={"recurrent": "!!!", "memory": "!!!"},
    strengths=(0.3, 0.6, 1.0),
    onset=0,
    curable=False,
)
def forgotten_parameters(run: Run, at: int, strength: float) -> None:
    """The optimizer was never given a share of the parameters, from the input on."""
    params = list(run.model.parameters())
    given = params[min(round(strength * len(params)), len(params) - 1) :]
    build = run.settings.optimizer or run.family.optimizer
    run.optimizer = build(given, run.base_rate)


@fault(Cause.WEIGHTS_DAMAGED, on={"decoder": "!!!", "encoder": "!!!"}, strengths=(10.0, 100.0, 1e4))
def embedding_spike(run: Run, at: int, strength: float) -> None:
    """One row of the embedding becomes so many times as large, once."""

    def spike() -> None:
        next(module for module in run.model.modules() if isinstance(module, nn.Embedding)).weight[3].mul_(strength)

    _once(run, at, spike)

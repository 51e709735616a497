from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.models.decoder import Decoder, DecoderConfig, next_token_loss
from surefoot.train.mixed_precision import Precision
from surefoot.train.recipe.schema import PrecisionSection, SpeedSection
from surefoot.train.speed import attention, checkpoint_activations, compiled, configure_torch, seed_everything

CPU = torch.device("cpu")


def _model(dropout: float = 0.0, layers: int = 4) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab=32, width=16, layers=layers, heads=2, context=16, dropout=dropout))


def _tokens() -> Tensor:
    return torch.arange(34).reshape(2, 17) % 7


def _gradients(model: nn.Module, forward: Any = None) -> list[Tensor]:
    torch.manual_seed(7)
    next_token_loss(model if forward is None else forward, _tokens()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_the_same_seed_draws_the_same_numbers() -> None:
    seed_everything(5)
    first = _drawn()
    seed_everything(5)
    assert _drawn() == first
    seed_everything(6)
    assert not set(_drawn()) & set(first)


def test_ranks_differ_in_dropout_only() -> None:
    seed_everything(5, rank=0)
    python, numpy, torch_ = _drawn()
    seed_everything(5, rank=1)
    other = _drawn()
    assert other[:2] == (python, numpy)
    assert other[2] != torch_
    seed_everything(6, rank=0)
    assert _drawn()[2] != other[2]


def test_a_seed_may_be_larger_than_numpy_can_take() -> None:
    seed_everything(2**70, rank=3)


@pytest.fixture
def _settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    configure_torch(SpeedSection(threads=threads), CPU)
    torch.backends.cudnn.benchmark = False


@pytest.mark.usefixtures("_settings")
def test_deterministic_mode_refuses_what_could_differ_and_the_other_takes_the_fastest() -> None:
    configure_torch(SpeedSection(deterministic=True), CPU)
    assert torch.are_deterministic_algorithms_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    configure_torch(SpeedSection(threads=2), CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_settings")
def test_deterministic_mode_on_a_gpu_fixes_the_workspace_of_its_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    configure_torch(SpeedSection(deterministic=True), torch.device("cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(("every", "number"), [(0, 0), (1, 4), (2, 2), (3, 2)])
def test_blocks_computed_again_give_the_same_gradients_dropout_and_names(every: int, number: int) -> None:
    plain, again = _model(dropout=0.2), _model(dropout=0.2)
    assert checkpoint_activations(again, every) == number
    assert list(again.state_dict()) == list(plain.state_dict())
    for mine, theirs in zip(_gradients(again), _gradients(plain), strict=True):
        assert torch.equal(mine, theirs)


def _kept(model: nn.Module) -> int:
    """Values that a forward pass keeps for backward."""
    kept = 0

    def keep(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.numel()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        next_token_loss(model, _tokens())
    return kept


def test_blocks_computed_again_keep_less_in_memory() -> None:
    half, whole = _model(), _model()
    checkpoint_activations(half, 2)
    checkpoint_activations(whole, 1)
    assert _kept(whole) < _kept(half) < _kept(_model())
    assert _kept(whole) < _kept(_model()) / 2


def test_blocks_are_computed_once_where_no_gradient_is_asked_for() -> None:
    model = _model()
    checkpoint_activations(model, 1)
    passes: list[int] = []
    model.blocks[0].attention.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        next_token_loss(model, _tokens())
    assert len(passes) == 1
    _gradients(model)
    assert len(passes) == 3


def test_a_copy_of_the_model_computes_its_own_blocks_again() -> None:
    model = _model()
    checkpoint_activations(model, 1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.blocks.parameters():
            p.zero_()
    assert not torch.equal(model(_tokens()[:, 1:]), other(_tokens()[:, 1:]))


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))


def test_blocks_computed_again_are_compiled_whole_and_compute_in_half_precision() -> None:
    precision = Precision(PrecisionSection(compute="bfloat16"), CPU)
    plain, again = precision.prepare(_blocks()), precision.prepare(_blocks())
    assert checkpoint_activations(again, 1) == 2
    whole = torch.compile(again, backend="aot_eager", fullgraph=True)
    with precision.forward():
        plain(torch.ones(2, 4)).sum().backward()
        whole(torch.ones(2, 4)).sum().backward()
    for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.01)


def test_a_model_without_blocks_cannot_compute_them_again() -> None:
    with pytest.raises(ValueError, match=r"speed\.checkpoint_activations: .*nn\.ModuleList.* set it to 0"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1)


@pytest.mark.parametrize("name", ["auto", "flash", "math"])
def test_attention_gives_the_same_answer_with_any_kernel(name: Any) -> None:
    model = _model()
    expected = model(_tokens()[:, 1:])
    with attention(SpeedSection(attention=name)):
        torch.testing.assert_close(model(_tokens()[:, 1:]), expected)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("cudnn", "cpu", r"speed\.attention: cudnn needs a GPU.* Use one of auto, flash, math"),
        ("flash", "cuda", r"speed\.attention: flash computes in bfloat16 and float16 only.* Use auto"),
    ],
)
def test_attention_that_cannot_run_is_refused_before_anything_runs(name: Any, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure_torch(SpeedSection(attention=name), torch.device(device), "float32")


def test_compiling_is_left_out_unless_asked_for() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert compiled(double, False) is double


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"speed\.compile: .* Install one, such as g\+\+, or set speed.compile=false"):
        compiled(abs, True)

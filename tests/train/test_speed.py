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


def test_same_seed_gives_the_same_numbers() -> None:
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


def test_seed_may_exceed_numpys_limit() -> None:
    seed_everything(2**70, rank=3)


@pytest.fixture
def _settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    configure_torch(SpeedSection(threads=threads), CPU)
    torch.backends.cudnn.benchmark = False


@pytest.mark.usefixtures("_settings")
def test_deterministic_mode_disables_cudnn_benchmark() -> None:
    configure_torch(SpeedSection(deterministic=True), CPU)
    assert torch.are_deterministic_algorithms_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    configure_torch(SpeedSection(threads=2), CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_settings")
def test_deterministic_mode_on_a_gpu_sets_the_cublas_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that monkeypatch restores it
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    configure_torch(SpeedSection(deterministic=True), torch.device("cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(("every", "number"), [(0, 0), (1, 4), (2, 2), (3, 2)])
def test_checkpointed_blocks_have_the_same_gradients_and_names(every: int, number: int) -> None:
    plain, checkpointed = _model(dropout=0.2), _model(dropout=0.2)
    assert checkpoint_activations(checkpointed, every) == number
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    for grad, expected in zip(_gradients(checkpointed), _gradients(plain), strict=True):
        assert torch.equal(grad, expected)


def _saved_values(model: nn.Module) -> int:
    """Number of values that a forward pass saves for backward."""
    count = 0

    def save(value: Tensor) -> Tensor:
        nonlocal count
        count += value.numel()
        return value

    with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value):
        next_token_loss(model, _tokens())
    return count


def test_checkpointed_blocks_save_fewer_activations() -> None:
    every_second, every_block = _model(), _model()
    checkpoint_activations(every_second, 2)
    checkpoint_activations(every_block, 1)
    assert _saved_values(every_block) < _saved_values(every_second) < _saved_values(_model())
    assert _saved_values(every_block) < _saved_values(_model()) / 2


def test_checkpointed_blocks_run_once_under_no_grad() -> None:
    model = _model()
    checkpoint_activations(model, 1)
    passes: list[int] = []
    model.blocks[0].attention.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        next_token_loss(model, _tokens())
    assert len(passes) == 1
    _gradients(model)
    assert len(passes) == 3


def test_deep_copy_recomputes_its_own_blocks() -> None:
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


def test_checkpointed_blocks_compile_as_one_graph_in_bfloat16() -> None:
    precision = Precision(PrecisionSection(compute="bfloat16"), CPU)
    plain, checkpointed = precision.prepare(_blocks()), precision.prepare(_blocks())
    assert checkpoint_activations(checkpointed, 1) == 2
    compiled_model = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    with precision.forward():
        plain(torch.ones(2, 4)).sum().backward()
        compiled_model(torch.ones(2, 4)).sum().backward()
    for param, expected in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=0.05, atol=0.01)


def test_checkpointing_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"speed\.checkpoint_activations: .*nn\.ModuleList.* set it to 0"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1)


@pytest.mark.parametrize("name", ["auto", "flash", "math"])
def test_attention_gives_the_same_result_with_any_kernel(name: Any) -> None:
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
def test_unsupported_attention_kernel_is_refused(name: Any, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure_torch(SpeedSection(attention=name), torch.device(device), "float32")


def test_compile_is_off_by_default() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert compiled(double, False) is double


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"speed\.compile: .* Install one, such as g\+\+, or set speed.compile=false"):
        compiled(abs, True)

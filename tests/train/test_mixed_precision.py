from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.models.decoder import Decoder, DecoderConfig, next_token_loss
from surefoot.train.mixed_precision import Precision
from surefoot.train.optimizers import make_optimizers
from surefoot.train.recipe.schema import OptimizerSection, PrecisionSection

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _reset_precision() -> Any:
    yield
    Precision(PrecisionSection(), CPU)  # back to full float32


def _model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab=32, width=16, layers=2, heads=2, context=16))


def _tokens() -> Tensor:
    return torch.arange(34).reshape(2, 17) % 7


def _losses(compute: Any, updates: int = 10) -> list[float]:
    precision = Precision(PrecisionSection(compute=compute), CPU)
    model = precision.prepare(_model())
    (optimizer,) = make_optimizers(model, OptimizerSection(lr=0.01))
    losses = []
    for _ in range(updates):
        with precision.forward():
            loss = next_token_loss(model, _tokens())
        if precision.scaler is None:
            loss.backward()
            optimizer.step()
        else:
            precision.scaler.scale(loss).backward()
            precision.scaler.step(optimizer)
            precision.scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return losses


@pytest.mark.parametrize(("compute", "tolerance"), [("tf32", 1e-6), ("bfloat16", 0.05), ("float16", 0.01)])
def test_every_precision_learns_like_float32(compute: str, tolerance: float) -> None:
    assert _losses(compute) == pytest.approx(_losses("float32"), rel=tolerance)


def test_matmuls_use_the_recipes_dtype_and_the_loss_float32() -> None:
    precision = Precision(PrecisionSection(compute="bfloat16"), CPU)
    model = precision.prepare(nn.Linear(4, 3))
    with precision.forward():
        logits = model(torch.randn(2, 4))
        loss = F.cross_entropy(logits, torch.tensor([0, 1]))
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)], ids=lambda n: type(n).__name__)
def test_norm_layers_stay_in_float32(norm: nn.Module) -> None:
    precision = Precision(PrecisionSection(compute="bfloat16"), CPU)
    model = precision.prepare(nn.Sequential(nn.Linear(4, 4), norm))
    with precision.forward():
        assert model(torch.randn(2, 4)).dtype == torch.float32


def test_keep_float32_modules_stay_in_float32() -> None:
    precision = Precision(PrecisionSection(compute="bfloat16", keep_float32=["2", "LayerNorm"]), CPU)
    model = precision.prepare(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    names = list(model.state_dict())
    dtypes: list[torch.dtype] = []
    for module in model:
        module.register_forward_hook(lambda m, args, out: dtypes.append(out.dtype))
    with precision.forward():
        model(torch.randn(2, 4)).sum().backward()
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def test_deep_copy_of_a_prepared_model_uses_its_own_weights() -> None:
    precision = Precision(PrecisionSection(compute="bfloat16", keep_float32=["Linear"]), CPU)
    model = precision.prepare(nn.Linear(4, 3))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    with precision.forward():
        assert not other(torch.ones(1, 4)).any()
        assert model(torch.ones(1, 4)).any()


def test_keep_float32_compiles_as_one_graph() -> None:
    precision = Precision(PrecisionSection(compute="bfloat16", keep_float32=["2"]), CPU)
    model = precision.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with precision.forward():
        output, compiled_output = model(torch.ones(2, 4)), compiled(torch.ones(2, 4))
    assert compiled_output.dtype == torch.float32
    torch.testing.assert_close(output, compiled_output, rtol=0.02, atol=0.02)


def test_keep_float32_pattern_without_a_match_is_refused() -> None:
    precision = Precision(PrecisionSection(compute="bfloat16", keep_float32=["Layernorm"]), CPU)
    with pytest.raises(ValueError, match=r"keep_float32: no module .* 'Layernorm'. It has, .* LayerNorm"):
        precision.prepare(_model())


def test_half_precision_weights_are_trained_in_float32() -> None:
    model = Precision(PrecisionSection(compute="bfloat16"), CPU).prepare(_model().bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.head.weight is model.embed.weight


def test_float16_uses_loss_scaling_and_backs_off_on_overflow() -> None:
    precision = Precision(PrecisionSection(compute="float16", growth_interval=2), CPU)
    scaler = precision.scaler
    assert scaler is not None
    model = precision.prepare(nn.Linear(4, 1))
    (optimizer,) = make_optimizers(model, OptimizerSection())
    before = model.weight.detach().clone()

    def update(factor: float) -> None:
        with precision.forward():
            loss = model(torch.ones(1, 4)).float().sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert scaler.get_scale() == 2**16
    update(float("inf"))
    assert scaler.get_scale() == 2**15
    assert torch.equal(model.weight, before)
    update(1e-3)
    update(1e-3)
    assert scaler.get_scale() == 2**16
    assert not torch.equal(model.weight, before)


def test_only_float16_has_a_scaler() -> None:
    assert [Precision(PrecisionSection(compute=c), CPU).scaler for c in ("float32", "tf32", "bfloat16")] == [None] * 3


def test_tf32_is_enabled_only_on_request() -> None:
    Precision(PrecisionSection(compute="tf32"), CPU)
    assert torch.get_float32_matmul_precision() == "high"
    Precision(PrecisionSection(compute="float32"), CPU)
    assert torch.get_float32_matmul_precision() == "highest"


def test_sharded_model_is_not_autocast() -> None:
    precision = Precision(PrecisionSection(compute="bfloat16", keep_float32=["LayerNorm"]), CPU, sharded=True)
    model = precision.prepare(_model())
    assert not precision.autocasts
    assert precision.compute is torch.bfloat16
    assert len(precision.float32_modules(model)) == 5
    with precision.forward():
        assert model(_tokens()[:, :-1]).dtype == torch.float32


def test_device_without_bfloat16_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "An Old GPU")
    with pytest.raises(ValueError, match=r"An Old GPU cannot compute in bfloat16. Use precision.compute=float16"):
        Precision(PrecisionSection(compute="bfloat16"), torch.device("cuda"))

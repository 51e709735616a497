from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import surefoot
from surefoot.models.decoder import Decoder, DecoderConfig, next_token_loss
from surefoot.train.optimizers import make_optimizers, scaled_lr
from surefoot.train.recipe.schema import OptimizerSection


def _model(**fields: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**({"vocab": 32, "width": 16, "layers": 2, "heads": 2, "context": 16} | fields)))


def _tokens() -> Tensor:
    return torch.arange(32).reshape(2, 16) % 7


def _optimizer(model: nn.Module, **fields: Any) -> Optimizer:
    (optimizer,) = make_optimizers(model, OptimizerSection(**fields))
    return optimizer


def _decay_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


def test_weight_decay_applies_to_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm([2, 8]), nn.Linear(8, 2))  # a norm with a 2-D weight
    decay = _decay_by_name(model, _optimizer(model, weight_decay=0.1))
    assert decay == {"0.weight": 0.1, "0.bias": 0, "1.weight": 0, "1.bias": 0, "2.weight": 0.1, "2.bias": 0}


def test_tied_weights_are_in_one_group() -> None:
    model = _model(tied=True)
    params = [p for group in _optimizer(model).param_groups for p in group["params"]]
    assert len(params) == len({id(p) for p in params}) == len(list(model.parameters()))


def test_frozen_weights_are_not_optimized() -> None:
    model = _model()
    model.embed.weight.requires_grad_(False)
    params = {id(p) for group in _optimizer(model).param_groups for p in group["params"]}
    assert id(model.embed.weight) not in params


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", "SGD"), ("AdamW", "AdamW"), ("ADAM", "Adam"), ("lamb", "Lamb"), ("LARS", "LARS"), ("rmsprop", "RMSprop")],
)
def test_optimizer_names_are_case_insensitive(name: str, kind: str) -> None:
    assert type(_optimizer(_model(), name=name)).__name__ == kind


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_optimizers_are_fused_by_default(name: str) -> None:
    assert all(group["fused"] for group in _optimizer(_model(), name=name).param_groups)


def test_fusing_can_be_disabled() -> None:
    assert not any(group["fused"] for group in _optimizer(_model(), fused=False).param_groups)
    assert not any(group["fused"] for group in _optimizer(_model(), options={"foreach": True}).param_groups)


def test_fused_is_refused_where_not_supported() -> None:
    with pytest.raises(ValueError, match=r"optimizer.fused: RMSprop has no fused"):
        _optimizer(_model(), name="rmsprop", fused=True)


def test_recipe_values_reach_the_optimizer() -> None:
    group = _optimizer(_model(), lr=0.01, betas=(0.8, 0.9), eps=1e-5, options={"amsgrad": True}).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["amsgrad"]) == (0.01, (0.8, 0.9), 1e-5, True)
    assert _optimizer(_model(), name="sgd", options={"nesterov": True}).param_groups[0]["momentum"] == 0.9


def test_adam_has_no_weight_decay_by_default() -> None:
    assert {group["weight_decay"] for group in _optimizer(_model(), name="adam").param_groups} == {0}
    assert {group["weight_decay"] for group in _optimizer(_model(), name="adamw").param_groups} == {0.1, 0}


def test_muon_gets_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = _model(tied=False)
    muon, adamw = make_optimizers(model, OptimizerSection(name="muon"))
    assert set(_decay_by_name(model, muon)) == {
        name for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2
    }
    assert {"embed.weight", "head.weight", "norm.weight"} < set(_decay_by_name(model, adamw))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb", "lars", "muon"])
def test_every_optimizer_trains_under_guard_with_float32_moments(name: str, tmp_path: Path) -> None:
    model = _model()
    lr = {"sgd": 0.3, "lars": 30.0}.get(name, 0.01)
    optimizers = make_optimizers(model, OptimizerSection(name=name, lr=lr))
    losses = []
    with surefoot.attach(model, optimizers, run_dir=tmp_path / "run") as guard:
        for _ in range(12):
            loss = guard.watch(next_token_loss(model, _tokens()), _tokens())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    moments = [v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim]
    assert moments
    assert {moment.dtype for moment in moments} == {torch.float32}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adamx"}, r"no optimizer 'adamx'; did you mean ada"),
        ({"name": "qqqqqqq"}, r"there are adadelta, .* module:Class"),
        ({"name": "lbfgs"}, r"lbfgs is not supported: it needs the loss several times"),
        ({"name": "sparseadam"}, r"sparse gradients"),
        ({"name": "nowhere:Thing"}, r"optimizer.name: there is no module 'nowhere'"),
        ({"name": "math:pi"}, r"math:pi is a float, not a function or class"),
        ({"name": "builtins:dict"}, r"dict is not an optimizer"),
        ({"name": "sgd", "betas": (0.8, 0.9)}, r"optimizer.betas: SGD has no betas. Leave it out"),
        ({"name": "adamw", "momentum": 0.5}, r"optimizer.momentum: AdamW has no momentum"),
        ({"options": {"amsgrat": True}}, r"optimizer.options.amsgrat: AdamW has no such argument. It has amsgrad"),
        ({"betas": (1.5, 0.9)}, r"optimizer: AdamW refused its arguments: Invalid beta"),
    ],
)
def test_invalid_optimizer_is_refused_with_advice(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizers(_model(), OptimizerSection(**fields))


def test_adamw_defaults_are_ignored_for_sgd() -> None:
    assert type(_optimizer(_model(), name="sgd", betas=(0.9, 0.95), eps=1e-8)).__name__ == "SGD"


class NotOfTorch:
    """Not a torch.optim.Optimizer."""

    def __init__(self, params: object, lr: float) -> None:
        self.lr = lr


class Signs(torch.optim.SGD):
    """A user's optimizer with weight decay by default."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.3) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


@pytest.fixture
def module_name(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "optimizers_of_mine", sys.modules[__name__])
    return "optimizers_of_mine"


def test_custom_optimizer_by_module_and_class(module_name: str) -> None:
    optimizer = _optimizer(_model(), name=f"{module_name}:Signs", lr=0.5)
    assert isinstance(optimizer, Signs)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.3), (0.5, 0.0)]


def test_non_torch_optimizer_is_refused_with_the_guards_message(module_name: str, tmp_path: Path) -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"torch\.optim\.Optimizer") as by_guard:
        surefoot.attach(model, NotOfTorch([], 0.1), run_dir=tmp_path / "run")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"torch\.optim\.Optimizer") as by_make_optimizers:
        make_optimizers(model, OptimizerSection(name=f"{module_name}:NotOfTorch"))
    assert str(by_make_optimizers.value) == str(by_guard.value)


def test_missing_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ValueError, match=r"pip install 'surefoot\[train\]'"):
        make_optimizers(_model(), OptimizerSection(name="lamb"))


def test_half_precision_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embed.weight is bfloat16.* precision.compute"):
        make_optimizers(_model().bfloat16(), OptimizerSection())


def test_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="it has no parameters"):
        make_optimizers(nn.ReLU(), OptimizerSection())


@pytest.mark.parametrize(("rule", "lr"), [("no", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_lr_scales_with_the_effective_batch(rule: Any, lr: float) -> None:
    spec = OptimizerSection(name="sgd", lr=0.1, scale_with_batch=rule, base_batch=256)
    assert scaled_lr(spec, 1024) == pytest.approx(lr)


def test_lr_scaling_rule_needs_base_batch() -> None:
    with pytest.raises(ValueError, match="needs base_batch"):
        OptimizerSection(scale_with_batch="linear")

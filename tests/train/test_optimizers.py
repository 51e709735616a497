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


def _one(model: nn.Module, **fields: Any) -> Optimizer:
    (made,) = make_optimizers(model, OptimizerSection(**fields))
    return made


def _decay_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm([2, 8]), nn.Linear(8, 2))  # a norm with a matrix of weights
    decay = _decay_by_name(model, _one(model, weight_decay=0.1))
    assert decay == {"0.weight": 0.1, "0.bias": 0, "1.weight": 0, "1.bias": 0, "2.weight": 0.1, "2.bias": 0}


def test_tied_weights_are_trained_once() -> None:
    model = _model(tied=True)
    held = [p for group in _one(model).param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


def test_frozen_weights_are_left_alone() -> None:
    model = _model()
    model.embed.weight.requires_grad_(False)
    held = {id(p) for group in _one(model).param_groups for p in group["params"]}
    assert id(model.embed.weight) not in held


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", "SGD"), ("AdamW", "AdamW"), ("ADAM", "Adam"), ("lamb", "Lamb"), ("LARS", "LARS"), ("rmsprop", "RMSprop")],
)
def test_an_optimizer_is_found_by_its_name_in_any_case_of_letters(name: str, kind: str) -> None:
    assert type(_one(_model(), name=name)).__name__ == kind


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_what_can_be_fused_is_fused_so_that_a_refusal_stays_on_the_device(name: str) -> None:
    assert all(group["fused"] for group in _one(_model(), name=name).param_groups)


def test_fusing_can_be_left_out() -> None:
    assert not any(group["fused"] for group in _one(_model(), fused=False).param_groups)
    assert not any(group["fused"] for group in _one(_model(), options={"foreach": True}).param_groups)


def test_fusing_what_cannot_be_fused_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer.fused: RMSprop has no fused"):
        _one(_model(), name="rmsprop", fused=True)


def test_what_the_recipe_says_reaches_the_optimizer() -> None:
    group = _one(_model(), lr=0.01, betas=(0.8, 0.9), eps=1e-5, options={"amsgrad": True}).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["amsgrad"]) == (0.01, (0.8, 0.9), 1e-5, True)
    assert _one(_model(), name="sgd", options={"nesterov": True}).param_groups[0]["momentum"] == 0.9


def test_decay_that_is_not_decoupled_is_none_unless_asked_for() -> None:
    assert {group["weight_decay"] for group in _one(_model(), name="adam").param_groups} == {0}
    assert {group["weight_decay"] for group in _one(_model(), name="adamw").param_groups} == {0.1, 0}


def test_muon_takes_the_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    model = _model(tied=False)
    muon, adamw = make_optimizers(model, OptimizerSection(name="muon"))
    assert set(_decay_by_name(model, muon)) == {
        name for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2
    }
    assert {"embed.weight", "head.weight", "norm.weight"} < set(_decay_by_name(model, adamw))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb", "lars", "muon"])
def test_moments_are_float32_and_the_guard_watches_and_the_loss_falls(name: str, tmp_path: Path) -> None:
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
def test_what_cannot_be_made_is_told_with_the_way_out(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizers(_model(), OptimizerSection(**fields))


def test_a_recipe_of_adamw_that_is_given_sgd_may_keep_what_it_says_by_default() -> None:
    assert type(_one(_model(), name="sgd", betas=(0.9, 0.95), eps=1e-8)).__name__ == "SGD"


class NotOfTorch:
    """Steps, but is no optimizer of torch."""

    def __init__(self, params: object, lr: float) -> None:
        self.lr = lr


class Signs(torch.optim.SGD):
    """An optimizer of the user's own, which decays by default."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.3) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "optimizers_of_mine", sys.modules[__name__])
    return "optimizers_of_mine"


def test_an_optimizer_of_ones_own_is_named_by_module_and_class_and_decays_matrices_only(own: str) -> None:
    made = _one(_model(), name=f"{own}:Signs", lr=0.5)
    assert isinstance(made, Signs)
    assert [(group["lr"], group["weight_decay"]) for group in made.param_groups] == [(0.5, 0.3), (0.5, 0.0)]


def test_what_the_guard_would_refuse_is_refused_in_its_words(own: str, tmp_path: Path) -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"torch\.optim\.Optimizer") as by_guard:
        surefoot.attach(model, NotOfTorch([], 0.1), run_dir=tmp_path / "run")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"torch\.optim\.Optimizer") as by_us:
        make_optimizers(model, OptimizerSection(name=f"{own}:NotOfTorch"))
    assert str(by_us.value) == str(by_guard.value)


def test_a_missing_library_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ValueError, match=r"pip install 'surefoot\[train\]'"):
        make_optimizers(_model(), OptimizerSection(name="lamb"))


def test_weights_in_half_precision_are_refused_for_their_moments_would_be_too() -> None:
    with pytest.raises(ValueError, match=r"embed.weight is bfloat16.* precision.compute"):
        make_optimizers(_model().bfloat16(), OptimizerSection())


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="it has no parameters"):
        make_optimizers(nn.ReLU(), OptimizerSection())


@pytest.mark.parametrize(("rule", "rate"), [("no", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_grows_with_the_effective_batch_by_the_chosen_rule(rule: Any, rate: float) -> None:
    spec = OptimizerSection(name="sgd", lr=0.1, scale_with_batch=rule, base_batch=256)
    assert scaled_lr(spec, 1024) == pytest.approx(rate)


def test_a_rule_needs_the_batch_it_starts_from() -> None:
    with pytest.raises(ValueError, match="needs base_batch"):
        OptimizerSection(scale_with_batch="linear")

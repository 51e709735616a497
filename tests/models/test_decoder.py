from __future__ import annotations

import pytest
import torch

from surefoot.models import SIZES, Decoder, DecoderConfig, count_parameters, next_token_loss

SMALL = DecoderConfig(vocab=32, width=32, layers=2, heads=2, context=16)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SMALL)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(SMALL.vocab, (3, SMALL.context + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", 1.0), ("10m", 10.7), ("124m", 124), ("350m", 354), ("1.3b", 1311)]
)
def test_named_sizes_have_the_size_in_their_name(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = Decoder(SIZES[name])
    assert count_parameters(model) / 1e6 == pytest.approx(millions, rel=0.02)


def test_attention_is_causal(model: Decoder, tokens: torch.Tensor) -> None:
    changed = tokens[:, :-1].clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % SMALL.vocab
    before, after = model(tokens[:, :-1]), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_token_order_matters(model: Decoder) -> None:
    forwards = model(torch.tensor([[1, 2, 3]]))[0, -1]
    backwards = model(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(forwards, backwards)


def test_untrained_loss_is_that_of_uniform_predictions(model: Decoder, tokens: torch.Tensor) -> None:
    assert next_token_loss(model, tokens).item() == pytest.approx(torch.tensor(32.0).log().item(), rel=0.05)


def test_overfits_one_batch(model: Decoder, tokens: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(60):
        next_token_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert next_token_loss(model, tokens).item() < 0.1


def test_loss_is_float32_in_a_bfloat16_model(model: Decoder, tokens: torch.Tensor) -> None:
    expected = next_token_loss(model, tokens)
    loss = next_token_loss(model.bfloat16(), tokens)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)


def test_compiles_as_one_graph(model: Decoder, tokens: torch.Tensor) -> None:
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(next_token_loss(compiled, tokens), next_token_loss(model, tokens))


def test_tied_weights_are_one_tensor() -> None:
    assert count_parameters(Decoder(SMALL)) == count_parameters(_untied()) - SMALL.vocab * SMALL.width


def _untied() -> Decoder:
    return Decoder(DecoderConfig(vocab=32, width=32, layers=2, heads=2, context=16, tied=False))


def test_bad_shapes_are_explained(model: Decoder) -> None:
    with pytest.raises(ValueError, match="multiple of 2 x heads"):
        DecoderConfig(vocab=32, width=30, layers=1, heads=4, context=8)
    with pytest.raises(ValueError, match="got 17 tokens"):
        model(torch.zeros(1, 17, dtype=torch.int64))

"""Small models of the suite, beside those of the zoo."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.models import Transformer, causal_mask


class TokenDecoder(nn.Module):
    """A causal decoder with tokens in and logits out; `look_ahead` leaves the mask out."""

    def __init__(self, vocab: int = 32, length: int = 16, *, look_ahead: bool = False) -> None:
        super().__init__()
        self.core = Transformer(vocab, vocab, length)
        self.look_ahead = look_ahead

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        return self.core(tokens, torch.ones(n, n, dtype=torch.bool) if self.look_ahead else causal_mask(n))


class TorchDecoder(nn.Module):
    """A causal decoder of torch's own layers."""

    def __init__(self, vocab: int = 24, length: int = 14, *, batch_first: bool = True, masked: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.place = nn.Embedding(length, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=batch_first, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, vocab)
        self.masked, self.batch_first = masked, batch_first

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        n = x.shape[1] if self.batch_first else x.shape[0]
        mask = nn.Transformer.generate_square_subsequent_mask(n) if self.masked else None
        return self.head(self.layers(x, mask=mask))


class MaskedEncoder(nn.Module):
    """A bidirectional encoder for masked tokens, with a padding mask."""

    def __init__(self, vocab: int = 24, length: int = 14) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.place = nn.Embedding(length, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, vocab)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.layers(x, src_key_padding_mask=None if mask is None else ~mask))


class TextClassifier(nn.Module):
    """Tokens and their mask to a class; `uses_mask=False` averages over padding too."""

    def __init__(self, vocab: int = 40, classes: int = 3, *, uses_mask: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 24)
        self.hidden = nn.Linear(24, 24)
        self.head = nn.Linear(24, classes)
        self.uses_mask = uses_mask

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.hidden(self.embed(tokens)).relu()
        weights = mask[..., None].float() if self.uses_mask else torch.ones_like(x[..., :1])
        return self.head((x * weights).sum(1) / weights.sum(1))


class AutoEncoder(nn.Module):
    def __init__(self, width: int = 48, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.ReLU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class VariationalAutoEncoder(nn.Module):
    def __init__(self, width: int = 48, code: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.Tanh(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(code), mean, log_var


class Embedder(nn.Module):
    """A normalised embedding of an image, for contrastive losses."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return F.normalize(x, dim=-1) if self.norm else x


class Siamese(nn.Module):
    """SimSiam: an encoder and a predictor."""

    def __init__(self, *, stop_gradient: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))
        self.stop_gradient = stop_gradient

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        za, zb = self.encoder(a.flatten(1)), self.encoder(b.flatten(1))
        pa, pb = self.predictor(za), self.predictor(zb)
        return (pa, pb, za.detach(), zb.detach()) if self.stop_gradient else (pa, pb, za, zb)


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank part."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def with_lora(model: TokenDecoder) -> TokenDecoder:
    """Freeze a decoder and put low-rank parts beside its linear layers."""
    model.requires_grad_(False)
    for block in model.core.blocks:
        attention, mlp = block.get_submodule("attention"), block.get_submodule("mlp")
        setattr(attention, "qkv", LoraLinear(attention.get_submodule("qkv")))  # pyright: ignore[reportArgumentType]
        setattr(mlp, "0", LoraLinear(mlp.get_submodule("0")))  # pyright: ignore[reportArgumentType]
    return model


class TwoHeads(nn.Module):
    """One trunk, a class and a number."""

    def __init__(self, features: int = 12, classes: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.kind = nn.Linear(32, classes)
        self.size = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.kind(x), self.size(x).squeeze(-1)


class SequenceRegressor(nn.Module):
    """A recurrent network that predicts the next value; `both_ways` reads the sequence backwards, too."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM] = nn.GRU, *, both_ways: bool = False) -> None:
        super().__init__()
        self.cell = kind(1, 24, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(48 if both_ways else 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


class Segmenter(nn.Module):
    """A class for each pixel."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.up = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))

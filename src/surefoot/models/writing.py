"""Text that a language model writes, one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context: int,
    device: torch.device,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """The prompt and what the model adds to it, drawn with a generator of its own; temperature 0 takes the likeliest.

    The whole text is read again for every token, which is slow for long ones and right for every model.
    """
    chance = torch.Generator(device).manual_seed(seed)
    text = list(prompt)
    for _ in range(max_new_tokens):
        seen = torch.tensor([text[-context:]], dtype=torch.int64, device=device)
        logits = model(seen)[0, -1].float()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=chance)))
    return text

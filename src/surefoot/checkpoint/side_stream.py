"""Work on a device beside the training: on a stream of its own, so that neither waits for the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextlib.contextmanager
def aside(devices: Iterable[torch.device]) -> Iterator[None]:
    """What is launched in here, in a thread of its own, goes to these devices' side streams.

    A thread begins on the stream that the training uses, and whatever it launches there stands in the training's way.
    What is read in here must have been there before: wait for its events first.
    """
    with contextlib.ExitStack() as stack:
        for device in {d for d in devices if d.type == "cuda"}:
            if device not in _streams:
                _streams[device] = torch.cuda.Stream(device)
            stack.enter_context(torch.cuda.stream(_streams[device]))
        yield

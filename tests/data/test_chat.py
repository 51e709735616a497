"""Conversations: which tokens are targets, packing, and invalid lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata")
sys.path.insert(0, str(Path(__file__).parent))
from corpora import counted_targets, opened, write_chats, write_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_only_assistant_tokens_and_their_end_are_targets(tmp_path: Path) -> None:
    chat = {
        "messages": [turn("system", "be kind"), turn("user", "2+2?"), turn("assistant", "4"), turn("user", "sure?")]
    }
    path = write(tmp_path / "a.jsonl", chat, {"prompt": "hello", "response": "good day"})
    data = opened("chat", path=path, held_out=0, packing=False, shuffle=False, context=100, batch_size=1)
    first, second = data.train_loader
    assert bytes(counted_targets(first)) == b"4\0"
    assert bytes(first["inputs"][0].tolist()).startswith(b"<|system|>\nbe kind\n<|user|>\n2+2?\n<|assistant|>\n4\0<|us")
    assert bytes(counted_targets(second)) == b"good day\0"
    assert second["count"] == 9


def test_packed_conversations_share_samples_and_none_is_cut(tmp_path: Path) -> None:
    data = opened("chat", path=write_chats(tmp_path / "a.jsonl", 50), held_out=0, context=150, batch_size=100)
    (batch,) = data.train_loader
    replies = bytes(counted_targets(batch)).split(b"\0")[:-1]
    assert sorted(replies) == sorted((f"it is {i}" * (1 + i % 3)).encode() for i in range(50))
    assert batch["inputs"].shape == (data.samples, 150)
    assert data.samples < 25
    texts = bytes(batch["inputs"].flatten().tolist())
    assert all(texts.count(b"<|user|>\nsay %d\n<|assistant|>\nit is %d" % (i, i)) == 1 for i in range(50))


def test_with_segments_conversations_of_a_sample_are_numbered(tmp_path: Path) -> None:
    data = opened("chat", path=write_chats(tmp_path / "a.jsonl", 6), held_out=0, context=200, segments=True)
    (batch,) = data.train_loader
    row, parts = batch["inputs"][0], batch["segments"][0]
    assert parts.max() >= 1
    for part in range(int(parts.max()) + 1):
        assert bytes(row[parts == part].tolist()).startswith(b"<|user|>\nsay ")
    assert (row[parts == -1] == 0).all()


def test_invalid_conversations_are_named_with_the_reason(tmp_path: Path) -> None:
    good = {"messages": [turn("user", "a"), turn("assistant", "b")]}
    path = write(
        tmp_path / "a.jsonl",
        good,
        '{"messages": [',
        "",
        "[1]",
        {"text": "hello"},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [turn("user", "alone")]},
        good,
    )
    data = opened("chat", path=path, held_out=0, context=50, packing=False)
    assert data.samples == 2
    reasons = {sample.name.rsplit(" ", 1)[1]: sample.reason for sample in data.unreadable}
    assert list(reasons) == ["2", "4", "5", "6", "7", "8"]
    assert reasons["2"].startswith("not JSON: Expecting value")
    assert reasons["5"] == "expected messages, or prompt and response; got text"
    assert reasons["7"] == "message 1 needs a role and content, both text"
    assert reasons["8"] == "the assistant says nothing in it"


def test_a_conversation_whose_answer_is_beyond_the_context_is_skipped_with_a_note(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "x" * 100, "response": "too late"},
        {"prompt": "short", "response": "y" * 100},
        {"prompt": "short", "response": "fine"},
    )
    data = opened("chat", path=path, held_out=0, context=50, packing=False)
    assert data.samples == 2
    assert data.notes[0].startswith("1 of 3 texts are longer than data.context 50 and were truncated")
    assert data.notes[1].startswith("1 of 3 texts were skipped: their targets lie beyond data.context")


def test_the_limit_is_in_conversations_and_some_are_held_out(tmp_path: Path) -> None:
    data = opened("chat", path=write_chats(tmp_path / "a.jsonl"), limit=10, held_out=0.3, packing=False, context=80)
    assert data.eval_loader is not None
    assert data.samples + len(data.eval_loader.samples) == 10
    assert 1 <= len(data.eval_loader.samples) <= 4


@pytest.mark.parametrize("beside", [False, True])
def test_the_tokenizers_own_template_is_used(tmp_path: Path, beside: bool) -> None:
    pytest.importorskip("transformers")
    config = {"eos_token": "<|im_end|>"} | ({} if beside else {"chat_template": TEMPLATE})
    folder = write_tokenizer(tmp_path / "tokenizer", **config)
    if beside:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    chat = {
        "messages": [
            turn("user", "what is it"),
            turn("assistant", "so it is"),
            turn("user", "and?"),
            turn("assistant", "so"),
        ]
    }
    data = opened(
        "chat",
        path=write(tmp_path / "a.jsonl", chat),
        tokenizer=str(folder),
        held_out=0,
        context=60,
        packing=False,
    )
    batch = next(iter(data.train_loader))
    assert data.tokenizer is not None
    inner = data.tokenizer.inner  # pyright: ignore[reportAttributeAccessIssue]
    assert inner.decode(counted_targets(batch), skip_special_tokens=False) == "so it is<|im_end|>\nso<|im_end|>\n"
    assert inner.decode(batch["inputs"][0].tolist(), skip_special_tokens=False).startswith(
        "<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\nso it is<|im_end|>\n"
    )

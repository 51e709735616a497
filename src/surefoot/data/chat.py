"""Conversations, one JSON object per line, tokenized with a loss mask for the assistant's tokens.

A line has `messages`, a list of `{"role": ..., "content": ...}`, or `prompt` and `response`.

The tokenizer's own chat template is used if it has one (this needs transformers). Otherwise a conversation looks like
this, where END is the end-of-text token (a line feed for tokenizers without one)::

    <|system|>
    You are kind.
    <|user|>
    What is two and two?
    <|assistant|>
    Four.END

The targets are everything the assistant says and the END after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.data_error import DataError, ReadReport, UnreadableSample, check_unreadable
from surefoot.data.token_cache import Advance
from surefoot.data.token_store import TokenWriter
from surefoot.data.tokenizers import HuggingFaceTokenizer, Tokenizer, read_tokenizer_config

Message = dict[str, str]
Encoded = tuple[list[int], list[int]]
"""Tokens, and a loss mask with 1 for each target."""
ASSISTANT = "assistant"


def tokenize_chats(
    files: Sequence[Path],
    encode: Callable[[list[Message]], Encoded],
    limit: int | None,
    max_unreadable: int,
    writer: TokenWriter,
    advance: Advance,
) -> ReadReport:
    """Write all conversations, `limit` at most; raises DataError above `max_unreadable` invalid lines."""
    report = ReadReport()
    for file_number, path in enumerate(files):
        try:
            for number, line in _read_lines(path):
                if limit is not None and writer.num_texts >= limit:
                    return report
                advance(len(line))
                try:
                    tokens, loss_mask = encode(parse_messages(line))
                    if not any(loss_mask[1:]):
                        raise ValueError("the assistant says nothing in it")
                except ValueError as error:
                    report.unreadable.append(UnreadableSample(f"{path} line {number}", str(error)))
                    check_unreadable(report.unreadable, max_unreadable)
                    continue
                writer.add(np.array(tokens), np.array(loss_mask))
                writer.end_text((file_number, number))
        except OSError as error:
            report.unreadable.append(UnreadableSample(str(path), error.strerror or str(error)))
    return report


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def parse_messages(line: bytes) -> list[Message]:
    """Parse a line; raises a ValueError with the reason."""
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} of the line is invalid") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected an object with messages, got {type(content).__name__}")
    if "messages" in content:
        messages = content["messages"]
    elif "prompt" in content and "response" in content:
        messages = [
            {"role": "user", "content": content["prompt"]},
            {"role": ASSISTANT, "content": content["response"]},
        ]
    else:
        raise ValueError(f"expected messages, or prompt and response; got {', '.join(map(str, content)) or 'nothing'}")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list with at least one message")
    return [_check_message(number, message) for number, message in enumerate(messages, 1)]


def _check_message(number: int, message: Any) -> Message:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"message {number} needs a role and content, both text")
    return {"role": role, "content": content}


def make_chat_encoder(tokenizer: Tokenizer) -> tuple[str, Callable[[list[Message]], Encoded]]:
    """A function from conversations to tokens, with its template, which identifies it in the cache."""
    template = read_chat_template(tokenizer.folder) if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if template is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return "plain", lambda messages: _encode_plain(tokenizer, messages)
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise DataError(
            f"the tokenizer in {tokenizer.folder} has a chat template, which needs transformers: pip install "
            "transformers, or copy tokenizer.json to an empty folder to use the plain template"
        ) from None
    special = {
        key: value
        for key, value in read_tokenizer_config(tokenizer.folder).items()
        if key in ("bos_token", "eos_token")
    }
    config = read_tokenizer_config(tokenizer.folder)
    special = {key: config[key] for key in ("bos_token", "eos_token") if config.get(key)}
    special = {key: value["content"] if isinstance(value, dict) else value for key, value in special.items()}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner, chat_template=template, **special)

    def render(messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            return wrapped.apply_chat_template(  # pyright: ignore
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the tokenizer's chat template rejects it: {error}") from None

    return template, lambda messages: _encode_template(tokenizer, render, messages)


def read_chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_tokenizer_config(folder).get("chat_template")
    return template if isinstance(template, str) else None


def _encode_plain(tokenizer: Tokenizer, messages: list[Message]) -> Encoded:
    tokens: list[int] = []
    loss_mask: list[int] = []
    for message in messages:
        is_target = message["role"] == ASSISTANT
        head, body = tokenizer.encode(f"<|{message['role']}|>\n"), tokenizer.encode(message["content"])
        end = [tokenizer.end] if is_target and tokenizer.end is not None else tokenizer.encode("\n")
        tokens += head + body + end
        loss_mask += [0] * len(head) + [int(is_target)] * (len(body) + len(end))
    return tokens, loss_mask


def _encode_template(
    tokenizer: HuggingFaceTokenizer, render: Callable[[list[Message], bool], str], messages: list[Message]
) -> Encoded:
    """Find each assistant message as the difference between two renderings: the prompt before it, and with it."""
    text, spans = render(messages, False), []
    for i, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before, after = render(messages[:i], True), render(messages[: i + 1], False)
            if not after.startswith(before) or not text.startswith(after.rstrip()):
                raise ValueError(
                    "the tokenizer's chat template rewrites earlier messages, so the assistant's cannot be located"
                )
            spans.append((len(before), len(after)))
    encoding = tokenizer.inner.encode(text, add_special_tokens=False)
    loss_mask = [int(any(first <= start < last for first, last in spans)) for start, _ in encoding.offsets]
    return encoding.ids, loss_mask

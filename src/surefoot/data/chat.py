"""Conversations, a line of JSON each, turned into tokens of which only the assistant's are to be learned.

A line has `messages`, a list of `{"role": ..., "content": ...}`, or `prompt` and `response`.

The tokenizer's own chat template is used where it has one (and transformers is installed, which knows how). Without one
a conversation looks like this, where END is the token that ends a text (a line feed for tokenizers without)::

    <|system|>
    You are kind.
    <|user|>
    What is two and two?
    <|assistant|>
    Four.END

What counts is everything the assistant says and the END after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.problem import DataError, UnreadableSample, check_unreadable
from surefoot.data.progress import Advance
from surefoot.data.store import TokenWriter
from surefoot.data.texts import ReadReport
from surefoot.data.tokenizers import HuggingFaceTokenizer, Tokenizer, read_tokenizer_config

Message = dict[str, str]
Encoded = tuple[list[int], list[int]]
"""Tokens, and 1 for each that counts."""
ASSISTANT = "assistant"


def tokenize_chats(
    files: Sequence[Path],
    encode: Callable[[list[Message]], Encoded],
    limit: int | None,
    max_unreadable: int,
    writer: TokenWriter,
    advance: Advance,
) -> ReadReport:
    """All conversations, `limit` at most; lines that are none are named, up to `most`."""
    told = ReadReport()
    for path in files:
        try:
            for number, line in _lines(path):
                if limit is not None and writer.num_texts >= limit:
                    return told
                advance(len(line))
                try:
                    tokens, counted = encode(parse_messages(line))
                    if not any(counted[1:]):
                        raise ValueError("the assistant says nothing in it")
                except ValueError as error:
                    told.unreadable.append(UnreadableSample(f"{path} line {number}", str(error)))
                    check_unreadable(told.unreadable, max_unreadable)
                    continue
                writer.add(np.array(tokens), np.array(counted))
                writer.end_text()
        except OSError as error:
            told.unreadable.append(UnreadableSample(str(path), error.strerror or str(error)))
    return told


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def parse_messages(line: bytes) -> list[Message]:
    """The conversation in a line; raises a ValueError that says what is wrong with it."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8: byte {error.start} of the line makes no sense") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object with messages, got {type(found).__name__}")
    if "messages" in found:
        given = found["messages"]
    elif "prompt" in found and "response" in found:
        given = [{"role": "user", "content": found["prompt"]}, {"role": ASSISTANT, "content": found["response"]}]
    else:
        raise ValueError(f"expected messages, or prompt and response; it has {', '.join(map(str, found)) or 'nothing'}")
    if not isinstance(given, list) or not given:
        raise ValueError("messages is no list, or an empty one")
    return [_message(number, one) for number, one in enumerate(given, 1)]


def _message(number: int, one: Any) -> Message:
    role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"message {number} needs a role and content, both text")
    return {"role": role, "content": content}


def make_chat_encoder(tokenizer: Tokenizer) -> tuple[str, Callable[[list[Message]], Encoded]]:
    """What turns a conversation into tokens, with a name that is another one for every template."""
    template = read_chat_template(tokenizer.folder) if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if template is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return "plain", lambda messages: _plain(tokenizer, messages)
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise DataError(
            f"the tokenizer in {tokenizer.folder} has a chat template, which needs transformers: pip install "
            "transformers, or name the tokenizer.json in a folder of its own to use a plain template"
        ) from None
    special = {
        key: value
        for key, value in read_tokenizer_config(tokenizer.folder).items()
        if key in ("bos_token", "eos_token")
    }
    special = {key: value["content"] if isinstance(value, dict) else value for key, value in special.items() if value}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner, chat_template=template, **special)

    def render(messages: list[Message], begun: bool) -> str:
        try:
            return wrapped.apply_chat_template(messages, tokenize=False, add_generation_prompt=begun)  # pyright: ignore
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"the tokenizer's chat template refuses it: {error}") from None

    return template, lambda messages: _templated(tokenizer, render, messages)


def read_chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    found = file.read_text(encoding="utf-8") if file.is_file() else read_tokenizer_config(folder).get("chat_template")
    return found if isinstance(found, str) else None


def _plain(tokenizer: Tokenizer, messages: list[Message]) -> Encoded:
    tokens: list[int] = []
    counted: list[int] = []
    for message in messages:
        said = message["role"] == ASSISTANT
        head, body = tokenizer.encode(f"<|{message['role']}|>\n"), tokenizer.encode(message["content"])
        end = [tokenizer.end] if said and tokenizer.end is not None else tokenizer.encode("\n")
        tokens += head + body + end
        counted += [0] * len(head) + [int(said)] * (len(body) + len(end))
    return tokens, counted


def _templated(
    tokenizer: HuggingFaceTokenizer, render: Callable[[list[Message], bool], str], messages: list[Message]
) -> Encoded:
    """What the assistant says lies between the conversation up to there, asked to go on, and the one with it."""
    text, spans = render(messages, False), []
    for i, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before, after = render(messages[:i], True), render(messages[: i + 1], False)
            if not after.startswith(before) or not text.startswith(after.rstrip()):
                raise ValueError(
                    "the tokenizer's chat template changes what came before, so the words cannot be told apart"
                )
            spans.append((len(before), len(after)))
    found = tokenizer.inner.encode(text, add_special_tokens=False)
    counted = [int(any(first <= start < last for first, last in spans)) for start, _ in found.offsets]
    return found.ids, counted

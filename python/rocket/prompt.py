"""Where a prompt comes from, and whether it fits."""

import sys
from dataclasses import dataclass
from typing import Any

from rocket.errors import UsageError
from rocket.failures import input_error, plan_error
from rocket.inputs import decode_text, open_file, read_text
from rocket.options import parse_ids

BYTES_A_TOKEN = 64  # no text has tokens that are longer in the mean

_SOURCES_HINT = "give one of --prompt, --prompt-file, --prompt-ids, or pipe the text into standard input"


@dataclass(frozen=True)
class Prompt:
    """Text, or token ids."""

    text: str | None = None
    ids: list[int] | None = None


def _trimmed(text: str) -> str:
    # Editors and echo end a file with a newline, and some editors begin it with a mark, that are no part of
    # what was meant.
    return text.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff")


def read_prompt(text: str | None, file: str | None, ids: str | None, chat: bool = False) -> Prompt:
    given = [
        name
        for name, value in (("--prompt", text), ("--prompt-file", file), ("--prompt-ids", ids))
        if value is not None
    ]
    if len(given) > 1:
        raise UsageError(f"expected one prompt, found {len(given)}: {' and '.join(given)}", _SOURCES_HINT)
    if ids is not None:
        if chat:
            raise UsageError("--chat takes text, found --prompt-ids", "give the message with --prompt")
        if not ids.strip():
            raise UsageError("--prompt-ids: the prompt is empty", _SOURCES_HINT)
        return Prompt(ids=parse_ids("--prompt-ids", ids))
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(
                "--prompt: expected UTF-8 text, found other bytes", "check the terminal's locale"
            ) from None
        name = "--prompt"
    elif file is not None:
        name = f"--prompt-file {file}"
        with open_file(file, "--prompt-file") as opened:
            text = _trimmed(decode_text(read_text(opened, name), name))
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt", _SOURCES_HINT)
        name = "standard input"
        text = _trimmed(decode_text(read_text(sys.stdin.buffer, name), name))
    if not text:
        raise UsageError(f"{name}: the prompt is empty", _SOURCES_HINT)
    return Prompt(text=text)


def check_ids(ids: list[int], vocab: int) -> None:
    """Throws InputError for the first id outside the vocabulary."""
    for place, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise input_error(
                f"prompt: token id {token} at place {place + 1}: the fuel's vocabulary is 0 to {vocab - 1}",
                "check the ids, or give the prompt as text",
            )


def check_text(text: str, name: str, limit: int) -> None:
    """Throws before a text is tokenized that no context could hold: that would take minutes."""
    found, room = len(text.encode("utf-8", "surrogatepass")), BYTES_A_TOKEN * limit
    if found > room:
        raise plan_error(
            f"{name}: too long: {found} bytes, but the model holds {limit} tokens ({room} bytes at the most)",
            "shorten the prompt",
        )


def context_for(prompt: int, tokens: int, asked: int | None, config: dict[str, Any]) -> int:
    """The context that a run needs. Throws if it is more than was asked for or than the model has."""
    limit, needed = int(config["max_position_embeddings"]), prompt + tokens
    numbers = f"{prompt} tokens of the prompt + {tokens} to generate = {needed}"
    if asked is not None and asked > limit:
        raise input_error(
            f"--max-context: expected 1 to {limit}, the model's own, found {asked}",
            f"use --max-context {limit}",
        )
    if needed > limit:
        room = limit - prompt
        shorter = f"shorten the prompt to {max(limit - tokens, 1)} tokens or less"
        if tokens >= limit:
            shorter += f", with --tokens {limit - 1} or less"
        hint = f"use --tokens {room} or less" if room >= 0 else shorter
        raise plan_error(f"context: {numbers}, but the model holds {limit}", hint)
    if asked is not None and needed > asked:
        hint = f"use --max-context {needed}"  # it is within the model's limit, as seen above
        if asked >= prompt:
            hint += f", or --tokens {asked - prompt}"
        raise plan_error(f"context: {numbers}, but --max-context is {asked}", hint)
    return asked if asked is not None else needed

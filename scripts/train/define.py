"""How often the greedy continuation of a held-out `def` line is Python, as the engine decodes it."""

import ast
import hashlib
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .errors import TrainError
from .tokens import END, read_stream, read_tokenizer

_LINE = re.compile(r"^def \w+\(.*\)(?: -> .+)?:$", re.M)

if TYPE_CHECKING:
    from rocket import Engine


def held_out_definitions(data: Path, count: int) -> list[str]:
    """Lines at the left margin of held-out code that begin a function, in an order without structure."""
    stream, tokenizer = read_stream(data, "test", "code"), read_tokenizer(data / "tokenizer.json")
    end = tokenizer.token_to_id(END)
    lines = set()
    for document in np.split(stream, np.flatnonzero(stream == end) + 1):
        lines |= set(_LINE.findall(tokenizer.decode(document.tolist())))
    return sorted(lines, key=lambda line: hashlib.sha256(line.encode()).digest())[:count]


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def without_last_statement(source: str) -> str:
    """Without what begins at the last line that is not indented; all of it if that is the first line."""
    starts = [m.start() for m in re.finditer(r"^[^\s)\]}#]", source, re.M)]
    return source[: starts[-1]] if starts and starts[-1] else source


def measure(fuel: Path, data: Path, count: int, limit: int) -> dict[str, int]:
    """Continuations end with the end-of-text token or after `limit` tokens, often within a statement."""
    from rocket import Engine, Error

    try:
        with Engine(str(fuel), backend="cpu") as engine:
            return _measure(engine, fuel, data, count, limit)
    except Error as error:
        raise TrainError(str(error), error.hint or "see `rocket fuel show`") from None


def _measure(engine: "Engine", fuel: Path, data: Path, count: int, limit: int) -> dict[str, int]:
    out = {"limit": limit, "prompts": 0, "parse": 0, "parse_without_last": 0, "ended": 0, "ended_parse": 0}
    tokenizer = read_tokenizer(fuel / "tokenizer.json")
    end = tokenizer.token_to_id(END)
    prompts = held_out_definitions(data, count)
    if not prompts:
        raise TrainError(f"{data}: no `def` line in the held-out code", "make the corpus of more packages")
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        tokens = list(engine.generate(ids, tokens=limit))
        ended = bool(tokens) and tokens[-1] == end
        source = prompt + tokenizer.decode(tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # odd escapes, `is` with a literal
            whole = parses(source)
            rest = whole or (not ended and parses(without_last_statement(source)))
        out["prompts"] += 1
        out["parse"] += whole
        out["parse_without_last"] += rest
        out["ended"] += ended
        out["ended_parse"] += ended and whole
    return out

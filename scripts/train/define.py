"""How often the greedy continuation of a held-out `def` line is Python, as the engine decodes it."""

import ast
import codeop
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


def judge(source: str) -> str:
    """`whole` if it parses, `begun` if more text could make it parse, else `wrong`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # odd escapes, `is` with a literal
        try:
            ast.parse(source)
            return "whole"
        except (SyntaxError, ValueError):
            pass
        try:
            return "wrong" if codeop.compile_command(source, symbol="exec") else "begun"
        except (SyntaxError, ValueError, OverflowError):
            return "wrong"


def measure(fuel: Path, data: Path, count: int, limit: int) -> dict[str, object]:
    """Continuations end with the end-of-text token, or are cut after `limit` tokens. A prompt holds the end
    of its line or, as people type it, not."""
    from rocket import Engine, Error

    prompts = held_out_definitions(data, count)
    if not prompts:
        raise TrainError(f"{data}: no `def` line in the held-out code", "make the corpus of more packages")
    try:
        with Engine(str(fuel), backend="cpu") as engine:
            ends = {"with_line_end": "\n", "without_line_end": ""}
            found = {k: _measure(engine, fuel, [p + end for p in prompts], limit) for k, end in ends.items()}
            return {"limit": limit, **found}
    except Error as error:
        raise TrainError(str(error), error.hint or "see `rocket fuel show`") from None


def _measure(engine: "Engine", fuel: Path, prompts: list[str], limit: int) -> dict[str, int]:
    out = dict.fromkeys(("prompts", "whole", "begun", "wrong", "ended", "ended_whole"), 0)
    tokenizer = read_tokenizer(fuel / "tokenizer.json")
    end = tokenizer.token_to_id(END)
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        tokens = list(engine.generate(ids, tokens=limit))
        verdict = judge(prompt + tokenizer.decode(tokens))
        ended = tokens[-1] == end
        out["prompts"] += 1
        out[verdict] += 1
        out["ended"] += ended
        out["ended_whole"] += ended and verdict == "whole"
    return out

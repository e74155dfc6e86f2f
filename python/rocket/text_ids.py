"""Token ids of long texts, in memory that grows by four bytes a token."""

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from rocket.errors import UsageError
from rocket.inputs import decode_text, open_file
from rocket.options import parse_ids
from rocket.tokenizer import Tokenizer

PIECE_BYTES = 1 << 18
BOM = b"\xef\xbb\xbf"

Ids = npt.NDArray[np.int32]

# After a line feed, before a visible ASCII character: see Tokenizer.splits_at_lines.
LINE = re.compile(rb"\n(?=[!-~])")
# Between ids; what follows must be visible, so that the piece before it is known to be whole.
SEPARATOR = re.compile(rb"[\s,](?=[0-9])")


@dataclass(frozen=True)
class TextIds:
    """A text's tokens: those that the tokenizer puts before every text, then the text's own."""

    opening: list[int]
    ids: Ids
    bytes: int | None  # of the text; None where only ids were given
    first_bytes: int = 0  # of the text's first token


def pieces(file: BinaryIO, cut: re.Pattern[bytes] | None, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """A file in pieces of at least ``size`` bytes that end where ``cut`` matches; whole without ``cut``."""
    rest = bytearray()
    searched = size
    while data := file.read(size if cut else -1):
        rest += data
        while cut and (found := cut.search(rest, min(searched, len(rest)))):
            yield bytes(rest[: found.end()])
            del rest[: found.end()]
            searched = size
        searched = max(size, len(rest) - 1)  # a match may need the next byte
    if rest:
        yield bytes(rest)


def ids_of_text(path: str, tokenizer: Tokenizer, size: int = PIECE_BYTES) -> TextIds:
    """Tokenizes a file piece by piece where the tokenizer allows it, else as a whole."""
    name = f"--text {path}"
    ids, offset, first_bytes = array("i"), 0, 0
    with open_file(path, "--text") as file:
        mark = len(BOM) if file.peek(len(BOM)).startswith(BOM) else 0
        file.read(mark)
        for piece in pieces(file, LINE if tokenizer.splits_at_lines else None, size):
            text = decode_text(piece, name, mark + offset)
            if offset == 0:
                first_bytes = tokenizer.first_token_bytes(text[:4096])
            ids.extend(tokenizer.encode(text, add_special_tokens=False))
            offset += len(piece)
    if not ids:
        raise UsageError(f"{name}: the text is empty", "give a file with text")
    return TextIds(tokenizer.opening_ids, np.frombuffer(ids, dtype=np.int32), offset, first_bytes)


def ids_of_file(path: str, size: int = PIECE_BYTES) -> TextIds:
    """Ids separated by commas or white space; brackets around them, as in JSON, do not count."""
    name = f"--ids {path}"
    ids, offset = array("i"), 0
    with open_file(path, "--ids") as file:
        for piece in pieces(file, SEPARATOR, size):
            text = decode_text(piece, name, offset).strip().strip("[]").strip(", \t\r\n")
            if text:
                ids.extend(parse_ids(name, text))
            offset += len(piece)
    if not ids:
        raise UsageError(f"{name}: there are no ids in it", "separate whole numbers with commas or spaces")
    return TextIds([], np.frombuffer(ids, dtype=np.int32), None)

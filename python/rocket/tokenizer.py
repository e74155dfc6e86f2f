"""Text to token ids and back. Text comes out as it is generated, at complete characters only."""

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from rocket.failures import fuel_error, input_error, refuse_hollow
from rocket.inputs import read_regular

LFS_MARK = b"version https://git-lfs.github.com/spec/"


def _byte_of_character() -> dict[str, int]:
    # Byte-level BPE writes each byte as one printable character: printable Latin-1 as itself, the other bytes
    # in order from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


_BYTES = _byte_of_character()


def _token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. One with any other character stands for itself, as added tokens do."""
    try:
        return bytes(_BYTES[c] for c in token)
    except KeyError:
        return token.encode()


class ByteStream:
    """For byte-level tokenizers: each token is a few bytes, and UTF-8 says which characters are whole."""

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class TextStream:
    """For other tokenizers, through the text of the last few tokens.

    Tokens wait while their text ends in U+FFFD, which is how an unfinished character reads. A character has
    at most four bytes, so four waiting tokens that still end so are broken for good.
    """

    _MAX_WAITING = 4

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._context: list[int] = []  # already printed; some decoders need a neighbour to place spaces
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        self._waiting.append(token)
        text = self._new_text()
        if text.endswith("�") and len(self._waiting) < self._MAX_WAITING:
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._new_text()) if self._waiting else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip)
        return self._tokenizer.decode(self._context + self._waiting, self._skip)[len(before) :]

    def _take(self, text: str) -> str:
        if text:
            self._context = self._waiting
        self._waiting = []
        return text


class Tokenizer:
    """The tokenizer of a fuel, from its tokenizer.json."""

    def __init__(self, fuel: str | Path) -> None:
        self.file = Path(fuel) / "tokenizer.json"
        try:
            data = read_regular(self.file)
        except FileNotFoundError:
            refuse_hollow(self.file.parent)
            raise fuel_error(
                f"{self.file}: not found; text needs a tokenizer",
                "copy tokenizer.json into the fuel's folder, or give token ids: --prompt-ids 1,2,3",
            ) from None
        except OSError as error:
            raise fuel_error(
                f"{self.file}: {error.strerror}", "check the file and its permissions"
            ) from error
        if data.startswith(LFS_MARK):
            raise fuel_error(
                f"{self.file}: a Git LFS pointer of {len(data)} bytes, not the file itself",
                "run git lfs pull in the fuel's folder",
            )
        try:
            self._inner = tokenizers.Tokenizer.from_str(data.decode())
            self._inner.no_truncation()
            self._inner.no_padding()
            self._description: dict[str, Any] = json.loads(data)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise fuel_error(
                f"{self.file}: no valid tokenizer: {error}", "download the file again"
            ) from error

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._inner.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        return (self._description.get("decoder") or {}).get("type") == "ByteLevel"

    @cached_property
    def splits_at_lines(self) -> bool:
        """Whether a text that is cut after a line feed, before a visible ASCII character, keeps its tokens.

        True of the byte-level tokenizers whose pre-tokenizer never joins a line feed to what follows it, and
        which neither rewrite the text first nor have added tokens that reach over white space.
        """
        if not self.is_byte_level or self._description.get("normalizer") is not None:
            return False
        for token in self._description.get("added_tokens", []):
            if token.get("lstrip") or token.get("rstrip") or any(c.isspace() for c in token["content"]):
                return False
        return self._splits_probe()

    def _splits_probe(self) -> bool:
        # The pre-tokenizer is a regular expression of the fuel; ask it rather than read it.
        pre = self._inner.pre_tokenizer
        if pre is None:
            return False
        for before in ("a\n", "a \n", "1\n\n", ".\n", " \n", "\r\n", "\t\n", "é\n"):
            for after in "aZ0(._-'\"<|{":
                text = before + after + "b 1"
                if not any(span[0] == len(before) for _, span in pre.pre_tokenize_str(text)):
                    return False
                alone = [piece for piece, _ in pre.pre_tokenize_str(text[len(before) :])]
                whole = [piece for piece, span in pre.pre_tokenize_str(text) if span[0] >= len(before)]
                if alone != whole:
                    return False
        return True

    @cached_property
    def opening_ids(self) -> list[int]:
        """The special tokens that the tokenizer puts before every text."""
        probe = self._inner.encode("a", add_special_tokens=False).ids
        whole = self._inner.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(probe) + 1):
            if whole[start : start + len(probe)] == probe:
                return whole[:start]
        return []

    def first_token_bytes(self, text: str) -> int:
        """How many bytes of a text its first token stands for."""
        encoding = self._inner.encode(text, add_special_tokens=False)
        if not encoding.ids:
            return 0
        if self.is_byte_level:  # a token may be a part of a character
            return len(self.bytes_of(encoding.ids[0]))
        return len(text[: encoding.offsets[0][1]].encode())

    def id_of(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token of a byte-level tokenizer."""
        text = self._inner.id_to_token(token)
        return b"" if text is None else _token_bytes(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise input_error(
                f"the text is not valid UTF-8: {error.object[error.start]!r} at character {error.start}",
                "check the encoding of the text",
            ) from None
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if self.is_byte_level:
            stream = ByteStream(self, skip_special)
            return "".join(stream.push(i) for i in ids) + stream.finish()
        return self._inner.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> ByteStream | TextStream:
        kind = ByteStream if self.is_byte_level else TextStream
        return kind(self, skip_special)

    def stream_text(self, ids: Iterable[int], skip_special: bool = True) -> Iterable[str]:
        """Pieces of text as soon as their characters are complete."""
        stream = self.stream(skip_special)
        for token in ids:
            if piece := stream.push(token):
                yield piece
        if piece := stream.finish():
            yield piece

"""The tokenizer, and token streams for training and measuring."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import GROUPS, read_documents
from .errors import TrainError

END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
SPECIAL = [END, USER, ASSISTANT, "<|system|>", "<think>", "</think>"]
WORDS = (  # letters with one leading sign, single digits, punctuation with its line end, white space
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Shares of a training batch; what a group repeats is its size against its share.
SHARES = {"code": 0.50, "docs": 0.28, "prose": 0.10, "facts": 0.06, "functions": 0.06}


def train_tokenizer(documents: Iterator[str], vocab: int) -> Tokenizer:
    """A byte-level BPE: any text round-trips, and text without special tokens never produces one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TrainError(f"{path} is missing", "train_fuel.py tokens writes it")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise TrainError(
            f"{path} is not a tokenizer: {error}", "write it again: train_fuel.py tokens"
        ) from None


def check_vocabulary(folder: Path, vocab: int) -> None:
    """Refuses streams whose tokens a network of this vocabulary does not know."""
    size = read_tokenizer(folder / "tokenizer.json").get_vocab_size()
    if size > vocab:
        raise TrainError(
            f"{folder}: its tokenizer has {size} tokens, but the shape has {vocab}",
            "make the tokens for the same --shape",
        )


def read_stream(folder: Path, split: str, group: str) -> np.ndarray:
    """The ids of a group, an end-of-text token after every document."""
    path = folder / f"{split}-{group}.npy"
    if not path.is_file():
        raise TrainError(f"{path} is missing", "train_fuel.py tokens writes it")
    try:
        stream = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise TrainError(f"{path} cannot be read: {error}", "write it again: train_fuel.py tokens") from None
    if stream.ndim != 1 or stream.dtype != np.uint16:
        raise TrainError(
            f"{path}: expected uint16 [n], found {stream.dtype} {list(stream.shape)}",
            "write it again: train_fuel.py tokens",
        )
    return stream


def sample(folder: Path, characters: int) -> Iterator[str]:
    """Training documents for the tokenizer, by the groups' shares."""
    for group in GROUPS:
        budget = characters * SHARES[group]
        documents = read_documents(folder, "train", group)
        stride = max(1, int(sum(map(len, documents)) / max(1.0, budget)))
        for document in documents[::stride]:
            yield document.replace(USER, "").replace(ASSISTANT, "")


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """One stream of ids, an end-of-text token after every document."""
    end = tokenizer.token_to_id(END)
    parts = []
    for i in range(0, len(documents), 2000):
        for coded in tokenizer.encode_batch_fast(documents[i : i + 2000], add_special_tokens=False):
            parts.append(np.asarray([*coded.ids, end], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def write_streams(folder: Path, tokenizer: Tokenizer, out: Path) -> dict[str, dict[str, int]]:
    """`{train,test}-GROUP.npy`, `counts.json` (tokens and UTF-8 bytes), and the corpus' `sources.json`."""
    out.mkdir(parents=True, exist_ok=True)
    counts: dict[str, dict[str, int]] = {}
    for split in ("train", "test"):
        for group in GROUPS:
            documents = read_documents(folder, split, group)
            stream = encode(tokenizer, documents)
            np.save(out / f"{split}-{group}.npy", stream)
            counts[f"{split}-{group}"] = {
                "tokens": len(stream),
                "bytes": sum(len(d.encode()) for d in documents),
                "documents": len(documents),
            }
    (out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
    shutil.copyfile(folder / "sources.json", out / "sources.json")
    return counts


def line_ends(tokenizer: Tokenizer) -> torch.Tensor:
    """[vocab, 2]: for a token that ends in line ends, the tokens of what comes before and of the line ends;
    else zeros."""
    table = torch.zeros(tokenizer.get_vocab_size(), 2, dtype=torch.int64)
    for i in range(len(table)):
        text = tokenizer.decode([i], skip_special_tokens=True)
        before = text.rstrip("\r\n")
        if before and before.strip() and before != text and "\ufffd" not in text:
            parts = [
                tokenizer.encode(part, add_special_tokens=False).ids for part in (before, text[len(before) :])
            ]
            if all(len(ids) == 1 for ids in parts):
                table[i] = torch.tensor([parts[0][0], parts[1][0]])
    return table


class Batches:
    """Random windows of the groups' streams. Half of them start at a document, as prompts do.

    The tokenizer joins punctuation to the line end after it, but a prompt may stop between the two. `split`
    is the share of such tokens that is cut in two, so that the network knows that a line may end there.

    What is drawn depends on the seed, and not on the device.
    """

    def __init__(
        self, folder: Path, device: torch.device, seed: int, end: int = 0, split: float = 0.0
    ) -> None:
        self.split = split
        self.ends = line_ends(read_tokenizer(folder / "tokenizer.json")).to(device)
        streams = {g: torch.from_numpy(read_stream(folder, "train", g).astype(np.int16)) for g in GROUPS}
        self.starts = {
            g: torch.cat((torch.zeros(1, dtype=torch.int64), (s == end).nonzero().flatten() + 1))
            for g, s in streams.items()
        }
        self.streams = {g: s.to(device) for g, s in streams.items()}
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, rows: int, length: int) -> torch.Tensor:
        """[rows, length] token ids, int64."""
        wanted = {g: round(rows * share) for g, share in SHARES.items()}
        wanted["code"] += rows - sum(wanted.values())
        parts = []
        for group, count in wanted.items():
            if count == 0:
                continue
            stream, starts = self.streams[group], self.starts[group]
            if len(stream) <= length:
                raise TrainError(
                    f"the training text of {group!r} has {len(stream)} tokens, but one row needs {length}",
                    "make the corpus of more text",
                )
            at = torch.randint(len(stream) - length, (count,), generator=self.generator)
            begin = starts[torch.searchsorted(starts, at, right=True) - 1]
            snap = (torch.rand(count, generator=self.generator) < 0.5) & (at - begin < length)
            at = torch.where(snap, begin, at).to(self.device)
            parts.append(stream[at.unsqueeze(1) + torch.arange(length, device=self.device)])
        ids = torch.cat(parts).long()
        return self._split_line_ends(ids) if self.split else ids

    def _split_line_ends(self, ids: torch.Tensor) -> torch.Tensor:
        """The same shape; rows lose at their end what splitting adds."""
        pair = self.ends[ids]
        chance = torch.rand(ids.shape, generator=self.generator).to(self.device) < self.split
        cut = (pair[..., 0] > 0) & chance
        at = torch.cumsum(cut.long() + 1, 1) - cut.long() - 1  # where each token, or its first part, goes
        out = torch.zeros(ids.shape[0], 2 * ids.shape[1], dtype=torch.int64, device=self.device)
        out.scatter_(1, torch.where(cut, at + 1, at), torch.where(cut, pair[..., 1], ids))
        out.scatter_(1, at, torch.where(cut, pair[..., 0], ids))
        return out[:, : ids.shape[1]]


def held_out_windows(folder: Path, group: str, length: int, limit: int | None = None) -> torch.Tensor:
    """Successive windows of a group's held-out stream, [n, length]; each shares its last token with the next
    one's first."""
    stream = read_stream(folder, "test", group).astype(np.int64)
    count = max(0, len(stream) - 1) // (length - 1)
    if limit is not None:
        count = min(count, limit)
    at = (length - 1) * np.arange(count)[:, None] + np.arange(length)
    return torch.from_numpy(stream[at])

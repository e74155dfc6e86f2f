"""Writing safetensors files: how tensors fall into shards, their headers, and the index."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar


class Stored(Protocol):
    """What a header says of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Stored)


def split_by_name(tensors: Sequence[S], files: int) -> list[list[S]]:
    """By name, as public shards are, so that an expert's tensors lie scattered; shards of about one size.

    Throws ValueError if there are too few tensors.
    """
    total = sum(t.nbytes for t in tensors)
    shards: list[list[S]] = [[] for _ in range(files)]
    done = 0
    for t in sorted(tensors, key=lambda t: t.name):
        shards[min(done * files // total, files - 1)].append(t)
        done += t.nbytes
    if not all(shards):
        raise ValueError(f"{len(tensors)} tensors do not fill {files} files")
    return shards


def shard_names(files: int) -> list[str]:
    if files == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]


def header_of(tensors: Sequence[Stored], *, unaligned: bool = False) -> bytes:
    """A safetensors file up to its data. The data start at a multiple of 8, or off it if unaligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in tensors:
        end = offset + t.nbytes
        entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8) + (b" " if unaligned else b"")
    return len(text).to_bytes(8, "little") + text


def index_text(shards: Mapping[str, Sequence[Stored]]) -> str:
    """model.safetensors.index.json of shards by file name."""
    where = {t.name: file for file, tensors in shards.items() for t in tensors}
    total = sum(t.nbytes for tensors in shards.values() for t in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(index, indent=2) + "\n"

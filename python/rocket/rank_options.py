"""Command lines of the ranks of one run: rank 0's decides what all of them do, and no other rank's may say
something else."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rocket._core import Fabric

# Of these every rank has its own, or only rank 0 uses them, or the engines compare what comes of them.
OUTPUTS = ("out", "trace_out", "logits_out", "json", "as_json", "stats", "profile", "diagnostics", "quiet")
OF_EACH_RANK = ("fuel", "threads", "expert_slab")
OF_ENGINES = (
    *("backend", "prefill_precision", "kv_dtype", "prefill_chunk", "chunk", "boosters", "booster_wait"),
    *("expert_cache_gib", "expert_slots", "slot_map", "expert_bank", "split", "split_dense"),
)
_HINT = "give all ranks the same command line; outputs, --threads and folders may differ"
_SHOWN = 40  # characters


def _text(value: Any) -> str:
    if value is None or value is False:
        return "none"
    text = str(value)
    if value is True:
        return "it"
    if len(text) <= _SHOWN:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{text[:_SHOWN]}… ({len(text)} characters, sha256 {digest}…)"


@dataclass(frozen=True)
class RankOptions:
    """By name: values of all options that ranks must agree on, and which of them were given."""

    values: dict[str, str]
    given: tuple[str, ...]

    @classmethod
    def of(cls, context: typer.Context) -> "RankOptions":
        values, given = {}, []
        for parameter in context.command.params:
            name = parameter.name or ""
            if name in (*OUTPUTS, *OF_EACH_RANK, *OF_ENGINES) or name not in context.params:
                continue
            option = parameter.opts[0]
            values[option] = _text(context.params[name])
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                given.append(option)
        return cls(values, tuple(given))

    def packed(self, names: Collection[str]) -> bytes:
        return json.dumps({name: self.values[name] for name in names}).encode()


def _difference(mine: dict[str, str], others: list[bytes]) -> str:
    """The first of rank 0's options of which another rank was told something else. Empty: none."""
    for rank, packed in enumerate(others[1:], 1):
        for option, value in json.loads(packed).items():
            if mine.get(option) != value:
                return f"boosters: {option}: rank 0 has {mine.get(option)}, rank {rank} has {value}"
    return ""


def agree(fabric: "Fabric", options: RankOptions) -> None:
    """Throws DeviceError on all ranks if one of them was told other than rank 0. What a rank was not told it
    takes from rank 0."""
    from rocket.failures import device_error

    others = fabric.gather(options.packed(options.given), "its command line")
    if fabric.rank == 0:
        found = _difference(options.values, others)
        fabric.tell(found.encode())
    else:
        found = fabric.hear("whether command lines agree").decode()
    if found:
        raise device_error(found, _HINT)

"""Options of the cache of experts and of routing traces, for every command that loads a fuel."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocket.errors import UsageError
from rocket.failures import input_error
from rocket.options import check_choice, check_integer, check_output_name, check_output_place, check_real
from rocket.output import AtomicFile
from rocket.slot_map import read_slot_map

GIB = 1 << 30
MAX_CACHE_GIB = 1 << 20

GIB_HELP = (
    "Keep routed experts in a cache of X GiB, over the disk or, on a GPU, over the host's memory; "
    "all of them are cut to what they are."
)
SLOTS_HELP = "The same, for N experts of all layers together."
MAP_HELP = 'The same, with slots for each MoE layer: {"per_layer": {"3": 176, …}}.'
SLAB_FILE = "experts.slab"
SLAB_HELP = "Fill the cache of experts from this slab, which rocket fuel slab has written."
BANKS = ("auto", "yes", "exclusive", "no")
BANK_WORDS = "|".join(BANKS)
BANK_HELP = (
    "What a GPU has in the host's memory behind that cache: all experts (yes), those that no slot holds "
    "(exclusive), or none, as it reads what is missing from the slab (no); auto is the first that fits."
)
TRACE_HELP = "Record the experts of every token fed, as rocket trace reads them."


@dataclass(frozen=True)
class ExpertCache:
    """What is asked of the cache of experts: at most one of the first three."""

    gib: float | None = None
    slots: int | None = None
    slot_map: str | None = None
    slab: str | None = None
    bank: str = "auto"

    @property
    def slab_file(self) -> str | None:
        """What a run reads of the slab, as an input that no output may replace."""
        return None if not self.slab else str(Path(self.slab) / SLAB_FILE)

    def check(self) -> None:
        """Throws UsageError for what can be seen before a fuel is looked at."""
        named = {
            "--expert-cache-gib": self.gib,
            "--expert-slots": self.slots,
            "--slot-map": self.slot_map,
        }
        given = [option for option, value in named.items() if value is not None]
        if len(given) > 1:
            raise UsageError(
                f"expected at most one of {', '.join(named)}, found {' and '.join(given)}", "give one of them"
            )
        if self.slab is not None and not given:
            raise UsageError(
                f"--expert-slab: expected one of {', '.join(named)} beside it, found none",
                "give the size of the cache that the slab shall fill",
            )
        if self.slab == "":
            raise UsageError("--expert-slab: expected a folder, found nothing", "give the slab's folder")
        check_choice("--expert-bank", self.bank, BANKS)
        if self.bank != "auto" and not given:
            raise UsageError(
                f"--expert-bank: expected one of {', '.join(named)} beside it, found none",
                "give the size of the cache that the bank shall fill",
            )
        if self.gib is not None:
            check_real("--expert-cache-gib", self.gib, 0, MAX_CACHE_GIB, with_low=False)
        if self.slots is not None:
            check_integer("--expert-slots", self.slots, 1)

    def arguments(self) -> dict[str, Any]:
        """Of Engine."""
        return {
            "expert_cache_gib": self.gib or 0.0,
            "expert_slots": self.slots or 0,
            "slot_map": self.slot_map,
            "expert_slab": self.slab,
            "expert_bank": self.bank,
        }


def layer_slots(slot_map: str | Path | Mapping[Any, int], moe_layers: Sequence[int]) -> list[int]:
    """Slots of each MoE layer, from a file or an object, layer number -> slots."""
    if isinstance(slot_map, Mapping):
        given = {str(layer): slots for layer, slots in slot_map.items()}
        wanted = [str(layer) for layer in moe_layers]
        if sorted(given) != sorted(wanted):
            raise input_error(
                f"slot_map: expected the MoE layers {', '.join(wanted)}, found {', '.join(given)}",
                "give each MoE layer its slots",
            )
        return [given[layer] for layer in wanted]
    return list(read_slot_map(str(slot_map), moe_layers))


def check_trace_name(trace_out: str | None) -> None:
    if trace_out is not None:
        check_output_name("--trace-out", trace_out)


def check_trace_place(trace_out: str, fuel: Path, inputs: Mapping[str, str | int | None]) -> None:
    """Throws before the fuel is loaded if the trace cannot be written there, or would damage something.

    A trace is written where it shall be, row by row, so that it can be read while it grows.
    """
    check_output_place("--trace-out", trace_out, fuel, inputs)
    for name, given in inputs.items():  # that need not exist yet
        if isinstance(given, str) and os.path.realpath(given) == os.path.realpath(trace_out):
            raise UsageError(
                f"--trace-out: {trace_out} is the file of {name}, and would be lost", "give another file"
            )
    pipe = Path(trace_out).is_fifo()  # opening one waits for a reader
    if not pipe:
        probe = AtomicFile(trace_out, "--trace-out")
        pipe = not probe.file.seekable()
        probe.discard()
    if pipe:
        raise UsageError(f"--trace-out: {trace_out} is a pipe, and can be read once only", "give a file")

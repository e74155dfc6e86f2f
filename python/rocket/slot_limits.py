"""The smallest and the largest cache of experts that makes sense, for every command that is asked for one.

The smallest holds one token's experts of one layer, or of each layer where each has slots of its own. The
largest holds all; what is beyond is cut, and said. The engine has the same rule (src/experts/budget.h).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rocket.errors import UsageError
from rocket.report import format_bytes

_GIB = 1 << 30
_WHY = "(the experts of one token in a layer)"


@dataclass(frozen=True)
class SlotLimits:
    """``owned``: experts that each MoE layer may be asked for."""

    owned: tuple[int, ...]
    topk: int

    @property
    def of_layer(self) -> tuple[int, ...]:
        """The fewest slots of each layer, where each has its own."""
        return tuple(min(self.topk, experts) for experts in self.owned)

    @property
    def fewest(self) -> int:
        """Of all layers together."""
        return max(self.of_layer, default=0)

    @property
    def most(self) -> int:
        return sum(self.owned)

    def total(self, option: str, asked: int) -> int:
        """Slots for all layers together, cut to all experts. Throws UsageError."""
        few = self.fewest
        if asked < few:
            raise UsageError(
                f"{option}: expected at least {few} slots {_WHY}, found {asked}", f"raise {option} to {few}"
            )
        return min(asked, self.most)

    def shared_out(self, option: str, asked: int) -> int:
        """The same where every layer gets a share."""
        few = sum(self.of_layer)
        if asked < few:
            raise UsageError(
                f"{option}: expected at least {few} slots, {self.fewest} for each of {len(self.owned)} "
                f"layers {_WHY}, found {asked}",
                f"raise {option} to {few}",
            )
        return min(asked, self.most)

    def in_bytes(self, option: str, asked: int, slot_bytes: int) -> int:
        """Slots of a cache of so many bytes."""
        few, hold = self.fewest, asked // slot_bytes
        if hold < few:
            needed = few * slot_bytes
            raise UsageError(
                f"{option}: expected at least {format_bytes(needed)}, {few} slots {_WHY}, "
                f"found {format_bytes(asked)}, which hold {hold}",
                f"raise {option} to {ceil(1_000_000 * needed / _GIB) / 1_000_000:.6f}",
            )
        return min(hold, self.most)

    def of_map(self, where: str, asked: Sequence[int], layers: Sequence[int]) -> tuple[int, ...]:
        """Slots of each layer, which a file has; ``where`` names it."""
        for layer, few, count in zip(layers, self.of_layer, asked, strict=True):
            if count < few:
                raise UsageError(
                    f"{where}: layer {layer}: expected at least {few} slots {_WHY}, found {count}",
                    f"give layer {layer} {few} slots or more",
                )
        return tuple(map(min, asked, self.owned))


def cut_from(asked: int, given: int) -> str:
    """What is said of a cut; empty without one."""
    return f"; cut from the {asked:,} that were asked for" if given < asked else ""

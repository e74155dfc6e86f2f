"""Routing traces: which experts each decoded token took in each MoE layer.

JSON lines, one a decoded token: ``{"tok": n, "layers": [[expert ids of the first MoE layer], …]}``.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rocket.checked import open_named, parse_json, shown
from rocket.errors import UsageError

MAX_LINE = 16 << 20
_HINT = 'a trace has a line a token: {"tok": n, "layers": [[ids of the first MoE layer], …]}'


@dataclass(frozen=True)
class Routing:
    """A trace that fits a model."""

    ids: npt.NDArray[np.int32]  # [tokens, MoE layers, top-k]
    experts: int
    name: str = "trace"

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def layers(self) -> int:
        return self.ids.shape[1]

    def halves(self) -> tuple["Routing", "Routing"]:
        """The first half, to fit to, and the rest, to judge by."""
        cut = self.tokens // 2
        return (
            Routing(self.ids[:cut], self.experts, self.name),
            Routing(self.ids[cut:], self.experts, self.name),
        )

    def loads(self) -> npt.NDArray[np.int64]:
        """How often each expert was taken, [MoE layers, experts]."""
        counts = np.zeros((self.layers, self.experts), np.int64)
        for layer in range(self.layers):
            counts[layer] = np.bincount(self.ids[:, layer].ravel(), minlength=self.experts)
        return counts

    def steps(self, streams: int) -> Iterator[npt.NDArray[np.int32]]:
        """Steps of one row a stream, each [streams, MoE layers, top-k]: every stream decodes a stretch of its
        own. What does not fill a last step is left out."""
        length = self.tokens // streams
        stretches = self.ids[: length * streams].reshape(streams, length, *self.ids.shape[1:])
        yield from stretches.swapaxes(0, 1)


def read_routing(path: str | Path, layers: int, experts: int, topk: int, option: str = "--trace") -> Routing:
    """Reads a trace of a model with so many MoE layers, experts in each, and experts a token."""
    model = layers, experts, topk
    rows: list[npt.NDArray[np.int32]] = []
    with open_named(str(path), option) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if not line.strip():
                continue
            where = f"{option} {path}, line {number}"
            if len(line) > MAX_LINE:
                raise UsageError(f"{where}: expected at most {MAX_LINE:,} bytes, found more", _HINT)
            value = parse_json(line, where)
            fits = b"true" not in line and b"false" not in line and _fits(value, model)
            rows.append(np.array(value["layers"] if fits else _row(value, where, model), np.int32))
    if not rows:
        raise UsageError(f"{option} {path}: expected a line a token, found none", _HINT)
    return Routing(np.stack(rows).reshape(len(rows), layers, topk), experts, Path(path).name)


def _fits(value: Any, model: tuple[int, int, int]) -> bool:
    """Quickly, whether a line is right; numpy takes booleans among numbers for numbers."""
    layers, experts, topk = model
    if not isinstance(value, dict) or sorted(value) != ["layers", "tok"]:
        return False
    if not isinstance(value["tok"], int) or value["tok"] < 0:
        return False
    try:
        ids = np.array(value["layers"])
    except ValueError:  # ragged
        return False
    if ids.dtype.kind != "i" or ids.shape != (layers, topk):
        return False
    ids.sort(axis=1)
    return bool((ids >= 0).all() and (ids < experts).all() and (np.diff(ids, axis=1) > 0).all())


def _row(value: Any, where: str, model: tuple[int, int, int]) -> list[list[int]]:
    """A line's layers, looked at number by number. Throws UsageError about the first that is wrong."""
    layers, experts, topk = model
    fits = f"of a model with {layers} MoE layers of {experts} experts, top-{topk}"

    def fail(field: str, expected: str, found: Any) -> None:
        text = found if isinstance(found, str) else shown(found)
        raise UsageError(f"{where}: {field}: expected {expected}, found {text}", f"give a trace {fits}")

    if not isinstance(value, dict):
        fail("the line", "an object with tok and layers", value)
    for field in value:
        if field not in ("tok", "layers"):
            fail(field, "one of tok, layers", "an unknown field")
    tok = value.get("tok")
    if isinstance(tok, bool) or not isinstance(tok, int) or tok < 0:
        fail("tok", "a whole number of at least 0", tok)
    given = value.get("layers")
    if not isinstance(given, list):
        fail("layers", f"{layers} lists, one a MoE layer", given)
    if len(given) != layers:
        fail("layers", f"{layers} lists, one a MoE layer", f"{len(given)}")
    for index, ids in enumerate(given):
        if not isinstance(ids, list) or len(ids) != topk:
            fail(f"layers[{index}]", f"{topk} expert ids", ids)
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < experts:
                fail(f"layers[{index}]", f"expert ids from 0 to {experts - 1}", i)
        if len(set(ids)) != topk:
            fail(f"layers[{index}]", "distinct expert ids", ids)
    return given


@dataclass(frozen=True)
class Replay:
    """What least-recently-used caches, one a layer and booster, make of a trace. A step counts each distinct
    expert once. ``slowest_…`` counts, layer by layer, the booster with most to do: the others wait for it."""

    steps: int
    hits: int
    misses: int
    slowest_lookups: int
    slowest_misses: int

    @property
    def lookups(self) -> int:
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups if self.lookups else 1.0


class LruLayer:
    """One layer's slots. A step looks all its experts up first; none of them makes way for another of them,
    so those that find no room are used and not kept."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def step(self, ids: Sequence[int]) -> int:
        """Takes a step's distinct experts; gives the number of hits."""
        absent = [i for i in ids if i not in self.held]
        hits = len(ids) - len(absent)
        for i in ids:
            if i in self.held:
                self.held.move_to_end(i)
        for i in absent:
            if len(self.held) < self.slots:
                self.held[i] = None
            elif next(iter(self.held), None) not in (None, *ids):
                self.held.popitem(last=False)
                self.held[i] = None
        return hits


def replay(
    routing: Routing,
    slots: Sequence[Sequence[int]],
    streams: int = 1,
    owners: Sequence[Sequence[int]] | None = None,
) -> Replay:
    """Decodes a trace through empty caches.

    ``slots``: of each layer, booster by booster. ``owners``: the booster of each expert, layer by layer;
    None: there is one booster.
    """
    caches = [[LruLayer(count) for count in counts] for counts in slots]
    steps = hits = lookups = slowest_lookups = slowest_misses = 0
    for step in routing.steps(streams):
        steps += 1
        for layer, rows in enumerate(step.swapaxes(0, 1)):
            shares: list[list[int]] = [[] for _ in caches]
            for i in dict.fromkeys(rows.ravel().tolist()):
                shares[owners[layer][i] if owners else 0].append(i)
            found = [cache[layer].step(share) for cache, share in zip(caches, shares, strict=True)]
            hits += sum(found)
            lookups += sum(map(len, shares))
            slowest_lookups += max(map(len, shares))
            slowest_misses += max(len(share) - n for share, n in zip(shares, found, strict=True))
    return Replay(steps, hits, lookups - hits, slowest_lookups, slowest_misses)

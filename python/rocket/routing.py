"""Routing traces in memory: which experts each token took in each MoE layer, and what caches make of that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Routing:
    """A trace that fits a model."""

    ids: Ids  # [tokens, MoE layers, top-k]
    experts: int
    name: str = "trace"
    layer_ids: tuple[int, ...] | None = None  # the model's numbers of the layers, where the trace names them
    step_ends: Numbers | None = None  # the token after each step's last; None: a step a token
    stream: Numbers | None = None  # of each token; None: one
    fingerprint: int = 0  # of the fuel; 0: unknown
    torn_bytes: int = 0  # of a last row that is not whole

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def layers(self) -> int:
        return self.ids.shape[1]

    @property
    def topk(self) -> int:
        return self.ids.shape[2]

    @property
    def layer_names(self) -> tuple[int, ...]:
        return self.layer_ids if self.layer_ids is not None else tuple(range(self.layers))

    @property
    def ends(self) -> Numbers:
        """The token after each step's last."""
        return self.step_ends if self.step_ends is not None else np.arange(1, self.tokens + 1)

    def halves(self) -> tuple["Routing", "Routing"]:
        """The first half, to fit to, and the rest, to judge by."""
        cut = self.tokens // 2
        return (
            Routing(self.ids[:cut], self.experts, self.name),
            Routing(self.ids[cut:], self.experts, self.name),
        )

    def loads(self) -> Numbers:
        """How often each expert was taken, [MoE layers, experts]."""
        counts = np.zeros((self.layers, self.experts), np.int64)
        for layer in range(self.layers):
            counts[layer] = np.bincount(self.ids[:, layer].ravel(), minlength=self.experts)
        return counts

    def steps(self, streams: int) -> Iterator[Ids]:
        """Steps of one row a stream, each [streams, MoE layers, top-k]: every stream decodes a stretch of its
        own. What does not fill a last step is left out."""
        length = self.tokens // streams
        stretches = self.ids[: length * streams].reshape(streams, length, *self.ids.shape[1:])
        yield from stretches.swapaxes(0, 1)


@dataclass(frozen=True)
class CacheRun:
    """What a cache of experts made of each step and layer. Counts are of distinct experts of a step."""

    lookups: Ids  # [steps, MoE layers]
    misses: Ids  # [steps, MoE layers]
    evictions: Numbers  # [MoE layers]
    slots: int  # delivered

    @property
    def hit_rate(self) -> float:
        lookups = int(self.lookups.sum())
        return 1 - int(self.misses.sum()) / lookups if lookups else 1.0

    def since(self, step: int) -> "CacheRun":
        """The same without the first steps. Evictions stay those of all."""
        return CacheRun(self.lookups[step:], self.misses[step:], self.evictions, self.slots)


def run_cache(
    ids: Ids,
    ends: Numbers,
    experts: int,
    *,
    slots: int = 0,
    layer_slots: Sequence[int] = (),
    owned: Sequence[int] = (),
    policy: str = "lru",
) -> CacheRun:
    """Decodes tokens ``ids`` [tokens, MoE layers, top-k] through an empty cache: the engine's own.

    ``slots``: for all layers together, in one order of eviction; or ``layer_slots``: a budget and an order
    for each layer. An id of -1 is nobody's. ``owned``: how many experts of each layer can be asked for.
    Throws PlanError if there are too few slots for one token.
    """
    from rocket._core import replay_routing

    lookups, misses, evictions, delivered = replay_routing(
        np.ascontiguousarray(ids, np.int32),
        np.ascontiguousarray(ends, np.int64),
        experts=experts,
        topk=ids.shape[2],
        slots=slots,
        layer_slots=list(layer_slots),
        owned=list(owned),
        policy=policy,
    )
    return CacheRun(lookups, misses, np.array(evictions, np.int64), delivered)


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


def replay(
    routing: Routing,
    slots: Sequence[Sequence[int]],
    streams: int = 1,
    owners: Sequence[Sequence[int]] | None = None,
) -> Replay:
    """Decodes a trace through empty caches.

    ``slots``: of each layer, booster by booster; in one order where a layer's hold less than a token's
    experts. ``owners: the booster of each expert, layer by layer;
    None: there is one booster.
    """
    steps = routing.tokens // streams
    if not steps or not routing.layers:
        return Replay(steps, 0, 0, 0, 0)
    rows = np.concatenate(list(routing.steps(streams)))
    ends = np.arange(1, steps + 1) * streams
    layer = np.arange(routing.layers)[:, None]
    of = np.zeros((routing.layers, routing.experts), np.int32) if owners is None else np.asarray(owners)
    runs = []
    for booster, budgets in enumerate(slots):
        owned = (of == booster).sum(axis=1)
        enough = all(has >= min(routing.topk, experts) for has, experts in zip(budgets, owned, strict=True))
        runs.append(
            run_cache(
                np.where(of[layer, rows] == booster, rows, -1),
                ends,
                routing.experts,
                slots=0 if enough else sum(budgets),
                layer_slots=budgets if enough else (),
                owned=owned.tolist(),
            )
        )
    lookups, misses = np.array([run.lookups for run in runs]), np.array([run.misses for run in runs])
    return Replay(
        steps=steps,
        hits=int(lookups.sum() - misses.sum()),
        misses=int(misses.sum()),
        slowest_lookups=int(lookups.max(axis=0).sum()),
        slowest_misses=int(misses.max(axis=0).sum()),
    )

"""Which booster owns which routed expert.

In every layer each booster owns the same number of experts, within one; where that does not come out even,
the boosters with one more change from layer to layer. Same fuel, trace and options: same split.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb

import numpy as np
import numpy.typing as npt

from rocket.errors import UsageError
from rocket.routing import Routing

WAYS = ("id", "load", "coactivation")
Owners = npt.NDArray[np.int32]  # [MoE layers, experts]


def sizes(experts: int, boosters: int, layer: int) -> list[int]:
    """How many experts each booster owns in the layer-th MoE layer."""
    each, more = divmod(experts, boosters)
    return [each + ((b - layer * more) % boosters < more) for b in range(boosters)]


def make_split(experts: int, layers: int, boosters: int, by: str, routing: Routing | None = None) -> Owners:
    """The owner of each expert. ``load`` and ``coactivation`` are fitted to the routing that is given."""
    if by not in WAYS:
        raise UsageError(f"--by: expected one of {', '.join(WAYS)}, found {by!r}", "for instance --by id")
    if not 1 <= boosters <= experts:
        raise UsageError(
            f"--boosters: expected 1 to {experts} (the experts of a layer), found {boosters}",
            "a booster without an expert would have nothing to do",
        )
    if by != "id" and routing is None:
        raise UsageError(
            f"--by {by}: expected --trace as well, found none", "give a routing trace, or use --by id"
        )
    way: Callable[[int, list[int]], Sequence[int]]
    if by == "id" or routing is None:
        way = _by_id
    elif by == "load":
        way = partial(_layer_by_load, routing.loads())
    else:
        way = partial(_layer_by_coactivation, routing)
    owners = [way(layer, sizes(experts, boosters, layer)) for layer in range(layers)]
    return np.array(owners, np.int32).reshape(layers, experts)


def _by_id(layer: int, room: list[int]) -> Sequence[int]:
    """Runs of neighbouring ids."""
    return np.repeat(np.arange(len(room)), room).tolist()


def _layer_by_load(loads: npt.NDArray[np.int64], layer: int, room: list[int]) -> Sequence[int]:
    return _by_load(loads[layer], room)


def _layer_by_coactivation(routing: Routing, layer: int, room: list[int]) -> Sequence[int]:
    return _by_coactivation(*_affinity(routing, layer), room)


def _by_load(load: npt.NDArray[np.int64], room: list[int]) -> Sequence[int]:
    """The busiest expert first, each to the booster that has least to do so far and has room; then exchanges
    that take from the busiest booster, for as long as one helps."""
    owner = np.zeros(len(load), np.int64)
    busy, left = np.zeros(len(room), np.int64), list(room)
    for expert in np.argsort(-load, kind="stable").tolist():
        b = min((b for b in range(len(room)) if left[b]), key=lambda b: (busy[b], b))
        owner[expert] = b
        busy[b] += load[expert]
        left[b] -= 1
    while _relieve(load, owner, busy):
        pass
    return owner.tolist()


def _relieve(load: npt.NDArray[np.int64], owner: npt.NDArray[np.int64], busy: npt.NDArray[np.int64]) -> bool:
    """Exchanges an expert of the busiest booster for a lighter one elsewhere, if that leaves both with less
    to do than the busiest had. The sum of squares falls each time, so this ends."""
    top = int(np.argmax(busy))
    here, there = np.flatnonzero(owner == top), np.flatnonzero(owner != top)
    if not len(there):
        return False
    moved = load[here][:, None] - load[there][None, :]
    after = np.maximum(busy[top] - moved, busy[owner[there]][None, :] + moved)
    one, other = np.unravel_index(int(np.argmin(after)), after.shape)
    if after[one, other] >= busy[top]:
        return False
    give, take = here[one], there[other]
    busy[top] -= moved[one, other]
    busy[owner[take]] += moved[one, other]
    owner[give], owner[take] = owner[take], top
    return True


def _affinity(routing: Routing, layer: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often each expert was taken, and for every two how much more often one token took both than chance
    would have it (times the number of tokens, to stay whole)."""
    taken = np.zeros((routing.tokens, routing.experts), np.float64)
    np.put_along_axis(taken, routing.ids[:, layer].astype(np.int64), 1, axis=1)
    together = np.rint(taken.T @ taken).astype(np.int64)
    load = together.diagonal().copy()
    affinity = routing.tokens * together - np.outer(load, load)
    np.fill_diagonal(affinity, 0)
    return load, affinity


def _by_coactivation(
    load: npt.NDArray[np.int64], affinity: npt.NDArray[np.int64], room: list[int]
) -> Sequence[int]:
    """Experts that are taken together go to one booster, so that a token has to visit fewer.

    Groups grow one by one from the busiest expert left; then two experts change places for as long as that
    raises the affinity within boosters.
    """
    owner = np.full(len(load), -1, np.int64)
    for b, size in enumerate(room):
        near = np.zeros(len(load), np.int64)
        for _ in range(size):
            free = np.flatnonzero(owner < 0)
            expert = free[np.lexsort((free, -load[free], -near[free]))[0]]
            owner[expert] = b
            near += affinity[expert]
    _swap(affinity, owner, len(room))
    return owner.tolist()


def _swap(affinity: npt.NDArray[np.int64], owner: npt.NDArray[np.int64], boosters: int) -> None:
    """Best exchange first. Each raises a whole number that is bounded, so this ends."""
    place = np.arange(len(owner))
    near = np.stack(
        [affinity[:, owner == b].sum(axis=1) for b in range(boosters)], axis=1
    )  # [expert, booster]
    while True:
        gain = near[:, owner] - near[place, owner][:, None]
        gain = gain + gain.T - 2 * affinity
        gain[owner[:, None] == owner[None, :]] = 0
        one, other = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[one, other] <= 0:
            return
        here, there = owner[one], owner[other]
        change = affinity[:, other] - affinity[:, one]
        near[:, here] += change
        near[:, there] -= change
        owner[one], owner[other] = there, here


# --- what to expect of a split ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Averages over tokens and MoE layers. A token is at home on any booster with the same chance.

    load_imbalance: the busiest booster's share of a layer's rows over an even share.
    step_imbalance: the same for a single token, whose few experts fall unevenly.
    hidden_rows: hidden states sent to other boosters that own some of a token's experts, over all layers.
    expert_rows: unsummed expert outputs that come back.
    """

    load_imbalance: float
    step_imbalance: float
    hidden_rows: float
    expert_rows: float

    @property
    def rows(self) -> float:
        return self.hidden_rows + self.expert_rows


def expected_on(routing: Routing, owners: Owners, boosters: int) -> Expected:
    """On a trace."""
    tokens, layers, topk = routing.ids.shape
    imbalance = step = visited = 0.0
    for layer in range(layers):
        where = owners[layer][routing.ids[:, layer]]  # [tokens, top-k]
        counts = np.stack([(where == b).sum(axis=1) for b in range(boosters)], axis=1)
        imbalance += float(counts.sum(axis=0).max()) / (tokens * topk / boosters)
        step += float(counts.max(axis=1).sum()) / (tokens * topk / boosters)
        visited += float((counts > 0).sum()) / tokens
    away = 1 - 1 / boosters
    return Expected(imbalance / layers, step / layers, visited * away, layers * topk * away)


def expected_uniform(experts: int, layers: int, topk: int, boosters: int) -> Expected:
    """If every set of top-k experts were as likely as any other: exact, by counting sets."""
    away, even = 1 - 1 / boosters, topk / boosters
    imbalance = step = visited = 0.0
    for layer in range(layers):
        room = sizes(experts, boosters, layer)
        imbalance += max(room) * boosters / experts
        step += _mean_most(room, topk) / even
        visited += sum(1 - comb(experts - size, topk) / comb(experts, topk) for size in room)
    return Expected(imbalance / layers, step / layers, visited * away, layers * topk * away)


def _mean_most(room: list[int], topk: int) -> float:
    """The mean of the largest share when `topk` of all experts are drawn without replacement."""
    total = comb(sum(room), topk)
    kinds = {size: room.count(size) for size in set(room)}
    at_most = [_ways(kinds, topk, most) for most in range(topk + 1)]
    return sum(most * (at_most[most] - at_most[most - 1]) for most in range(1, topk + 1)) / total


def _ways(kinds: dict[int, int], topk: int, most: int) -> int:
    """Sets of `topk` experts of which no booster owns more than `most`."""
    ways = [1, *[0] * topk]
    for size, count in kinds.items():
        one = [comb(size, taken) for taken in range(min(most, topk) + 1)]
        for _ in range(count):
            ways = [
                sum(ways[all_ - taken] * one[taken] for taken in range(min(all_, len(one) - 1) + 1))
                for all_ in range(topk + 1)
            ]
    return ways[topk]

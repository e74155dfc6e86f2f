"""Slots for each layer, fitted to a trace: each goes where it saves most misses, by measured
curves of hits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rocket.console import Progress
from rocket.plan import spread
from rocket.routing import CacheRun, Numbers, Routing, run_cache


@dataclass(frozen=True)
class Cut:
    """A trace in two: what is fitted to, and the steps after it, which judge."""

    steps: int  # that are fitted to
    tokens: int

    @staticmethod
    def of(routing: Routing) -> "Cut":
        ends = routing.ends
        steps = min(len(ends) - 1, int(np.searchsorted(ends, routing.tokens / 2)) + 1)
        return Cut(steps, int(ends[steps - 1]))


def hit_curves(routing: Routing, cut: Cut, progress: Progress | None = None) -> Numbers:
    """Hits of each layer on the fitted part, by its number of slots, [MoE layers, experts + 1]; -1 where a
    layer would have fewer slots than a token has experts."""
    ids, ends = routing.ids[: cut.tokens], routing.ends[: cut.steps]
    curves = np.full((routing.layers, routing.experts + 1), -1, np.int64)
    for slots in range(routing.topk, routing.experts + 1):
        run = run_cache(ids, ends, routing.experts, layer_slots=[slots] * routing.layers)
        curves[:, slots] = run.lookups.sum(axis=0) - run.misses.sum(axis=0)
        if progress is not None:
            progress(slots - routing.topk + 1, routing.experts - routing.topk + 1)
    return curves


def fit(curves: Numbers, topk: int, slots: int) -> tuple[int, ...]:
    """Shares slots out by marginal gain, at least top-k to each layer.

    Curves may have stretches where one slot more gains little and several gain much: gains are those of the
    least concave curve above, so a layer gets the slots of a stretch one after the other. Ties go to the
    first layers.
    """
    gains = np.array([_concave_gains(curve[topk:]) for curve in curves])  # never rising along a row
    layers, more = gains.shape
    order = np.argsort(-gains.ravel(), kind="stable")[: slots - layers * topk]
    taken = np.bincount(order // more, minlength=layers) if more else np.zeros(layers, np.int64)
    return tuple(int(topk + count) for count in taken)


def _concave_gains(curve: Numbers) -> npt.NDArray[np.float64]:
    """What each further slot gains on the least concave curve that lies on or above this one."""
    corners = [0]
    for point in range(1, len(curve)):
        while len(corners) > 1 and _bends_up(curve, corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    gains = np.zeros(len(curve) - 1)
    for a, b in pairwise(corners):
        gains[a:b] = (curve[b] - curve[a]) / (b - a)
    return gains


def _bends_up(curve: Numbers, a: int, b: int, c: int) -> bool:
    """Whether b lies on or below the line from a to c."""
    return int(curve[b] - curve[a]) * (c - a) <= int(curve[c] - curve[a]) * (b - a)


@dataclass(frozen=True)
class Fitted:
    slots: tuple[int, ...]  # of each layer
    equal: tuple[int, ...]
    cut: Cut
    held_out: dict[str, CacheRun]  # fitted, equal, one order for all layers: the steps after the cut


def fit_and_judge(routing: Routing, slots: int, progress: Progress | None = None) -> Fitted:
    """The caches that judge have decoded the first part, too: they are warm."""
    cut = Cut.of(routing)
    fitted = fit(hit_curves(routing, cut, progress), routing.topk, slots)
    equal = spread(slots, [routing.experts] * routing.layers)

    def judge(total: int = 0, budgets: Sequence[int] = ()) -> CacheRun:
        run = run_cache(routing.ids, routing.ends, routing.experts, slots=total, layer_slots=budgets)
        return run.since(cut.steps)

    held_out = {"fitted": judge(0, fitted), "equal": judge(0, equal), "one_order": judge(slots)}
    return Fitted(fitted, equal, cut, held_out)

"""What a routing trace looks like: how evenly a layer's experts are taken, and how much neighbours share."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rocket.routing import Ids, Routing

BUSY = 8  # one in so many experts counts as busy


@dataclass(frozen=True)
class LayerFigures:
    layer: int  # the model's number
    entropy_bits: float  # of the experts' shares of all choices
    spread: float  # 2^entropy over the experts: 1 where all are taken equally often
    used: int  # experts that were taken at all
    overlap: float | None  # of a token's experts, those that the token before took, too; None: one token
    busiest_share: float  # of all choices, those of the busiest eighth of the experts


def figures(routing: Routing) -> list[LayerFigures]:
    loads = routing.loads()
    overlaps = _overlaps(routing)
    busy = -(-routing.experts // BUSY)
    rows = []
    for index, layer in enumerate(routing.layer_names):
        share = loads[index] / loads[index].sum()
        taken = share[share > 0]
        entropy = max(0.0, -float((taken * np.log2(taken)).sum()))
        rows.append(
            LayerFigures(
                layer=layer,
                entropy_bits=entropy,
                spread=2**entropy / routing.experts,
                used=int(np.count_nonzero(loads[index])),
                overlap=None if overlaps is None else float(overlaps[index]),
                busiest_share=float(np.sort(share)[-busy:].sum()),
            )
        )
    return rows


def _overlaps(routing: Routing) -> npt.NDArray[np.float64] | None:
    """The mean share of each layer's experts that neighbours in one stream have in common, [MoE layers]."""
    first, second = _neighbours(routing)
    if not len(first):
        return None
    shared = np.zeros(routing.layers)
    for layer in range(routing.layers):
        a, b = routing.ids[first, layer], routing.ids[second, layer]
        shared[layer] = _common(a, b, routing.experts) / a.size
    return shared


def _neighbours(routing: Routing) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places of tokens and of those that follow them in the same stream."""
    order = np.arange(routing.tokens)
    if routing.stream is None:
        return order[:-1], order[1:]
    order = np.argsort(routing.stream, kind="stable")
    same = np.diff(routing.stream[order]) == 0
    return order[:-1][same], order[1:][same]


def _common(a: Ids, b: Ids, experts: int) -> int:
    """How many ids the rows of a and b have in common; no row has one twice."""
    rows = np.arange(len(a), dtype=np.int64)[:, None] * experts
    return int(np.isin(a + rows, b + rows).sum())

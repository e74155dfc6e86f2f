"""Routing traces: which experts each token chose in each MoE layer.

A trace is a file of JSON lines, one for each decoded token: ``{"tok": 1, "layers": [[3, 17, …], …]}``, with a
list of distinct expert ids for each MoE layer, in the order of the layers.
"""

import json
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rocket.errors import UsageError
from rocket.inputs import read_file

_HINT = 'a trace has a line a token: {"tok": 1, "layers": [[expert, …], …]}, one list for each MoE layer'


@dataclass(frozen=True)
class Trace:
    """routes[row, MoE layer, rank]: expert ids, ascending within a layer."""

    path: str
    routes: npt.NDArray[np.int32]

    @property
    def rows(self) -> int:
        return self.routes.shape[0]

    @property
    def layers(self) -> int:
        return self.routes.shape[1]

    @property
    def topk(self) -> int:
        return self.routes.shape[2]

    def require(self, layers: int, experts: int, topk: int) -> None:
        """Throws UsageError if this is no trace of a model with so many MoE layers and experts."""
        most = int(self.routes.max())
        for what, expected, found, wrong in (
            ("MoE layers", layers, self.layers, self.layers != layers),
            ("experts a token in each", topk, self.topk, self.topk != topk),
            ("experts in each layer", experts, f"expert {most}", most >= experts),
        ):
            if wrong:
                raise UsageError(
                    f"--trace {self.path}: expected {expected} {what}, found {found}",
                    "this trace is of another model: record one with this fuel",
                )


def read_trace(path: str, option: str = "--trace") -> Trace:
    """Throws UsageError that names the line at fault."""
    rows: list[list[list[int]]] = []
    where = f"{option} {path}"
    for number, line in enumerate(read_file(path, option).splitlines(), 1):
        if line.strip():
            rows.append(_layers_of(line, f"{where}, line {number}"))
            if (len(rows[-1]), len(rows[-1][0])) != (len(rows[0]), len(rows[0][0])):
                shape = f"{len(rows[0])} layers of {len(rows[0][0])} experts as on the first line"
                _fail(f"{where}, line {number}", shape, f"{len(rows[-1])} of {len(rows[-1][0])}")
    if not rows:
        _fail(where, "at least one line", "none")
    return Trace(path, np.sort(np.array(rows, np.int32), axis=-1))


def _layers_of(line: bytes, where: str) -> list[list[int]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: broken JSON: {error}", _HINT) from None
    layers = value.get("layers") if isinstance(value, dict) else None
    if not isinstance(layers, list) or not layers:
        _fail(where, 'an object with a list "layers"', value if layers is None else layers)
    for i, experts in enumerate(layers):
        place = f"{where}: layers[{i}]"
        if not isinstance(experts, list) or not experts or not all(map(_is_id, experts)):
            _fail(place, "a list of expert ids", experts)
        if len(set(experts)) != len(experts):
            _fail(place, "distinct expert ids", experts)
        if len(experts) != len(layers[0]):
            _fail(place, f"{len(layers[0])} experts as in the first layer", len(experts))
    return layers


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 20


def _fail(where: str, expected: str, found: object) -> NoReturn:
    text = json.dumps(found, default=str)
    raise UsageError(
        f"{where}: expected {expected}, found {text if len(text) <= 60 else text[:59] + '…'}", _HINT
    )

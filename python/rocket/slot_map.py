"""Slot maps: how many slots the experts of each MoE layer may take. ``{"per_layer": {"3": 176, …}}``, or the
inner object alone."""

import json
from collections.abc import Mapping, Sequence

from rocket.checked import parse_json, read_whole, shown
from rocket.errors import UsageError

_MOST = 1 << 40  # more than any cache has; what is beyond the experts is cut
_HINT = "give an object like the slots_of_layer that rocket plan --json prints"


def read_slot_map(path: str, layer_ids: Sequence[int], option: str = "--slot-map") -> tuple[int, ...]:
    """Slots of each of the layers, in their order."""
    where = f"{option} {path}"
    value = parse_json(read_whole(path, option), where)
    if isinstance(value, dict) and "per_layer" in value:
        for name in value:
            if name != "per_layer":
                raise UsageError(f"{where}: expected per_layer alone, found {shown(name)} beside it", _HINT)
        value = value["per_layer"]
        where += ": per_layer"
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected an object, layer number -> slots, found {shown(value)}", _HINT)
    layers = [str(layer) for layer in layer_ids]
    for layer, count in value.items():
        if layer not in layers:
            raise UsageError(f"{where}: expected MoE layers {_listed(layers)}, found {shown(layer)}", _HINT)
        if isinstance(count, bool) or not isinstance(count, int):
            raise UsageError(
                f"{where}: layer {layer}: expected a whole number of slots, found {shown(count)}", _HINT
            )
        if not 0 <= count <= _MOST:
            raise UsageError(
                f"{where}: layer {layer}: expected 0 to {_MOST} slots, found {shown(count)}", _HINT
            )
    for layer in layers:
        if layer not in value:
            raise UsageError(f"{where}: layer {layer}: missing; expected a whole number of slots", _HINT)
    return tuple(value[layer] for layer in layers)


def slot_map_text(slots: Mapping[int, int]) -> str:
    return json.dumps({"per_layer": {str(layer): count for layer, count in slots.items()}}, indent=1) + "\n"


def _listed(layers: Sequence[str]) -> str:
    return f"from {layers[0]} to {layers[-1]}" if layers else "(this fuel has none)"

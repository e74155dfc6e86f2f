"""A picture of a routing trace as SVG: a row a layer, a column an expert, darker the more often it was
taken."""

from html import escape

import numpy as np

from rocket.routing import Routing

_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 44, 140, 46
_LIGHT, _DARK = (247, 251, 255), (8, 48, 107)
_FULL = 4.0  # times an even share: as dark as it gets


def plot(routing: Routing, entropy_bits: list[float]) -> str:
    loads = routing.loads()
    even = loads.sum(axis=1, keepdims=True) / routing.experts
    darkness = np.minimum(loads / even / _FULL, 1.0)
    cell, height = max(2, 960 // routing.experts), max(6, min(24, 720 // routing.layers))
    width, depth = cell * routing.experts, height * routing.layers
    about = f"{routing.name}: {routing.tokens} tokens, top-{routing.topk} of {routing.experts} experts"
    size = f'width="{_LEFT + width + _RIGHT}" height="{_TOP + depth + _BOTTOM}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 18, about),
        _text(_LEFT + width + 10, _TOP - 8, f"entropy, of {np.log2(routing.experts):.2f} bits"),
    ]
    for row, layer in enumerate(routing.layer_names):
        y = _TOP + row * height
        parts.append(_text(_LEFT - 8, y + height - 2, str(layer), "end"))
        parts.extend(_cells(darkness[row], y, cell, height))
        parts.append(_bar(_LEFT + width + 10, y, height, entropy_bits[row], np.log2(routing.experts)))
    parts.append(_text(_LEFT, _TOP + depth + 18, "expert 0"))
    parts.append(_text(_LEFT + width, _TOP + depth + 18, f"{routing.experts - 1}", "end"))
    scale = f"white: never taken; darkest: {_FULL:g} times an even share or more"
    parts.append(_text(_LEFT, _TOP + depth + 36, scale))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cells(darkness: np.ndarray, y: int, width: int, height: int) -> list[str]:
    return [
        f'<rect x="{_LEFT + expert * width}" y="{y}" width="{width}" height="{height}" '
        f'fill="{_colour(float(dark))}"/>'
        for expert, dark in enumerate(darkness)
        if dark > 0
    ]


def _bar(x: int, y: int, height: int, entropy: float, most: float) -> str:
    length = 110 * entropy / most if most else 0
    return f'<rect x="{x}" y="{y + 1}" width="{length:.1f}" height="{height - 2}" fill="#888"/>'


def _colour(dark: float) -> str:
    mixed = (round(a + (b - a) * dark) for a, b in zip(_LIGHT, _DARK, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _text(x: int, y: int, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'

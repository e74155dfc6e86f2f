"""Rocket runs mixture-of-experts language models that are bigger than the GPU.

    from rocket import Engine
    with Engine("path/to/fuel") as engine:
        for token in engine.generate(engine.tokenizer.encode("Hello"), tokens=20):
            ...

Names are loaded on first use, so that the parts in plain Python work without the C++ module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocket._core import (
        DeviceError,
        Error,
        FuelError,
        InputError,
        PlanError,
        Row,
        SamplingParams,
        __version__,
    )
    from rocket.engine import Engine, Stream
    from rocket.tokenizer import Tokenizer

_HOME = {
    "Engine": "engine",
    "Stream": "engine",
    "Tokenizer": "tokenizer",
    "Error": "_core",
    "FuelError": "_core",
    "PlanError": "_core",
    "InputError": "_core",
    "DeviceError": "_core",
    "Row": "_core",
    "SamplingParams": "_core",
    "__version__": "_core",
}

__all__ = [
    "DeviceError",
    "Engine",
    "Error",
    "FuelError",
    "InputError",
    "PlanError",
    "Row",
    "SamplingParams",
    "Stream",
    "Tokenizer",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'rocket' has no attribute {name!r}")
    value = getattr(import_module(f"rocket.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

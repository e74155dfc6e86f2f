"""The console scripts. Nothing that takes time is imported before Ctrl-C is seen to."""

import os
import signal
from importlib import import_module
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Imports have nothing to clean up, and some turn an exception in their midst into another.
    os._exit(_INTERRUPTED)


def _start(module: str) -> NoReturn:
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job does not
    if listens:
        signal.signal(signal.SIGINT, _leave)
    main = import_module(module).main
    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
    raise AssertionError("main() exits")


def decode() -> NoReturn:
    _start("rocket.decode")


def rocket() -> NoReturn:
    _start("rocket.cli")

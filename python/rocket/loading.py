"""Loading a fuel for a command."""

from pathlib import Path
from typing import Any

from rocket import _core
from rocket.console import Notes
from rocket.engine import Engine
from rocket.errors import UsageError


def load_engine(folder: Path, notes: Notes, **numbers: Any) -> Engine:
    """Loads with progress shown. A number that the engine refuses on this machine is a wrong command line."""
    try:
        with notes.progress("loading") as progress:
            return Engine(folder, progress=progress, **numbers)
    except _core.InputError as error:
        message = str(error)
        option = "--" if message.startswith(("threads:", "prefill-precision:", "kv-dtype:")) else ""
        raise UsageError(option + message, getattr(error, "hint", "") or "see --help") from error

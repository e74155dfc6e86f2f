"""Imported first by scripts that run the engine: Rocket is the installed one or else the source tree's. Where
packages or the C++ module are missing, the script ends with a line that says so."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("rocket") is None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))

from rocket.launch import require_engine

require_engine()

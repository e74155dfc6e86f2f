"""Starts the command line from a build tree, where pip has not seen to the dependencies."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec

# import name -> name for pip
DEPENDENCIES = {
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "pydantic": "pydantic",
    "ruamel.yaml": "ruamel.yaml",
    "typer": "typer",
    "rich": "rich",
}
FUEL_MAKING = {module: DEPENDENCIES[module] for module in ("numpy", "typer")}  # enough for rocket.random_fuel


def is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        return False


def require_packages(needed: Mapping[str, str] = DEPENDENCIES) -> None:
    """Ends the program in one line where packages are missing."""
    missing = [package for module, package in needed.items() if not is_there(module)]
    if missing:
        names = " ".join(missing)
        sys.stderr.write(f"error: Python packages are missing: {names}\n\n")
        sys.stderr.write(f"hint: {sys.executable} -m pip install {names}\n")
        sys.exit(1)


def require_engine() -> None:
    """Ends the program in one line where the C++ module was not built for this Python."""
    require_packages()
    if not is_there("rocket._core"):
        sys.stderr.write("error: the C++ module of Rocket is missing: rocket._core\n\n")
        sys.stderr.write(f"hint: build it in Rocket's folder: {sys.executable} -m pip install .\n")
        sys.exit(1)


def main() -> None:
    require_packages()
    name = sys.argv.pop(1)
    if name == "decode":
        from rocket.entry import decode as run
    else:
        from rocket.entry import rocket as run
    run()


if __name__ == "__main__":
    main()

"""Starts the command line from a build tree, where pip has not seen to the dependencies."""

import sys
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


def is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        return False


def main() -> None:
    missing = [package for module, package in DEPENDENCIES.items() if not is_there(module)]
    if missing:
        names = " ".join(missing)
        sys.stderr.write(f"error: Python packages are missing: {names}\n\n")
        sys.stderr.write(f"hint: {sys.executable} -m pip install {names}\n")
        sys.exit(1)
    name = sys.argv.pop(1)
    if name == "decode":
        from rocket.entry import decode as run
    else:
        from rocket.entry import rocket as run
    run()


if __name__ == "__main__":
    main()

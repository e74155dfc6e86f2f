#!/usr/bin/env python3
"""What a token reads of a fuel, summed over its safetensors headers: the same as `rocket bytes`."""

import importlib.util
import sys
from pathlib import Path

DEFAULT = "glm-5.3-flash"


def main() -> None:
    if importlib.util.find_spec("rocket") is None:  # not installed: the source tree's
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
    from rocket.launch import require_packages

    require_packages()
    import typer

    from rocket.bytes_command import register
    from rocket.errors import run_command_line

    def build() -> typer.Typer:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        register(app)
        return app

    if len(sys.argv) == 1 or sys.argv[1:] == ["--json"]:
        sys.argv.append(DEFAULT)
    run_command_line(build, Path(__file__).name)


if __name__ == "__main__":
    main()

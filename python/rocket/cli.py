"""rocket: everything beside decoding. A subcommand is a module with ``register(app)``, named in COMMANDS."""

import sys
from importlib import import_module
from typing import Annotated, NoReturn

import typer

from rocket.boosters import leave, only_rank0_prints, speaks
from rocket.errors import run_command_line

COMMANDS = (
    "rocket.score",
    "rocket.bench",
    "rocket.fuel_command",
    "rocket.bytes_command",
    "rocket.plan_command",
    "rocket.split_command",
    "rocket.trace_command",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from rocket import __version__

        print(f"rocket {__version__}")
        raise typer.Exit(0)


def rocket(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Measure and prepare what rocket-decode runs."""


def build() -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(rocket)
    for module in COMMANDS:
        import_module(module).register(app)
    return app


def main() -> NoReturn:
    takes_part = sys.argv[1:2] == ["score"] or sys.argv[1:3] == ["bench", "decode"]
    only_rank0_prints()
    run_command_line(build, "rocket", lambda message, hint: speaks(message, hint, takes_part), leave)

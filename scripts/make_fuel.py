#!/usr/bin/env python3
"""Makes a random glm5_next fuel: the command line of rocket.random_fuel."""

import argparse
import dataclasses
import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from rocket.launch import FUEL_MAKING, require_packages

require_packages(FUEL_MAKING)

from rocket.random_fuel import counted_bytes, make_fuel  # noqa: E402  (once packages are there)
from rocket.random_fuel_shape import (  # noqa: E402
    PRESETS,
    VARIANTS,
    FuelOptions,
    RandomFuelError,
    Shape,
)


def number_or_null(text: str) -> float | None:
    return None if text == "null" else float(text)


def add_field(
    parser: argparse._ArgumentGroup, field: dataclasses.Field, kind: object, **extra: object
) -> None:
    name = "--" + field.name.replace("_", "-")
    if kind is bool:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None, **extra)
        return
    convert = {int: int, float: float, str: str}.get(kind, number_or_null)
    if field.name.endswith("_expert_layers"):
        convert = int
        extra["nargs"] = "*"
    parser.add_argument(name, type=convert, default=argparse.SUPPRESS, **extra)


def parse(argv: list[str]) -> tuple[argparse.Namespace, FuelOptions]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="starting point (default: tiny)")
    parser.add_argument("--variant", choices=VARIANTS, help="weight formats as some release has them")
    parser.add_argument("--force", action="store_true", help="replace a fuel that is already there")
    parser.add_argument("--dry-run", action="store_true", help="only print the sizes")
    shape_group = parser.add_argument_group("shape (names as in config.json)")
    shape_types = typing.get_type_hints(Shape)
    for field in dataclasses.fields(Shape):
        add_field(shape_group, field, shape_types[field.name])
    options_group = parser.add_argument_group("spelling on disk")
    option_types = typing.get_type_hints(FuelOptions)
    for field in dataclasses.fields(FuelOptions):
        if field.name != "shape":
            choices = (
                {"choices": FuelOptions.CHOICES[field.name]} if field.name in FuelOptions.CHOICES else {}
            )
            add_field(options_group, field, option_types[field.name], **choices)
    args = parser.parse_args(argv)

    preset = dataclasses.replace(PRESETS[args.preset], **VARIANTS.get(args.variant, {}))
    given = {
        name: value for name, value in vars(args).items() if value is not None or name == "linear_lower_bound"
    }
    shape_fields = {f.name for f in dataclasses.fields(Shape)}
    option_fields = {f.name for f in dataclasses.fields(FuelOptions)} - {"shape"}
    shape = dataclasses.replace(preset.shape, **{k: v for k, v in given.items() if k in shape_fields})
    rest = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in option_fields}
    return args, dataclasses.replace(preset, shape=shape, **rest)


def main(argv: list[str]) -> int:
    args, options = parse(argv)
    try:
        options.check()
        sizes = counted_bytes(options)
        print(
            f"{sizes['parameters'] / 1e9:.3f} B parameters, {sizes['disk'] / 1e9:.3f} GB on disk, "
            f"a token reads {sizes['token'] / 1e6:.1f} MB "
            f"(dense {sizes['dense'] / 1e6:.1f} MB in all, experts {sizes['expert'] / 1e6:.1f} MB in all)",
            file=sys.stderr,
        )
        if args.dry_run:
            return 0
        tty = sys.stderr.isatty()

        def progress(done: int, total: int) -> None:
            if tty:
                print(f"\r{100 * done // total:3d} %", end="" if done < total else "\n", file=sys.stderr)

        print(make_fuel(args.out, options, force=args.force, progress=progress))
    except RandomFuelError as e:
        print(f"error: {e}", file=sys.stderr)
        if e.hint:
            print(f"\nhint: {e.hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

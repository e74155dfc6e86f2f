"""rocket fuel: manifests, what weights are made of, and hollow fuels."""

from typing import Annotated

import typer

from rocket.accounting import GIB
from rocket.console import Notes, write_data
from rocket.errors import CliError
from rocket.fuel import known_fuels
from rocket.fuel_account import locate, weights_of_folder, weights_of_manifest
from rocket.fuel_report import formats_text, manifest_text, mismatch_text, table
from rocket.hollow import disk_bytes, write_hollow
from rocket.manifest import find_manifest, known_manifests, read_manifest
from rocket.options import flag, string
from rocket.validate import compare, fix, require_same_model

NameArgument = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A manifest: a name or a file.")]


def list_fuels() -> int:
    """Every fuel that is known by name: its manifest's numbers, and where its weights are."""
    manifests, weights = known_manifests(), known_fuels()
    rows = [("name", "chemistry", "parameters", "on disk", "a token reads", "weights")]
    for name in sorted({*manifests, *weights}):
        where = str(weights[name]) if name in weights else "-"
        if name not in manifests:
            rows.append((name, "-", "-", "-", "-", where))
            continue
        m = read_manifest(manifests[name]).manifest
        rows.append(
            (
                name,
                m.chemistry,
                f"{m.parameters.trunk_billion.value:g} B",
                f"{m.residency.checkpoint_gib.value:g} GiB",
                f"{m.residency.single_token_active_gib.value:g} GiB",
                where,
            )
        )
    if len(rows) == 1:
        raise CliError("no fuels are known by name", "set ROCKET_FUELS to folders of fuels")
    write_data(table(rows, right=(2, 3, 4)) + "\n")
    return 0


def show(
    fuel: Annotated[str, typer.Argument(metavar="NAME|DIR", help="The fuel: a name, a folder, a manifest.")],
) -> int:
    """What a manifest says; for weights, the format of each part and what the engine makes of it at load."""
    source = locate(fuel)
    parts = []
    if source.manifest is not None:
        parts.append(manifest_text(source.manifest))
    if source.weights_dir is not None:
        weights = source.weights()
        parts.append(formats_text(weights.account, weights.formats, str(source.weights_dir)))
    write_data("\n".join(parts))
    return 0


def validate(
    manifest: NameArgument,
    weights: Annotated[
        str | None,
        string("DIR", "Recompute from the headers of these weights; else from the manifest's config."),
    ] = None,
    fix_it: Annotated[bool, flag("--fix", "Write the found values into the manifest.")] = False,
) -> int:
    """Recompute every recorded number; each that disagrees is a row, and the status is 1.

    A number agrees if it is what is found, rounded as it is written.
    """
    file = find_manifest(manifest)
    if weights is None:
        held, folder = weights_of_manifest(file.manifest), "its own config and weight formats"
    else:
        held, folder = weights_of_folder(weights), weights
        require_same_model(file, held, folder)
    mismatches, count = compare(file.manifest, held)
    if not mismatches:
        write_data(f"{file.path}: {count} recorded values agree with {folder}\n")
        return 0
    write_data(mismatch_text(mismatches))
    if not fix_it:
        raise CliError(
            f"{file.path}: {len(mismatches)} of {count} recorded values disagree with {folder}",
            "--fix writes the found values back",
        )
    fixed = fix(file, mismatches, "measured" if weights is not None else "derived")
    left, _ = compare(fixed, held)
    if left:
        raise CliError(f"{file.path}: {left[0].field} still disagrees", "correct the file by hand")
    Notes().say(f"{file.path}: {len(mismatches)} values written")
    return 0


def hollow(
    manifest: NameArgument,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to make.")],
    quiet: Annotated[bool, flag("--quiet", "Nothing on standard error but errors.")] = False,
) -> int:
    """Write a checkpoint with true names, shapes, dtypes and shard sizes but no data.

    It takes a few MB on disk. Accounting, validation and planning run on it; decoding from it is refused.
    """
    file = find_manifest(manifest)
    notes = Notes(quiet)
    with notes.progress("writing", unit="files") as progress:
        path = write_hollow(file.manifest, folder, progress)
    files = list(path.glob("*.safetensors"))
    size = sum(f.stat().st_size for f in files)
    used = sum(map(disk_bytes, path.iterdir()))
    notes.say(f"{path}: {len(files)} files of {size / GIB:.2f} GiB, which take {used / 1e6:.0f} MB on disk")
    return 0


def register(app: typer.Typer) -> None:
    fuel = typer.Typer(help="Manifests, weight formats, hollow fuels.")
    fuel.command("list")(list_fuels)
    for command in (show, validate, hollow):
        fuel.command()(command)
    app.add_typer(fuel, name="fuel")

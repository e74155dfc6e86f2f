"""rocket fuel: manifests, what weights are made of, and hollow fuels."""

from collections.abc import Callable
from typing import Annotated

import typer

from rocket.accounting import GIB
from rocket.architecture import read_architecture
from rocket.console import Notes, write_data
from rocket.errors import CliError, UsageError, one_line
from rocket.fuel import CONFIG, has, known_fuels
from rocket.fuel_account import locate, weights_of_folder, weights_of_manifest
from rocket.fuel_report import formats_text, manifest_text, mismatch_text, table
from rocket.hollow import disk_bytes, write_hollow
from rocket.manifest import Manifest, ManifestFile, find_manifest, json_schema, known_manifests, read_manifest
from rocket.options import flag, string
from rocket.report import counted
from rocket.slab_command import slab
from rocket.validate import Weights, compare, fix, require_consistent, require_same_model, written

NameArgument = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A manifest: a name or a file.")]


def list_fuels() -> int:
    """Every fuel that is known by name: its manifest's numbers, and where its weights are."""
    manifests, weights = known_manifests(), known_fuels()
    broken: list[str] = []
    rows = [("name", "chemistry", "parameters", "on disk", "a token reads", "weights")]
    for name in sorted({*manifests, *weights}):
        where = str(weights[name]) if name in weights else "-"
        numbers = ("-", "-", "-", "-")
        problem = _problem(lambda name=name: read_architecture(weights[name])) if name in weights else ""
        if name in manifests:
            try:
                numbers = _numbers(read_manifest(manifests[name]).manifest)
            except Exception as error:
                problem = _reason(error)
        if problem:
            broken.append(name)
            where = f"{where}; broken: {problem}" if name in weights else f"broken: {problem}"
        rows.append((one_line(name), *numbers, where))
    if len(rows) == 1:
        raise CliError("no fuels are known by name", "set ROCKET_FUELS to folders of fuels")
    write_data(table(rows, right=(2, 3, 4)) + "\n")
    if broken:
        Notes().say(f"cannot be used as they are: {', '.join(map(one_line, broken))}")
    return 0


def _numbers(m: Manifest) -> tuple[str, str, str, str]:
    return (
        m.chemistry,
        f"{m.parameters.trunk_billion.value:g} B",
        f"{m.residency.checkpoint_gib.value:g} GiB",
        f"{m.residency.single_token_active_gib.value:g} GiB",
    )


def _reason(error: Exception) -> str:
    text = one_line(str(error))
    return text if len(text) <= 160 else f"{text[:159]}…"


def _problem(read: Callable[[], object]) -> str:
    """Why something cannot be read; empty if it can."""
    try:
        read()
    except Exception as error:
        return _reason(error)
    return ""


def show(
    fuel: Annotated[str, typer.Argument(metavar="NAME|DIR", help="The fuel: a name, a folder, a manifest.")],
) -> int:
    """What a manifest says; for weights, the format of each part and what the engine makes of it at load."""
    source = locate(fuel)
    parts = []
    weights = weights_of_folder(source.weights_dir) if source.weights_dir is not None else None
    if source.manifest is not None:
        parts.append(manifest_text(source.manifest))
    if weights is not None:
        parts.append(formats_text(weights.account, weights.formats, str(source.weights_dir)))
    write_data("\n".join(parts))
    if source.manifest is not None and (doubt := _doubt(source.manifest, weights, str(source.weights_dir))):
        Notes().say(doubt)
    return 0


def _held_against(file: ManifestFile, weights: Weights | None, folder: str) -> tuple[Weights, str]:
    """What a manifest's numbers are recomputed from, and what to call it."""
    if weights is None:
        return weights_of_manifest(file.manifest), "its own config and weight formats"
    require_same_model(file, weights, folder)
    return weights, folder


def _doubt(file: ManifestFile, weights: Weights | None, folder: str) -> str | None:
    """What speaks against a manifest, on one line."""
    try:
        held, against = _held_against(file, weights, folder)
    except UsageError as error:
        return one_line(str(error))
    mismatches, count = compare(file.manifest, held)
    if not mismatches:
        return None
    first = mismatches[0]
    return one_line(
        f"{file.path}: {len(mismatches)} of {count} recorded values disagree with {against}, first "
        f"{first.field}: recorded {first.recorded}, found {written(first.found)}; "
        f"rocket fuel validate lists all"
    )


def validate(
    manifest: NameArgument,
    weights: Annotated[
        str | None,
        string("DIR", "Recompute from the headers of these weights; default: those beside the manifest."),
    ] = None,
    fix_it: Annotated[bool, flag("--fix", "Write the found values into the manifest.")] = False,
) -> int:
    """Recompute every recorded number; each that disagrees is a row, and the status is 1.

    Without weights the manifest's own config is what counts. A number agrees if it is what is found, rounded
    as it is written.
    """
    file = find_manifest(manifest)
    if weights == "":
        raise UsageError("--weights: expected a folder, found nothing", "leave it out, or give a folder")
    if weights is None and has(file.path.parent, CONFIG):
        weights = str(file.path.parent)
    read = weights_of_folder(weights) if weights is not None else None
    held, folder = _held_against(file, read, str(weights))
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
    fix(file, mismatches, "measured" if weights is not None else "derived", held)
    Notes().say(f"{file.path}: {counted(len(mismatches), 'value')} written")
    return 0


def hollow(
    manifest: NameArgument,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to make.")],
    quiet: Annotated[bool, flag("--quiet", "Nothing on standard error but errors.")] = False,
) -> int:
    """Write a checkpoint with true names, shapes, dtypes and shard sizes but no data.

    Its headers take some tens of MB on disk. Accounting, validation and planning run on it; decoding from it
    is refused.
    """
    file = find_manifest(manifest)
    require_consistent(file.manifest, str(file.path))
    notes = Notes(quiet)
    with notes.progress("writing", unit="files") as progress:
        path = write_hollow(file.manifest, folder, progress)
    files = list(path.glob("*.safetensors"))
    size = sum(f.stat().st_size for f in files)
    used = sum(map(disk_bytes, path.iterdir()))
    apparent = f"{counted(len(files), 'file')} of {size / GIB:.2f} GiB"
    notes.say(f"{path}: {apparent}, which take {used / 1e6:.1f} MB on disk")
    return 0


def schema() -> int:
    """Print the JSON schema of manifests: their fields and what each takes."""
    write_data(json_schema())
    return 0


def register(app: typer.Typer) -> None:
    fuel = typer.Typer(help="Manifests, weight formats, hollow fuels.")
    fuel.command("list")(list_fuels)
    for command in (show, validate, hollow, slab, schema):
        fuel.command()(command)
    app.add_typer(fuel, name="fuel")

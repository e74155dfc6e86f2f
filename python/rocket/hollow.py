"""Hollow fuels: checkpoints with true names, shapes, dtypes and shard sizes, but without data.

The files are as long as real ones and hold nothing behind their headers, so that they take no room on a disk
that keeps holes. Accounting, validation and planning read no more than headers; the engine refuses to run
them.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from rocket.architecture import to_config
from rocket.console import Progress
from rocket.errors import CliError, UsageError, reason_of
from rocket.inventory import TensorInfo, parameters, tensors
from rocket.manifest import Manifest
from rocket.shards import header_of, index_text, shard_names, split_by_name
from rocket.validate import require_consistent

PROBE_BYTES = 256 << 20


def hollow_tensors(manifest: Manifest) -> list[TensorInfo]:
    """Every tensor of the checkpoint that a manifest describes."""
    formats = manifest.weight_formats
    found = parameters(manifest.model, draft_own_head=formats.draft_own_head)
    return list(tensors(found, formats.scheme))


def _quantization(manifest: Manifest) -> dict[str, Any] | None:
    """What config.json says of the weights. Their dtypes decide; this names the spelling."""
    kind = manifest.weight_formats.routed_experts
    if kind == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    if kind == "nvfp4-packed":
        return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    if kind == "fp8-row":
        return {"quant_method": "compressed-tensors", "format": "float-quantized"}
    if kind == "fp8":
        return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return {"quant_method": "modelopt", "quant_algo": "MXFP8"} if kind == "mxfp8" else None


def write_hollow(manifest: Manifest, target: str, progress: Progress | None = None) -> Path:
    """Makes the folder `target`, which must be absent or empty. It appears whole or not at all."""
    if not target or "\0" in target:
        raise UsageError(
            f"{target!r}: expected the name of a folder", "give a folder that does not exist yet"
        )
    require_consistent(manifest, manifest.id)
    path = Path(target)
    _check_target(path)
    made = [folder for folder in path.parents if not folder.exists()]
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _check_holes(partial)
        _write(partial, manifest, progress)
        partial.rename(path)
    except OSError as error:
        raise CliError(
            f"{target}: cannot write the hollow fuel: {reason_of(error)}",
            "give a folder that can be made, on a disk with room",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not path.exists():
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()
    return path


def disk_bytes(file: Path) -> int:
    """What a file takes of its disk; holes take nothing."""
    return file.stat().st_blocks * 512


def _check_target(path: Path) -> None:
    hint = "give a folder that does not exist yet"
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UsageError(f"{path}: expected no file of that name, found one", hint)
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path}: expected no folder, or an empty one, found one with files", hint)
    if not path.name:
        raise UsageError(f"{path}: expected the name of a folder", hint)


def _check_holes(folder: Path) -> None:
    """A disk that keeps no holes would fill up."""
    probe = folder / "probe"
    with probe.open("wb") as file:
        file.truncate(PROBE_BYTES)
        os.fsync(file.fileno())
    used = disk_bytes(probe)
    probe.unlink()
    if used >= PROBE_BYTES:
        raise CliError(
            f"{folder.parent}: its file system keeps no holes in files, so the fuel would take its full size",
            "give a folder on another disk",
        )


def _write(folder: Path, manifest: Manifest, progress: Progress | None) -> None:
    config = to_config(manifest.model)
    quantization = _quantization(manifest)
    if quantization:
        config["quantization_config"] = quantization
    _write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    files = manifest.weight_formats.shard_files
    try:
        split = split_by_name(hollow_tensors(manifest), files)
    except ValueError as error:
        raise UsageError(f"weight_formats.shard_files: {error}", "ask for fewer files") from None
    shards = dict(zip(shard_names(files), split, strict=True))
    for done, (name, found) in enumerate(shards.items(), 1):
        header = header_of(found)
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(t.nbytes for t in found))
        if progress:
            progress(done, files)
    if files > 1:
        _write_text(folder / "model.safetensors.index.json", index_text(shards))


def _write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")

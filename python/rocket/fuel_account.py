"""A fuel as the control layer sees it: weights on disk whose headers can be read, or a manifest alone."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from rocket.accounting import Account, account_of_tensors, read_tensors
from rocket.architecture import ConfigError, read_architecture
from rocket.failures import fuel_error
from rocket.fuel import CONFIG, MANIFEST, has, known_fuels
from rocket.inventory import Naming, TensorInfo, detect_naming
from rocket.manifest import ManifestFile, known_manifests, read_manifest
from rocket.validate import Weights, require_consistent, weights_of_manifest


@dataclass(frozen=True)
class FuelSource:
    """Where a fuel's numbers come from."""

    name: str
    weights_dir: Path | None
    manifest: ManifestFile | None

    def weights(self) -> Weights:
        """From the headers where there are weights, else from the manifest."""
        if self.weights_dir is not None:
            return weights_of_folder(self.weights_dir)
        assert self.manifest is not None
        require_consistent(self.manifest.manifest, str(self.manifest.path))
        return weights_of_manifest(self.manifest.manifest)

    def account(self) -> Account:
        return self.weights().account

    @property
    def id(self) -> str:
        """The manifest's name, else the folder's."""
        if self.manifest is not None:
            return self.manifest.manifest.id
        return Path(self.name).resolve().name if self.weights_dir == Path(self.name) else self.name

    @property
    def origin(self) -> str:
        """What the numbers are taken from, in words."""
        if self.weights_dir is not None:
            return f"from the headers in {self.weights_dir}"
        assert self.manifest is not None
        return f"from the manifest {self.manifest.path}; there are no weights beside it"


def weights_of_folder(folder: str | Path) -> Weights:
    """From config.json and the headers of a fuel's files."""
    try:
        arch = read_architecture(folder)
    except ConfigError as error:
        raise fuel_error(str(error), error.hint or "check the fuel's config.json") from None
    except RecursionError:
        raise fuel_error(
            f"{Path(folder) / 'config.json'}: broken JSON: too many levels", "download the file again"
        ) from None
    found, files = read_tensors(folder)
    naming = detect_naming([t.name for t in found])
    account = account_of_tensors(arch, found, naming)
    account.set_files(files)
    _require_fitting(account, found, naming, folder)
    return Weights(account, found, naming)


def _require_fitting(account: Account, found: list[TensorInfo], naming: Naming, folder: str | Path) -> None:
    """Throws FuelError where config.json speaks of another model than the headers: what is counted would mean
    nothing. The engine checks every shape when it loads."""
    arch, hint = account.arch, "config.json and the weights are not of one model: download both again"
    table = next((t for t in found if t.name == f"{naming.trunk}embed_tokens.weight"), None)
    if table is not None and table.dtype != "U8" and table.shape != (arch.vocab_size, arch.hidden_size):
        raise fuel_error(
            f"{folder}: {table.name}: expected {arch.vocab_size} x {arch.hidden_size} (config.json: "
            f"vocab_size, hidden_size), found {' x '.join(map(str, table.shape))}",
            hint,
        )
    for layer in arch.moe_layer_ids:
        seen = account.expert_ids.get(layer, set())
        right = len(seen) == arch.n_routed_experts and max(seen) < arch.n_routed_experts
        if not right and seen != {-1}:  # -1: all experts in one tensor
            raise fuel_error(
                f"{folder}: layer {layer}: expected {arch.n_routed_experts} routed experts (config.json: "
                f"n_routed_experts), found {len(seen)}",
                hint,
            )


def locate(name: str) -> FuelSource:
    """A fuel given as a folder, by name, or as a manifest's file. Throws FuelError with the candidates."""
    path = Path(name) if name and "\0" not in name else None
    if path is not None and path.is_dir():
        return _in_folder(name, path)
    if path is not None and path.exists():
        if path.suffix not in (".yaml", ".yml"):
            near = has(path.parent, CONFIG) or has(path.parent, MANIFEST)
            raise fuel_error(
                f"fuel {name}: expected a folder or a {MANIFEST}, found another file",
                f"did you mean its folder, {path.parent}?" if near else "rocket fuel list has names",
            )
        return FuelSource(name, None, read_manifest(path))
    weights, manifests = known_fuels(), known_manifests()
    if name in weights or name in manifests:
        manifest = read_manifest(manifests[name]) if name in manifests else None
        return FuelSource(name, weights.get(name), manifest)
    known = sorted({*weights, *manifests})
    close = difflib.get_close_matches(name, known, n=3)
    listed = f"known fuels: {', '.join(known) or 'none'}; or give a folder that holds config.json"
    hint = f"did you mean {' or '.join(close)}?" if close else listed
    raise fuel_error(f"fuel {name!r}: no such folder, and no fuel of that name", hint)


def load_account(name: str) -> tuple[str, Account]:
    """The name and the account of a fuel given as locate takes it."""
    source = locate(name)
    return source.id, source.account()


def _in_folder(name: str, folder: Path) -> FuelSource:
    manifest = read_manifest(folder / MANIFEST) if has(folder, MANIFEST) else None
    weights = folder if has(folder, CONFIG) or manifest is None else None
    return FuelSource(name, weights, manifest)

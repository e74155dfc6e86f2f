"""Are a manifest's numbers those of its weights? Each is recomputed from config and headers, and can be put
right."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from math import floor, log10
from pathlib import Path
from typing import Any

from rocket import booster as boosters
from rocket.accounting import GIB, KV_DTYPES, Account, State, account_of_inventory
from rocket.architecture import Architecture
from rocket.errors import UsageError
from rocket.formats import FormatRow, format_rows
from rocket.inventory import Bucket, Naming, TensorInfo, default_naming
from rocket.manifest import ByDtype, Manifest, ManifestFile, Number, parse_manifest
from rocket.manifest_text import Change, Value, changed
from rocket.output import AtomicFile

_NEAR = 0.05  # a rounded number is still within this fraction of the exact one


@dataclass(frozen=True)
class Found:
    """What a field should say."""

    value: Value
    digits: int = 0  # decimals when written


@dataclass(frozen=True)
class Mismatch:
    field: str
    recorded: Value
    found: Found

    @property
    def ratio(self) -> str:
        recorded, found = self.recorded, self.found.value
        if isinstance(recorded, str | bool) or isinstance(found, str | bool) or not recorded:
            return "-"
        ratio = found / recorded
        return f"{ratio:.2f}x" if ratio < 1e6 else f"{ratio:.1e}x"


@dataclass(frozen=True)
class Weights:
    """What a manifest is held against: an account, and the tensors' formats where there are files."""

    account: Account
    tensors: list[TensorInfo] | None = None
    naming: Naming | None = None

    @cached_property
    def formats(self) -> list[FormatRow]:
        """The formats of the tensors; none without tensors."""
        if self.tensors is None or self.naming is None:
            return []
        return format_rows(self.tensors, self.account.arch, self.naming)


# --- what is found ----------------------------------------------------------------------------------------


def _architecture(account: Account) -> Iterator[tuple[str, Value]]:
    a = account.arch
    yield "layers", a.num_hidden_layers
    yield "kda_layers", a.kda_layers
    yield "sparse_mla_layers", a.mla_layers
    yield "indexer_layers", a.indexer_layers
    yield "dense_mlp_layers", a.dense_layers
    yield "moe_layers", a.moe_layers
    yield "draft_layers", account.draft_layers
    yield "vision_layers", a.vision.depth if a.vision and account[Bucket.VISION].tensors else 0
    yield "hidden_size", a.hidden_size
    yield "vocabulary_size", a.vocab_size
    yield "experts_per_layer", a.n_routed_experts
    yield "experts_per_token", a.num_experts_per_tok
    yield "shared_experts_per_layer", a.n_shared_experts
    yield "context_tokens", a.max_position_embeddings


def _residency(account: Account) -> Iterator[tuple[str, float, int]]:
    draft = account[Bucket.DRAFT].stored + account[Bucket.DRAFT_EXPERTS].stored
    for field, count in (
        ("checkpoint_gib", account.tensor_bytes),
        ("resident_gib", account.resident_bytes),
        ("routed_experts_gib", account.expert_bytes),
        ("draft_gib", draft),
        ("vision_gib", account[Bucket.VISION].stored),
        ("single_token_routed_gib", account.routed_token_bytes),
        ("single_token_active_gib", account.token_bytes_full_table),
        ("single_token_touched_gib", account.token_bytes_touched),
    ):
        yield field, count / GIB, 2
    yield "expert_slot_mib", account.slot_bytes / (1 << 20), 2


def _state(arch: Architecture) -> Iterator[tuple[str, str, float]]:
    for dtype in KV_DTYPES:
        state = State(arch, dtype)
        pooled = arch.indexer_layers * state.pooled_row_bytes / arch.index_kpool
        yield "latent_kv_bytes_per_token", dtype, arch.mla_layers * state.latent_row_bytes
        yield "pooled_indexer_keys_bytes_per_token", dtype, pooled
    state = State(arch)
    yield "unfinished_pool_bytes_per_stream", "f32", state.pool_tail_bytes
    yield "kda_matrix_bytes_per_stream", "f32", state.kda_matrix_bytes
    yield "conv_tail_bytes_per_stream", "f32", state.conv_tail_bytes


_FORMAT_GROUPS = {
    "routed_experts": ("routed experts",),
    "shared_experts": ("shared experts",),
    "attention": ("KDA attention", "sparse-MLA attention"),
    "dense_mlp": ("dense MLP",),
    "lm_head": ("lm_head",),
    "routers": ("routers",),
    "hyper_connections": ("hyper-connections",),
    "draft_layer": ("draft layer",),
    "draft_experts": ("draft experts",),
}


def _formats(weights: Weights) -> Iterator[tuple[str, Value]]:
    """The format of most bytes in each group."""
    found = weights.tensors
    if found is None:
        return
    for field, groups in _FORMAT_GROUPS.items():
        sizes: dict[str, int] = {}
        for row in weights.formats:
            if row.group in groups:
                blocks = row.format.startswith("fp8") and row.format != "fp8-row"
                kind = "fp8" if blocks else row.format
                sizes[kind] = sizes.get(kind, 0) + row.stored_bytes
        if sizes:
            yield field, max(sizes, key=lambda kind: sizes[kind])
    yield "draft_own_head", any(t.name.endswith(".shared_head.head.weight") for t in found)
    yield "input_scales", any(t.name.endswith(".input_scale") for t in found)
    yield "shard_files", weights.account.file_count


def weights_of_manifest(manifest: Manifest) -> Weights:
    """What the fuel of a manifest would have."""
    formats = manifest.weight_formats
    account = account_of_inventory(manifest.model, formats.scheme, own_head=formats.draft_own_head)
    return Weights(account, None, default_naming(manifest.model))


def found_values(manifest: Manifest, weights: Weights) -> dict[str, Found]:
    """Every field that can be recomputed, by its dotted name."""
    account = weights.account
    found = {f"architecture.{field}": Found(value) for field, value in _architecture(account)}
    for field, count in (
        ("total_billion", account.parameters),
        ("trunk_billion", account.trunk_parameters),
        ("active_billion", account.active_parameters),
    ):
        found[f"parameters.{field}"] = Found(count / 1e9, 2)
    for field, value in _formats(weights):
        found[f"weight_formats.{field}"] = Found(value)
    for field, size, digits in _residency(account):
        found[f"residency.{field}"] = Found(size, digits)
    for field, dtype, size in _state(account.arch):
        found[f"reusable_state.{field}.{dtype}"] = Found(size, 0 if size == int(size) else 1)
    single = manifest.serving_regime.single_stream_reference
    rate = boosters.load(single.booster).read_bytes_s * single.boosters / account.token_bytes_full_table
    found["serving_regime.single_stream_reference.tok_per_s"] = Found(rate, 1)
    return found


# --- comparing --------------------------------------------------------------------------------------------


def _recorded(manifest: Manifest) -> dict[str, Value]:
    """Every recorded value by its dotted name; absent ones are left out."""
    out: dict[str, Value] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Number):
            out[prefix] = value.value
        elif isinstance(value, int | float | str):
            out[prefix] = value
        elif isinstance(value, ByDtype) or hasattr(value, "model_fields_set"):
            for name in type(value).model_fields:
                walk(f"{prefix}.{name}" if prefix else name, getattr(value, name))

    walk("", manifest)
    return out


def _agree(recorded: Value, found: Found) -> bool:
    """Whether a recorded number is the found one, rounded as the recorded one is written."""
    value = found.value
    if isinstance(recorded, str | bool) or isinstance(value, str | bool):
        return recorded == value
    digits = max(0, -int(Decimal(repr(recorded)).normalize().as_tuple().exponent))
    return round(value, digits) == recorded and abs(value - recorded) <= _NEAR * abs(value)


def require_same_model(manifest: ManifestFile, weights: Weights, folder: str) -> None:
    """Throws UsageError if the weights are of another model than the manifest's."""
    ours, theirs = manifest.manifest.model, weights.account.arch
    for field in (
        "chemistry",
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "n_routed_experts",
        "moe_intermediate_size",
    ):
        expected, found = getattr(ours, field), getattr(theirs, field)
        if expected != found:
            raise UsageError(
                f"{manifest.path}: this manifest is of other weights: {field}: expected {expected}, "
                f"found {found} in {folder}",
                "give the manifest of these weights, or the folder of the manifest's fuel",
            )


def require_consistent(manifest: Manifest, where: str) -> None:
    """Throws UsageError if a manifest's architecture is not what its own config says."""
    account = weights_of_manifest(manifest).account
    for field, found in _architecture(account):
        recorded = getattr(manifest.architecture, field)
        if recorded != found:
            raise UsageError(
                f"{where}: architecture.{field}: found {recorded}, but architecture.config and the defaults "
                f"of {manifest.chemistry} say {found}",
                "correct the field or the config; rocket fuel validate lists all that disagrees",
            )


def compare(manifest: Manifest, weights: Weights) -> tuple[list[Mismatch], int]:
    """What disagrees, and how many numbers were held against the weights."""
    recorded = _recorded(manifest)
    found = {name: f for name, f in found_values(manifest, weights).items() if name in recorded}
    wrong = [Mismatch(name, recorded[name], f) for name, f in found.items() if not _agree(recorded[name], f)]
    return wrong, len(found)


# --- putting right ----------------------------------------------------------------------------------------


_PLAIN = ("architecture", "weight_formats")  # their values have no provenance
_CONFIG_ONLY = ("reusable_state", "serving_regime")  # headers say nothing about these


def fixed_text(text: str, mismatches: list[Mismatch], source: str, where: str = "manifest") -> str:
    """The manifest's text with the found values, all else kept. `source` is that of the account."""
    changes = {}
    for mismatch in mismatches:
        section = mismatch.field.split(".")[0]
        origin = None
        if section not in _PLAIN:
            origin = "derived" if section in _CONFIG_ONLY else source
        changes[mismatch.field] = Change(written(mismatch.found), origin)
    return changed(text, changes, where)


def written(found: Found) -> Value:
    """A found value as a manifest has it."""
    if isinstance(found.value, str | bool):
        return found.value
    if not found.digits:
        return round(found.value)
    small = 3 - floor(log10(found.value)) if 0 < found.value < 1 else 0  # four digits that say something
    return round(found.value, max(found.digits, small))


def fix(manifest: ManifestFile, mismatches: list[Mismatch], source: str, weights: Weights) -> None:
    """Writes the found values into the manifest's file. Throws UsageError, with the file as it was, if these
    do not make a manifest that agrees with the weights."""
    text = fixed_text(manifest.text, mismatches, source, str(manifest.path))
    fixed = parse_manifest(text.encode(), str(manifest.path))
    left, _ = compare(fixed, weights)
    if left:
        raise UsageError(
            f"{manifest.path}: {left[0].field} would still disagree; nothing is written",
            "correct the file by hand",
        )
    with AtomicFile(Path(manifest.path), "--fix") as out:
        out.write(text.encode())

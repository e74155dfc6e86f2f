"""Manifests: what is known of a fuel, in ``fuels/<name>/fuel.yaml``.

Field names carry units. A number says where it comes from, ``{value: 21.05, source: measured}``; a bare
number counts as published. ``python -m rocket.manifest`` prints the JSON schema (fuels/fuel.schema.json).
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator

from rocket import booster as boosters
from rocket.architecture import (
    CHEMISTRIES,
    GLM5_NEXT,
    Architecture,
    ConfigError,
    VisionTower,
    config_fields,
    from_fields,
)
from rocket.checked import parse_yaml, read_whole, validate
from rocket.errors import UsageError
from rocket.fuel import MANIFEST, folders_with, has
from rocket.inventory import Scheme
from rocket.quantity import Quantity

_HINT = "rocket fuel schema prints the fields and what each takes"
_ID = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class Number(Quantity):
    """A number with its provenance, or a bare number, which counts as published."""

    value: float = Field(ge=0, le=1e15, description="a number from 0 to 1e15")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"value": value} if not isinstance(value, dict | Quantity) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(schema)
        resolved = handler.resolve_ref_schema(described)
        whole = dict(resolved)
        resolved.clear()
        most = whole["properties"]["value"]["maximum"]
        bare = {"type": "number", "minimum": 0, "maximum": most}
        resolved.update(anyOf=[bare, whole], description=cls.__doc__)
        return described


class Size(Number):
    """A size in GiB or MiB, or parameters in 10^9: a number with its provenance, or a bare one."""

    value: float = Field(ge=0, le=100_000, description="a number from 0 to 100000")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _whole(low: int, high: int, what: str = "") -> Any:
    return Field(ge=low, le=high, description=f"a whole number from {low} to {high}{what and f': {what}'}")


def _number(what: str) -> Any:
    return Field(description=f"a number of at least 0, or {{value, source, note}}: {what}")


def _optional(what: str) -> Any:
    return Field(None, description=f"a number of at least 0, or {{value, source, note}}: {what}")


class Parameters(_Section):
    """Numbers of parameters, in 10^9."""

    total_billion: Size = _number("all tensors of the checkpoint")
    trunk_billion: Size = _number("the text model without draft layers")
    active_billion: Size = _number("read for a token, one row of the embedding counted")


class ArchitectureSection(_Section):
    """Layers by kind, experts, context. `config` has what differs from the chemistry's defaults."""

    layers: int = _whole(1, 1024)
    kda_layers: int = _whole(0, 1024)
    sparse_mla_layers: int = _whole(0, 1024)
    indexer_layers: int = _whole(0, 1024, "layers with an indexer of their own")
    dense_mlp_layers: int = _whole(0, 1024)
    moe_layers: int = _whole(0, 1024)
    draft_layers: int = _whole(0, 64)
    vision_layers: int = _whole(0, 1024)
    hidden_size: int = _whole(1, 1 << 20)
    vocabulary_size: int = _whole(1, 1 << 24)
    experts_per_layer: int = _whole(1, 4096)
    experts_per_token: int = _whole(1, 64, "the router's top-k")
    shared_experts_per_layer: int = _whole(0, 64)
    context_tokens: int = _whole(1, (1 << 31) - 1)
    config: dict[str, Any] = Field(
        default_factory=dict, description="fields of config.json's text model that differ from the defaults"
    )
    vision_config: dict[str, Any] | None = Field(
        None, description="fields of vision_config that differ from the defaults; {} for all defaults"
    )


Format = Literal["f32", "bf16", "f16", "nvfp4", "nvfp4-packed", "fp8", "fp8-row", "mxfp8"]
Plain = Literal["f32", "bf16", "f16"]


class WeightFormats(_Section):
    """The format of each group; nvfp4 is ModelOpt's spelling, nvfp4-packed compressed-tensors'; fp8-row has a
    scale for each row, fp8 for blocks."""

    routed_experts: Format
    shared_experts: Format = "bf16"
    attention: Format = "bf16"
    dense_mlp: Format = "bf16"
    lm_head: Format = "bf16"
    routers: Plain = "bf16"
    hyper_connections: Plain = "bf16"
    small_tensors: Plain = "f32"
    convolution_taps: Plain = "bf16"
    draft_layer: Format = "bf16"
    draft_experts: Format | None = None
    draft_own_head: bool = False
    input_scales: bool = True
    shard_files: int = _whole(1, 100_000, "safetensors files")

    @property
    def scheme(self) -> Scheme:
        return Scheme(
            experts=self.routed_experts,
            shared=self.shared_experts,
            linear=self.attention,
            dense_mlp=self.dense_mlp,
            head=self.lm_head,
            router=self.routers,
            hyper=self.hyper_connections,
            small=self.small_tensors,
            taps=self.convolution_taps,
            draft=self.draft_layer,
            draft_experts=self.draft_experts,
            input_scale=self.input_scales,
        )


class Residency(_Section):
    """Where the bytes are and which of them a token reads. GiB are 2^30 bytes."""

    checkpoint_gib: Size = _number("all tensors on disk")
    resident_gib: Size = _number("weights of the trunk without routed experts")
    routed_experts_gib: Size = _number("all routed experts of the trunk")
    expert_slot_mib: Size = _number("one expert in a slot")
    draft_gib: Size | None = _optional("the draft layers")
    vision_gib: Size | None = _optional("the vision tower")
    single_token_routed_gib: Size = _number("routed experts that a token reads")
    single_token_active_gib: Size = _number("weights that a token reads, the whole embedding counted")
    single_token_touched_gib: Size = _number("weights that a token reads, one embedding row counted")


class ByDtype(_Section):
    """Bytes by the dtype of the state."""

    f32: Number | None = None
    bf16: Number | None = None
    fp8: Number | None = None


class ReusableState(_Section):
    """What a stream keeps between steps, and what a prefix cache can keep for it."""

    latent_kv_bytes_per_token: ByDtype
    pooled_indexer_keys_bytes_per_token: ByDtype
    unfinished_pool_bytes_per_stream: ByDtype | None = None
    kda_matrix_bytes_per_stream: ByDtype | None = None
    conv_tail_bytes_per_stream: ByDtype | None = None


def _is_booster(value: str) -> str:
    if value not in boosters.names():
        raise ValueError(f"expected one of {', '.join(boosters.names())}, found {value!r}")
    return value


class SingleStream(_Section):
    """The rate that memory bandwidth allows one stream when every weight lies in the boosters' memory."""

    booster: Annotated[str, AfterValidator(_is_booster)] = Field(
        description="a shipped booster's name", json_schema_extra={"enum": list(boosters.names())}
    )
    boosters: int = _whole(1, 1024)
    tok_per_s: Number = _number("read rate of the boosters through single_token_active_gib")


class ServingRegime(_Section):
    """How the fuel is meant to be run."""

    single_stream_reference: SingleStream
    note: str | None = None


# Of config's fields those whose size is work; any other number is at most _MOST.
_LIMITS = {
    "num_hidden_layers": 1024,
    "depth": 1024,
    "num_nextn_predict_layers": 64,
    "n_routed_experts": 4096,
    "n_shared_experts": 64,
}
_MOST = (1 << 31) - 1


def _bounded(config: dict[str, Any], where: str) -> None:
    for field, value in config.items():
        most = _LIMITS.get(field, _MOST)
        if isinstance(value, int | float) and not value <= most:
            raise ValueError(f"{where}.{field}: expected a number of at most {most}, found {value}")


def _known_config(section: ArchitectureSection, chemistry: str) -> None:
    known = config_fields(chemistry)
    for field in section.config:
        if field not in known:
            raise ValueError(
                f"architecture.config.{field}: unknown field; expected one of {', '.join(sorted(known))}"
            )
    _bounded(section.config, "architecture.config")
    _bounded(section.vision_config or {}, "architecture.vision_config")
    for field in section.vision_config or {}:
        if field not in VisionTower.__dataclass_fields__:
            allowed = ", ".join(VisionTower.__dataclass_fields__)
            raise ValueError(f"architecture.vision_config.{field}: unknown field; expected one of {allowed}")


def _is_id(value: str) -> str:
    if not re.fullmatch(_ID, value):
        raise ValueError(f"expected letters, digits, '.', '-' and '_', found {value!r}")
    return value


def _allowed_config(schema: dict[str, Any]) -> None:
    """Into the JSON schema: the fields of config that each chemistry knows."""
    schema["allOf"] = []
    for chemistry in CHEMISTRIES:
        allowed: dict[str, Any] = {"config": {"propertyNames": {"enum": sorted(config_fields(chemistry))}}}
        tower = {"propertyNames": {"enum": list(VisionTower.__dataclass_fields__)}}
        allowed["vision_config"] = tower if chemistry == GLM5_NEXT else {"type": "null"}
        condition = {"properties": {"chemistry": {"const": chemistry}}}
        consequence = {"properties": {"architecture": {"properties": allowed}}}
        schema["allOf"].append({"if": condition, "then": consequence})


class Manifest(_Section):
    """What is known of a fuel."""

    model_config = ConfigDict(json_schema_extra=_allowed_config)

    id: Annotated[str, AfterValidator(_is_id)] = Field(
        max_length=128,
        description="the fuel's name: letters, digits, '.', '-' and '_'",
        json_schema_extra={"pattern": _ID},
    )
    name: str = Field(description="as its makers call it")
    chemistry: Literal["glm5_next", "glm_moe_dsa"]
    source: str | None = Field(None, description="where the weights come from")
    note: str | None = None
    parameters: Parameters
    architecture: ArchitectureSection
    weight_formats: WeightFormats
    residency: Residency
    reusable_state: ReusableState
    serving_regime: ServingRegime

    @model_validator(mode="after")
    def _config_is_known(self) -> "Manifest":
        _known_config(self.architecture, self.chemistry)
        if self.architecture.vision_config is not None and self.chemistry != GLM5_NEXT:
            raise ValueError(f"architecture.vision_config: expected none for {self.chemistry}")
        try:
            _ = self.model
        except ConfigError as error:
            raise ValueError(f"architecture.{error}") from None
        return self

    @cached_property
    def model(self) -> Architecture:
        """The sizes that the manifest's config stands for."""
        vision = self.architecture.vision_config
        tower = VisionTower.of(vision) if vision is not None else None
        return from_fields(self.chemistry, self.architecture.config, "config.", tower)


@dataclass(frozen=True)
class ManifestFile:
    """A manifest and where it was read."""

    path: Path
    text: str
    manifest: Manifest


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Throws UsageError: field, value, what is allowed."""
    return validate(Manifest, parse_yaml(data, where), where, _HINT)


def read_manifest(path: Path, option: str = "manifest") -> ManifestFile:
    data = read_whole(str(path), option)
    manifest = parse_manifest(data, str(path))
    return ManifestFile(path, data.decode(), manifest)


def known_manifests() -> dict[str, Path]:
    """Name -> file of every manifest on the search path for fuels."""
    return {name: folder / MANIFEST for name, folder in folders_with(MANIFEST).items()}


def find_manifest(name: str) -> ManifestFile:
    """A manifest by name, file, or folder. Throws UsageError with what is known."""
    if not name or "\0" in name:
        raise UsageError(
            f"manifest {name!r}: expected a name, a file or a folder", "rocket fuel list has names"
        )
    path = Path(name)
    if path.exists() and not path.is_dir():
        return read_manifest(path)
    if path.is_dir():
        if has(path, MANIFEST):
            return read_manifest(path / MANIFEST)
        raise UsageError(f"{name}: expected a folder with a {MANIFEST}, found none in it", _HINT)
    known = known_manifests()
    if name in known:
        return read_manifest(known[name])
    listed = ", ".join(known) or "none"
    raise UsageError(
        f"manifest {name!r}: expected a name or a file, found neither", f"known manifests: {listed}"
    )


def json_schema() -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main(write: Callable[[str], Any] = print) -> None:
    write(json_schema().rstrip("\n"))


if __name__ == "__main__":
    main()

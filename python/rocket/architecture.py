"""The sizes of a model, from its config.json: what decides every tensor's shape and every stream's state.

Two chemistries are known. ``glm5_next`` (GLM-5.3-Flash) mixes KDA and sparse MLA layers and has
hyper-connections; its configs are read by the C++ module. ``glm_moe_dsa`` (GLM-5.3) is sparse MLA throughout,
with rotary positions and plain residuals. Fields are named as in config.json and default as in transformers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rocket.inputs import read_regular

GLM5_NEXT = "glm5_next"
GLM_MOE_DSA = "glm_moe_dsa"
CHEMISTRIES = (GLM5_NEXT, GLM_MOE_DSA)


class ConfigError(Exception):
    """A config cannot be understood. ``e.hint`` says what to do about it (may be empty)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


# Whole numbers and their defaults, for each chemistry.
_COMMON = {
    "vocab_size": 154880,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 0,
}
_DEFAULTS: dict[str, dict[str, int]] = {
    GLM5_NEXT: {
        **_COMMON,
        "hidden_size": 4096,
        "num_hidden_layers": 45,
        "max_position_embeddings": 1048576,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "index_kpool": 16,
        "linear_num_heads": 64,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "n_routed_experts": 288,
        "hc_mult": 4,
    },
    GLM_MOE_DSA: {
        **_COMMON,
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 256,
    },
}
_MAY_BE_ZERO = ("num_nextn_predict_layers", "qk_rope_head_dim")


@dataclass(frozen=True)
class VisionTower:
    """The image tower of glm5_next (fields of vision_config)."""

    depth: int = 24
    hidden_size: int = 1024
    num_heads: int = 16
    intermediate_size: int = 4096
    out_hidden_size: int = 4096  # the text model's hidden_size
    projection_intermediate_size: int = 10240
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    attention_bias: bool = True

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "VisionTower":
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})


@dataclass(frozen=True)
class Architecture:
    """Sizes and per-layer kinds of a model. Zero where a chemistry has no such part."""

    chemistry: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_head_dim: int
    index_n_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    is_kda: tuple[bool, ...]
    is_moe: tuple[bool, ...]
    indexer_full: tuple[bool, ...]
    index_kpool: int = 1
    index_kpool_always_select_tail: bool = False
    linear_num_heads: int = 0
    linear_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    hc_mult: int = 0
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    vision: VisionTower | None = None

    @property
    def kda_channels(self) -> int:
        return self.linear_num_heads * self.linear_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kda_layers(self) -> int:
        return sum(self.is_kda)

    @property
    def mla_layers(self) -> int:
        return self.num_hidden_layers - self.kda_layers

    @property
    def indexer_layers(self) -> int:
        """Layers with an indexer of their own."""
        return sum(full and not kda for full, kda in zip(self.indexer_full, self.is_kda, strict=True))

    @property
    def moe_layers(self) -> int:
        return sum(self.is_moe)

    @property
    def dense_layers(self) -> int:
        return self.num_hidden_layers - self.moe_layers

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        return tuple(i for i, moe in enumerate(self.is_moe) if moe)


def _whole(config: Mapping[str, Any], field: str, default: int, where: str) -> int:
    value = config.get(field, default)
    if value is None and field == "num_nextn_predict_layers":
        return 0
    low = 0 if field in _MAY_BE_ZERO else 1
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 31:
        raise ConfigError(f"{where}{field}: expected a whole number of at least {low}, found {value!r}")
    return value


def _flag(config: Mapping[str, Any], field: str, default: bool, where: str) -> bool:
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}{field}: expected true or false, found {value!r}")
    return value


def _kinds(
    config: Mapping[str, Any], field: str, layers: int, kinds: Mapping[str, bool], where: str
) -> tuple[bool, ...] | None:
    """A list with one entry a layer, as the booleans that the entries stand for."""
    value = config.get(field)
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != layers:
        found = f"{len(value)} entries" if isinstance(value, list) else repr(value)
        raise ConfigError(f"{where}{field}: expected {layers} entries (num_hidden_layers), found {found}")
    for i, kind in enumerate(value):
        if not isinstance(kind, str) or kind not in kinds:
            raise ConfigError(f"{where}{field}[{i}]: expected {' or '.join(kinds)}, found {kind!r}")
    return tuple(kinds[kind] for kind in value)


def _indexers(config: Mapping[str, Any], layers: int, where: str) -> tuple[bool, ...]:
    given = _kinds(config, "indexer_types", layers, {"full": True, "shared": False}, where)
    if given is not None:
        return given
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        letters = {"index_topk_pattern": list(pattern)}
        names = {"F": True, "S": False, "full": True, "shared": False}
        return _kinds(letters, "index_topk_pattern", layers, names, where) or ()
    every = max(_schedule(config, "index_topk_freq", 1, where), 1)
    offset = _schedule(config, "index_skip_topk_offset", 2, where)
    return tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))


def _schedule(config: Mapping[str, Any], field: str, default: int, where: str) -> int:
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}{field}: expected a whole number, found {value!r}")
    return value


_LAYER_TYPES = {
    "linear_attention": True,
    "full_attention": False,
    "indexed_attention": False,
    "deepseek_sparse_attention": False,
}


_LISTS = {
    GLM5_NEXT: ("layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern"),
    GLM_MOE_DSA: ("mlp_layer_types", "indexer_types", "index_topk_pattern"),
}
_SCHEDULES = ("first_k_dense_replace", "index_topk_freq", "index_skip_topk_offset")
_FLAGS = {
    GLM5_NEXT: ("tie_word_embeddings", "attention_bias", "index_kpool_always_select_tail"),
    GLM_MOE_DSA: ("tie_word_embeddings", "attention_bias"),
}


def config_fields(chemistry: str) -> tuple[str, ...]:
    """The fields of a config that from_fields looks at."""
    return (*_DEFAULTS[chemistry], *_LISTS[chemistry], *_SCHEDULES, *_FLAGS[chemistry])


def from_fields(
    chemistry: str, config: Mapping[str, Any], where: str = "config: ", vision: VisionTower | None = None
) -> Architecture:
    """From the fields of a text config (a config.json's own, or its text_config). Throws ConfigError."""
    if chemistry not in CHEMISTRIES:
        raise ConfigError(
            f"{where}model_type: expected {' or '.join(CHEMISTRIES)}, found {chemistry!r}",
            f"known chemistries: {', '.join(CHEMISTRIES)}",
        )
    numbers = {
        field: _whole(config, field, default, where) for field, default in _DEFAULTS[chemistry].items()
    }
    layers = numbers["num_hidden_layers"]
    moe = _kinds(config, "mlp_layer_types", layers, {"sparse": True, "dense": False}, where)
    if moe is None:
        dense = _schedule(config, "first_k_dense_replace", 3, where)
        moe = tuple(i >= dense for i in range(layers))
    kda = (False,) * layers
    tail = False
    if chemistry == GLM5_NEXT:
        given = _kinds(config, "layer_types", layers, _LAYER_TYPES, where)
        kda = given if given is not None else tuple(i % 4 != 3 for i in range(layers))
        tail = _flag(config, "index_kpool_always_select_tail", True, where)
    _check(numbers, where)
    return Architecture(
        chemistry=chemistry,
        is_kda=kda,
        is_moe=moe,
        indexer_full=_indexers(config, layers, where),
        index_kpool_always_select_tail=tail,
        tie_word_embeddings=_flag(config, "tie_word_embeddings", False, where),
        attention_bias=_flag(config, "attention_bias", False, where),
        vision=vision,
        **numbers,
    )


def _check(numbers: Mapping[str, int], where: str) -> None:
    experts, chosen = numbers["n_routed_experts"], numbers["num_experts_per_tok"]
    if chosen > experts:
        raise ConfigError(
            f"{where}num_experts_per_tok: expected at most n_routed_experts ({experts}), found {chosen}"
        )
    if numbers["index_topk"] % numbers.get("index_kpool", 1):
        raise ConfigError(
            f"{where}index_topk: expected a multiple of index_kpool ({numbers['index_kpool']}), "
            f"found {numbers['index_topk']}"
        )


def to_fields(arch: Architecture) -> dict[str, Any]:
    """The text config that from_fields reads as this architecture."""
    fields: dict[str, Any] = {name: getattr(arch, name) for name in _DEFAULTS[arch.chemistry]}
    fields |= {name: getattr(arch, name) for name in _FLAGS[arch.chemistry]}
    fields["num_key_value_heads"] = arch.num_attention_heads
    fields["mlp_layer_types"] = ["sparse" if moe else "dense" for moe in arch.is_moe]
    fields["indexer_types"] = ["full" if full else "shared" for full in arch.indexer_full]
    if arch.chemistry == GLM5_NEXT:
        names = ("linear_attention", "deepseek_sparse_attention")
        fields["layer_types"] = [names[0] if kda else names[1] for kda in arch.is_kda]
    return fields


def to_config(arch: Architecture) -> dict[str, Any]:
    """A config.json of this architecture."""
    if arch.chemistry == GLM_MOE_DSA:
        return {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": GLM_MOE_DSA, **to_fields(arch)}
    text = {"model_type": "glm5_next_text", **to_fields(arch)}
    config = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": GLM5_NEXT,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "text_config": text,
    }
    if arch.vision is not None:
        config["vision_config"] = {"model_type": "glm5_next_vision", **asdict(arch.vision)}
    return config


def from_core(fields: Mapping[str, Any], vision: Mapping[str, Any] | None = None) -> Architecture:
    """From what _core.read_config gives for a glm5_next fuel."""
    known = Architecture.__dataclass_fields__
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items() if k in known}
    tower = VisionTower.of(vision) if vision is not None else None
    return Architecture(chemistry=GLM5_NEXT, vision=tower, **values)


def read_architecture(folder: str | Path) -> Architecture:
    """From the config.json of a fuel on disk. Throws ConfigError, or the C++ module's FuelError."""
    from rocket import _core

    file = Path(folder) / "config.json"
    try:
        config = json.loads(read_regular(file))
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}", "give the folder that holds a fuel's config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file}: broken JSON: {error}", "download the file again") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind == GLM_MOE_DSA:
        return from_fields(GLM_MOE_DSA, config, f"{file}: ")
    if kind is not None and kind not in (GLM5_NEXT, f"{GLM5_NEXT}_text"):
        known = f"{GLM5_NEXT}, {GLM5_NEXT}_text or {GLM_MOE_DSA}"
        raise ConfigError(f"{file}: model_type: expected {known}, found {kind!r}", "give a fuel of these")
    # The C++ reader refuses every other type, and checks these configs as the engine does.
    fields = _core.read_config(str(folder))
    vision = config.get("vision_config")
    return from_core(fields, vision if isinstance(vision, dict) else None)

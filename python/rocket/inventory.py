"""Every tensor of a model: its name, shape, dtype, and what it is for.

``parameters`` lists what an architecture has, whatever the format on disk; ``encode`` says which tensors of a
safetensors file one of them becomes in a weight format; ``classify`` tells from a tensor's name in a real
checkpoint which bucket its bytes count in.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod
from typing import NamedTuple

from rocket.architecture import GLM_MOE_DSA, Architecture, VisionTower

DTYPE_BYTES = {
    **{"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2},
    **{"U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


class Bucket(str, Enum):
    """What a tensor's bytes count as."""

    EMBED = "embed"
    HEAD = "lm_head"
    KDA = "kda"
    MLA = "mla"
    DENSE_MLP = "dense_mlp"
    SHARED = "shared_experts"
    SMALL = "small"  # routers, hyper-connections, norms
    EXPERTS = "experts"
    DRAFT = "draft"  # a draft layer without its routed experts
    DRAFT_EXPERTS = "draft_experts"
    VISION = "vision"
    UNUSED = "unused"  # scales of activations: weights alone are quantised here
    OTHER = "other"


class Kind(Enum):
    """How a parameter is spelled on disk and what may be done to it."""

    EMBEDDING = "embedding"  # NAME.weight
    LINEAR = "linear"  # NAME.weight, in any weight format
    ROUTER = "router"  # NAME.weight, plain
    HYPER = "hyper"  # the bare name: matrices of the hyper-connections
    MATRIX = "matrix"  # the bare name
    NORM = "norm"  # the bare name; one number a channel
    SMALL = "small"  # the bare name; F32 in most releases, BF16 in some
    TAPS = "taps"  # the bare name; BF16 in most releases, F32 in some


class TensorInfo(NamedTuple):
    """One tensor as a safetensors header has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model; a linear's shape is [out, in]."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    bucket: Bucket
    layer: int = -1
    expert: int = -1


@dataclass(frozen=True)
class Naming:
    """Where the text model's tensors are: "layers.0…" follows `trunk`, "lm_head.weight" follows `head`."""

    trunk: str = "model."
    head: str = ""
    vision: str = "model.visual."

    @cached_property
    def layer_pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.trunk) + r"layers\.(\d+)\.(.+)")


NESTED = Naming("model.language_model.")
FLAT = Naming("model.")
_NAMINGS = (NESTED, Naming("language_model.model.", "language_model."), FLAT, Naming(""))
_VISION = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|vision_encoder|vision_projector|vit|image_newline"
    r"|multi_modal_projector|mm_projector)(\.|$)"
)
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")
_UNUSED = (".input_scale", ".input_global_scale")


def default_naming(arch: Architecture) -> Naming:
    """As the releases of a chemistry spell their names."""
    return FLAT if arch.chemistry == GLM_MOE_DSA else NESTED


def detect_naming(names: list[str]) -> Naming:
    """The naming of a checkpoint, by the first that fits any layer's tensor."""
    for naming in _NAMINGS:
        if any(naming.layer_pattern.match(name) for name in names):
            return naming
    return FLAT


class Place(NamedTuple):
    bucket: Bucket
    layer: int = -1
    expert: int = -1


def classify(name: str, arch: Architecture, naming: Naming) -> Place:
    """The bucket of a checkpoint's tensor, with its layer and expert where it belongs to one."""
    if name.endswith(_UNUSED):
        return Place(Bucket.UNUSED)
    if _VISION.match(name):
        return Place(Bucket.VISION)
    match = naming.layer_pattern.match(name)
    if match:
        return _classify_in_layer(match[2], int(match[1]), arch)
    if name.startswith(naming.head + "lm_head."):
        return Place(Bucket.HEAD)
    if name.startswith(naming.trunk + "embed_tokens."):
        return Place(Bucket.EMBED)
    return Place(Bucket.SMALL if name.startswith(naming.trunk + "norm.") else Bucket.OTHER)


def _classify_in_layer(rest: str, layer: int, arch: Architecture) -> Place:
    expert = _EXPERT.match(rest)
    number = int(expert[1]) if expert else -1
    routed = rest.startswith("mlp.experts.")
    if layer >= arch.num_hidden_layers:
        return Place(Bucket.DRAFT_EXPERTS if routed else Bucket.DRAFT, layer, number)
    if routed:
        return Place(Bucket.EXPERTS, layer, number)
    if rest.startswith("mlp.shared_experts."):
        return Place(Bucket.SHARED, layer)
    if rest.startswith("self_attn."):
        return Place(Bucket.KDA if arch.is_kda[layer] else Bucket.MLA, layer)
    if rest.startswith("mlp.") and not rest.startswith("mlp.gate."):
        return Place(Bucket.DENSE_MLP, layer)
    return Place(Bucket.SMALL, layer)


# --- what a model has -------------------------------------------------------------------------------------


class _Walk:
    """Lists parameters in the order in which data flows."""

    def __init__(self, arch: Architecture, naming: Naming, experts: int) -> None:
        self.arch = arch
        self.naming = naming
        self.experts = experts  # of each MoE layer to list
        self.found: list[Parameter] = []

    def add(self, name: str, shape: tuple[int, ...], kind: Kind) -> None:
        # The bucket is the one that a reader of the file would find.
        place = classify(name + ".weight", self.arch, self.naming)
        self.found.append(Parameter(name, shape, kind, *place))

    def linear(self, name: str, out: int, inp: int) -> None:
        self.add(name, (out, inp), Kind.LINEAR)

    def norm(self, name: str, width: int) -> None:
        self.add(name + ".weight", (width,), Kind.NORM)

    def small(self, name: str, *shape: int) -> None:
        self.add(name, shape, Kind.SMALL)

    def mlp(self, name: str, width: int) -> None:
        h = self.arch.hidden_size
        self.linear(name + ".gate_proj", width, h)
        self.linear(name + ".up_proj", width, h)
        self.linear(name + ".down_proj", h, width)

    def moe(self, layer: str) -> None:
        a = self.arch
        self.add(layer + "mlp.gate", (a.n_routed_experts, a.hidden_size), Kind.ROUTER)
        self.small(layer + "mlp.gate.e_score_correction_bias", a.n_routed_experts)
        for e in range(self.experts):
            self.mlp(f"{layer}mlp.experts.{e}", a.moe_intermediate_size)
        self.mlp(layer + "mlp.shared_experts", a.moe_intermediate_size * a.n_shared_experts)

    def kda(self, name: str) -> None:
        a = self.arch
        h, d, c = a.hidden_size, a.linear_head_dim, a.kda_channels
        for part in "qkv":
            self.linear(f"{name}{part}_proj", c, h)
        for part in "qkv":
            self.add(f"{name}{part}_conv1d.weight", (c, 1, a.linear_conv_kernel_dim), Kind.TAPS)
        for part in "fg":
            self.linear(f"{name}{part}_a_proj", d, h)
            self.linear(f"{name}{part}_b_proj", c, d)
        self.linear(name + "b_proj", a.linear_num_heads, h)
        self.small(name + "dt_bias", c)
        self.small(name + "A_log", a.linear_num_heads)
        self.norm(name + "o_norm", d)
        self.linear(name + "o_proj", h, c)

    def mla(self, name: str, indexer: bool) -> None:
        a = self.arch
        h, heads, rope = a.hidden_size, a.num_attention_heads, a.qk_rope_head_dim
        self.linear(name + "q_a_proj", a.q_lora_rank, h)
        self.norm(name + "q_a_layernorm", a.q_lora_rank)
        self.linear(name + "q_b_proj", heads * a.qk_head_dim, a.q_lora_rank)
        self.linear(name + "kv_a_proj_with_mqa", a.kv_lora_rank + rope, h)
        self.norm(name + "kv_a_layernorm", a.kv_lora_rank)
        self.linear(name + "kv_b_proj", heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
        self.linear(name + "o_proj", h, heads * a.v_head_dim)
        if a.attention_bias:
            for part, width in (
                ("q_a_proj", a.q_lora_rank),
                ("kv_a_proj_with_mqa", a.kv_lora_rank + rope),
                ("o_proj", h),
            ):
                self.add(f"{name}{part}.bias", (width,), Kind.NORM)
        if indexer:
            self.indexer(name + "indexer.")

    def indexer(self, name: str) -> None:
        a = self.arch
        h, d = a.hidden_size, a.index_head_dim
        self.linear(name + "wq_b", a.index_n_heads * d, a.q_lora_rank)
        self.linear(name + "wk", d, h)
        self.norm(name + "k_norm", d)
        self.add(name + "k_norm.bias", (d,), Kind.NORM)
        self.linear(name + "weights_proj", a.index_n_heads, h)
        if a.chemistry != GLM_MOE_DSA:
            self.add(name + "index_kpool_compress_ape", (a.index_kpool, d), Kind.TAPS)
            self.add(name + "index_kpool_compress_gate", (d, h), Kind.MATRIX)

    def hyper(self, name: str) -> None:
        n = self.arch.hc_mult
        if not n:
            return
        rows = (2 + n) * n
        self.add(name + "_fn", (rows, n * self.arch.hidden_size), Kind.HYPER)
        self.small(name + "_base", rows)
        self.small(name + "_scale", 3)

    def trunk_layer(self, i: int) -> None:
        a, layer = self.arch, f"{self.naming.trunk}layers.{i}."
        self.hyper(layer + "hc_attn")
        self.norm(layer + "input_layernorm", a.hidden_size)
        if a.is_kda[i]:
            self.kda(layer + "self_attn.")
        else:
            self.mla(layer + "self_attn.", a.indexer_full[i])
        self.hyper(layer + "hc_ffn")
        self.norm(layer + "post_attention_layernorm", a.hidden_size)
        if a.is_moe[i]:
            self.moe(layer)
        else:
            self.mlp(layer + "mlp", a.intermediate_size)

    def draft_layer(self, i: int, own_head: bool) -> None:
        a, layer = self.arch, f"{self.naming.trunk}layers.{i}."
        self.norm(layer + "enorm", a.hidden_size)
        self.norm(layer + "hnorm", a.hidden_size)
        self.linear(layer + "eh_proj", a.hidden_size, 2 * a.hidden_size)
        self.norm(layer + "input_layernorm", a.hidden_size)
        self.mla(layer + "self_attn.", True)
        self.norm(layer + "post_attention_layernorm", a.hidden_size)
        self.moe(layer)
        self.norm(layer + "shared_head.norm", a.hidden_size)
        if own_head:
            self.linear(layer + "shared_head.head", a.vocab_size, a.hidden_size)
            self.add(layer + "embed_tokens", (a.vocab_size, a.hidden_size), Kind.EMBEDDING)

    def vision_linear(self, name: str, out: int, inp: int, bias: bool) -> None:
        self.add(name + ".weight", (out, inp), Kind.MATRIX)
        if bias:
            self.add(name + ".bias", (out,), Kind.NORM)

    def vision(self, v: VisionTower) -> None:
        name, width, inner = self.naming.vision, v.hidden_size, v.intermediate_size
        patch = (v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
        self.add(name + "patch_embed.proj.weight", (width, *patch), Kind.MATRIX)
        self.add(name + "patch_embed.proj.bias", (width,), Kind.NORM)
        for i in range(v.depth):
            block = f"{name}blocks.{i}."
            self.norm(block + "norm1", width)
            self.vision_linear(block + "attn.qkv", 3 * width, width, v.attention_bias)
            self.vision_linear(block + "attn.proj", width, width, v.attention_bias)
            for part in ("q_norm", "k_norm"):
                self.norm(f"{block}attn.{part}", width // v.num_heads)
            self.norm(block + "norm2", width)
            self.vision_linear(block + "mlp.gate_proj", inner, width, v.attention_bias)
            self.vision_linear(block + "mlp.up_proj", inner, width, v.attention_bias)
            self.vision_linear(block + "mlp.down_proj", width, inner, v.attention_bias)
        self.norm(name + "post_layernorm", width)
        merge, out, context = v.spatial_merge_size, v.out_hidden_size, v.projection_intermediate_size
        self.add(name + "downsample.weight", (out, width, merge, merge), Kind.MATRIX)
        self.add(name + "downsample.bias", (out,), Kind.NORM)
        self.vision_linear(name + "merger.proj", out, out, False)
        self.norm(name + "merger.post_projection_norm", out)
        self.add(name + "merger.post_projection_norm.bias", (out,), Kind.NORM)
        self.vision_linear(name + "merger.gate_proj", context, out, False)
        self.vision_linear(name + "merger.up_proj", context, out, False)
        self.vision_linear(name + "merger.down_proj", out, context, False)


def parameters(
    arch: Architecture,
    naming: Naming | None = None,
    *,
    drafts: int | None = None,
    draft_own_head: bool = False,
    experts: int | None = None,
) -> list[Parameter]:
    """Every parameter of a model. `drafts`: draft layers, by default as many as the config announces.

    `experts`: list only so many of each MoE layer; all have the same shapes.
    """
    walk = _Walk(arch, naming or default_naming(arch), arch.n_routed_experts if experts is None else experts)
    name = walk.naming.trunk
    walk.add(name + "embed_tokens", (arch.vocab_size, arch.hidden_size), Kind.EMBEDDING)
    for i in range(arch.num_hidden_layers):
        walk.trunk_layer(i)
    for i in range(arch.num_nextn_predict_layers if drafts is None else drafts):
        walk.draft_layer(arch.num_hidden_layers + i, draft_own_head)
    walk.norm(name + "norm", arch.hidden_size)
    if not arch.tie_word_embeddings:
        walk.linear(walk.naming.head + "lm_head", arch.vocab_size, arch.hidden_size)
    if arch.vision is not None:
        walk.vision(arch.vision)
    return walk.found


# --- how it lies on disk ----------------------------------------------------------------------------------

PLAIN_FORMATS = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
QUANTISED_FORMATS = ("nvfp4", "nvfp4-packed", "fp8", "fp8-row", "mxfp8")
FORMATS = (*PLAIN_FORMATS, *QUANTISED_FORMATS)
# Other spellings of FP8 that the engine reads: block scales in BF16, block scales as compressed-tensors and
# ModelOpt name them, and one scale for the whole weight.
FP8_SPELLINGS = ("fp8-bf16-scales", "fp8-packed", "fp8-modelopt", "fp8-tensor")
# Columns that share a scale; a weight with another number of columns cannot have the format.
FORMAT_COLUMNS = {"nvfp4": 16, "nvfp4-packed": 16, "mxfp8": 32}


@dataclass(frozen=True)
class Scheme:
    """The weight format of each group of parameters. A group that is None goes with `linear` or `experts`."""

    experts: str = "nvfp4"  # FORMATS; nvfp4 is ModelOpt's spelling, nvfp4-packed compressed-tensors'
    linear: str = "bf16"
    shared: str | None = None
    dense_mlp: str | None = None
    draft: str | None = None
    draft_experts: str | None = None
    head: str = "bf16"
    router: str = "bf16"
    hyper: str = "bf16"
    small: str = "f32"
    taps: str = "bf16"
    input_scale: bool = True

    def format_of(self, p: Parameter) -> str:
        by_kind = {
            Kind.ROUTER: self.router,
            Kind.HYPER: self.hyper,
            Kind.SMALL: self.small,
            Kind.TAPS: self.taps,
        }
        if p.kind is not Kind.LINEAR:
            return by_kind.get(p.kind, "bf16")
        by_bucket = {
            Bucket.EXPERTS: self.experts,
            Bucket.DRAFT_EXPERTS: self.draft_experts or self.experts,
            Bucket.DRAFT: self.draft or self.linear,
            Bucket.SHARED: self.shared or self.linear,
            Bucket.DENSE_MLP: self.dense_mlp or self.linear,
            Bucket.HEAD: self.head,
        }
        return by_bucket.get(p.bucket, self.linear)


def encode(
    p: Parameter, weight_format: str, *, input_scale: bool = True, scalar: tuple[int, ...] = ()
) -> list[TensorInfo]:
    """The tensors on disk of one parameter in a weight format (FORMATS or FP8_SPELLINGS)."""
    named = p.kind in (Kind.LINEAR, Kind.ROUTER, Kind.EMBEDDING)
    if weight_format in PLAIN_FORMATS:
        return [TensorInfo(p.name + ".weight" * named, PLAIN_FORMATS[weight_format], p.shape)]
    out, inp = p.shape
    name = p.name
    if weight_format in ("nvfp4", "nvfp4-packed"):
        packed = weight_format == "nvfp4-packed"
        tensors = [
            TensorInfo(name + (".weight_packed" if packed else ".weight"), "U8", (out, inp // 2)),
            TensorInfo(name + ".weight_scale", "F8_E4M3", (out, inp // 16)),
            TensorInfo(name + (".weight_global_scale" if packed else ".weight_scale_2"), "F32", scalar),
        ]
        if input_scale and not packed:
            tensors.append(TensorInfo(name + ".input_scale", "F32", scalar))
        return tensors
    weight = TensorInfo(name + ".weight", "F8_E4M3", (out, inp))
    if weight_format == "mxfp8":
        return [weight, TensorInfo(name + ".weight_scale", "U8", (out, inp // 32))]
    blocks = (-(-out // 128), -(-inp // 128))
    if weight_format in ("fp8", "fp8-bf16-scales"):
        dtype = "F32" if weight_format == "fp8" else "BF16"
        return [weight, TensorInfo(name + ".weight_scale_inv", dtype, blocks)]
    if weight_format == "fp8-packed":
        return [weight, TensorInfo(name + ".weight_scale", "BF16", blocks)]
    if weight_format == "fp8-modelopt":
        return [weight, TensorInfo(name + ".weight_scale", "F32", (blocks[0], 1, blocks[1], 1))]
    if weight_format == "fp8-row":
        return [weight, TensorInfo(name + ".weight_scale", "BF16", (out, 1))]
    if weight_format == "fp8-tensor":
        tensors = [weight, TensorInfo(name + ".weight_scale", "F32", scalar)]
        return [*tensors, TensorInfo(name + ".input_scale", "F32", scalar)] if input_scale else tensors
    raise ValueError(f"weight format: expected one of {', '.join(FORMATS)}, found {weight_format!r}")


def tensors(found: list[Parameter], scheme: Scheme) -> Iterator[TensorInfo]:
    """The tensors on disk of a list of parameters."""
    for p in found:
        yield from encode(p, scheme.format_of(p), input_scale=scheme.input_scale)

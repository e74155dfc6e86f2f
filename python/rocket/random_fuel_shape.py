"""What a random fuel may look like: the architecture's sizes, the spellings on disk, and presets."""

import dataclasses
from typing import ClassVar


class RandomFuelError(Exception):
    """A random fuel cannot be made as asked. ``e.hint`` says what to do about it (may be empty)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclasses.dataclass(frozen=True)
class Shape:
    """The fields of a glm5_next text config, named as in config.json; patterns for its per-layer lists."""

    vocab_size: int = 1024
    hidden_size: int = 64
    intermediate_size: int = 96
    moe_intermediate_size: int = 32
    num_hidden_layers: int = 8
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    num_attention_heads: int = 4
    q_lora_rank: int = 48
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 24
    v_head_dim: int = 16

    index_topk: int = 32
    index_head_dim: int = 16
    index_n_heads: int = 4
    index_kpool: int = 4
    index_kpool_always_select_tail: bool = True

    linear_num_heads: int = 4
    linear_head_dim: int = 16
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float | None = -5.0

    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    swiglu_limit: float = 10.0

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    attention_pattern: str = ""  # a letter a layer: K = KDA, M = sparse MLA; "" = every fourth is MLA
    mlp_pattern: str = ""  # D = dense, S = sparse (experts); "" = the first three are dense
    indexer_pattern: str = ""  # F = full, S = shared; "" = all full

    def is_kda(self, layer: int) -> bool:
        return self.attention_pattern[layer] == "K" if self.attention_pattern else layer % 4 != 3

    def is_moe(self, layer: int) -> bool:
        return self.mlp_pattern[layer] == "S" if self.mlp_pattern else layer >= 3

    def indexer_full(self, layer: int) -> bool:
        return self.indexer_pattern[layer] == "F" if self.indexer_pattern else True

    def check(self) -> None:
        """Raises RandomFuelError for a shape that no model can have."""
        self._check_numbers()
        self._check_patterns()
        self._check_router()

    def _check_numbers(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise RandomFuelError(f"{field.name} is {value}; it must be at least 1")
        for name, step, why in (
            ("hidden_size", 16, "NVFP4 scales cover 16 columns"),
            ("moe_intermediate_size", 16, "NVFP4 scales cover 16 columns"),
            ("linear_head_dim", 8, "KDA works on 8 channels at a time"),
            ("index_topk", self.index_kpool, "whole pools are chosen"),
        ):
            if getattr(self, name) % step:
                raise RandomFuelError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of {step}: {why}"
                )
        if self.linear_head_dim > 256:
            raise RandomFuelError(f"linear_head_dim is {self.linear_head_dim}; it must be at most 256")
        if not 2 <= self.linear_conv_kernel_dim <= 8:
            raise RandomFuelError(
                f"linear_conv_kernel_dim is {self.linear_conv_kernel_dim}; it must be 2 to 8"
            )

    def _check_patterns(self) -> None:
        for name, letters in (("attention_pattern", "KM"), ("mlp_pattern", "DS"), ("indexer_pattern", "FS")):
            pattern = getattr(self, name)
            if not pattern:
                continue
            if len(pattern) != self.num_hidden_layers:
                raise RandomFuelError(
                    f"{name} has {len(pattern)} letters for {self.num_hidden_layers} layers"
                )
            if set(pattern) - set(letters):
                raise RandomFuelError(
                    f"{name} is {pattern}; only the letters {' and '.join(letters)} may occur"
                )
        for i in range(self.num_hidden_layers):
            if (
                not self.is_kda(i)
                and not self.indexer_full(i)
                and (i == 0 or self.is_kda(i - 1) or not self.indexer_full(i - 1))
            ):
                raise RandomFuelError(
                    f"layer {i} shares an indexer, but layer {i - 1} is no sparse MLA layer with its own"
                )

    def _check_router(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups:
            raise RandomFuelError(f"{experts} experts do not fall into {groups} groups of one size")
        if self.topk_group > groups:
            raise RandomFuelError(f"topk_group is {self.topk_group}, but there are only {groups} groups")
        if experts // groups < 2:
            raise RandomFuelError(
                f"a group needs at least 2 experts; {experts} experts in {groups} groups are too few"
            )
        if self.num_experts_per_tok > experts // groups * self.topk_group:
            raise RandomFuelError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, but only "
                f"{experts // groups * self.topk_group} experts may compete"
            )


PATCHES = (  # the formats of a patchwork
    *("bf16", "f16", "f32", "nvfp4", "nvfp4-packed"),
    *("fp8", "fp8-bf16-scales", "fp8-packed", "fp8-modelopt", "fp8-tensor", "mxfp8"),
)
LINEAR_FORMATS = (*PATCHES, "fp8-row")


@dataclasses.dataclass(frozen=True)
class FuelOptions:
    """A shape, a seed, and how the fuel is spelled on disk."""

    shape: Shape
    seed: int = 0
    experts: str = "modelopt"  # modelopt, compressed-tensors (both NVFP4), or one of LINEAR_FORMATS
    bf16_expert_layers: tuple[int, ...] = ()  # layers whose experts are BF16 whatever the config says
    fp8_expert_layers: tuple[int, ...] = ()  # the same, FP8 in blocks (beside ModelOpt's, in its spelling)
    # The other linear weights. A weight whose columns a format does not divide stays BF16, as quantisers do.
    attention: str = "bf16"
    dense_mlp: str = "bf16"
    shared: str = "bf16"
    head: str = "bf16"
    embedding: str = "bf16"
    draft_weights: str = "auto"  # auto: experts as the trunk's, the rest BF16
    patchwork: bool = False  # every linear weight in a format of its own, whatever is said above
    mx_scales: str = "U8"  # U8 | F8_E8M0: how the header names MXFP8's scales
    quantization: str = "auto"  # auto | config | hf: config.json, or hf_quant_config.json alone
    ignore_prefix: str = "own"  # own | nested | flat: names in the config's lists of modules
    small: str = "F32"  # F32 | BF16 | mixed: hc base and scale, A_log, dt_bias, router bias, ape, conv taps
    wide: str = "BF16"  # F32 | BF16: router and hyper-connection matrices
    scalars: str = "auto"  # empty | one | auto: shape of NVFP4 global scales, [] or [1]
    input_scale: bool = True  # ModelOpt: write input_scale (weight-only engines do not use it)
    router_bias: float = 0.1  # standard deviation; with hundreds of experts it decides alone who is chosen
    zero_global: bool = False  # expert 0 of each layer gets a down projection with global scale 0
    layout: str = "nested"  # nested (text_config) | flat | text (model_type glm5_next_text)
    layer_type_names: str = "release"  # release | transformers | full | absent
    linear_config: str = "nested"  # nested (linear_attn_config) | flat (linear_* fields)
    files: int = 1
    index: bool = True  # with more than one file: write model.safetensors.index.json
    unaligned: bool = False  # tensors start at odd file offsets
    draft: str = "none"  # none | layer | own-head (with a head and an embedding of its own)
    vision: bool = False
    tokenizer: bool = True

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "experts": ("modelopt", "compressed-tensors", *LINEAR_FORMATS),
        "attention": LINEAR_FORMATS,
        "dense_mlp": LINEAR_FORMATS,
        "shared": LINEAR_FORMATS,
        "head": LINEAR_FORMATS,
        "embedding": LINEAR_FORMATS,
        "draft_weights": ("auto", *LINEAR_FORMATS),
        "mx_scales": ("U8", "F8_E8M0"),
        "quantization": ("auto", "config", "hf"),
        "ignore_prefix": ("own", "nested", "flat"),
        "small": ("F32", "BF16", "mixed"),
        "wide": ("F32", "BF16"),
        "scalars": ("auto", "empty", "one"),
        "layout": ("nested", "flat", "text"),
        "layer_type_names": ("release", "transformers", "full", "absent"),
        "linear_config": ("nested", "flat"),
        "draft": ("none", "layer", "own-head"),
    }

    def check(self) -> None:
        """Raises RandomFuelError for options that cannot be."""
        for name, choices in self.CHOICES.items():
            if getattr(self, name) not in choices:
                raise RandomFuelError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}"
                )
        self.shape.check()
        if not 0 <= self.seed < 1 << 63:
            raise RandomFuelError(f"seed is {self.seed}; it must be 0 to 2^63 - 1")
        if not 0 <= self.router_bias <= 10:
            raise RandomFuelError(f"router_bias is {self.router_bias}; it must be 0 to 10")
        if self.files < 1:
            raise RandomFuelError(f"files is {self.files}; it must be at least 1")
        if self.layer_type_names == "absent" and self.shape.attention_pattern:
            raise RandomFuelError("layer_types cannot be absent when an attention pattern is given")
        layers = self.shape.num_hidden_layers + (self.draft != "none")
        for name in ("bf16_expert_layers", "fp8_expert_layers"):
            for i in getattr(self, name):
                if not 0 <= i < layers:
                    raise RandomFuelError(f"{name} names layer {i}; there are {layers} layers")


# About a 1.07 B-parameter model, for benchmarks on a CPU: GLM-5.3-Flash's shapes scaled down.
BENCH = Shape(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=3584,
    moe_intermediate_size=512,
    num_hidden_layers=12,
    max_position_embeddings=131072,
    num_attention_heads=16,
    q_lora_rank=384,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    v_head_dim=64,
    index_topk=2048,
    index_head_dim=128,
    index_n_heads=8,
    linear_num_heads=8,
    linear_head_dim=128,
    n_routed_experts=64,
    num_experts_per_tok=8,
)

# Layers 0 to 7 of GLM-5.3-Flash at its real shapes: 3 dense, 5 with experts.
FLASH_SLICE = Shape(
    vocab_size=154880,
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    num_hidden_layers=8,
    max_position_embeddings=1048576,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=256,
    v_head_dim=256,
    index_topk=2048,
    index_head_dim=128,
    index_n_heads=32,
    linear_num_heads=64,
    linear_head_dim=128,
    n_routed_experts=288,
    num_experts_per_tok=8,
)

PRESETS: dict[str, FuelOptions] = {
    "tiny": FuelOptions(Shape()),
    "bench": FuelOptions(BENCH),
    "flash-slice": FuelOptions(FLASH_SLICE, files=8, router_bias=0.005),
}

_ALL_FP8 = {"attention": "fp8", "dense_mlp": "fp8", "shared": "fp8"}
# What releases look like: options to put over a preset.
VARIANTS: dict[str, dict[str, object]] = {
    # ModelOpt, NVFP4 experts only; hf_quant_config.json alone, its lists in the other prefix.
    "modelopt": {"quantization": "hf", "ignore_prefix": "flat", "draft": "layer", "draft_weights": "bf16"},
    # ModelOpt, the dense MLPs as well, with static input scales.
    "modelopt-dense": {"dense_mlp": "nvfp4", "scalars": "one", "draft": "layer"},
    "compressed-tensors": {"experts": "compressed-tensors", "scalars": "empty", "small": "BF16"},
    "fp8": {"experts": "fp8", **_ALL_FP8, "draft": "layer", "draft_weights": "fp8"},
    # compressed-tensors, a scale for each row of every linear weight.
    "fp8-rows": {"experts": "fp8-row", "attention": "fp8-row", "dense_mlp": "fp8-row", "shared": "fp8-row"},
    # One algorithm a module: NVFP4 experts and dense MLPs, FP8 with one scale for the rest.
    "mixed-layers": {
        "attention": "fp8-tensor",
        "dense_mlp": "nvfp4",
        "shared": "fp8-tensor",
        "fp8_expert_layers": (4,),
        "input_scale": False,
        "draft": "own-head",
        "draft_weights": "nvfp4",
    },
    # Several groups: NVFP4 experts, FP8 in blocks for the rest.
    "mixed-groups": {
        "experts": "compressed-tensors",
        "attention": "fp8-packed",
        "dense_mlp": "nvfp4-packed",
        "shared": "fp8-packed",
        "bf16_expert_layers": (3,),
        "small": "mixed",
        "layout": "flat",
        "ignore_prefix": "nested",
    },
    "mxfp8": {"experts": "mxfp8", "attention": "mxfp8", "dense_mlp": "mxfp8", "shared": "mxfp8"},
    "bf16": {"experts": "bf16", "small": "BF16", "draft": "layer"},
    # Every linear weight in a format of its own; nothing that a release would do, but all that one might.
    "patchwork": {"patchwork": True, "mx_scales": "F8_E8M0", "unaligned": True, "draft": "own-head"},
}

"""Which weight format each part of a checkpoint is in, and what the engine makes of it when it loads.

The rule of the engine: a linear weight stays in its format (F32, BF16, NVFP4, FP8 in blocks, MXFP8), F16 and
FP8 with a scale for each row become F32, and experts are used where they lie in the file. The embedding,
kv_b_proj and the hyper-connections' matrices are taken apart when used, so they get an expanded copy in F32
if quantised. All small tensors become F32.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rocket.accounting import expands, is_matrix, loaded_bytes, scales_rows
from rocket.architecture import Architecture
from rocket.inventory import Bucket, Naming, TensorInfo, classify

# The groups whose format a manifest records; each is told by its linear weights.
GROUPS = (
    "routed experts",
    "shared experts",
    "dense MLP",
    "KDA attention",
    "sparse-MLA attention",
    "embedding",
    "lm_head",
    "routers",
    "hyper-connections",
    "small tensors",
    "draft layer",
    "draft experts",
    "vision tower",
    "other",
)
_BUCKET_GROUPS = {
    Bucket.EXPERTS: "routed experts",
    Bucket.SHARED: "shared experts",
    Bucket.DENSE_MLP: "dense MLP",
    Bucket.KDA: "KDA attention",
    Bucket.MLA: "sparse-MLA attention",
    Bucket.EMBED: "embedding",
    Bucket.HEAD: "lm_head",
    Bucket.DRAFT: "draft layer",
    Bucket.DRAFT_EXPERTS: "draft experts",
    Bucket.VISION: "vision tower",
}
# What a format is called, and whether the ops take it as it lies in a file.
FORMAT_NAMES = {
    "f32": "F32",
    "bf16": "BF16",
    "f16": "F16",
    "nvfp4": "NVFP4, ModelOpt",
    "nvfp4-packed": "NVFP4, compressed-tensors",
    "fp8": "FP8 in blocks",
    "fp8-bf16-scales": "FP8 in blocks, scales BF16",
    "fp8-packed": "FP8 in blocks, compressed-tensors",
    "fp8-modelopt": "FP8 in blocks, ModelOpt",
    "fp8-tensor": "FP8, one scale",
    "fp8-row": "FP8, a scale a row",
    "mxfp8": "MXFP8",
}
_IN_PLACE = ("f32", "bf16", "nvfp4", "nvfp4-packed", "fp8", "fp8-packed", "fp8-modelopt", "mxfp8")
BECOME_F32 = ("f16", "fp8-row")
_POWERS = ("U8", "F8_E8M0")  # dtypes of MXFP8's scales
_SUFFIXES = (
    ".weight_packed",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_scale",
    ".input_scale",
    ".input_global_scale",
    ".weight",
)
KEPT = "kept"
NOT_LOADED = "not loaded"


@dataclass
class StoredWeight:
    """One weight and the tensors beside it."""

    name: str
    data: TensorInfo
    parts: dict[str, TensorInfo] = field(default_factory=dict)  # by suffix

    @property
    def format(self) -> str:
        """A key of FORMAT_NAMES, or the dtype for what is no format of a weight."""
        if self.data.name.endswith(".weight_packed"):
            return "nvfp4-packed"
        dtype = self.data.dtype
        if dtype == "U8":
            return "nvfp4"
        if dtype != "F8_E4M3":
            return {"F32": "f32", "BF16": "bf16", "F16": "f16"}.get(dtype, dtype)
        scale = self.fp8_scale
        if scale is not None and scale.dtype in _POWERS:
            return "mxfp8"
        if scale is not None and scale.name.endswith("_inv"):
            return "fp8" if scale.dtype == "F32" else "fp8-bf16-scales"
        if scale is not None and scales_rows(self.data, scale):
            return "fp8-row"
        dimensions = 0 if scale is None else len(scale.shape)
        return {2: "fp8-packed", 4: "fp8-modelopt"}.get(dimensions, "fp8-tensor")

    @property
    def fp8_scale(self) -> TensorInfo | None:
        """Of an FP8 weight."""
        return self.parts.get(".weight_scale_inv") or self.parts.get(".weight_scale")

    @property
    def rewrites_scales(self) -> bool:
        """Whether its scales become a table of float32, one for each block, when it is loaded."""
        if self.format in ("fp8-bf16-scales", "fp8-tensor"):
            return True
        spelled = self.format in ("fp8-packed", "fp8-modelopt")
        return spelled and self.fp8_scale is not None and self.fp8_scale.dtype != "F32"

    @property
    def tensors(self) -> list[TensorInfo]:
        return [self.data, *self.parts.values()]

    @property
    def stored_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def loaded_bytes(self) -> int:
        scales = sum(loaded_bytes(t, self.data) for t in self.parts.values())
        return loaded_bytes(self.data, self.fp8_scale) + scales


def weights_of(found: Iterable[TensorInfo]) -> list[StoredWeight]:
    """A checkpoint's tensors, brought together weight by weight."""
    by_name: dict[str, dict[str, TensorInfo]] = {}
    for t in found:
        suffix = next((s for s in _SUFFIXES if t.name.endswith(s)), "")
        by_name.setdefault(t.name.removesuffix(suffix), {})[suffix] = t
    weights = []
    for name, parts in by_name.items():
        key = next((s for s in (".weight_packed", ".weight", "") if s in parts), None)
        if key is None:  # scales without a weight: the engine's loader says what is missing
            key = next(iter(parts))
        data = parts.pop(key)
        weights.append(StoredWeight(name, data, parts))
    return weights


def group_of(weight: StoredWeight, bucket: Bucket) -> str:
    """One of GROUPS."""
    if bucket is Bucket.VISION or (bucket is Bucket.OTHER):
        return _BUCKET_GROUPS.get(bucket, "other")
    if not is_matrix(weight.data):
        return "small tensors" if bucket not in (Bucket.DRAFT, Bucket.DRAFT_EXPERTS) else "draft layer"
    if bucket is Bucket.SMALL:
        return "hyper-connections" if weight.name.endswith("_fn") else "routers"
    return _BUCKET_GROUPS.get(bucket, "other")


def treatment(weight: StoredWeight, bucket: Bucket) -> str:
    """What the engine does with a weight at load."""
    if bucket in (Bucket.DRAFT, Bucket.DRAFT_EXPERTS, Bucket.VISION, Bucket.OTHER):
        return NOT_LOADED
    if not is_matrix(weight.data):
        return KEPT if weight.format == "f32" else "F32 at load"
    if weight.format in BECOME_F32:
        return "F32 at load"
    if expands(weight.data):
        return "kept, and expanded to F32 at load"
    if weight.rewrites_scales:
        return "kept, scales F32 for each block at load"
    if bucket is Bucket.EXPERTS and weight.format in _IN_PLACE:
        return "kept, used where it lies"
    return KEPT


@dataclass
class FormatRow:
    """All weights of a group that have one format and one treatment."""

    group: str
    format: str
    treatment: str
    weights: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0

    @property
    def format_name(self) -> str:
        return FORMAT_NAMES.get(self.format, self.format)


def format_rows(found: Iterable[TensorInfo], arch: Architecture, naming: Naming) -> list[FormatRow]:
    """The formats of a checkpoint, in the order of GROUPS; in each, the largest first."""
    rows: dict[tuple[str, str, str], FormatRow] = {}
    for weight in weights_of(found):
        bucket = classify(weight.data.name, arch, naming).bucket
        key = (group_of(weight, bucket), weight.format, treatment(weight, bucket))
        row = rows.setdefault(key, FormatRow(*key))
        row.weights += 1
        row.stored_bytes += weight.stored_bytes
        row.loaded_bytes += weight.loaded_bytes if key[2] != NOT_LOADED else 0
    return sorted(rows.values(), key=lambda row: (GROUPS.index(row.group), -row.stored_bytes))

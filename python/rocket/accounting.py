"""What a fuel's bytes are for, and which of them a step reads: integer arithmetic on headers.

    account = account_of_fuel("path/to/fuel")           # from the headers of its files
    account = account_of_inventory(arch, Scheme())      # from a config and a weight format, no files

Two counts of what a token reads. The *full-table count* takes the whole embedding table, as sums over a
checkpoint do; the *touched count* takes the one row that is read (unless the table is the head as well).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rocket.architecture import Architecture, read_architecture
from rocket.dense_split import CutTensor, check_share, cut_of, share_of
from rocket.inventory import (
    DTYPE_BYTES,
    Bucket,
    Naming,
    Place,
    Scheme,
    TensorInfo,
    classify,
    default_naming,
    detect_naming,
    parameters,
    tensors,
)

GIB = 1 << 30

# Read in full by every step, whatever the tokens are.
RESIDENT = (
    Bucket.EMBED,
    Bucket.HEAD,
    Bucket.KDA,
    Bucket.MLA,
    Bucket.DENSE_MLP,
    Bucket.SHARED,
    Bucket.SMALL,
)
_SCALES = (".weight_scale", ".weight_scale_inv")
_GLOBALS = (".weight_scale_2", ".weight_global_scale")
_BARE_MATRICES = ("hc_attn_fn", "hc_ffn_fn", "index_kpool_compress_gate")
# Given a float32 copy at load if quantised: used row by row or taken apart.
_EXPANDED = ("embed_tokens", "kv_b_proj", "hc_attn_fn", "hc_ffn_fn")


@dataclass
class Count:
    """Bytes as they lie on disk, as an engine holds them in memory, and the numbers they stand for."""

    tensors: int = 0
    stored: int = 0
    loaded: int = 0
    parameters: int = 0

    def add(self, stored: int, loaded: int, elements: int, times: int = 1) -> None:
        self.tensors += times
        self.stored += stored * times
        self.loaded += loaded * times
        self.parameters += elements * times


def is_matrix(t: TensorInfo) -> bool:
    """Whether the engine multiplies by it: such weights keep their format, all others become float32."""
    if t.name.endswith(_BARE_MATRICES):
        return True
    return t.name.endswith((".weight", ".weight_packed")) and len(t.shape) == 2 and "conv1d" not in t.name


def elements_of(t: TensorInfo) -> int:
    """Parameters that a tensor stands for: two a byte in NVFP4, none in a scale."""
    if t.name.endswith((*_SCALES, *_GLOBALS, ".input_scale", ".input_global_scale")):
        return 0
    packed = t.dtype == "U8" and t.name.endswith((".weight", ".weight_packed"))
    return prod(t.shape) * (2 if packed else 1)


def scales_rows(weight: TensorInfo, scale: TensorInfo) -> bool:
    """Whether an FP8 weight has a scale for each row: no format in memory has, so that it becomes float32."""
    out = weight.shape[0] if weight.shape else 1
    named = scale.name.endswith(".weight_scale") and scale.dtype in ("F32", "BF16", "F16")
    return named and weight.dtype == "F8_E4M3" and out > 1 and scale.shape in ((out,), (out, 1))


def loaded_bytes(t: TensorInfo, other: TensorInfo | None = None) -> int:
    """Bytes in the engine's memory. `other`: of a scale its weight, of a weight its scale."""
    if t.name.endswith((*_GLOBALS, ".input_scale", ".input_global_scale")):
        return 0  # kept beside the weight, not in it
    if t.name.endswith(_SCALES):
        if other is not None and other.dtype == "F8_E4M3" and t.dtype in ("F32", "BF16", "F16"):
            # float32, 128 x 128 blocks
            return 0 if scales_rows(other, t) else 4 * prod(ceil(n / 128) for n in other.shape)
        return t.nbytes
    if not is_matrix(t) or t.dtype == "F16" or (other is not None and scales_rows(t, other)):
        return 4 * prod(t.shape)
    return t.nbytes + (4 * elements_of(t) if expands(t) else 0)  # what is expanded is kept packed as well


def expands(t: TensorInfo) -> bool:
    """Whether a weight gets a float32 copy at load, though its format is one of a linear weight."""
    name = t.name.removesuffix(".weight_packed").removesuffix(".weight")
    return t.dtype in ("U8", "F8_E4M3") and name.endswith(_EXPANDED)


@dataclass
class Account:
    """Bytes of a fuel by bucket."""

    arch: Architecture
    buckets: dict[Bucket, Count] = field(default_factory=dict)
    experts: dict[int, Count] = field(default_factory=dict)  # trunk layer -> all its routed experts
    expert_ids: dict[int, set[int]] = field(default_factory=dict)  # those that were seen
    header_bytes: int = 0  # of the files, 0 without files
    file_bytes: int = 0
    file_count: int = 0
    hollow: bool = False
    draft_layers: int = 0
    cuts: list[CutTensor] = field(default_factory=list)  # dense weights that boosters may share
    head_shares: int = 1  # boosters that share the head, where it is the embedding

    def set_files(self, files: Sequence[Mapping[str, Any]]) -> None:
        """What _core.read_headers says of the files."""
        self.file_count = len(files)
        self.file_bytes = sum(f["bytes"] for f in files)
        self.header_bytes = self.file_bytes - sum(t[4] for f in files for t in f["tensors"])
        self.hollow = any(f["sparse"] for f in files)

    def __getitem__(self, bucket: Bucket) -> Count:
        return self.buckets.get(bucket, Count())

    def share(self, boosters: int) -> "Account":
        """What one of so many boosters has that share the dense weights. Throws UsageError if they cannot."""
        check_share(self.arch, self.cuts, boosters)
        buckets = {bucket: replace(count) for bucket, count in self.buckets.items()}
        for cut in self.cuts:
            stored, loaded = cut.share(boosters)
            buckets[cut.bucket].stored -= cut.stored - stored
            buckets[cut.bucket].loaded -= cut.loaded - loaded
        arch = share_of(self.arch, boosters)
        return replace(self, arch=arch, buckets=buckets, cuts=[], head_shares=boosters)

    # --- sizes ---------------------------------------------------------------------------------------------

    @property
    def tensor_bytes(self) -> int:
        return sum(count.stored for count in self.buckets.values())

    @property
    def resident_bytes(self) -> int:
        """Trunk weights without routed experts, as stored."""
        return sum(self[bucket].stored for bucket in RESIDENT)

    @property
    def resident_loaded_bytes(self) -> int:
        """The same as the engine holds them: small tensors in float32, some formats expanded."""
        return sum(self[bucket].loaded for bucket in RESIDENT)

    @property
    def expert_bytes(self) -> int:
        """All routed experts of the trunk."""
        return self[Bucket.EXPERTS].stored

    @property
    def trunk_parameters(self) -> int:
        return sum(self[bucket].parameters for bucket in (*RESIDENT, Bucket.EXPERTS))

    @property
    def parameters(self) -> int:
        """Of all tensors, draft layers and vision tower included."""
        return sum(count.parameters for count in self.buckets.values())

    @property
    def active_parameters(self) -> int:
        """Read for a token; of the embedding one row, unless it is the head as well."""
        dense = sum(self[bucket].parameters for bucket in RESIDENT)
        routed = self[Bucket.EXPERTS].parameters * self.arch.num_experts_per_tok // self.arch.n_routed_experts
        untouched = self[Bucket.EMBED].parameters - self.arch.hidden_size
        return dense + routed - (untouched if self[Bucket.HEAD].parameters else 0)

    @property
    def slot_bytes(self) -> int:
        """The largest expert's weights and block scales; the global scales live in a side table."""
        most = max((count.loaded for count in self.experts.values()), default=0)
        return ceil(most / self.arch.n_routed_experts)

    def slot_bytes_of(self, layer: int) -> int:
        """One expert of a trunk layer in a slot."""
        return ceil(self.experts[layer].loaded / self.arch.n_routed_experts)

    # --- what a step reads ---------------------------------------------------------------------------------

    @property
    def embed_row_bytes(self) -> int:
        return self[Bucket.EMBED].stored // self.arch.vocab_size

    @property
    def routed_token_bytes(self) -> int:
        """Top-k experts of every MoE layer."""
        return round(self.routed_bytes(dict.fromkeys(self.experts, self.arch.num_experts_per_tok)))

    def routed_bytes(self, used: dict[int, float]) -> float:
        """Bytes of so many distinct experts of each layer."""
        n = self.arch.n_routed_experts
        return sum(self.experts[layer].stored * count / n for layer, count in used.items())

    @property
    def token_bytes_full_table(self) -> int:
        return self.resident_bytes + self.routed_token_bytes

    def embed_untouched_bytes(self, rows: int = 1) -> int:
        """What the full-table count has too much: rows of the table that a step does not read."""
        if self[Bucket.HEAD].stored == 0:  # the table is the head as well
            return self[Bucket.EMBED].stored - self[Bucket.EMBED].stored // self.head_shares
        return max(0, self[Bucket.EMBED].stored - rows * self.embed_row_bytes)

    @property
    def token_bytes_touched(self) -> int:
        return self.token_bytes_full_table - self.embed_untouched_bytes()

    def step_bytes(self, rows: int, used: dict[int, float] | None = None) -> float:
        """Touched weight bytes of a step of `rows` rows, each of which counts an embedding row of its own.

        `used`: distinct experts of each MoE layer (expected_union, trace_union); by default uniform routing.
        """
        if used is None:
            union = expected_union(self.arch.n_routed_experts, self.arch.num_experts_per_tok, rows)
            used = dict.fromkeys(self.experts, union)
        return self.resident_bytes - self.embed_untouched_bytes(rows) + self.routed_bytes(used)

    # --- draft ---------------------------------------------------------------------------------------------

    @property
    def draft_token_bytes(self) -> int:
        """What one draft step reads of the draft layers' own tensors (the common head comes on top)."""
        routed = self[Bucket.DRAFT_EXPERTS].stored * self.arch.num_experts_per_tok
        return self[Bucket.DRAFT].stored + routed // self.arch.n_routed_experts


def expected_union(experts: int, topk: int, rows: int) -> float:
    """Expected distinct experts when each of `rows` rows draws `topk` different ones uniformly."""
    return experts - (experts - topk) * (1 - topk / experts) ** (rows - 1)


def trace_union(routes: npt.NDArray[np.integer], rows: int) -> list[float]:
    """Mean distinct experts of each MoE layer over blocks of `rows` consecutive rows of a trace.

    `routes`: [rows, MoE layers, top-k]. The last rows that do not fill a block are left out.
    """
    blocks = len(routes) // rows
    if blocks == 0:
        raise ValueError(f"trace: expected at least {rows} rows, found {len(routes)}")
    layers = routes.shape[1]
    cut = routes[: blocks * rows].reshape(blocks, rows, layers, -1).transpose(2, 0, 1, 3)
    ordered = np.sort(cut.reshape(layers, blocks, -1), axis=-1)
    distinct = 1 + np.count_nonzero(np.diff(ordered, axis=-1), axis=-1)
    return [float(n) for n in distinct.mean(axis=1)]


def trace_popularity_union(routes: npt.NDArray[np.integer], experts: int, rows: int) -> list[float]:
    """Expected distinct experts of each MoE layer when the rows are drawn from the trace independently.

    This is a batch of unrelated streams with the trace's popularity of experts; consecutive rows of one
    stream (trace_union) share more.
    """
    out = []
    for layer in range(routes.shape[1]):
        used = np.bincount(routes[:, layer].ravel(), minlength=experts) / len(routes)
        out.append(float(np.sum(1 - (1 - used) ** rows)))
    return out


# --- building accounts ------------------------------------------------------------------------------------


class _Counter:
    def __init__(self, arch: Architecture, naming: Naming) -> None:
        self.account = Account(arch)
        self.naming = naming
        self.drafts: set[int] = set()

    def add_all(self, found: Sequence[TensorInfo], times: int = 1) -> None:
        named = {t.name: t for t in found if t.name.endswith((".weight", ".weight_packed", *_SCALES))}
        # Beside a weight lie its scales: hundreds of thousands of names, a third as many places.
        places: dict[str, Place] = {}
        for t in found:
            module, _, suffix = t.name.rpartition(".")
            other = None
            if suffix in ("weight_scale", "weight_scale_inv"):
                other = named.get(module + ".weight_packed") or named.get(module + ".weight")
            elif t.dtype == "F8_E4M3":
                other = named.get(module + ".weight_scale")
            if suffix.startswith("weight"):
                place = places.get(module)
                if place is None:
                    place = places[module] = classify(t.name, self.account.arch, self.naming)
            else:
                place = classify(t.name, self.account.arch, self.naming)
            self.add(t, place, other, times)

    def add(self, t: TensorInfo, place: Place, other: TensorInfo | None, times: int) -> None:
        loaded = loaded_bytes(t, other)
        sizes = (t.nbytes, loaded, elements_of(t), times)
        self.account.buckets.setdefault(place.bucket, Count()).add(*sizes)
        if place.bucket is Bucket.EXPERTS:
            self.account.experts.setdefault(place.layer, Count()).add(*sizes)
            self.account.expert_ids.setdefault(place.layer, set()).add(place.expert)
        elif place.bucket in (Bucket.DRAFT, Bucket.DRAFT_EXPERTS):
            self.drafts.add(place.layer)
            self.account.draft_layers = len(self.drafts)
        else:
            row_scales = other is not None and t.name.endswith(_SCALES) and scales_rows(other, t)
            cut = cut_of(t, other, place.bucket, loaded, row_scales)
            if cut is not None:
                self.account.cuts.append(cut)


def account_of_tensors(
    arch: Architecture, found: Iterable[TensorInfo], naming: Naming | None = None
) -> Account:
    listed = list(found)
    counter = _Counter(arch, naming or detect_naming([t.name for t in listed]))
    counter.add_all(listed)
    return counter.account


def account_of_inventory(
    arch: Architecture, scheme: Scheme | None = None, *, drafts: int | None = None, own_head: bool = False
) -> Account:
    """What a fuel of this architecture and weight format would have."""
    scheme = scheme or Scheme()
    # One expert stands for all of its layer.
    found = parameters(arch, drafts=drafts, draft_own_head=own_head, experts=1)
    counter = _Counter(arch, default_naming(arch))
    counter.add_all(list(tensors([p for p in found if p.expert < 0], scheme)))
    experts = tensors([p for p in found if p.expert >= 0], scheme)
    counter.add_all(list(experts), times=arch.n_routed_experts)
    return counter.account


def read_tensors(folder: str | Path) -> tuple[list[TensorInfo], list[dict[str, Any]]]:
    """The tensors of a fuel's checked headers, and what _core.read_headers gives of the files."""
    from rocket import _core

    files = _core.read_headers(str(folder))
    return [TensorInfo(t[0], t[1], tuple(t[2])) for f in files for t in f["tensors"]], files


def account_of_fuel(folder: str | Path, arch: Architecture | None = None) -> Account:
    """From config.json and the checked headers of a fuel's files; reads no weights."""
    found, files = read_tensors(folder)
    account = account_of_tensors(arch or read_architecture(folder), found)
    account.set_files(files)
    return account


# --- state ------------------------------------------------------------------------------------------------

KV_DTYPES = {"f32": 4, "bf16": 2, "fp8": 1}
INDEX_DTYPE = "f32"  # how the engine keeps pooled keys, however it keeps latents
PAGE_TOKENS = 64


@dataclass(frozen=True)
class State:
    """Bytes that a stream keeps between steps, and what a decoded token reads and writes of them.

    The recurrent part has a fixed size for each stream and is float32: KDA matrices, the tails of the
    convolutions, and the raw keys and gates of the indexer's unfinished pool. The paged part grows with the
    context: a latent for each token and sparse MLA layer, and a pooled key for each `index_kpool` tokens and
    layer with an indexer.
    """

    arch: Architecture
    kv_dtype: str = "f32"
    index_dtype: str | None = None  # of the pooled keys; None: as the latents

    def __post_init__(self) -> None:
        for dtype in (self.kv_dtype, self.index_dtype):
            if dtype is not None and dtype not in KV_DTYPES:
                raise ValueError(f"state dtype: expected one of {', '.join(KV_DTYPES)}, found {dtype!r}")

    @property
    def dtypes(self) -> str:
        """In words."""
        index = self.index_dtype or self.kv_dtype
        if index == self.kv_dtype:
            return f"latents and indexer keys in {index}"
        return f"latents in {self.kv_dtype}, indexer keys in {index}"

    @property
    def latent_row_bytes(self) -> int:
        """One token in one layer."""
        return (self.arch.kv_lora_rank + self.arch.qk_rope_head_dim) * KV_DTYPES[self.kv_dtype]

    @property
    def pooled_row_bytes(self) -> int:
        """One pool in one layer."""
        return self.arch.index_head_dim * KV_DTYPES[self.index_dtype or self.kv_dtype]

    @property
    def kda_matrix_bytes(self) -> int:
        """All layers."""
        a = self.arch
        return 4 * a.kda_layers * a.linear_num_heads * a.linear_head_dim**2

    @property
    def conv_tail_bytes(self) -> int:
        a = self.arch
        return 4 * a.kda_layers * max(0, a.linear_conv_kernel_dim - 1) * 3 * a.kda_channels

    @property
    def pool_tail_bytes(self) -> int:
        """Raw keys and gates of the unfinished pool; none where a pool is one token."""
        a = self.arch
        return 4 * a.indexer_layers * 2 * a.index_kpool * a.index_head_dim if a.index_kpool > 1 else 0

    @property
    def stream_bytes(self) -> int:
        """Fixed bytes of a stream."""
        return self.kda_matrix_bytes + self.conv_tail_bytes + self.pool_tail_bytes

    @property
    def page_tokens(self) -> int:
        return ceil(PAGE_TOKENS / self.arch.index_kpool) * self.arch.index_kpool

    @property
    def page_bytes(self) -> int:
        a, tokens = self.arch, self.page_tokens
        latents = a.mla_layers * tokens * self.latent_row_bytes
        return latents + a.indexer_layers * tokens // a.index_kpool * self.pooled_row_bytes

    @property
    def token_bytes(self) -> float:
        """Paged bytes a token."""
        return self.page_bytes / self.page_tokens

    def bytes_at(self, context: int) -> int:
        """All state of one stream with a context of so many tokens, in whole pages."""
        return self.stream_bytes + ceil(context / self.page_tokens) * self.page_bytes

    def traffic(self, context: int) -> dict[str, int]:
        """Bytes that one decoded token moves, by part, with `context` tokens before it."""
        a = self.arch
        pools = context // a.index_kpool
        selected = min(pools, a.index_topk // a.index_kpool) * a.index_kpool
        tail = context % a.index_kpool if a.index_kpool_always_select_tail else 0
        return {
            "kda_read": self.kda_matrix_bytes,
            "kda_write": self.kda_matrix_bytes,
            "conv_read": self.conv_tail_bytes,
            "conv_write": self.conv_tail_bytes,
            "indexer_read": a.indexer_layers * pools * self.pooled_row_bytes,
            "latent_read": a.mla_layers * (selected + tail) * self.latent_row_bytes,
            "latent_write": a.mla_layers * self.latent_row_bytes,
            "indexer_write": self._indexer_write(),
        }

    def _indexer_write(self) -> int:
        """A raw key and gate for each token; a pooled key for each pool, spread over its tokens."""
        a = self.arch
        raw = 4 * 2 * a.index_head_dim if a.index_kpool > 1 else 0
        return a.indexer_layers * (raw + ceil(self.pooled_row_bytes / a.index_kpool))

    def traffic_bytes(self, context: int) -> int:
        return sum(self.traffic(context).values())


__all__ = [
    "DTYPE_BYTES",
    "GIB",
    "INDEX_DTYPE",
    "KV_DTYPES",
    "PAGE_TOKENS",
    "RESIDENT",
    "Account",
    "Count",
    "State",
    "account_of_fuel",
    "account_of_inventory",
    "account_of_tensors",
    "elements_of",
    "expands",
    "expected_union",
    "is_matrix",
    "loaded_bytes",
    "read_tensors",
    "scales_rows",
    "trace_popularity_union",
    "trace_union",
]

"""Random glm5_next fuels of any shape, for tests, first runs and benchmarks.

Every tensor has a random stream of its own, seeded from the fuel's seed and the tensor's name, and only
integer draws of PCG64 and exact float32 arithmetic are used: the same options give the same bytes on any
machine. Data are made in pieces and go straight to disk, so a fuel may be far larger than the memory.
"""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rocket import random_fuel_config as config_files
from rocket.random_fuel_shape import FuelOptions, RandomFuelError, Shape

PIECE = 1 << 22  # random 64-bit words a piece
LANES_FROM = 1 << 18  # BF16 tensors of this many elements and more are made from bit lanes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def e4m3_values() -> npt.NDArray[np.float32]:
    """The 256 values of an E4M3 byte (no infinities; 0x7f and 0xff are NaN)."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, (code & 7).astype(np.float32)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest even; finite input."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Bits:
    """The random words of one tensor."""

    def __init__(self, seed: int, name: str) -> None:
        words = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u4").tolist()
        self._generator = np.random.PCG64(np.random.SeedSequence([seed, *words]))

    def words(self, n: int) -> npt.NDArray[np.uint64]:
        return np.asarray(self._generator.random_raw(n), np.dtype("<u8"))

    def normal(self, n: int) -> npt.NDArray[np.float32]:
        """Sums of four 16-bit draws, scaled to a variance of 1."""
        lanes = self.words(n).view("<u2").reshape(n, 4).astype(np.int32)
        return (lanes.sum(1) - 131070).astype(np.float32) * np.float32(1 / 37837.2)

    def uniform(self) -> float:
        return int(self.words(1)[0] >> np.uint64(11)) / (1 << 53)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor on disk: what its header says, and where its bytes come from."""

    name: str
    dtype: str  # as in a safetensors header
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[npt.NDArray]]
    role: str = "dense"  # dense | embed | expert | draft | vision

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.elements * {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}[self.dtype]


def _normal_pieces(bits: Bits, n: int, std: float, mean: float, dtype: str) -> Iterator[npt.NDArray]:
    for begin in range(0, n, PIECE):
        x = bits.normal(min(PIECE, n - begin)) * np.float32(std) + np.float32(mean)
        yield x if dtype == "F32" else to_bf16(x)


def _lane_pieces(bits: Bits, n: int, std: float) -> Iterator[npt.NDArray]:
    """BF16 values of random sign and mantissa and one of four exponents: about `std` in RMS, quick to make."""
    top = 127 + round(float(np.log2(std / 0.88)))
    for begin in range(0, n, 4 * PIECE):
        count = min(4 * PIECE, n - begin)
        lanes = bits.words((count + 3) // 4).view("<u2")[:count]
        exponent = np.uint16(top) - ((lanes >> 7) & np.uint16(3))
        yield (lanes & np.uint16(0x807F)) | (exponent << np.uint16(7))


def _byte_pieces(bits: Bits, n: int) -> Iterator[npt.NDArray]:
    for begin in range(0, n, 8 * PIECE):
        count = min(8 * PIECE, n - begin)
        yield bits.words((count + 7) // 8).view(np.uint8)[:count]


# One block scale for each random byte: 32 … 120 as a rule, eight times 448, eight zero or subnormal.
SCALE_CODES = np.concatenate([np.arange(12 << 3, 14 << 3).repeat(15), np.full(8, 0x7E), np.arange(8)]).astype(
    np.uint8
)
NVFP4_RMS = float(np.sqrt(np.mean(E2M1**2) * np.mean(e4m3_values()[SCALE_CODES].astype(np.float64) ** 2)))


def _scale_pieces(bits: Bits, n: int) -> Iterator[npt.NDArray]:
    for piece in _byte_pieces(bits, n):
        yield SCALE_CODES[piece]


class TensorTable:
    """All tensors of a fuel, in the order of a reader's walk through the model."""

    def __init__(self, options: FuelOptions) -> None:
        self.o = options
        self.s = options.shape
        self.specs: list[TensorSpec] = []
        self.prefix = "model.language_model." if options.layout == "nested" else "model."
        self._build()

    def bits(self, name: str) -> Bits:
        return Bits(self.o.seed, name)

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        std: float,
        mean: float = 0.0,
        dtype: str = "BF16",
        role: str = "dense",
    ) -> None:
        n = int(np.prod(shape, dtype=np.int64))

        def pieces() -> Iterator[npt.NDArray]:
            if dtype == "BF16" and mean == 0 and n >= LANES_FROM:
                return _lane_pieces(self.bits(name), n, std)
            return _normal_pieces(self.bits(name), n, std, mean, dtype)

        self.specs.append(TensorSpec(name, dtype, shape, pieces, role))

    def _linear(
        self, name: str, out: int, inp: int, gain: float = 1.0, role: str = "dense", dtype: str = "BF16"
    ) -> None:
        self._add(name + ".weight", (out, inp), gain * inp**-0.5, dtype=dtype, role=role)

    def _small(
        self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, role: str = "dense"
    ) -> None:
        dtype = self.o.small
        if dtype == "mixed":
            dtype = "F32" if hashlib.sha256(name.encode()).digest()[0] & 1 else "BF16"
        self._add(name, shape, std, mean, dtype, role)

    def _norm(self, name: str, width: int, role: str = "dense") -> None:
        self._add(name + ".weight", (width,), 0.2, 1.0, role=role)

    def _nvfp4(self, name: str, out: int, inp: int, std: float, role: str) -> None:
        scale = np.float32(std / NVFP4_RMS)
        if self.o.zero_global and name.endswith("experts.0.down_proj"):
            scale = np.float32(0)
        compressed = self.o.experts == "compressed-tensors"
        suffix = ("weight_packed", "weight_global_scale") if compressed else ("weight", "weight_scale_2")
        stored = np.float32(1) / scale if compressed and scale else scale
        scalar = {"empty": (), "one": (1,), "auto": (1,) if compressed else ()}[self.o.scalars]

        def add(
            suffix: str, dtype: str, shape: tuple[int, ...], pieces: Callable[[], Iterator[npt.NDArray]]
        ) -> None:
            self.specs.append(TensorSpec(f"{name}.{suffix}", dtype, shape, pieces, role))

        packed, scales = f"{name}.packed", f"{name}.scales"
        add(suffix[0], "U8", (out, inp // 2), lambda: _byte_pieces(self.bits(packed), out * inp // 2))
        add(
            "weight_scale",
            "F8_E4M3",
            (out, inp // 16),
            lambda: _scale_pieces(self.bits(scales), out * inp // 16),
        )
        add(suffix[1], "F32", scalar, lambda: iter([np.array([stored], np.float32)]))
        if not compressed and self.o.input_scale:
            add("input_scale", "F32", scalar, lambda: iter([np.array([0.03125], np.float32)]))

    def _mlp(self, name: str, width: int, role: str = "dense") -> None:
        h = self.s.hidden_size
        self._linear(name + ".gate_proj", width, h, 3.0, role)
        self._linear(name + ".up_proj", width, h, 3.0, role)
        self._linear(name + ".down_proj", h, width, 0.25, role)

    def _experts(self, layer: str, index: int, role: str) -> None:
        s = self.s
        bf16 = self.o.experts == "bf16" or index in self.o.bf16_expert_layers
        for e in range(s.n_routed_experts):
            name = f"{layer}mlp.experts.{e}"
            # Gate and up apart by up to ten times, either way.
            bits = self.bits(name + ".spread")
            spread = 1 + 2.16 * bits.uniform()
            gains = (3 * spread, 3 / spread) if bits.uniform() < 0.5 else (3 / spread, 3 * spread)
            parts = (
                ("gate_proj", s.moe_intermediate_size, s.hidden_size, gains[0]),
                ("up_proj", s.moe_intermediate_size, s.hidden_size, gains[1]),
                ("down_proj", s.hidden_size, s.moe_intermediate_size, 0.25),
            )
            for part, out, inp, gain in parts:
                if bf16:
                    self._linear(f"{name}.{part}", out, inp, gain, role)
                else:
                    self._nvfp4(f"{name}.{part}", out, inp, gain * inp**-0.5, role)

    def _moe(self, layer: str, index: int, role: str = "dense") -> None:
        s = self.s
        self._linear(layer + "mlp.gate", s.n_routed_experts, s.hidden_size, 1.5, role, self.o.wide)
        self._small(layer + "mlp.gate.e_score_correction_bias", (s.n_routed_experts,), 0.1, role=role)
        self._experts(layer, index, "expert" if role == "dense" else role)
        self._mlp(layer + "mlp.shared_experts", s.moe_intermediate_size * s.n_shared_experts, role)

    def _kda(self, name: str) -> None:
        s = self.s
        h, d, c = s.hidden_size, s.linear_head_dim, s.linear_num_heads * s.linear_head_dim
        for part in "qkv":
            self._linear(f"{name}{part}_proj", c, h)
        for part in "qkv":
            self._small(f"{name}{part}_conv1d.weight", (c, 1, s.linear_conv_kernel_dim), 0.5)
        for part in "fg":
            self._linear(f"{name}{part}_a_proj", d, h)
            self._linear(f"{name}{part}_b_proj", c, d)
        self._linear(name + "b_proj", s.linear_num_heads, h)
        self._small(name + "dt_bias", (c,), 1.5, -3.0)
        self._small(name + "A_log", (s.linear_num_heads,), 0.3)
        self._norm(name + "o_norm", d)
        self._linear(name + "o_proj", h, c)

    def _mla(self, name: str, indexer: bool, role: str = "dense") -> None:
        s = self.s
        h, heads = s.hidden_size, s.num_attention_heads
        self._linear(name + "q_a_proj", s.q_lora_rank, h, role=role)
        self._norm(name + "q_a_layernorm", s.q_lora_rank, role)
        self._linear(name + "q_b_proj", heads * s.qk_nope_head_dim, s.q_lora_rank, 2.0, role)
        self._linear(name + "kv_a_proj_with_mqa", s.kv_lora_rank, h, role=role)
        self._norm(name + "kv_a_layernorm", s.kv_lora_rank, role)
        self._linear(
            name + "kv_b_proj", heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank, role=role
        )
        self._linear(name + "o_proj", h, heads * s.v_head_dim, 1.5, role)
        if not indexer:
            return
        d, index = s.index_head_dim, name + "indexer."
        self._linear(index + "wq_b", s.index_n_heads * d, s.q_lora_rank, role=role)
        self._linear(index + "wk", d, h, role=role)
        self._norm(index + "k_norm", d, role)
        self._add(index + "k_norm.bias", (d,), 0.1, role=role)
        self._linear(index + "weights_proj", s.index_n_heads, h, role=role)
        self._small(index + "index_kpool_compress_ape", (s.index_kpool, d), 1.0, role=role)
        self._add(index + "index_kpool_compress_gate", (d, h), h**-0.5, role=role)

    def _hyper(self, name: str) -> None:
        n = self.s.hc_mult
        rows, width = (2 + n) * n, n * self.s.hidden_size
        self._add(name + "_fn", (rows, width), width**-0.5, dtype=self.o.wide)
        self._small(name + "_base", (rows,), 1.5)
        self._small(name + "_scale", (3,), 0.2, 1.0)

    def _trunk_layer(self, i: int) -> None:
        layer = f"{self.prefix}layers.{i}."
        self._hyper(layer + "hc_attn")
        self._norm(layer + "input_layernorm", self.s.hidden_size)
        if self.s.is_kda(i):
            self._kda(layer + "self_attn.")
        else:
            self._mla(layer + "self_attn.", self.s.indexer_full(i))
        self._hyper(layer + "hc_ffn")
        self._norm(layer + "post_attention_layernorm", self.s.hidden_size)
        if self.s.is_moe(i):
            self._moe(layer, i)
        else:
            self._mlp(layer + "mlp", self.s.intermediate_size)

    def _draft_layer(self, i: int) -> None:
        h, layer = self.s.hidden_size, f"{self.prefix}layers.{i}."
        for name in ("enorm", "hnorm"):
            self._norm(layer + name, h, "draft")
        self._linear(layer + "eh_proj", h, 2 * h, role="draft")
        self._norm(layer + "input_layernorm", h, "draft")
        self._mla(layer + "self_attn.", True, "draft")
        self._norm(layer + "post_attention_layernorm", h, "draft")
        self._moe(layer, i, "draft")
        self._norm(layer + "shared_head.norm", h, "draft")
        if self.o.draft == "own-head":
            self._linear(layer + "shared_head.head", self.s.vocab_size, h, 2.0, "draft")
            self._add(layer + "embed_tokens.weight", (self.s.vocab_size, h), 1.0, role="draft")

    def _vision(self) -> None:
        v = config_files.vision_config(self.s)
        width, patch = v["hidden_size"], (3, v["temporal_patch_size"], v["patch_size"], v["patch_size"])
        self._add("model.visual.patch_embed.proj.weight", (width, *patch), 0.02, role="vision")
        self._add("model.visual.blocks.0.attn.qkv.weight", (3 * width, width), 0.02, role="vision")
        self._add("model.visual.blocks.0.attn.qkv.bias", (3 * width,), 0.02, role="vision")

    def _build(self) -> None:
        s = self.s
        self._add(self.prefix + "embed_tokens.weight", (s.vocab_size, s.hidden_size), 1.0, role="embed")
        for i in range(s.num_hidden_layers):
            self._trunk_layer(i)
        if self.o.draft != "none":
            self._draft_layer(s.num_hidden_layers)
        self._norm(self.prefix + "norm", s.hidden_size)
        if not s.tie_word_embeddings:
            self._linear("lm_head", s.vocab_size, s.hidden_size, 2.0)
        if self.o.vision:
            self._vision()


def counted_bytes(options: FuelOptions) -> dict[str, int]:
    """Bytes on disk by role, parameters of the trunk, and the weight bytes that one decoded token reads."""
    specs = TensorTable(options).specs
    s = options.shape
    total = {
        role: sum(t.nbytes for t in specs if t.role == role)
        for role in ("dense", "embed", "expert", "draft", "vision")
    }
    row = total["embed"] // s.vocab_size
    head = total["embed"] if s.tie_word_embeddings else 0
    packed = sum(
        t.elements * (2 if t.dtype == "U8" else 1) for t in specs if t.role == "expert" and _is_weight(t)
    )
    plain = sum(t.elements for t in specs if t.role in ("dense", "embed"))
    return {
        **total,
        "disk": sum(t.nbytes for t in specs),
        "parameters": plain + packed,
        "token": total["dense"] + head + row + total["expert"] * s.num_experts_per_tok // s.n_routed_experts,
    }


def _is_weight(t: TensorSpec) -> bool:
    return t.name.endswith((".weight", ".weight_packed"))


def make_fuel(
    out: str | os.PathLike[str],
    options: FuelOptions | None = None,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a fuel into the new directory `out` and returns its path.

    It is written under a temporary name beside `out` and renamed when whole. `progress(done, total)` gets
    bytes; an exception in it stops the work and leaves nothing behind.
    """
    options = options or FuelOptions(Shape())
    options.check()
    path = Path(out)
    _check_target(path, force)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        config_files.write_all(partial, options)
        config_files.write_tensors(partial, TensorTable(options).specs, options, progress)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
    except OSError as e:
        raise RandomFuelError(f"{path}: cannot write the fuel: {e.strerror or e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _check_target(path: Path, force: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise RandomFuelError(f"{path} exists and is not a directory", "choose another output directory")
    if not any(path.iterdir()):
        return
    if not force:
        raise RandomFuelError(
            f"{path} exists and is not empty", "choose another directory, or replace it with --force"
        )
    if not (path / "config.json").is_file():
        raise RandomFuelError(
            f"{path} holds no config.json: not a fuel, so it is not replaced", "remove it yourself"
        )


def fuel_sha256(path: str | os.PathLike[str]) -> str:
    """A digest over the names and bytes of a fuel's weights and its config.json."""
    digest = hashlib.sha256()
    root = Path(path)
    for file in [root / "config.json", *sorted(root.glob("*.safetensors"))]:
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as f:
            while piece := f.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()

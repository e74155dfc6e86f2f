"""Random glm5_next fuels of any shape, for tests, first runs and benchmarks.

Every tensor has a random stream of its own, seeded from the fuel's seed and the tensor's name, and only
integer draws of PCG64 and exact float32 arithmetic are used: the same options give the same bytes on any
machine. Data are made in pieces and go straight to disk, so a fuel may be far larger than the memory.
"""

import dataclasses
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rocket import random_fuel_config as config_files
from rocket.accounting import elements_of
from rocket.architecture import GLM5_NEXT, Architecture, VisionTower
from rocket.inventory import (
    DTYPE_BYTES,
    FLAT,
    NESTED,
    PLAIN_FORMATS,
    Bucket,
    Kind,
    Parameter,
    TensorInfo,
    encode,
    parameters,
)
from rocket.random_fuel_formats import Bits, QuantisedBytes, expert_format, format_of, to_bf16
from rocket.random_fuel_quantization import formats_of_modules
from rocket.random_fuel_shape import FuelOptions, RandomFuelError, Shape

PIECE = 1 << 22  # random 64-bit words a piece
LANES_FROM = 1 << 18  # BF16 tensors of this many elements and more are made from bit lanes


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
        return self.elements * DTYPE_BYTES[self.dtype]


def _normal_pieces(bits: Bits, n: int, std: float, mean: float, dtype: str) -> Iterator[npt.NDArray]:
    for begin in range(0, n, PIECE):
        x = bits.normal(min(PIECE, n - begin)) * np.float32(std) + np.float32(mean)
        yield x if dtype == "F32" else x.astype(np.float16) if dtype == "F16" else to_bf16(x)


def _lane_pieces(bits: Bits, n: int, std: float) -> Iterator[npt.NDArray]:
    """BF16 values of random sign and mantissa and one of four exponents: `std` in RMS, quick to make."""
    top = 127 + round(float(np.log2(std / 0.88)))
    for begin in range(0, n, 4 * PIECE):
        count = min(4 * PIECE, n - begin)
        lanes = bits.words((count + 3) // 4).view("<u2")[:count]
        exponent = np.uint16(top) - ((lanes >> 7) & np.uint16(3))
        yield (lanes & np.uint16(0x807F)) | (exponent << np.uint16(7))


# Standard deviation of a linear's weights, as a multiple of 1 / sqrt(columns).
GAINS = {
    "q_b_proj": 2.0,
    "o_proj": 1.5,
    "gate_proj": 3.0,
    "up_proj": 3.0,
    "down_proj": 0.25,
    "gate": 1.5,
    "lm_head": 2.0,
    "head": 2.0,
}
# Standard deviation and mean of the small tensors.
SMALL_VALUES = {
    "weight": (0.5, 0.0),  # taps of the convolutions
    "dt_bias": (1.5, -3.0),
    "A_log": (0.3, 0.0),
    "index_kpool_compress_ape": (1.0, 0.0),
    "hc_attn_base": (1.5, 0.0),
    "hc_attn_scale": (0.2, 1.0),
    "hc_ffn_base": (1.5, 0.0),
    "hc_ffn_scale": (0.2, 1.0),
}
VISION_STD = 0.02
_ROLES = {
    Bucket.EMBED: "embed",
    Bucket.EXPERTS: "expert",
    Bucket.DRAFT: "draft",
    Bucket.DRAFT_EXPERTS: "draft",
    Bucket.VISION: "vision",
}


def architecture_of(options: FuelOptions) -> Architecture:
    """The sizes of a random fuel, as the inventory of tensors takes them."""
    s = options.shape
    layers = range(s.num_hidden_layers)
    shared = Architecture.__dataclass_fields__.keys() & s.__dataclass_fields__.keys()
    return Architecture(
        chemistry=GLM5_NEXT,
        qk_rope_head_dim=0,
        is_kda=tuple(map(s.is_kda, layers)),
        is_moe=tuple(map(s.is_moe, layers)),
        indexer_full=tuple(map(s.indexer_full, layers)),
        num_nextn_predict_layers=int(options.draft != "none"),
        vision=VisionTower.of(config_files.vision_config(s)) if options.vision else None,
        **{field: getattr(s, field) for field in shared},
    )


class TensorTable:
    """All tensors of a fuel, each with the source of its bytes."""

    def __init__(self, options: FuelOptions) -> None:
        self.o = options
        naming = NESTED if options.layout == "nested" else FLAT
        own_head = options.draft == "own-head"
        self.parameters = parameters(architecture_of(options), naming, draft_own_head=own_head)
        self.specs = [spec for p in self.parameters for spec in self._specs(p)]

    def bits(self, name: str) -> Bits:
        return Bits(self.o.seed, name)

    def _specs(self, p: Parameter) -> Iterator[TensorSpec]:
        role = _ROLES.get(p.bucket, "dense")
        std, mean = self._values(p)
        weight_format = format_of(self.o, p)
        packed = expert_format(self.o) == "nvfp4-packed"
        scalar = {"empty": (), "one": (1,), "auto": (1,) if packed else ()}[self.o.scalars]
        quantised = QuantisedBytes(self.o, p, std, PIECE)
        for t in encode(p, weight_format, input_scale=self.o.input_scale, scalar=scalar):
            plain = weight_format in PLAIN_FORMATS
            pieces = self._plain(t, std, mean) if plain else quantised.pieces(t)
            mx_scale = weight_format == "mxfp8" and t.dtype == "U8"
            yield TensorSpec(t.name, self.o.mx_scales if mx_scale else t.dtype, t.shape, pieces, role)

    def _values(self, p: Parameter) -> tuple[float, float]:
        """Standard deviation and mean."""
        leaf = p.name.rsplit(".", 1)[-1]
        if p.kind is Kind.EMBEDDING:
            return 1.0, 0.0
        if leaf == "e_score_correction_bias":
            return self.o.router_bias, 0.0
        if p.kind in (Kind.SMALL, Kind.TAPS):
            return SMALL_VALUES[leaf]
        if p.kind is Kind.NORM:
            return (0.1, 0.0) if leaf == "bias" else (0.2, 1.0)
        if p.bucket is Bucket.VISION:
            return VISION_STD, 0.0
        gain = 1.0 if leaf == "o_proj" and p.bucket is Bucket.KDA else GAINS.get(leaf, 1.0)
        if p.expert >= 0 and leaf != "down_proj":
            gain *= self._spread(p.name.rsplit(".", 1)[0], leaf)
        return gain * p.shape[1] ** -0.5, 0.0

    def _spread(self, expert: str, leaf: str) -> float:
        """Gate and up apart by up to ten times, either way."""
        bits = self.bits(expert + ".spread")
        spread = 1 + 2.16 * bits.uniform()
        wide_gate = bits.uniform() < 0.5
        return spread if wide_gate == (leaf == "gate_proj") else 1 / spread

    def _plain(self, t: TensorInfo, std: float, mean: float) -> Callable[[], Iterator[npt.NDArray]]:
        n = math.prod(t.shape)

        def pieces() -> Iterator[npt.NDArray]:
            if t.dtype == "BF16" and mean == 0 and n >= LANES_FROM:
                return _lane_pieces(self.bits(t.name), n, std)
            return _normal_pieces(self.bits(t.name), n, std, mean, t.dtype)

        return pieces


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
    return {
        **total,
        "disk": sum(t.nbytes for t in specs),
        "parameters": sum(
            elements_of(TensorInfo(t.name, t.dtype, t.shape))
            for t in specs
            if t.role in ("dense", "embed", "expert")
        ),
        "token": total["dense"] + head + row + total["expert"] * s.num_experts_per_tok // s.n_routed_experts,
    }


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
        table = TensorTable(options)
        config_files.write_all(partial, options, formats_of_modules(options, table.parameters))
        config_files.write_tensors(partial, table.specs, options, progress)
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

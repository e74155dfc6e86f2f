"""The weight format of each parameter of a random fuel, and the random bytes of the quantised ones."""

import hashlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from rocket.inventory import FORMAT_COLUMNS, Bucket, Kind, Parameter, TensorInfo
from rocket.random_fuel_shape import PATCHES, FuelOptions

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_EXPERT_FORMATS = {"modelopt": "nvfp4", "compressed-tensors": "nvfp4-packed"}
_BY_BUCKET = {
    Bucket.EMBED: "embedding",
    Bucket.HEAD: "head",
    Bucket.KDA: "attention",
    Bucket.MLA: "attention",
    Bucket.DENSE_MLP: "dense_mlp",
    Bucket.SHARED: "shared",
}


def _byte_of(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0]


def expert_format(options: FuelOptions) -> str:
    """Of the routed experts, but for layers that are excepted."""
    return _EXPERT_FORMATS.get(options.experts, options.experts)


def format_of(options: FuelOptions, p: Parameter) -> str:
    """One of LINEAR_FORMATS."""
    if p.kind in (Kind.SMALL, Kind.TAPS):
        if options.small != "mixed":
            return options.small.lower()
        return "f32" if _byte_of(p.name) & 1 else "bf16"
    if p.kind in (Kind.ROUTER, Kind.HYPER):
        return options.wide.lower()
    if p.kind not in (Kind.LINEAR, Kind.EMBEDDING):
        return "bf16"
    wanted = _wanted(options, p)
    return "bf16" if p.shape[1] % FORMAT_COLUMNS.get(wanted, 1) else wanted


def _wanted(options: FuelOptions, p: Parameter) -> str:
    if options.patchwork:
        return PATCHES[_byte_of(p.name) % len(PATCHES)]
    if p.bucket in (Bucket.DRAFT, Bucket.DRAFT_EXPERTS) and options.draft_weights != "auto":
        return "bf16" if p.kind is Kind.EMBEDDING else options.draft_weights
    if p.bucket in (Bucket.EXPERTS, Bucket.DRAFT_EXPERTS):
        if p.layer in options.bf16_expert_layers:
            return "bf16"
        blocks = "fp8-modelopt" if options.experts == "modelopt" else "fp8"
        return blocks if p.layer in options.fp8_expert_layers else expert_format(options)
    field = _BY_BUCKET.get(p.bucket)
    return getattr(options, field) if field else "bf16"


# --- values -----------------------------------------------------------------------------------------------


def e4m3_values() -> npt.NDArray[np.float32]:
    """The 256 values of an E4M3 byte (no infinities; 0x7f and 0xff are NaN)."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, (code & 7).astype(np.float32)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


def _rms(values: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


# One block scale for each random byte: 32 … 120 as a rule, eight times 448, eight zero or subnormal.
SCALE_CODES = np.concatenate([np.arange(12 << 3, 14 << 3).repeat(15), np.full(8, 0x7E), np.arange(8)]).astype(
    np.uint8
)
NVFP4_RMS = float(np.sqrt(np.mean(E2M1**2) * np.mean(e4m3_values()[SCALE_CODES].astype(np.float64) ** 2)))

# One E4M3 weight for each random byte: 16 … 240 as a rule, some smaller, zero, subnormal, 448; either sign.
_POSITIVE = np.concatenate(
    [np.arange(11 << 3, 15 << 3).repeat(3), np.arange(8 << 3, 11 << 3), np.arange(4), np.full(4, 0x7E)]
)
FP8_CODES = np.concatenate([_POSITIVE, _POSITIVE | 0x80]).astype(np.uint8)
FP8_RMS = _rms(e4m3_values()[FP8_CODES])


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

    def bytes(self, n: int, piece: int) -> Iterator[npt.NDArray[np.uint8]]:
        """`n` bytes, `piece` words at a time."""
        for begin in range(0, n, 8 * piece):
            count = min(8 * piece, n - begin)
            yield self.words((count + 7) // 8).view(np.uint8)[:count]


class QuantisedBytes:
    """The bytes of one quantised parameter's tensors."""

    def __init__(self, options: FuelOptions, p: Parameter, std: float, piece: int) -> None:
        self.o, self.p, self.std, self.piece = options, p, std, piece
        self.zero = options.zero_global and p.name.endswith("experts.0.down_proj")

    def pieces(self, t: TensorInfo) -> Callable[[], Iterator[npt.NDArray]]:
        suffix, n = t.name.removeprefix(self.p.name), math.prod(t.shape)
        if suffix in (".weight_packed", ".weight"):
            if t.dtype == "U8":
                return lambda: self._bytes(".packed", n)
            return lambda: (FP8_CODES[piece] for piece in self._bytes(".codes", n))
        if t.dtype == "F8_E4M3":
            return lambda: (SCALE_CODES[piece] for piece in self._bytes(".scales", n))
        if t.dtype in ("U8", "F8_E8M0"):
            return lambda: self._exponents(n)
        if suffix == ".input_scale":
            return lambda: iter([np.array([0.03125], np.float32)])
        if suffix in (".weight_scale_2", ".weight_global_scale"):
            return lambda: iter([self._global(suffix == ".weight_global_scale")])
        return lambda: iter([self._multipliers(n, t.dtype)])

    def _bits(self, what: str) -> Bits:
        return Bits(self.o.seed, self.p.name + what)

    def _bytes(self, what: str, n: int) -> Iterator[npt.NDArray[np.uint8]]:
        return self._bits(what).bytes(n, self.piece)

    def _global(self, divides: bool) -> npt.NDArray[np.float32]:
        scale = np.float32(0 if self.zero else self.std / NVFP4_RMS)
        return np.array([np.float32(1) / scale if divides and scale else scale], np.float32)

    def _multipliers(self, n: int, dtype: str) -> npt.NDArray:
        """Float scales of FP8, apart by up to three times where there are several."""
        spread = (self._bits(".multipliers").words(n) >> np.uint64(40)).astype(np.float32) * np.float32(
            2**-24
        ) + np.float32(0.5)
        scale = np.float32(0 if self.zero else self.std / FP8_RMS) * (spread if n > 1 else np.float32(1))
        scale = np.broadcast_to(scale, n).astype(np.float32)
        return scale if dtype == "F32" else to_bf16(scale)

    def _exponents(self, n: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Powers of two about the one that fits: half of it and twice as much, each for a quarter of all."""
        fit = 127 + round(math.log2(self.std / FP8_RMS))
        steps = np.array([-1, 0, 0, 1])
        for piece in self._bytes(".exponents", n):
            yield np.zeros(len(piece), np.uint8) if self.zero else (fit + steps[piece & 3]).astype(np.uint8)

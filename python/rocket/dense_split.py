"""Which dense weights boosters share, and what of them is one booster's.

Projections into heads and columns are cut by rows, those out of them by columns, the head by rows. What is
small and needed by all stays whole: router, norms, low-rank projections, indexer, hyper-connections, the
embedding. Weights that have a scale for a block of numbers are cut where blocks end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from rocket.architecture import Architecture
from rocket.errors import UsageError
from rocket.inventory import Bucket, TensorInfo

OPTION = "--split-dense"
_FP8_BLOCK = 128
_MOST_LISTED = 64  # numbers of boosters that would do
_MLP = {"gate_proj": False, "up_proj": False, "down_proj": True}
# The bucket and the module's name -> whether columns are cut, else rows.
_CUT: dict[Bucket, dict[str, bool]] = {
    Bucket.KDA: {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d"), False),
        **dict.fromkeys(("f_b_proj", "g_b_proj", "b_proj", "dt_bias", "A_log"), False),
        "o_proj": True,
    },
    Bucket.MLA: {"q_b_proj": False, "kv_b_proj": False, "o_proj": True},
    Bucket.DENSE_MLP: _MLP,
    Bucket.SHARED: _MLP,
    Bucket.HEAD: {"lm_head": False},
}
_SUFFIXES = (".weight", ".weight_packed", ".weight_scale", ".weight_scale_inv")


def _axis(name: str, bucket: Bucket) -> bool | None:
    modules = _CUT.get(bucket)
    if modules is None:
        return None
    stem, dot, suffix = name.rpartition(".")
    module = stem if dot + suffix in _SUFFIXES else name
    return modules.get(module.rpartition(".")[2])


@dataclass(frozen=True)
class CutTensor:
    """A tensor of which each booster has a part; of scales, a weight's of which it has a part."""

    name: str
    bucket: Bucket
    stored: int
    loaded: int
    columns: bool  # cut by columns, else by rows
    count: int  # numbers of the weight along that way
    block: int = 1  # of them share a scale
    spread: tuple[int, ...] = ()  # of FP8 with a scale for each block (or one for all): the weight's shape
    grid: bool = True  # the scales are laid out as blocks are; else one is for all
    follows: bool = True  # it is cut as well; else every booster has it whole

    def fits(self, boosters: int) -> bool:
        """Whether no cut falls inside a block."""
        if self.count % boosters:
            return False
        part, block = self.count // boosters, self.block
        if part % block == 0:
            return True
        # The last block of FP8 may be cut short, so that a part may also lie within one.
        firsts = range(0, self.count, part)
        return bool(self.spread) and all(
            first % block == 0 or first // block == (first + part - 1) // block for first in firsts
        )

    def share(self, boosters: int) -> tuple[int, int]:
        """Bytes of one booster: as stored, as loaded."""
        if not self.spread:
            return (self.stored // boosters, self.loaded // boosters) if self.follows else (self.stored, 0)
        whole = self._blocks(1)
        part = self._blocks(boosters)
        return self.stored * part // whole if self.grid else self.stored, 4 * part

    def _blocks(self, boosters: int) -> int:
        shape = list(self.spread)
        shape[1 if self.columns else 0] //= boosters
        return prod(ceil(n / _FP8_BLOCK) for n in shape)


def cut_of(
    t: TensorInfo, other: TensorInfo | None, bucket: Bucket, loaded: int, row_scales: bool
) -> CutTensor | None:
    """What becomes of a tensor; None: it stays whole. ``other``: of a scale its weight. ``row_scales``: it
    has a scale for each row of an FP8 weight."""
    columns = _axis(t.name, bucket)
    if columns is None:
        return None
    of = other if other is not None and t.name.endswith(_SUFFIXES[2:]) else t
    packed = of.dtype == "U8"
    shape = (of.shape[0], of.shape[1] * 2) if packed else of.shape
    cut = CutTensor(of.name, bucket, t.nbytes, loaded, columns, shape[1 if columns else 0])
    if of is t:
        return cut
    if row_scales:
        return replace(cut, follows=not columns)
    if packed:
        return replace(cut, block=16 if columns else 1)
    if t.dtype in ("U8", "F8_E8M0"):
        return replace(cut, block=32 if columns else 1)
    one = t.shape in ((), (1,))
    return replace(cut, block=1 if one else _FP8_BLOCK, spread=of.shape, grid=not one)


# --- how many may share -----------------------------------------------------------------------------------


def _pieces(arch: Architecture) -> list[tuple[str, int]]:
    """What is split, and into how many pieces it may go."""
    pieces = []
    if any(arch.is_kda):
        pieces.append(("KDA heads", arch.linear_num_heads))
    if not all(arch.is_kda):
        pieces.append(("MLA heads", arch.num_attention_heads))
    if not all(arch.is_moe):
        pieces.append(("columns of the dense MLPs", arch.intermediate_size))
    if any(arch.is_moe):
        pieces.append(("columns of the shared experts", arch.moe_intermediate_size * arch.n_shared_experts))
    return [*pieces, ("rows of lm_head", arch.vocab_size)]


def sharers(arch: Architecture, cuts: Sequence[CutTensor]) -> list[int]:
    """Numbers of boosters, 1 first, that can share these weights."""
    counts = [count for _, count in _pieces(arch)]
    found = [n for n in range(1, _MOST_LISTED + 1) if all(count % n == 0 for count in counts)]
    return [n for n in found if all(cut.fits(n) for cut in cuts)]


def check_share(arch: Architecture, cuts: Sequence[CutTensor], boosters: int) -> None:
    """Throws UsageError for a number of boosters that cannot share these weights, with those that can."""
    wrong = None
    for name, count in _pieces(arch):
        if wrong is None and count % boosters:
            wrong = f"a number of boosters that divides the {count} {name}, found {boosters}"
    for cut in cuts:
        if wrong is None and not cut.fits(boosters):
            way = "columns" if cut.columns else "rows"
            wrong = (
                f"{way} of {cut.name} in {boosters} parts of whole blocks of {cut.block}, found {cut.count}"
            )
    if wrong is not None:
        listed = ", ".join(map(str, sharers(arch, cuts)))
        raise UsageError(
            f"{OPTION}: expected {wrong}", f"with these weights it works with this many boosters: {listed}"
        )


def share_of(arch: Architecture, boosters: int) -> Architecture:
    """One booster's heads and columns."""
    return replace(
        arch,
        linear_num_heads=arch.linear_num_heads // boosters,
        num_attention_heads=arch.num_attention_heads // boosters,
        intermediate_size=arch.intermediate_size // boosters,
    )

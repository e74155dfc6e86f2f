"""Does a fuel fit a booster, and with how many expert slots: integer arithmetic on bytes, no device in sight.

Every booster holds the dense weights and the state of all streams, or its share of them, and a share of the
routed experts. What is left of its memory becomes slots: resident + slots + state + workspace + reserve <=
memory, and what stays unused is less than a slot unless every expert has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from rocket.accounting import INDEX_DTYPE, KV_DTYPES, Account, State
from rocket.architecture import Architecture
from rocket.booster import GIB, Booster
from rocket.errors import UsageError
from rocket.slot_limits import SlotLimits
from rocket.split import Owners, sizes

DEFAULT_CONTEXT = 8192
STEP_ROWS = 256  # rows of a prefill step, unless --prefill-chunk says otherwise
LOGITS_BYTES = 32 << 20  # bounds the logits of one step
THREADS = 64  # workers whose scratch is counted
LARGE_PAGE = 2 << 20  # the workspace is one block of these
ALIGN = 64
STAMP_FLOATS = 16  # at the head of what a booster sends
BUFFERS = 64  # no forward pass has more at once; each may be padded to ALIGN


@dataclass(frozen=True)
class Request:
    """What a plan is asked for. None is chosen by the plan. Slots and cache bytes are each booster's."""

    booster: Booster
    boosters: int = 1
    context: int | None = None
    streams: int = 1
    kv_dtype: str | None = None
    cache_bytes: int | None = None
    slots: int | None = None
    slot_map: tuple[int, ...] | None = None  # slots of each MoE layer
    slot_map_file: str = ""  # for messages
    owners: Owners | None = None  # the booster of each expert; None: by id
    split_dense: bool = False  # boosters share the dense weights, too
    prefill_chunk: int | None = None  # rows of a prefill step

    @property
    def prompt_rows(self) -> int:
        return self.prefill_chunk or STEP_ROWS

    @property
    def step_rows(self) -> int:
        """Of the largest step: a piece of a prompt, or a row of each stream."""
        return max(self.prompt_rows, self.streams)


@dataclass(frozen=True)
class Plan:
    """A plan that fits, for each booster."""

    account: Account
    each: Account  # what one booster has of the dense weights: all of them, or its share
    request: Request
    context: int
    kv_dtype: str
    owned: tuple[int, ...]  # experts of each MoE layer on the booster that owns most
    slots: tuple[int, ...]  # of each MoE layer, on that booster
    slot_bytes: int
    resident: int
    stream_state: int
    workspace: int

    @property
    def slot_count(self) -> int:
        return sum(self.slots)

    @property
    def slots_requested(self) -> int | None:
        """What was asked for in slots, before any cut."""
        if self.request.slot_map is not None:
            return sum(self.request.slot_map)
        return self.request.slots

    @property
    def state(self) -> int:
        return self.request.streams * self.stream_state

    @property
    def reserve(self) -> int:
        return self.request.booster.reserve_bytes

    @property
    def memory(self) -> int:
        return self.request.booster.memory_bytes

    @property
    def cache(self) -> int:
        return self.slot_count * self.slot_bytes

    @property
    def required(self) -> int:
        return self.resident + self.cache + self.state + self.workspace + self.reserve

    @property
    def left(self) -> int:
        return self.memory - self.required

    @property
    def holds_all(self) -> bool:
        """Every expert that a booster owns has a slot."""
        return self.slots == self.owned

    def slots_of_each(self) -> list[tuple[int, ...]]:
        """Slots of each MoE layer, booster by booster: as many in all wherever there are experts for them."""
        owned = owned_by_each(self.account, self.request)
        if self.request.slot_map is not None:
            return [tuple(map(min, self.request.slot_map, own)) for own in owned]
        return [spread(self.slot_count, own) for own in owned]

    @property
    def state_of(self) -> State:
        return State(self.each.arch, self.kv_dtype, INDEX_DTYPE)


class OverBudgetError(Exception):
    """There is less than a plan needs. ``plan`` is what was asked for, with as few slots as that allows."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            f"needs {_gib(plan.required)} on each booster and {_gib(plan.memory)} are there: "
            f"{_gib(-plan.left)} too much"
        )
        self.plan = plan


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


# --- sizes ------------------------------------------------------------------------------------------------


def stream_state_bytes(arch: Architecture, kv_dtype: str, context: int) -> int:
    """All that a stream keeps, and its recurrent state again: as it was before a step with checkpoints."""
    state = State(arch, kv_dtype, INDEX_DTYPE)
    return state.bytes_at(context) + state.stream_bytes


def workspace_bytes(
    arch: Architecture, context: int, rows: int = STEP_ROWS, boosters: int = 1, split_dense: bool = False
) -> int:
    """An upper bound of what the forward pass takes for steps of so many rows, their logits included. With
    ``split_dense`` the architecture is a booster's share."""
    a, r = arch, rows
    h, streams = a.hidden_size, max(1, a.hc_mult)
    logits = min(r, max(16, LOGITS_BYTES // (4 * a.vocab_size)))
    whole_step = r * (streams * h + 2 * h + streams + streams**2 + a.index_topk + a.index_kpool + 1)
    blocks = _block_floats(a, r, boosters)
    if split_dense:  # parts of sums, or of logits, of all boosters
        own = logits * a.vocab_size // boosters
        blocks = [count + boosters * (STAMP_FLOATS + r * h) for count in blocks]
        blocks.append(own + boosters * (STAMP_FLOATS + own))
    floats = whole_step + max(blocks) + logits * (h + a.vocab_size)
    tables = 12 * a.moe_layers * a.n_routed_experts  # three global scales of each expert
    exact = 4 * floats + _scratch_bytes(a, r, context) + tables + ALIGN * BUFFERS + (1 << 20)
    return ceil(exact / LARGE_PAGE) * LARGE_PAGE


def _block_floats(a: Architecture, r: int, boosters: int) -> list[int]:
    """Activations of each kind of block. Rows that cross between boosters have a buffer of their own."""
    h, c, d, latent = a.hidden_size, a.kda_channels, a.linear_head_dim, a.kv_lora_rank + a.qk_rope_head_dim
    heads, index_heads = a.num_attention_heads, a.index_n_heads
    kda = r * (9 * c + 2 * d + a.linear_num_heads)
    mla = r * (a.q_lora_rank + latent + heads * (a.qk_head_dim + 2 * latent + a.v_head_dim))
    mla += r * (index_heads * (a.index_head_dim + 1) + 2 * a.index_head_dim)
    chosen, shared = a.num_experts_per_tok, a.moe_intermediate_size * a.n_shared_experts
    moe = r * (a.n_routed_experts + chosen * (2 + h) + 2 * shared)
    if boosters > 1:
        moe += r * chosen * (1 + h) + STAMP_FLOATS * boosters
    return [kda, mla, moe, r * 2 * a.intermediate_size]


def _scratch_bytes(a: Architecture, r: int, context: int) -> int:
    """The largest scratch of an op beside the activations; ops pad what they pack to 256 channels."""
    pools = context // a.index_kpool + 1
    widest = max(
        *(a.hidden_size, a.intermediate_size, a.moe_intermediate_size * a.n_shared_experts, a.q_lora_rank),
        *(a.kda_channels, a.num_attention_heads * a.v_head_dim),
    )
    chosen = r * a.num_experts_per_tok
    return 8192 + max(
        r * 12 * _padded(widest) + 4 * r * a.linear_num_heads,  # projections, KDA recurrence
        min(r, 16) * (pools + 64) * 12,  # indexer: scores and keys of a block of rows
        4 * THREADS * (a.num_attention_heads * (a.index_topk + a.index_kpool + 16) + 64),  # sparse MLA
        chosen * (8 * _padded(a.moe_intermediate_size) + 64)
        + 4 * r * _padded(a.hidden_size)
        + 16 * a.n_routed_experts,
    )


def _padded(channels: int) -> int:
    return ceil(channels / 256) * 256


# --- slots ------------------------------------------------------------------------------------------------


def spread(total: int, caps: Sequence[int]) -> tuple[int, ...]:
    """`total` slots over layers as evenly as caps allow; what does not divide goes to the first layers."""
    slots = [0] * len(caps)
    open_layers, left = list(range(len(caps))), min(total, sum(caps))
    while open_layers and left:
        share = max(1, left // len(open_layers))
        for layer in open_layers:
            more = min(share, caps[layer] - slots[layer], left)
            slots[layer] += more
            left -= more
        open_layers = [layer for layer in open_layers if slots[layer] < caps[layer]]
    return tuple(slots)


def _limits(account: Account, owned: Sequence[int]) -> SlotLimits:
    return SlotLimits(tuple(owned), account.arch.num_experts_per_tok)


def _asked_slots(account: Account, request: Request, owned: tuple[int, ...]) -> tuple[int, ...] | None:
    """Slots of each layer, where the request says how many. Throws UsageError for a number that no plan can
    have."""
    limits = _limits(account, owned)
    if request.slot_map is not None:
        where = f"--slot-map {request.slot_map_file}".rstrip()
        return limits.of_map(where, request.slot_map, account.arch.moe_layer_ids)
    if request.slots is not None:
        return spread(limits.total("--expert-slots", request.slots), owned)
    if request.cache_bytes is not None:
        slots = limits.in_bytes("--expert-cache-gib", request.cache_bytes, account.slot_bytes)
        return spread(slots, owned)
    return None


def owned_by_each(account: Account, request: Request) -> list[tuple[int, ...]]:
    """Experts of each MoE layer, booster by booster."""
    arch, boosters = account.arch, request.boosters
    if request.owners is None:
        layers = [sizes(arch.n_routed_experts, boosters, layer) for layer in range(arch.moe_layers)]
    else:
        layers = [np.bincount(row, minlength=boosters).tolist() for row in request.owners]
    return list(zip(*layers, strict=True)) if layers else [()] * boosters


def _owned(account: Account, request: Request) -> tuple[int, ...]:
    """Of the booster that owns most: a plan that fits there fits on all."""
    return max(owned_by_each(account, request), key=sum)


def _each(account: Account, request: Request) -> Account:
    return account.share(request.boosters) if request.split_dense and request.boosters > 1 else account


def _check(account: Account, request: Request) -> None:
    arch = account.arch
    if not 1 <= request.boosters <= arch.n_routed_experts:
        raise UsageError(
            f"--boosters: expected 1 to {arch.n_routed_experts} (the experts of a layer), "
            f"found {request.boosters}",
            "a booster without an expert would have nothing to do",
        )
    if request.context is not None and not 1 <= request.context <= arch.max_position_embeddings:
        raise UsageError(
            f"--context: expected 1 to {arch.max_position_embeddings} (the model's limit), "
            f"found {request.context}",
            "give fewer tokens",
        )
    if not arch.moe_layers and (request.slots, request.cache_bytes) != (None, None):
        raise UsageError(
            "expert slots: expected none, since this fuel has no MoE layers, found some",
            "leave out --expert-slots and --expert-cache-gib",
        )
    if request.streams < 1:
        raise UsageError(
            f"--streams: expected at least 1, found {request.streams}", "give a number of streams"
        )
    if request.kv_dtype is not None and request.kv_dtype not in KV_DTYPES:
        raise UsageError(
            f"--kv-dtype: expected one of {', '.join(KV_DTYPES)}, found {request.kv_dtype!r}",
            "leave it out for f32",
        )


def fewest_slots(account: Account, request: Request) -> int:
    return _limits(account, _owned(account, request)).fewest


def make_plan(account: Account, request: Request) -> Plan:
    """The plan of a request. Throws OverBudgetError, or UsageError for what no booster could do.

    A context that was left open gives way; what was asked for does not.
    """
    _check(account, request)
    if request.context is not None:
        return _plan(account, request, request.context)
    usual = min(DEFAULT_CONTEXT, account.arch.max_position_embeddings)
    try:
        return _plan(account, request, usual)
    except OverBudgetError:
        shorter = longest_context(account, request)
        if not shorter:
            raise
        return _plan(account, request, shorter)


def _plan(account: Account, request: Request, context: int) -> Plan:
    slot = account.slot_bytes
    owned = _owned(account, request)
    least = _limits(account, owned).fewest
    asked = _asked_slots(account, request, owned)
    kv_dtype = request.kv_dtype or "f32"
    each = _each(account, request)
    plan = Plan(
        account=account,
        each=each,
        request=request,
        context=context,
        kv_dtype=kv_dtype,
        owned=owned,
        slots=spread(least, owned) if asked is None else asked,
        slot_bytes=slot,
        resident=each.resident_loaded_bytes,
        stream_state=stream_state_bytes(each.arch, kv_dtype, context),
        workspace=workspace_bytes(
            each.arch, context, request.step_rows, request.boosters, each is not account
        ),
    )
    if plan.left < 0:
        raise OverBudgetError(plan)
    if asked is None and slot:
        plan = replace(plan, slots=spread(least + plan.left // slot, owned))
    return plan


# --- context for slots ------------------------------------------------------------------------------------


def fits(account: Account, request: Request) -> Plan | None:
    """The plan if there is one."""
    try:
        return make_plan(account, request)
    except (OverBudgetError, UsageError):
        return None


def longest_context(account: Account, request: Request) -> int:
    """The most tokens, in whole pages or the model's limit, with which a request fits; 0 if none."""
    limit, page = account.arch.max_position_embeddings, State(account.arch).page_tokens
    low, high = 0, ceil(limit / page)  # pages: `low` fit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(account, replace(request, context=min(limit, middle * page))):
            low = middle
        else:
            high = middle - 1
    return min(limit, low * page)


@dataclass(frozen=True)
class Exchange:
    context: int
    slots: int


def exchange_by_context(plan: Plan) -> list[Exchange]:
    """Slots with a half, twice and four times the context, beside the plan's own."""
    limit = plan.account.arch.max_position_embeddings
    wanted = {max(1, plan.context // 2), plan.context, *(min(limit, plan.context * by) for by in (2, 4))}
    rows = []
    for context in sorted(wanted):
        other = fits(plan.account, _with_auto_slots(plan.request, context))
        if other:
            rows.append(Exchange(context, other.slot_count))
    return rows


def exchange_by_slots(plan: Plan) -> list[Exchange]:
    """The longest context with fewer and more slots than the plan's own, by a tenth of them."""
    limits = _limits(plan.account, plan.owned)
    step = max(1, plan.slot_count // 10)
    wanted = {max(limits.fewest, plan.slot_count - step), min(limits.most, plan.slot_count + step)}
    wanted.add(plan.slot_count)
    rows = []
    for slots in sorted(wanted) if plan.slot_bytes else ():
        request = replace(_with_auto_slots(plan.request, None), slots=slots)
        context = longest_context(plan.account, request)
        if context:
            rows.append(Exchange(context, slots))
    return rows


def _with_auto_slots(request: Request, context: int | None) -> Request:
    return replace(request, context=context, cache_bytes=None, slots=None, slot_map=None)

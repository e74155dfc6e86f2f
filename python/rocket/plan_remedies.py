"""What to change when a plan is over budget. Every remedy is a request that was planned and fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from rocket import booster as boosters_module
from rocket.accounting import KV_DTYPES, Account
from rocket.booster import GIB, Booster
from rocket.plan import (
    DEFAULT_CONTEXT,
    OverBudgetError,
    Request,
    fewest_slots,
    fits,
    longest_context,
    make_plan,
)
from rocket.quantity import Quantity

MOST = 6  # a hint with more is not read


@dataclass(frozen=True)
class Remedy:
    """Options to give, each with its value, and the request that they make. ``memory_gib`` is no option but
    a field of the booster's profile."""

    options: dict[str, str]
    request: Request

    @property
    def text(self) -> str:
        return " ".join(
            f"a booster with memory_gib {value}" if option == "memory_gib" else f"{option} {value}".rstrip()
            for option, value in self.options.items()
        )


def remedies(account: Account, request: Request) -> list[Remedy]:
    """At least two ways out, the smallest changes first."""
    found = list(_single(account, request))
    if len(found) < 2:
        found += _combined(account, request)
    # More memory always works, but cannot be had by an option.
    if len(found) < 2:
        found.append(_more_memory(account, request, {}))
    if len(found) < 2:
        options, small = _smallest(account, request)
        found.append(_more_memory(account, small, options))
    return found[:MOST]


def _single(account: Account, request: Request) -> Iterator[Remedy]:
    """One option changed."""
    yield from _fewer_slots(account, request)
    context = longest_context(account, request)
    if context:
        yield Remedy({"--context": str(context)}, replace(request, context=context))
    width = KV_DTYPES[request.kv_dtype or "f32"]
    for dtype, bytes_each in KV_DTYPES.items():
        narrower = replace(request, kv_dtype=dtype)
        if bytes_each < width and fits(account, narrower):
            yield Remedy({"--kv-dtype": dtype}, narrower)
            break
    streams = _most_streams(account, request)
    if streams:
        yield Remedy({"--streams": str(streams)}, replace(request, streams=streams))
    if request.owners is None:
        yield from _more_boosters(account, request)
    yield from _other_boosters(account, request)


def _fewer_slots(account: Account, request: Request) -> Iterator[Remedy]:
    if request.cache_bytes is None and request.slots is None and request.slot_map is None:
        return
    automatic = replace(request, cache_bytes=None, slots=None, slot_map=None)
    plan = fits(account, automatic)
    if plan is None:
        return
    if request.cache_bytes is not None:
        gib = plan.cache * 100 // GIB / 100
        smaller = replace(automatic, cache_bytes=int(gib * GIB))
        if fits(account, smaller):
            yield Remedy({"--expert-cache-gib": f"{gib:.2f}"}, smaller)
            return
    yield Remedy({"--expert-slots": str(plan.slot_count)}, replace(automatic, slots=plan.slot_count))


def _most_streams(account: Account, request: Request) -> int:
    low, high = 0, request.streams - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(account, replace(request, streams=middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _more_boosters(account: Account, request: Request) -> Iterator[Remedy]:
    """Each holds fewer experts then. More of them need no more, so one search is enough."""
    low, high = request.boosters + 1, account.arch.n_routed_experts
    if low > high or not fits(account, replace(request, boosters=high)):
        return
    while low < high:
        middle = (low + high) // 2
        if fits(account, replace(request, boosters=middle)):
            high = middle
        else:
            low = middle + 1
    yield Remedy({"--boosters": str(low)}, replace(request, boosters=low))


def _other_boosters(account: Account, request: Request) -> Iterator[Remedy]:
    """Shipped profiles with more memory, the smallest that is enough."""
    for booster in _shipped():
        if booster.memory_bytes > request.booster.memory_bytes:
            other = replace(request, booster=booster)
            if fits(account, other):
                yield Remedy({"--booster": booster.id}, other)
                return


def _shipped() -> list[Booster]:
    found = [boosters_module.load(name) for name in boosters_module.names()]
    return sorted(found, key=lambda booster: booster.memory_bytes)


def _smallest(account: Account, request: Request) -> tuple[dict[str, str], Request]:
    """The least that a request can be brought down to, its context apart, and the options that do it."""
    options: dict[str, str] = {}
    small = request
    if request.streams > 1:
        options["--streams"], small = "1", replace(small, streams=1)
    if request.kv_dtype != "fp8":
        options["--kv-dtype"], small = "fp8", replace(small, kv_dtype="fp8")
    automatic = replace(small, cache_bytes=None, slots=None, slot_map=None)
    if automatic != small:
        slots = fewest_slots(account, request)
        options["--expert-slots"], small = str(slots), replace(automatic, slots=slots)
    return options, small


def _combined(account: Account, request: Request) -> Iterator[Remedy]:
    """Everything smaller at once, here or on the smallest booster where that is enough."""
    options, small = _smallest(account, request)
    larger = [b for b in _shipped() if b.memory_bytes > request.booster.memory_bytes]
    wanted = request.context or DEFAULT_CONTEXT
    for booster in (request.booster, *larger):
        context = min(wanted, longest_context(account, replace(small, booster=booster)))
        if not context:
            continue
        named = {} if booster is request.booster else {"--booster": booster.id}
        final = replace(small, booster=booster, context=context)
        if fits(account, final):
            yield Remedy({**named, **options, "--context": str(context)}, final)
            if named:
                return


def _more_memory(account: Account, request: Request, options: dict[str, str]) -> Remedy:
    """The memory with which a request would fit."""
    gib = ceil(_required(account, request) * 100 / GIB) / 100
    memory = Quantity(value=gib, source="derived")
    larger = request.booster.model_copy(update={"memory_gib": memory})
    return Remedy(
        {**options, "memory_gib": f"{gib:.2f}"},
        # Checked again, so that what the first one has worked out is not taken over.
        replace(request, booster=Booster.model_validate(larger.model_dump())),
    )


def _required(account: Account, request: Request) -> int:
    try:
        return make_plan(account, request).required
    except OverBudgetError as error:
        return error.plan.required

"""What a run says about itself: the closing line, the table of stages, the diagnostics of layers."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

Stage = tuple[str, float, bool]  # name, ms, whether it is a part of the stage before it


def finite(value: float | None) -> float | None:
    """For JSON, which knows neither nan nor infinity."""
    return value if value is not None and math.isfinite(value) else None


def counted(count: int, what: str, several: str | None = None) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {several or what + 's'}"


def format_bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 0.1 * size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"


def format_rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.1f}"


@dataclass
class Timing:
    """Seconds of a run. The first token comes out of the prompt's last step, so it belongs to the prefill."""

    load_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)  # the engine's part of each decode step

    @property
    def prefill_tok_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        return len(self.steps_s) / self.decode_s if self.steps_s and self.decode_s else None

    def as_json(self) -> dict[str, Any]:
        steps = [1000 * s for s in self.steps_s]
        summary = (
            {"min": min(steps), "median": statistics.median(steps), "max": max(steps)} if steps else None
        )
        return {
            "load_s": self.load_s,
            "prefill_s": self.prefill_s,
            "prefill_tok_s": self.prefill_tok_s,
            "decode_s": self.decode_s,
            "decode_tok_s": self.decode_tok_s,
            "step_ms": summary,
        }


@dataclass(frozen=True)
class Experts:
    """Counts over some steps. A step counts each distinct expert once."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    streamed_bytes: int = 0
    fetch_s: float = 0.0
    layers: tuple[tuple[int, int, int, int], ...] = ()  # layer, hits, misses, evictions
    hints: dict[str, int] = field(default_factory=dict)  # ExpertHintStats, counted apart

    @staticmethod
    def from_stats(stats: dict[str, Any]) -> "Experts":
        return Experts(
            stats["expert_hits"],
            stats["expert_misses"],
            stats["expert_evictions"],
            stats["streamed_bytes"],
            stats["fetch_seconds"],
            tuple(stats["expert_layers"]),
            stats["expert_hints"],
        )

    def __sub__(self, earlier: "Experts") -> "Experts":
        return Experts(
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.evictions - earlier.evictions,
            self.streamed_bytes - earlier.streamed_bytes,
            self.fetch_s - earlier.fetch_s,
            _less(self.layers, earlier.layers),
            {name: count - earlier.hints.get(name, 0) for name, count in self.hints.items()},
        )

    @property
    def hit_rate(self) -> float | None:
        return _share(self.hits, self.misses)

    @property
    def fetch_gb_s(self) -> float | None:
        """While bytes were on their way."""
        return self.streamed_bytes / self.fetch_s / 1e9 if self.fetch_s > 0 else None

    def counts(self) -> dict[str, Any]:
        return {
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
            "hit_rate": self.hit_rate,
            "streamed_bytes": self.streamed_bytes,
        }

    def as_json(self) -> dict[str, Any]:
        return {
            **self.counts(),
            "fetch_gb_s": self.fetch_gb_s,
            "hints": self.hints,
            "layers": [
                {
                    "layer": layer,
                    "hits": hits,
                    "misses": misses,
                    "evictions": evictions,
                    "hit_rate": _share(hits, misses),
                }
                for layer, hits, misses, evictions in self.layers
            ],
        }


def _share(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _less(
    now: tuple[tuple[int, int, int, int], ...], earlier: tuple[tuple[int, int, int, int], ...]
) -> tuple[tuple[int, int, int, int], ...]:
    before = {layer: counts for layer, *counts in earlier}
    return tuple(
        (layer, hits - h, misses - m, evictions - e)
        for layer, hits, misses, evictions in now
        for h, m, e in [before.get(layer, (0, 0, 0))]
    )


def slot_cache_line(seconds: float, steps: int, experts: Experts) -> str:
    """What the cache of experts did in a window of time."""
    rate = "-" if experts.hit_rate is None else f"{100 * experts.hit_rate:.1f} %"
    misses = f"{experts.misses / steps:.2f}" if steps else "-"
    speed = "-" if experts.fetch_gb_s is None else f"{experts.fetch_gb_s:.2f} GB/s"
    return (
        f"SLOT_CACHE STATS window {seconds:.2f} s: "
        f"steps {steps}, hits {experts.hits}, misses {experts.misses}, "
        f"evictions {experts.evictions}, hit rate {rate}, misses a step {misses}, "
        f"streamed {format_bytes(experts.streamed_bytes)}, link {speed}"
    )


def closing_line(
    tokens: int, timing: Timing, decode: Experts, fraction: float | None, bounded: bool = False
) -> str:
    """The line that ends a run, for instance (on one line):

    128 tok, 7.1 s, 18.0 tok/s (55.6 ms/tok) | prefill 512 tok, 1.2 s |
    experts 91.2 % hit, 0.42 GiB/tok in decode | 74 % of read limit

    With a bounded cache of experts it has misses and evictions, too. They are those of decoding, which --json
    has as experts.decode.
    """
    first = f"{tokens} tok, {format_seconds(timing.decode_s)}"
    rate = timing.decode_tok_s
    if rate:
        first += f", {format_rate(rate)} tok/s ({1000 / rate:.{1 if rate < 100 else 2}f} ms/tok)"
    parts = [first, f"prefill {timing.prefill_tokens} tok, {format_seconds(timing.prefill_s)}"]
    used = decode.hits + decode.misses
    if used and timing.steps_s:
        streamed = format_bytes(decode.streamed_bytes / len(timing.steps_s))
        turnover = (
            f"{counted(decode.misses, 'miss', 'misses')}, {counted(decode.evictions, 'eviction')}, "
            if bounded
            else ""
        )
        parts.append(f"experts {100 * decode.hits / used:.1f} % hit, {turnover}{streamed}/tok in decode")
    if fraction is not None:
        parts.append(f"{100 * fraction:.0f} % of read limit")
    return " | ".join(parts)


def boosters_part(boosters: list[dict[str, Any]]) -> str:
    """What several boosters add to the closing line."""
    if not boosters:
        return ""
    rows = sum(booster["rows_sent"] for booster in boosters)
    longest = max(booster["wait_ms"] for booster in boosters) / 1000
    return f" | {len(boosters)} boosters, {counted(rows, 'row')} crossed, waited {format_seconds(longest)}"


def alone(info: dict[str, Any]) -> dict[str, Any]:
    """One booster, as each of several reports itself."""
    return {
        "rank": 0,
        "device": info["device"],
        "experts_owned": info["experts_owned"],
        "expert_bytes": info["owned_bytes"],
        "dense_bytes": info["dense_bytes"],
        "rows_sent": 0,
        "rows_received": 0,
        "wait_ms": 0.0,
    }


def profile_table(title: str, stages: list[Stage], steps: int) -> str:
    """Stages in ms a step and their shares; parts of a stage are indented and outside sum and shares."""
    total = sum(ms for _, ms, part in stages if not part)
    names = [f"  of which {name}" if part else name for name, _, part in stages]
    width = max(map(len, [title, "sum", *names]))
    lines = [f"{title:<{width}}  {'ms':>10}  {'share':>7}"]
    for name, (_, ms, part) in zip(names, stages, strict=True):
        share = "" if part or not total else f"{100 * ms / total:.1f} %"
        lines.append(f"{name:<{width}}  {ms / steps:>10.3f}  {share:>7}".rstrip())
    lines.append(f"{'sum':<{width}}  {total / steps:>10.3f}")
    return "\n".join(lines)


def mean_entropy(layers: list[tuple[float, float]]) -> float | None:
    """Over the layers that route; a dense layer has -1."""
    entropies = [entropy for _, entropy in layers if entropy >= 0 or math.isnan(entropy)]
    return statistics.fmean(entropies) if entropies else None


def diagnostics_table(layers: list[tuple[float, float]], topk: int) -> str:
    lines = [f"{'layer':>5}  {'stream mean RMS':>15}  {'router entropy':>14}"]
    for index, (rms, entropy) in enumerate(layers):
        shown = "-" if entropy < 0 else f"{entropy:.4f}"
        lines.append(f"{index:>5}  {rms:>15.6g}  {shown:>14}")
    mean = mean_entropy(layers)
    if mean is not None:
        count = sum(entropy >= 0 for _, entropy in layers)
        lines.append(
            f"router entropy, mean over {count} MoE layers: {mean:.4f} nats; ln {topk} = {math.log(topk):.4f}"
        )
    return "\n".join(lines)

#!/usr/bin/env python3
"""What perfect hints hide: a decode run from a slab with a bounded cache of experts, without hints, and with
the experts that each token will take hinted before its step, from a trace of the same run."""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needs_engine  # noqa: F401  (what is missing ends the script here)

# isort: split
import numpy as np

from rocket import Engine, Error
from rocket._core import FuelSlab, SamplingParams, read_trace
from rocket.errors import CliError
from rocket.fuel import resolve

GREEDY = SamplingParams()
PROMPT_TOKENS = 64


@dataclass
class Run:
    tokens: list[int]
    ms: float  # a token
    before: dict[str, Any]
    after: dict[str, Any]

    def counted(self, name: str) -> float:
        """A token."""
        return (self.after[name] - self.before[name]) / len(self.tokens)

    def hints(self, name: str) -> float:
        return (self.after["expert_hints"][name] - self.before["expert_hints"][name]) / len(self.tokens)


def decode(engine: Engine, tokens: int, future: np.ndarray | None, trace: Path | None = None) -> Run:
    """A prompt of random tokens, then ``tokens`` more. future: [tokens, MoE layers, top-k]."""
    core = engine.core
    prompt = np.random.default_rng(5).integers(0, engine.info["vocab"], PROMPT_TOKENS).tolist()
    layers = [layer for layer, *_ in core.stats()["expert_layers"]]
    stream = core.open()
    last = core.prompt(stream, prompt, GREEDY)
    if trace is not None:
        core.start_trace(str(trace))
    before, out = core.stats(), []
    start = time.perf_counter()
    for step in range(tokens):
        if future is not None:
            for layer, experts in zip(layers, future[step].tolist(), strict=True):
                core.hint(layer, experts)
        last = core.decode(stream, last, GREEDY)
        out.append(last)
    ms = 1000 * (time.perf_counter() - start) / tokens
    if trace is not None:
        core.stop_trace()
    run = Run(out, ms, before, core.stats())
    core.close(stream)
    return run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fuel", default="sparkler", help="name or folder")
    parser.add_argument("--slab", help="its folder; by default one is written and removed")
    parser.add_argument("--slots", type=int, action="append", help="of the cache; may be repeated")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="of each way; the fastest counts")
    return parser.parse_args()


def bench(o: argparse.Namespace, fuel: Path, work: Path) -> None:
    common: dict[str, Any] = {
        "backend": "cpu",
        "threads": o.threads,
        "max_context": PROMPT_TOKENS + o.tokens + 1,
        "max_streams": 1,
    }
    slab = Path(o.slab) if o.slab else work
    if not o.slab:
        FuelSlab(str(fuel), str(slab)).write()
    with Engine(fuel, **common) as engine:
        info = engine.info
        plain = decode(engine, o.tokens, None, work / "routing")
    future = read_trace(str(work / "routing"))["ids"]
    every = info["moe_layers"] * info["experts"]
    size = info["slot_bytes"] / 2**20
    print(f"{every} experts of {size:.2f} MiB; in place {plain.ms:.2f} ms a token")
    print("slots  hints     ms/tok  misses/tok  useful  late  wasted  waited ms/tok")
    for slots in o.slots or [every // 4, every // 2]:
        for hinted in (None, future):
            with Engine(fuel, expert_slots=slots, expert_slab=slab, **common) as engine:
                runs = [decode(engine, o.tokens, hinted) for _ in range(o.rounds)]
            if any(run.tokens != plain.tokens for run in runs):
                sys.exit("error: other tokens than with experts in place")
            best = min(runs, key=lambda run: run.ms)
            name = "none" if hinted is None else "perfect"
            by_kind = [best.hints(kind) for kind in ("useful", "late", "wasted")]
            print(
                f"{slots:5}  {name:8}  {best.ms:6.2f}  {best.counted('expert_misses'):10.2f}  "
                f"{by_kind[0]:6.2f}  {by_kind[1]:4.2f}  {by_kind[2]:6.2f}  "
                f"{1000 * best.counted('fetch_seconds'):13.2f}"
            )


def main() -> None:
    options = arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="rocket-hints-") as folder:
            bench(options, resolve(options.fuel), Path(folder))
    except (CliError, Error) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

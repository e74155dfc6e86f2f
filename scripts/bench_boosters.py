#!/usr/bin/env python3
"""How much faster two boosters decode than one: one alone, experts split, dense weights split as well.

    scripts/bench_boosters.py FUEL [--streams 1 4 8] [--caches] [--out DIR]

Starts each run by itself, those of two with mpirun, and checks that they give the same tokens. On GPUs a
small run over NCCL comes first, with a time limit of its own and NCCL's log in DIR; if it fails, rows go
through the host's memory. Prints a table; DIR/boosters.json has all of it.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import needs_engine  # noqa: F401  (what is missing ends the script here)

WARM_UP = 4  # steps that record what is replayed after them
SMOKE_SECONDS = 150
COLUMNS = ("run", "streams", "ms/step", "tok/s", "x one", "GiB/step", "wait ms", "rows", "misses", "tokens")


def decode(engine: Any, streams: int, prompt: int, tokens: int, repeats: int) -> dict[str, Any]:
    """On rank 0: a prompt, its forks, and their steps together."""
    from rocket._core import SamplingParams

    core, info, greedy = engine.core, engine.info, SamplingParams()
    ids = [(7 + 7919 * i) % info["vocab"] for i in range(prompt)]
    numbers = [core.open()]
    token = core.prompt(numbers[0], ids, greedy)
    numbers += [core.fork(numbers[0]) for _ in range(streams - 1)]
    last = [(token + 7919 * i) % info["vocab"] for i in range(streams)]  # else all choose the same experts
    sampling, seen = [greedy] * streams, []

    def steps(count: int) -> float:
        nonlocal last
        start = time.perf_counter()
        for _ in range(count):
            last = core.decode_batch(numbers, last, sampling)
            seen.append(last)
        return 1000 * (time.perf_counter() - start) / count

    steps(WARM_UP)
    before = core.stats()
    ms = [steps(tokens) for _ in range(repeats)]
    after = core.stats()
    for number in numbers:
        core.close(number)
    return {"streams": streams, "ms": ms, "tokens": seen, **figures(info, before, after, tokens * repeats)}


def figures(
    info: dict[str, Any], before: dict[str, Any], after: dict[str, Any], steps: int
) -> dict[str, Any]:
    """A step's, of what was counted before and after some."""
    used, misses = (
        sum(after[name] - before[name] for name in names) / steps
        for names in (("expert_hits", "expert_misses"), ("expert_misses",))
    )
    pairs = list(zip(before["boosters"], after["boosters"], strict=True))
    ranks = info["boosters"]
    one = info["owned_bytes"] / max(1, info["experts_owned"])
    dense = info["token_bytes"] - one * info["topk"] * info["moe_layers"] / ranks
    return {
        "wait_ms": max(((b["wait_ms"] - a["wait_ms"]) / steps for a, b in pairs), default=0.0),
        "rows_sent": sum(b["rows_sent"] - a["rows_sent"] for a, b in pairs) / steps,
        "misses": misses,
        "bytes": dense + used * one / ranks if used else None,  # that each booster reads, the mean of all
    }


def take_part(options: argparse.Namespace) -> None:
    """What each rank of a run does. Rank 0 writes what it measured."""
    from rocket import Engine

    work = json.loads(options.work)
    room = options.prompt + WARM_UP + options.tokens * options.repeats
    with Engine(
        options.fuel,
        backend=options.backend,
        threads=options.threads,
        max_context=room,
        max_streams=max(options.streams),
        booster_wait=options.booster_wait,
        **work["engine"],
    ) as engine:
        if engine.rank:
            engine.follow()
            return
        rest = (options.prompt, options.tokens, options.repeats)
        runs = [decode(engine, streams, *rest) for streams in options.streams]
        info = {key: engine.info[key] for key in ("device", "choices", "token_bytes", "hidden", "topk")}
        found = {"info": info, "boosters": engine.core.stats()["boosters"], "runs": runs}
    Path(work["result"]).write_text(json.dumps(found))


def launcher() -> list[str]:
    beside = shutil.which("mpirun", path=str(Path(sys.prefix) / "bin"))
    found = os.environ.get("ROCKET_MPIRUN") or beside or shutil.which("mpirun")
    if found is None:
        sys.exit("error: no mpirun was found\n\nhint: pip install mpich, then build Rocket again")
    version = subprocess.run([found, "--version"], capture_output=True, check=False).stdout.lower()
    if b"open mpi" not in version and b"open-mpi" not in version:
        return [found]
    return [found, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe"]


def run(
    options: argparse.Namespace, name: str, engine: dict[str, Any], limit: float, **changed: Any
) -> dict[str, Any] | None:
    """Starts the ranks of a run, and ends them after so many seconds. What it gave; none if it failed."""
    result, log = options.out / f"{name}.json", options.out / f"{name}.log"
    result.unlink(missing_ok=True)
    work = json.dumps({"engine": engine, "result": str(result)})
    chosen = {**vars(options), **changed}
    names = ("backend", "threads", "prompt", "tokens", "repeats", "booster_wait")
    command = [sys.executable, __file__, str(chosen["fuel"]), "--work", work]
    for key in names:
        command += [f"--{key.replace('_', '-')}", str(chosen[key])]
    command += ["--streams", *map(str, chosen["streams"])]
    ranks = engine.get("boosters", 1)
    if ranks > 1:
        command = [*launcher(), "-np", str(ranks), *command]
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: object = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"none within {limit:.0f} s"
            process.terminate()  # the launcher ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start
    if status == 0 and result.exists():
        print(f"{name}: {seconds:.0f} s", file=sys.stderr)
        return json.loads(result.read_text())
    print(f"{name}: status {status} after {seconds:.0f} s, see {log}", file=sys.stderr)
    print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), file=sys.stderr)
    return None


def try_nccl(options: argparse.Namespace) -> str:
    """How rows cross, by a small run with everything split."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(options.out / "nccl.%h.%p.log")}
    given = {key: os.environ.get(key) for key in log}
    os.environ.update(log)
    small = {"fuel": "sparkler", "streams": [1, 3], "prompt": 20, "tokens": 8, "repeats": 1}
    found = run(
        options, "nccl", {"boosters": 2, "split_dense": True}, SMOKE_SECONDS, **small, booster_wait=100
    )
    for key, value in given.items():
        if value is None:
            del os.environ[key]
        else:
            os.environ[key] = value
    if found is None:
        os.environ["ROCKET_NO_NCCL"] = "1"
        return f"the small run over NCCL failed: see {options.out}/nccl.*; ROCKET_NO_NCCL=1 from here on"
    return next(line for line in found["info"]["choices"] if line.startswith("boosters: "))


def configurations(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    from rocket import _core
    from rocket.fuel import resolve

    all_of_them = {
        "one": {},
        "experts": {"boosters": 2},
        "all": {"boosters": 2, "split_dense": True},
    }
    if options.caches:
        config = _core.read_config(str(resolve(options.fuel)))
        experts = sum(config["is_moe"]) * config["n_routed_experts"]
        all_of_them["one-half"] = {"expert_slots": experts // 2}
        all_of_them["experts-half"] = {"boosters": 2, "expert_slots": experts // 4}
    return {name: all_of_them[name] for name in options.runs or all_of_them}


def compared(name: str, tokens: list[list[int]], one: list[list[int]]) -> str:
    """With the tokens of one booster; only what adds in another order may differ from them."""
    if tokens == one:
        return "same"
    same = sum(
        a == b for ours, theirs in zip(tokens, one, strict=True) for a, b in zip(ours, theirs, strict=True)
    )
    share = f"{100 * same / sum(map(len, one)):.0f} %"
    return share if name == "all" else f"WRONG, {share}"


def table(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [COLUMNS]
    for name, result in results.items():
        for found in result["runs"]:
            base = results.get("one", {"runs": []})["runs"]
            one = next((other for other in base if other["streams"] == found["streams"]), None)
            ms = statistics.median(found["ms"])
            rows.append(
                (
                    name,
                    str(found["streams"]),
                    f"{ms:.3f}",
                    f"{1000 * found['streams'] / ms:.0f}",
                    f"{statistics.median(one['ms']) / ms:.3f}" if one else "-",
                    f"{found['bytes'] / 2**30:.3f}" if found["bytes"] else "-",
                    f"{found['wait_ms']:.3f}",
                    f"{found['rows_sent']:.1f}",
                    f"{found['misses']:.2f}",
                    compared(name, found["tokens"], one["tokens"]) if one else "-",
                )
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("fuel", help="a name or a directory")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of it")
    parser.add_argument("--tokens", type=int, default=64, help="steps of a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements, of which the median counts")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--booster-wait", type=float, default=60)
    parser.add_argument("--limit", type=float, default=200, help="seconds for a run")
    parser.add_argument("--caches", action="store_true", help="also with slots for half of the experts")
    parser.add_argument("--runs", nargs="+", help="one, experts, all, one-half, experts-half")
    parser.add_argument("--out", type=Path, default=Path("boosters-bench"), help="directory for results")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if options.work:
        take_part(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    way = try_nccl(options) if options.backend == "cuda" else ""
    if way:
        print(way, file=sys.stderr)
    results: dict[str, dict[str, Any]] = {}
    wanted = configurations(options)
    for name, engine in wanted.items():
        found = run(options, name, engine, options.limit)
        if found is not None:
            results[name] = found
    rows = table(results)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
    summary = {"fuel": options.fuel, "way": way, "command": sys.argv, "runs": results}
    (options.out / "boosters.json").write_text(json.dumps(summary))
    return int(len(results) < len(wanted) or any("WRONG" in row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""What every rank of a test runs: one engine after the other. Rank 0 drives them through a scenario.

Without a launcher it is the single booster that the others are compared with.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rocket import Engine, InputError, PlanError
from rocket._core import Row, SamplingParams

GREEDY = SamplingParams()


def scenario(engine: Engine, seed: int, hints: bool) -> dict[str, Any]:
    """Prompts in chunks of several sizes, batches, forks, mixed steps, checkpoints, snapshots, rollbacks,
    embeddings, scores, and calls that are refused: everything that comes out."""
    rng = np.random.default_rng(seed)
    core, info = engine.core, engine.info
    logits: list[np.ndarray] = []
    tokens: list[int] = []

    def some(count: int) -> list[int]:
        return rng.integers(0, info["vocab"], count).tolist()

    streams = [core.open() for _ in range(3)]
    for stream, length, chunk in zip(streams, (50, 23, 9), (64, 7, 1), strict=True):
        logits.append(core.feed(stream, some(length), logits="all", chunk=chunk))
    streams.append(core.fork(streams[1]))
    last = some(4)
    warm = SamplingParams(0.9, top_k=20, seed=seed)
    guess = np.random.default_rng(seed)
    for _ in range(5):
        for layer, *_ in core.stats()["expert_layers"] if hints else ():
            core.hint(layer, guess.integers(0, info["experts"], 6).tolist())
        last = core.decode_batch(streams, last, [GREEDY, warm, GREEDY, warm])
        logits.append(core.last_logits())
        tokens += last
    refuse(lambda: core.open() and core.open() and core.open(), PlanError)
    refuse(lambda: core.step([Row(info["vocab"], streams[0])]), InputError)
    refuse(lambda: core.restore("nothing of that name"), InputError)
    refuse(lambda: core.step([Row(1, streams[0])] * (info["max_rows"] + 1)), PlanError)
    core.close(5)
    core.close(4)
    # Prompt rows of one stream beside decode rows of the others, one of them an embedding.
    hidden = rng.standard_normal(info["hidden"]).astype(np.float32)
    rows = [Row(t, streams[0], wants_logits=True, prefill=True) for t in some(11)]
    rows += [Row(t, s, wants_logits=s != streams[2]) for s, t in zip(streams[1:3], some(2), strict=True)]
    rows += [Row(stream=streams[3], wants_logits=True, embedding=hidden)]
    logits.append(core.step(rows)[0])
    # Drafts: four rows, of which two are kept.
    rows = [Row(t, streams[1], wants_logits=True, checkpoint=True) for t in some(4)]
    logits.append(core.step(rows)[0])
    core.commit(streams[1], 2)
    core.snapshot(streams[2], "kept")
    if info["split_dense"]:
        refuse(lambda: core.save_snapshot("kept", "/nowhere/file"), InputError)
        refuse(lambda: core.load_snapshot("other", "/nowhere/file"), InputError)
    core.truncate(streams[0], 40)
    streams.append(core.restore("kept"))
    core.drop_snapshot("kept")
    for stream in streams:
        tokens.append(core.decode(stream, some(1)[0], GREEDY))
        logits.append(core.last_logits())
    ids = some(30)
    log_prob, rank, best = core.score(streams[4], ids, [*ids[1:], 0], chunk=8)
    for stream in streams:
        core.close(stream)
    return {
        "logits": np.concatenate(logits),
        "tokens": tokens,
        "scores": (log_prob, rank, best),
        "stats": core.stats(),
        "info": info,
    }


def refuse(call: Any, kind: type[Exception]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")


def run(fuel: Path, hints: bool = False, backend: str = "cpu", **options: Any) -> dict[str, Any] | None:
    """On rank 0 what came out."""
    with Engine(
        fuel,
        backend=backend,
        threads=1,
        max_context=160,
        max_rows=64,
        max_streams=6,
        booster_wait=30,
        **options,
    ) as engine:
        if engine.rank:
            engine.follow()
            return None
        return scenario(engine, 7, hints)


if __name__ == "__main__":
    inputs, output = sys.argv[1:]
    results = [run(**options) for options in pickle.loads(Path(inputs).read_bytes())]
    if results[0] is not None:
        Path(output).write_bytes(pickle.dumps(results))

"""A stand-in for rocket._core whose "model" follows a script, for what a real model cannot be made to do.

$FAKE_CORE is a JSON object: ``script`` (token ids that follow any prompt, in turn), ``vocab``,
``max_context``, ``step_seconds``, ``choices``, ``profile``, ``diagnostics``, ``interrupt_at`` (the step that
meets a Ctrl-C), ``shift`` (added to log-probabilities), ``nan`` (the last of them is none), ``read_rate``,
``no_memory`` (to measure it), ``backend``, ``no_device`` (to measure), ``refuses`` (message and hint of a
PlanError instead of loading). Run as a program it is the command
line over the stand-in: ``python fake_core.py decode|rocket ARGUMENT…``.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

__version__ = "0.0.0"
cuda_built = False
SCRIPT = json.loads(os.environ.get("FAKE_CORE", "{}"))
VOCAB = SCRIPT.get("vocab", 1024)


class Error(Exception):
    hint = ""


class FuelError(Error):
    pass


class PlanError(Error):
    pass


class InputError(Error):
    pass


class DeviceError(Error):
    pass


for _kind in (Error, FuelError, PlanError, InputError, DeviceError):
    _kind.__module__ = "rocket"


class Row:
    pass


class SamplingParams:
    def __init__(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
        self.temperature, self.top_k, self.top_p, self.min_p, self.seed = (
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
        )


class CoreEngine:
    def __init__(
        self,
        fuel_dir,
        *,
        backend,
        threads,
        max_context,
        max_rows,
        max_streams,
        prefill_precision,
        kv_dtype,
        expert_cache_bytes,
        expert_slots,
        layer_slots,
        expert_slab,
        expert_bank,
        progress,
    ):
        self._context = min(max_context or 8192, SCRIPT.get("max_context", 10**9))
        self._rows = max_rows or 64
        self._fed = {}
        self._prompt = 0
        self._steps = 0
        self._last = np.zeros((0, VOCAB), np.float32)
        self.log = []
        if "refuses" in SCRIPT:
            message, hint = SCRIPT["refuses"]
            error = PlanError(message)
            error.hint = hint
            raise error
        if progress:
            progress(1, 2)
            progress(2, 2)

    def info(self):
        return {
            "backend": SCRIPT.get("backend", "cpu"),
            "device": "fake, 1 thread",
            "choices": SCRIPT.get("choices", []),
            "vocab": VOCAB,
            "topk": 8,
            "max_context": self._context,
            "max_rows": self._rows,
            "max_logits_rows": self._rows,
            "threads": 1,
            "rank": 0,
            "slots": 16,
            "experts_owned": 16,
            "owned_bytes": 16384,
            "dense_bytes": 10**8,
            "slot_bytes": 1024,
            "expert_store": SCRIPT.get("expert_store", ""),
            "bank_bytes": 0,
            "slots_requested": 0,
            "cache_bytes_requested": 0,
            "token_bytes": 10**6,
        }

    def open(self):
        self._fed[len(self._fed)] = []
        return len(self._fed) - 1

    def fork(self, stream):
        number = self.open()
        self._fed[number] += self._fed[stream]
        return number

    def close(self, stream):
        del self._fed[stream]

    def position(self, stream):
        return len(self._fed[stream])

    def _logits(self, ids):
        """Token t follows s with weight 1 + (3s + 5t) mod 7: a test can compute it."""
        weight = 1.0 + (3 * np.asarray(ids)[:, None] + 5 * np.arange(VOCAB)) % 7
        return np.log(weight / weight.sum(1, keepdims=True)).astype(np.float32)

    def feed(self, stream, ids, *, logits="last", chunk=0):
        assert len(ids) > 0
        self._fed[stream] += ids
        assert len(self._fed[stream]) <= self._context
        self._prompt = len(self._fed[stream])
        self._last = self._logits(ids[-1:])
        return self._logits(ids) if logits == "all" else None

    def score(self, stream, ids, targets, chunk=0):
        self._fed[stream] += ids
        assert len(self._fed[stream]) <= self._context
        logits = self._logits(ids).astype(np.float64)
        rows = np.arange(len(ids))
        of = logits[rows, targets]
        rank = (logits > of[:, None]).sum(1) + (
            (logits == of[:, None]) & (np.arange(VOCAB) < np.asarray(targets)[:, None])
        ).sum(1)
        of += SCRIPT.get("shift", 0.0)
        if SCRIPT.get("nan"):
            of[-1] = np.nan
        return of, rank.astype(np.int32), logits.argmax(1).astype(np.int32)

    def sample(self, sampling, counter, row=-1, stream=-1):
        script = SCRIPT.get("script", [65])
        return script[(counter - self._prompt) % len(script)]

    def prompt(self, stream, ids, sampling, chunk=0):
        self.feed(stream, ids, chunk=chunk)
        return self.sample(sampling, len(self._fed[stream]))

    def decode(self, stream, token, sampling):
        time.sleep(SCRIPT.get("step_seconds", 0))
        self._steps += 1
        self._fed[stream].append(token)
        self._last = self._logits([token])
        if self._steps == SCRIPT.get("interrupt_at"):
            os.kill(os.getpid(), signal.SIGINT)
        return self.sample(sampling, len(self._fed[stream]))

    def decode_batch(self, streams, tokens, sampling):
        """One step of all, as long as a step of one."""
        assert len(streams) == len(tokens) == len(sampling)
        time.sleep(SCRIPT.get("step_seconds", 0))
        self._steps += 1
        for stream, token in zip(streams, tokens, strict=True):
            self._fed[stream].append(token)
        return [self.sample(s, len(self._fed[n])) for n, s in zip(streams, sampling, strict=True)]

    def last_logits(self):
        return self._last

    def stop_trace(self):
        return 0

    def stats(self):
        return {
            "steps": self._steps,
            "fetch_seconds": 0.0,
            "expert_layers": [],
            "expert_hits": 9 * self._steps,
            "expert_misses": self._steps,
            "expert_evictions": self._steps,
            "streamed_bytes": self._steps << 20,
            "expert_hints": {"taken": 0},
            "boosters": [],
        }

    def set_profile(self, on):
        pass

    def profile(self):
        return [tuple(stage) for stage in SCRIPT.get("profile", [])]

    def set_diagnostics(self, on):
        pass

    def diagnostics(self):
        return [tuple(layer) for layer in SCRIPT.get("diagnostics", [])]

    def unload(self):
        self._fed = {}


def read_config(directory):
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise FuelError(f"{file}: not found")
    return {"vocab_size": VOCAB, "max_position_embeddings": SCRIPT.get("model_context", 10**6)}


def read_headers(directory):
    return []


def read_rate_gb_s(bytes=0, threads=0, seconds=0.5):
    if SCRIPT.get("no_memory"):
        raise PlanError("read rate: the system refused 256.00 MiB")
    return SCRIPT.get("read_rate", 10.0)


def device_read_rate_gb_s(seconds=0.5):
    if SCRIPT.get("no_memory"):
        raise DeviceError("measuring the device: expected a buffer of\nat least 4 bytes, found room for 2")
    return None if SCRIPT.get("no_device") else SCRIPT.get("read_rate", 10.0)


def memory_available():
    return 1 << 34, "fake"


def cpu_isa():
    return "fake"


def log_prob(before, token):
    """What the model above says of a token, computed apart from it."""
    weights = [1 + (3 * before + 5 * t) % 7 for t in range(VOCAB)]
    return math.log(weights[token] / sum(weights))


if __name__ == "__main__":
    import rocket

    sys.modules["rocket._core"] = rocket._core = sys.modules["__main__"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore it
    command = sys.argv.pop(1)
    if command == "decode":
        from rocket.decode import main
    else:
        from rocket.cli import main
    main()

"""Scoring: a text is cut into windows, fed, and each token's log-probability and rank come back."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rocket.console import Notes
from rocket.engine import Engine
from rocket.errors import CliError
from rocket.score_file import Row
from rocket.text_ids import TextIds

BLOCK = 4096  # tokens whose results are held at once


@dataclass(frozen=True)
class Window:
    """Tokens ``begin`` to ``end`` are scored after ``context`` to ``begin`` were fed, without scores."""

    context: int
    begin: int
    end: int


def windows(tokens: int, opening: int, room: int) -> Iterator[Window]:
    """Cuts a text into windows that need at most ``room`` tokens fed, the tokenizer's opening counted.

    Each but the first repeats the half before it as context. The last token of a window is never fed.
    """
    length = room - opening
    begin = 0 if opening else 1
    context = 0
    while begin < tokens:
        end = min(tokens, context + length + 1)
        yield Window(context, begin, end)
        begin = end
        context = end - max(1, length // 2)


@dataclass
class Totals:
    """Sums over scored tokens."""

    scored: int = 0
    log_prob: float = 0.0
    not_finite: int = 0
    top1: int = 0

    def add(self, log_prob: npt.NDArray[Any], rank: npt.NDArray[Any]) -> None:
        finite = np.isfinite(log_prob)
        self.scored += len(log_prob)
        self.log_prob += float(log_prob[finite].sum())
        self.not_finite += int((~finite).sum())
        self.top1 += int((rank == 0).sum())

    def summary(self, text_bytes: int | None) -> dict[str, Any]:
        """nats and bits; null where a log-probability is not finite or nothing is scored."""
        known = bool(self.scored) and not self.not_finite
        mean = self.log_prob / self.scored if known else None
        return {
            "scored": self.scored,
            "not_finite": self.not_finite,
            "mean_log_prob": mean,
            "perplexity": math.exp(-mean) if mean is not None and mean > -700 else None,
            "bits_per_byte": -self.log_prob / math.log(2) / text_bytes if known and text_bytes else None,
            "top1": self.top1 / self.scored if self.scored else None,
        }


def _rows(
    ids: npt.NDArray[Any], log_prob: npt.NDArray[Any], rank: npt.NDArray[Any], top: npt.NDArray[Any]
) -> Iterator[Row]:
    for token, value, place, best in zip(
        ids.tolist(), log_prob.tolist(), rank.tolist(), top.tolist(), strict=True
    ):
        yield token, value if math.isfinite(value) else None, place, best


def _require_finite(log_prob: npt.NDArray[Any], targets: npt.NDArray[Any], begin: int) -> None:
    wrong = np.flatnonzero(~np.isfinite(log_prob))
    if wrong.size:
        i = int(wrong[0])
        raise CliError(
            f"the log-probability of token {begin + i} (id {targets[i]}) is {log_prob[i]}: "
            "expected a finite number",
            "the weights are damaged, or overflow: check them against their source",
        )


class Scorer:
    """One run over one text. With ``strict`` a log-probability that is not finite is an error."""

    def __init__(self, engine: Engine, text: TextIds, chunk: int, notes: Notes, strict: bool = True) -> None:
        self.strict = strict
        self.core = engine.core
        self.text = text
        self.chunk = chunk
        self.notes = notes
        self.room = engine.info["max_context"]
        self.totals = Totals()
        self.plan = list(windows(len(text.ids), len(text.opening), self.room))

    def blocks(self) -> Iterator[list[Row]]:
        """Rows of all tokens, in order, a block at a time."""
        if not self.text.opening:
            yield [(int(self.text.ids[0]), None, None, None)]
        with self.notes.progress("scoring", unit="tokens") as progress:
            for window in self.plan:
                for rows in self._window(window):
                    yield rows
                    if progress:
                        progress(self.totals.scored, len(self.text.ids))

    def _window(self, window: Window) -> Iterator[list[Row]]:
        ids, core = self.text.ids, self.core
        stream = core.open()
        try:
            # The token before the first scored one is fed with it: its logits are what scores it.
            before = [*self.text.opening, *ids[window.context : window.begin].tolist()]
            if before[:-1]:
                core.feed(stream, before[:-1], logits="none", chunk=self.chunk)
            last = before[-1]
            for begin in range(window.begin, window.end, BLOCK):
                targets = ids[begin : min(window.end, begin + BLOCK)]
                fed = [last, *targets[:-1].tolist()]
                last = int(targets[-1])
                log_prob, rank, top = core.score(stream, fed, targets.tolist(), self.chunk)
                if self.strict:
                    _require_finite(log_prob, targets, begin)
                self.totals.add(log_prob, rank)
                yield list(_rows(targets, log_prob, rank, top))
        finally:
            core.close(stream)

    def summary(self) -> dict[str, Any]:
        """Bits a byte count scored tokens only: the first is none of them if nothing stands before it."""
        counted = self.text.bytes
        if counted is not None and not self.text.opening:
            counted -= self.text.first_bytes
        return self.totals.summary(counted)

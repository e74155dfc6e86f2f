"""What the cache of experts does, window by window, while a run goes on."""

import time

from rocket.console import Notes
from rocket.engine import Engine
from rocket.report import Experts, slot_cache_line


class Windows:
    """Says a line for each window of so many seconds, between steps: a step that takes longer is waited for.

    The windows follow each other without gaps, so that their counts add up to the run's.
    """

    def __init__(self, engine: Engine, seconds: float | None, notes: Notes) -> None:
        self.engine = engine
        self.seconds = seconds
        self.notes = notes
        if self.on:
            self._start = time.perf_counter()
            self._steps, self._experts = self._now()

    @property
    def on(self) -> bool:
        return self.seconds is not None

    def _now(self) -> tuple[int, Experts]:
        stats = self.engine.core.stats()
        return stats["steps"], Experts.from_stats(stats)

    def tick(self) -> None:
        """To be called after each step."""
        if self.seconds is not None and time.perf_counter() - self._start >= self.seconds:
            self._say()

    def close(self) -> None:
        """Says what is left of the last window."""
        if self.on and self.engine.core.stats()["steps"] > self._steps:
            self._say()

    def _say(self) -> None:
        now = time.perf_counter()
        steps, experts = self._now()
        self.notes.always(slot_cache_line(now - self._start, steps - self._steps, experts - self._experts))
        self._start, self._steps, self._experts = now, steps, experts

"""Booster profiles: what a machine offers a fuel. Some ship; ``rocket bench host`` writes its machine's."""

import os
from functools import cache, cached_property
from math import ceil
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rocket.checked import parse_yaml, read_whole, validate
from rocket.errors import UsageError
from rocket.quantity import AnyQuantity, Quantity

GIB = 1 << 30
SHIPPED = Path(__file__).parent / "boosters"
OS_RESERVE_GIB = 5  # what an operating system needs to live


def least_reserve_gib(memory_gib: float) -> float:
    """What a profile with unified memory keeps back at the least."""
    return min(OS_RESERVE_GIB, memory_gib / 4)


LEAST, MOST = 1e-3, 1e9  # of sizes and rates: no machine is outside, and what is computed stays finite


def _within(quantity: Quantity) -> Quantity:
    if not LEAST <= quantity.value <= MOST:
        raise ValueError(f"expected a number from {LEAST:g} to {MOST:g}, found {quantity.value:g}")
    return quantity


def _at_most(quantity: Quantity) -> Quantity:
    if not quantity.value <= MOST:
        raise ValueError(f"expected a number of at most {MOST:g}, found {quantity.value:g}")
    return quantity


def _field(what: str, unit: str, *, required: bool = True) -> Field:
    text = f"{what} in {unit}: a number from {LEAST:g} to {MOST:g}, or {{value, source, note}}"
    return Field(description=text) if required else Field(None, description=text)


Size = Annotated[AnyQuantity, AfterValidator(_within)]
Reserve = Annotated[AnyQuantity, AfterValidator(_at_most)]


class Booster(BaseModel):
    """A machine. GiB are 2^30 bytes, GB/s 10^9 bytes a second."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="a name of small letters, digits, . _ -")
    name: str = Field(description="a text")
    unified_memory: bool = Field(description="true where accelerator and CPU share one memory, else false")
    memory_gib: Size = _field("memory of the accelerator that can be had", "GiB")
    reserve_gib: Reserve = Field(description="a number of GiB of at least 0")
    read_gb_s: Size = _field("streaming read rate of that memory", "GB/s")
    copy_gb_s: Size = _field("copy rate within that memory, bytes read and written", "GB/s")
    host_memory_gib: Size | None = _field("host memory that can be had", "GiB", required=False)
    host_reserve_gib: Reserve | None = Field(None, description="a number of GiB of at least 0")
    link_gb_s: Size | None = _field("rate from pinned host memory to the accelerator", "GB/s", required=False)
    link_pageable_gb_s: Size | None = _field(
        "rate from pageable host memory to the accelerator", "GB/s", required=False
    )
    disk_read_gb_s: Size = _field("sequential read rate of the disk that holds fuels", "GB/s")
    disk_write_gb_s: Size | None = _field("sequential write rate of that disk", "GB/s", required=False)

    @model_validator(mode="after")
    def _hangs_together(self) -> "Booster":
        if self.reserve_gib.value >= self.memory_gib.value:
            raise ValueError(
                f"reserve_gib: expected less than memory_gib ({self.memory_gib.value:g}), "
                f"found {self.reserve_gib.value:g}"
            )
        host = ("host_memory_gib", "host_reserve_gib", "link_gb_s")
        for field in host:
            value = getattr(self, field)
            if self.unified_memory and value is not None:
                raise ValueError(
                    f"{field}: expected none with unified_memory, where there is one memory, "
                    f"found {value.value:g}"
                )
            if not self.unified_memory and value is None:
                raise ValueError(f"{field}: missing; expected a number where unified_memory is false")
        least = least_reserve_gib(self.memory_gib.value)
        if self.unified_memory and self.reserve_gib.value < least:
            raise ValueError(
                f"reserve_gib: expected at least {least:g} with unified_memory, where the operating system "
                f"lives in it, found {self.reserve_gib.value:g}"
            )
        if self.host_memory_gib and self.host_reserve_gib:
            left, kept = self.host_memory_gib.value, self.host_reserve_gib.value
            if kept >= left:
                raise ValueError(
                    f"host_reserve_gib: expected less than host_memory_gib ({left:g}), found {kept:g}"
                )
        return self

    @cached_property
    def memory_bytes(self) -> int:
        return int(self.memory_gib.value * GIB)

    @cached_property
    def reserve_bytes(self) -> int:
        return ceil(self.reserve_gib.value * GIB)

    @cached_property
    def bank_bytes(self) -> int:
        """Host memory that can hold experts outside the accelerator's memory."""
        if self.host_memory_gib is None or self.host_reserve_gib is None:
            return 0
        return int((self.host_memory_gib.value - self.host_reserve_gib.value) * GIB)

    @cached_property
    def read_bytes_s(self) -> int:
        return int(self.read_gb_s.value * 1e9)

    @cached_property
    def link_bytes_s(self) -> int:
        """From the bank. Zero where there is none."""
        return int(self.link_gb_s.value * 1e9) if self.link_gb_s else 0

    @cached_property
    def disk_bytes_s(self) -> int:
        return int(self.disk_read_gb_s.value * 1e9)


def names() -> list[str]:
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def parse(data: bytes, where: str) -> Booster:
    hint = "see the shipped profiles for an example, or let rocket bench host write one"
    return validate(Booster, parse_yaml(data, where), where, hint)


@cache
def _shipped(name: str) -> Booster:
    file = SHIPPED / f"{name}.yaml"
    return parse(file.read_bytes(), file.name)


def load(name: str) -> Booster:
    """A shipped profile by name, or a profile from a file."""
    if name in names():
        return _shipped(name)
    if not os.path.lexists(name) or Path(name).is_dir():
        raise UsageError(
            f"--booster: expected {', '.join(names())} or a file, found {name!r}",
            "rocket bench host writes a profile of this machine",
        )
    return parse(read_whole(name, "--booster"), f"--booster {name}")

"""``split.json``: a split, the fuel and the number of boosters that it is for, and what to expect of it."""

import json
from collections.abc import Callable
from math import isclose
from typing import Any, Literal, NoReturn

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rocket.accounting import Account
from rocket.checked import parse_json, read_whole, validate
from rocket.errors import UsageError
from rocket.split import Expected, Owners

FORMAT = "rocket-split-1"
_HINT = "write it with: rocket split FUEL --boosters N --out FILE"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SplitFuel(_Strict):
    """What makes a fuel the one that a split is for: all that decides how many experts there are, where, and
    how large. Two downloads of one release are the same fuel wherever they lie."""

    chemistry: str = Field(description="a text")
    hidden_size: int = Field(description="a whole number")
    moe_intermediate_size: int = Field(description="a whole number")
    experts: int = Field(ge=1, description="a whole number of at least 1")
    top_k: int = Field(ge=1, description="a whole number of at least 1")
    moe_layers: list[int] = Field(description="a list of layer numbers")
    slot_bytes: int = Field(ge=1, description="a whole number of at least 1")

    @classmethod
    def of(cls, account: Account) -> "SplitFuel":
        arch = account.arch
        return cls(
            chemistry=arch.chemistry,
            hidden_size=arch.hidden_size,
            moe_intermediate_size=arch.moe_intermediate_size,
            experts=arch.n_routed_experts,
            top_k=arch.num_experts_per_tok,
            moe_layers=list(arch.moe_layer_ids),
            slot_bytes=account.slot_bytes,
        )


class SplitTrace(_Strict):
    file: str = Field(description="a text")
    sha256: str = Field(description="a text")
    fitted_tokens: int = Field(ge=0, description="a whole number of at least 0")
    judged_tokens: int = Field(ge=1, description="a whole number of at least 1")


class SplitExpected(_Strict):
    source: str = Field(description="a text")
    load_imbalance: float = Field(description="a number")
    step_imbalance: float = Field(description="a number")
    hidden_rows_a_token: float = Field(description="a number")
    expert_rows_a_token: float = Field(description="a number")
    cross_booster_rows_a_token: float = Field(description="a number")

    @classmethod
    def of(cls, expected: Expected, source: str) -> "SplitExpected":
        return cls(
            source=source,
            load_imbalance=expected.load_imbalance,
            step_imbalance=expected.step_imbalance,
            hidden_rows_a_token=expected.hidden_rows,
            expert_rows_a_token=expected.expert_rows,
            cross_booster_rows_a_token=expected.rows,
        )


class SplitFile(_Strict):
    format: Literal["rocket-split-1"] = Field(description=FORMAT)
    fuel_id: str = Field(description="a text")
    fuel: SplitFuel = Field(description="an object")
    boosters: int = Field(ge=1, description="a whole number of at least 1")
    by: Literal["id", "load", "coactivation"] = Field(description="one of id, load, coactivation")
    trace: SplitTrace | None = Field(description="an object or null")
    experts_of_booster: list[int] = Field(description="a list of whole numbers")
    bytes_of_booster: list[int] = Field(description="a list of whole numbers")
    expected: SplitExpected = Field(description="an object")
    # MoE layer -> the booster of each expert
    owner: dict[str, list[int]] = Field(description="an object: layer number -> a booster for each expert")

    @property
    def owners(self) -> Owners:
        """[MoE layers, experts]"""
        return np.array([self.owner[str(layer)] for layer in self.fuel.moe_layers], np.int32)

    def text(self) -> str:
        """JSON with a field, and of the owners a layer, on each line."""
        value = self.model_dump()
        owner = value.pop("owner")
        lines = [f" {_json(field)}: {_json(content)}" for field, content in value.items()]
        layers = ",\n".join(f"  {_json(layer)}: {_json(ids)}" for layer, ids in owner.items())
        return "{\n" + ",\n".join([*lines, f' "owner": {{\n{layers}\n }}']) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def bytes_of_booster(account: Account, owners: Owners, boosters: int) -> list[int]:
    """Routed experts as stored. The dense weights come on top, on every booster."""
    total = np.zeros(boosters, np.int64)
    for layer, row in zip(account.arch.moe_layer_ids, owners, strict=True):
        total += np.bincount(row, minlength=boosters) * account.slot_bytes_of(layer)
    return total.tolist()


def read_split(path: str, account: Account, boosters: int | None, option: str = "--split") -> SplitFile:
    """A split that is for this fuel and, if given, this number of boosters."""
    where = f"{option} {path}"
    split = validate(SplitFile, parse_json(read_whole(path, option), where), where, _HINT)
    _same_fuel(split, SplitFuel.of(account), where)
    if boosters is not None and split.boosters != boosters:
        raise UsageError(
            f"{where}: boosters: expected {boosters}, found {split.boosters}",
            f"make a split for {boosters}, or give --boosters {split.boosters}",
        )
    _whole(split, where)
    _consistent(split, account, where)
    return split


def _same_fuel(split: SplitFile, fuel: SplitFuel, where: str) -> None:
    for field, expected in fuel.model_dump().items():
        found = getattr(split.fuel, field)
        if found != expected:
            raise UsageError(
                f"{where}: fuel.{field}: expected {_short(expected)}, "
                f"found {_short(found)} (of {split.fuel_id})",
                "this split is for another fuel: make one for this",
            )


def _whole(split: SplitFile, where: str) -> None:
    """Every expert of every layer has one owner, and boosters own the same number within one."""
    layers = [str(layer) for layer in split.fuel.moe_layers]
    fail = _failure(where)
    if split.boosters > split.fuel.experts:
        fail("boosters", f"at most {split.fuel.experts} (the experts of a layer)", split.boosters)
    if set(split.owner) != set(layers):
        fail("owner", f"the MoE layers {_short(split.fuel.moe_layers)}", ", ".join(split.owner))
    for layer, owner in split.owner.items():
        if len(owner) != split.fuel.experts:
            fail(f"owner.{layer}", f"a booster for each of {split.fuel.experts} experts", len(owner))
        for booster in owner:
            if not 0 <= booster < split.boosters:
                fail(f"owner.{layer}", f"boosters from 0 to {split.boosters - 1}", booster)
        counts = np.bincount(owner, minlength=split.boosters)
        if counts.max() - counts.min() > 1:
            fail(f"owner.{layer}", "the same number of experts on each booster, within one", counts.tolist())


def _failure(where: str) -> Callable[[str, str, Any], NoReturn]:
    def fail(field: str, expected: str, found: Any) -> NoReturn:
        raise UsageError(f"{where}: {field}: expected {expected}, found {_short(found)}", _HINT)

    return fail


def _consistent(split: SplitFile, account: Account, where: str) -> None:
    """What the file says of its boosters is what follows from the owners."""
    fail = _failure(where)
    owners = split.owners
    counts = [int((owners == b).sum()) for b in range(split.boosters)]
    if split.experts_of_booster != counts:
        fail("experts_of_booster", f"{_short(counts)}, as the owners say", split.experts_of_booster)
    sizes = bytes_of_booster(account, owners, split.boosters)
    if split.bytes_of_booster != sizes:
        fail("bytes_of_booster", f"{_short(sizes)}, as the owners say", split.bytes_of_booster)
    e = split.expected
    for field in ("load_imbalance", "step_imbalance"):
        if getattr(e, field) < 1 - 1e-9:  # means are rounded
            fail(f"expected.{field}", "at least 1 (an even share)", getattr(e, field))
    for field in ("hidden_rows_a_token", "expert_rows_a_token"):
        if getattr(e, field) < 0:
            fail(f"expected.{field}", "at least 0", getattr(e, field))
    rows = e.hidden_rows_a_token + e.expert_rows_a_token
    if not isclose(e.cross_booster_rows_a_token, rows, rel_tol=1e-6, abs_tol=1e-9):
        fail(
            "expected.cross_booster_rows_a_token", f"{rows:g}, the sum of both", e.cross_booster_rows_a_token
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"

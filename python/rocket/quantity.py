"""Numbers that say where they come from: ``{value: 238, source: measured, note: …}``, or a bare number."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SOURCES = ("measured", "derived", "published")


class Quantity(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    value: float = Field(ge=0, description="a number of at least 0")
    source: Literal["measured", "derived", "published"] = Field(
        "published", description="one of measured, derived, published"
    )
    note: str | None = Field(None, description="a text")


def _from_bare(value: Any) -> Any:
    """Whoever writes a bare number has it from somewhere: it counts as published."""
    if isinstance(value, dict | Quantity):
        return value
    return {"value": value}


AnyQuantity = Annotated[Quantity, BeforeValidator(_from_bare)]

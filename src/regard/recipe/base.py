"""The base class of the sections of a recipe, and the validator of names that are registered."""

from __future__ import annotations

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from regard.recipe.registry import CHECKED_NAMES, allowed_names


def registered(key: str) -> AfterValidator:
    """A validator that accepts the names registered for a recipe key."""

    def check(name: str) -> str:
        if (key, name) in CHECKED_NAMES:
            return name
        allowed = allowed_names(key)
        if name not in allowed:
            *most, last = [f"'{one}'" for one in allowed]
            expected = f"{', '.join(most)} or {last}" if most else last
            raise PydanticCustomError(
                "choice", "Input should be {expected}", {"expected": expected}
            )
        return name

    return AfterValidator(check)


class Section(BaseModel):
    """A section of a recipe. Unknown keys are refused; the docstring of a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

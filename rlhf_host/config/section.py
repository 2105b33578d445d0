"""The base of every section of the configuration: how it is validated, and the types of its values. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, field_validator

from rlhf_host.records.sampling import broken_rule


def _unlike(name: str) -> AfterValidator:
    """Refuses what no engine samples with."""

    def check(value: Any) -> Any:
        if rule := broken_rule(name, value):
            raise ValueError(f"should be {rule}")
        return value

    return AfterValidator(check)


Temperature = Annotated[float, _unlike("temperature")]
TopP = Annotated[float, _unlike("top_p")]
TopK = Annotated[int, _unlike("top_k")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(gt=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are checked when set."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _true_is_no_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        validated = validate(value)
        if isinstance(value, bool) and not isinstance(validated, bool):
            raise ValueError(f"should not be {str(value).lower()}")
        return validated


class Open(Section):
    """A section whose other keys are a plugin's options."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's own options. Changes of this mapping are changes of the section."""
        return cast(dict[str, Any], self.model_extra)

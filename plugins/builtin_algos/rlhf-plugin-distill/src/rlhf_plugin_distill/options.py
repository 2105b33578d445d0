"""Options of both algorithms. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import functional as F


class DivergenceOptions(BaseModel):
    """Options for the divergence."""

    model_config = ConfigDict(extra="forbid")

    beta: float = Field(
        0.0, ge=0, le=1, description="0: KL(teacher, student); 1: KL(student, teacher); between: generalised Jensen-Shannon"
    )
    top_k: int = Field(0, ge=0, description="the teacher's likeliest tokens are compared; 0: the whole vocabulary")
    tail: Literal["bucket", "renormalise"] = Field(
        "bucket", description="top_k: all other tokens count as one, or are left out and the rest is renormalised"
    )

    @model_validator(mode="after")
    def _has_a_tail(self) -> DivergenceOptions:
        if self.tail == "renormalise" and not self.top_k:
            raise ValueError("tail renormalise is for the tokens beyond top_k, and top_k is 0: set top_k, or leave tail out")
        return self


class Options(DivergenceOptions):
    alpha: float = Field(1.0, gt=0, le=1, description="weight of the divergence; the rest is that of the data's own tokens")
    temperature: float = Field(1.0, gt=0, description="of both distributions in the divergence")

    @model_validator(mode="after")
    def _knows_the_temperature(self) -> Options:
        if self.temperature != 1 and self.top_k and self.tail == "bucket":
            raise ValueError(
                "the probability of the tokens beyond top_k is known at temperature 1 only: set tail to renormalise, top_k to 0,"
                " or leave temperature out"
            )
        return self


class OnPolicyOptions(DivergenceOptions, F.PolicyLossOptions):
    averages_itself: ClassVar[bool] = False
    """True if ``aggregation`` is that of the divergence too."""

    signal: Literal["sample", "full"] = Field(
        "sample", description="sample: the sampled token's log-probabilities, as an advantage; full: the divergence"
    )
    beta: float = Field(
        1.0,
        ge=0,
        le=1,
        description="full: 0: KL(teacher, student); 1: KL(student, teacher); between: generalised Jensen-Shannon",
    )

    @property
    def without_policy(self) -> tuple[str, str] | None:
        """Setting with which there is no policy loss, and another with which there is one."""
        return ("signal full", "signal to sample") if self.signal == "full" else None

    @model_validator(mode="after")
    def _fits_the_signal(self) -> OnPolicyOptions:
        divergence = {"beta": self.beta != 1, "top_k": self.top_k > 0}
        if self.signal == "sample" and (idle := [name for name, changed in divergence.items() if changed]):
            raise ValueError(f"signal sample compares sampled tokens and has no {idle[0]}: leave it out, or set signal to full")
        policy = {
            "loss": self.loss != "clip",
            "entropy_coef": self.entropy_coef > 0,
            "aggregation": self.aggregation is not None and not self.averages_itself,
        }
        if (why := self.without_policy) and (idle := [name for name, changed in policy.items() if changed]):
            raise ValueError(f"{why[0]} has no policy loss and so no {idle[0]}: leave it out, or set {why[1]}")
        return self


class SDPOOptions(OnPolicyOptions):
    averages_itself: ClassVar[bool] = True

    alpha: float = Field(
        1.0, gt=0, le=1, description="weight of self-distillation; the rest is that of the policy loss with GRPO's advantages"
    )
    teacher_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="share by which the teacher's weights go to the policy's after each step; 1: the teacher is the policy; 0: it"
        " stays as the policy began",
    )
    ratio_max: float = Field(2.0, gt=0, description="largest value of the ratio to the sampling policy as a weight")
    success: float = Field(1.0, description="reward from which an answer is a solution that the others of its group learn from")
    solutions: bool = Field(True, description="the teacher sees a solution, where the group has one")
    own_solution: bool = Field(False, description="a successful answer may be its own solution")
    feedback: Literal["always", "without_solution", "never"] = Field(
        "always", description="when the teacher sees the feedback that rewards gave on the answer"
    )
    remove_thinking: bool = Field(False, description="leave <think>...</think> out of solutions")
    template: str = Field(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        description="the teacher's prompt, or its last message: {prompt}, {solution} and {feedback} are replaced",
    )
    solution_template: str = Field("\nCorrect solution:\n\n{solution}\n\n", description="what stands for {solution} there")
    feedback_template: str = Field(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback}\n\n",
        description="what stands for {feedback} there",
    )

    @property
    def without_policy(self) -> tuple[str, str] | None:
        return ("alpha 1", "alpha below 1") if self.alpha == 1 else None

    @model_validator(mode="after")
    def _has_a_hint(self) -> SDPOOptions:
        if not self.solutions and self.feedback == "never":
            raise ValueError("the teacher sees neither solutions nor feedback: set one of them")
        wanted = {"template": "{prompt}", "solution_template": "{solution}", "feedback_template": "{feedback}"}
        if lacking := [f"{name} has no {part}" for name, part in wanted.items() if part not in getattr(self, name)]:
            raise ValueError(lacking[0])
        return self

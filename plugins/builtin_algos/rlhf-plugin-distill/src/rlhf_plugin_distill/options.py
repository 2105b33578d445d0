"""Options of both algorithms. Imports no torch."""

from __future__ import annotations

import math
import re
from typing import ClassVar, Literal, Self

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


class TeacherOptions(BaseModel):
    """Options for the teachers, of both algorithms."""

    teachers: dict[str, float] = Field(
        {"teacher": 1.0},
        min_length=1,
        description="roles that teach, as JSON, with the weight of each; roles.NAME.model is its model",
    )
    teacher_key: str | None = Field(
        None, description="column with the name of the row's teacher; default: every teacher teaches every row"
    )
    own_tokens: bool = Field(
        False, description="teachers have other tokenizers than the actor: they read the texts, and both are aligned by bytes"
    )
    across: Literal["gold", "uld"] = Field(
        "gold",
        description="own_tokens: gold: the divergence of tokens that both vocabularies have, and ULD's distance of the others;"
        " uld: ULD's distance of all",
    )
    merge: Literal["last", "first"] = Field(
        "last", description="own_tokens: which token of several has the distribution; the others have their probabilities"
    )
    shared_weight: float | None = Field(
        None, ge=0, description="gold: weight of the shared tokens; default: their share of the teacher's vocabulary"
    )
    others_weight: float | None = Field(None, ge=0, description="gold: weight of the others; default: the rest")

    @model_validator(mode="after")
    def _has_teachers(self) -> Self:
        for name, weight in self.teachers.items():
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in ("actor", "critic", "reference", "reward"):
                raise ValueError(
                    f"teachers: {name!r} is no name for a teacher: give small letters, digits and _, and none of the host's roles"
                )
            if not 0 < weight < math.inf:
                raise ValueError(f"teachers: the weight of {name!r} is {weight:g}: give a finite number above 0")
        idle = {"across": self.across != "gold", "merge": self.merge != "last"}
        idle |= {"shared_weight": self.shared_weight is not None, "others_weight": self.others_weight is not None}
        whole = getattr(self, "signal", "full") == "full"
        for name in (name for name, changed in idle.items() if changed):
            if not self.own_tokens:
                raise ValueError(f"{name} is for teachers with other tokenizers: set own_tokens, or leave it out")
            if not whole:
                raise ValueError(f"signal sample compares sampled texts and has no {name}: leave it out, or set signal to full")
        if (self.shared_weight is None) != (self.others_weight is None):
            raise ValueError("set both shared_weight and others_weight, or neither")
        if self.across == "uld" and self.shared_weight is not None:
            raise ValueError(
                "across uld compares all tokens in one way, and has no shared_weight and others_weight: leave them out"
            )
        if self.across == "uld" and getattr(self, "beta", 0) != type(self).model_fields["beta"].default:
            raise ValueError("across uld has a distance and no divergence, so no beta: leave it out")
        if self.own_tokens and getattr(self, "tail", "bucket") != "bucket":
            raise ValueError("own_tokens: the tokens beyond top_k count as one: leave tail out")
        return self

    @property
    def several(self) -> bool:
        """True if losses and metrics have the teachers' names, because there is not one that teaches every row token by token."""
        return self.own_tokens or self.teacher_key is not None or {*self.teachers} != {"teacher"}


class Options(TeacherOptions, DivergenceOptions):
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


class OnPolicyDistillOptions(TeacherOptions, OnPolicyOptions):
    """Options of ``on_policy_distill``."""


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

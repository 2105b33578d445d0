"""Findings of an X-ray: gradients beside each other, and how each algorithm pushes each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from rlhf_host import Trajectory

SAME = 0.9995
"""Cosine from which two gradients are called one direction."""
LEAST = 1e-6
"""Share of an algorithm's largest push below which a token does not act: rounding."""


@dataclass(slots=True)
class Algorithm:
    """An algorithm on the batch."""

    name: str
    length: float
    """Euclidean norm of its gradient."""
    rows: int
    """Number of answers with a token that acts."""
    tokens: int
    """Number of tokens that act."""
    half: int
    """In how few tokens half of the push lies."""
    push: list[list[float]] = field(repr=False)
    """Per answer and completion token: minus the derivative of the whole loss by the token's log-probability."""
    largest: float = 0.0
    """The largest push of a token, without its sign."""

    @property
    def unseen(self) -> bool:
        """True if its loss does not go through the log-probabilities of the tokens."""
        return self.length > 0 and self.largest == 0

    @classmethod
    def of(cls, name: str, gradient: Tensor, push: Sequence[Sequence[float]]) -> Self:
        sizes = sorted((abs(value) for row in push for value in row), reverse=True)
        largest = sizes[0] if sizes else 0.0
        acts = [[abs(value) > LEAST * largest for value in row] for row in push]
        half, total, whole = 0, 0.0, math.fsum(sizes)
        while total < whole / 2:
            total, half = total + sizes[half], half + 1
        length = float(gradient.double().norm())
        return cls(name, length, sum(map(any, acts)), sum(map(sum, acts)), half, [list(row) for row in push], largest)


@dataclass(slots=True)
class XRay:
    """Result of an X-ray."""

    algorithms: list[Algorithm]
    cosines: list[list[float]]
    """Between the gradients; NaN beside one that is 0."""
    left_out: dict[str, str]
    """Algorithm → why it is not among them."""
    answers: list[Trajectory]
    pieces: list[list[str]]
    """Per answer: the texts of its completion tokens."""
    logprobs: list[list[float]]
    """Per answer and completion token, by the model."""
    about: dict[str, Any]
    """Origins of batch and model, and what is compared."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list, repr=False)
    """Per algorithm: weight → its gradient, float32 on the CPU."""

    def alike(self) -> list[list[str]]:
        """Returns groups of algorithms whose gradients have one direction."""
        names, groups = [each.name for each in self.algorithms], []
        left = list(range(len(names)))
        while left:
            first = left[0]
            group = [number for number in left if number == first or self.cosines[first][number] >= SAME]
            left = [number for number in left if number not in group]
            if len(group) > 1:
                groups.append([names[number] for number in group])
        return groups

    def spread(self, count: int) -> list[int]:
        """Returns the numbers of so many algorithms that differ most, the first one first, in their order."""
        chosen = [number for number, each in enumerate(self.algorithms) if each.length > 0][:1]
        while chosen and len(chosen) < count:
            left = [number for number, each in enumerate(self.algorithms) if number not in chosen and each.length > 0]
            if not left:
                break
            chosen.append(min(left, key=lambda number: max(self.cosines[number][other] for other in chosen)))
        return sorted(chosen)

    def row(self) -> dict[str, Any]:
        """Returns JSON values."""
        facts = ("name", "length", "rows", "tokens", "half")
        return {
            **self.about,
            "algorithms": [{name: getattr(each, name) for name in facts} for each in self.algorithms],
            "cosines": self.cosines,
            "alike": self.alike(),
            "left_out": self.left_out,
        }


def cosines(gradients: Sequence[Tensor], at_once: int = 1 << 22) -> list[list[float]]:
    """Returns the cosines between vectors, in float64. Args: ``at_once``: numbers of each that are read at a time."""
    count = len(gradients)
    products = torch.zeros(count, count, dtype=torch.float64)
    for begin in range(0, gradients[0].numel() if count else 0, at_once):
        part = torch.stack([gradient[begin : begin + at_once] for gradient in gradients]).double()
        products += part @ part.T
    sizes = products.diagonal().sqrt()
    scale = sizes[:, None] * sizes[None, :]
    found = torch.where(scale > 0, products / scale.clamp(min=1e-300), math.nan)
    return [[value if math.isnan(value) else max(-1.0, min(1.0, value)) for value in row] for row in found.tolist()]

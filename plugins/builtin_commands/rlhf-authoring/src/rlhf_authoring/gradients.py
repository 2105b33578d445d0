"""Gradients of a plugin's loss, in float64, against the slope of the loss itself: central differences on a small batch."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlhf_authoring.contracts.loss import cases
from rlhf_authoring.contracts.offline_batches import offline_batch
from rlhf_authoring.contracts.subject import Broken, Subject, expect
from rlhf_authoring.contracts.training import Bigram, gradients_of, trainable, training_batch
from rlhf_host import Batch, Experience, LossTerm, Metric
from rlhf_host.internals import Denominators, PluginManager, Reducer, ask, correction_weights, reduced

STEP = 1e-5
"""Half the distance of the two points of a central difference, whose error is of the order of its square."""
LARGEST = 1e-6
"""Largest relative error of a right gradient."""
DIRECTIONS = 24
"""Number of random directions in which the model's parameters are moved."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One loss of one role."""

    case: str
    """``loss=clip``, or the role where it is not the actor; ``loss`` for the only one."""
    error: float
    """Largest relative error."""
    held: bool = False
    """True if the loss stops gradients, and this is the error with all that it stops held fixed."""


def compare(subject: Subject) -> Iterator[Compared]:
    """Compares every loss on offer for every trained role. The loss is summed as the host sums it, in float64.

    Raises:
        Broken: there is no gradient, or the loss is not computed in float64.
    """
    for name, manager, role, batch in cases(subject, offline_batch if subject.offline else training_batch):
        case = name.strip().rstrip(":").replace(": ", ", ") or "loss"
        loss = _Loss(subject, manager, role, batch)
        error = _error(loss, analytic := loss.gradient(), loss.value)
        held = error > LARGEST
        if held:
            with_held = _error(loss, analytic, _holding(loss))
            held, error = with_held <= LARGEST, min(error, with_held)
        yield Compared(case, error, held)


class _Loss:
    """The loss of a batch as a function of a model's parameters, all in float64."""

    def __init__(self, subject: Subject, manager: PluginManager, role: str, batch: Experience):
        self.subject, self.manager, self.role = subject, manager, role
        self.model, self.head = Bigram(), trainable(subject)[role]
        self.model.table, self.model.head = (one.detach().double().requires_grad_() for one in self.model.parameters)
        self.model.parameters = [self.model.table, self.model.head]
        self.rows, self.weights = list(range(len(batch))), dict[int, Tensor]()
        batch = batch.map(lambda _, value: value.double() if value.is_floating_point() else value)
        self.reducer, self.batch = Reducer(Denominators.of(batch)), batch.batch()
        with torch.no_grad():
            outputs = self.model(self.head, self.batch)
            items = list(ask(manager, "batch_statistics", self.batch, role=role, outputs=outputs))
            # A worker computes both once for a batch, and the loss has no gradient through them.
            self.batch.stats = {**batch.stats, **reduced(item for _, item in items if isinstance(item, Metric))}
            self.corrections = correction_weights(manager, outputs, self.batch, gates_only=False)

    def value(self) -> Tensor:
        """Returns the sum of all terms, with their weights in the batch."""
        part: Batch = self.batch
        outputs = self.model(self.head, part, self.subject.needs.outputs)
        answers = ask(self.manager, "compute_loss", part, role=self.role, outputs=outputs)
        terms = [item for _, item in answers if isinstance(item, LossTerm)]
        expect(terms, f"compute_loss gives no loss term for {self.role}")
        for term in terms:
            seen = str(term.values.dtype).removeprefix("torch.")
            message = f"loss term {term.name!r} is {seen} where everything that it is made of is float64: keep the dtype"
            expect(term.values.dtype == torch.float64, message)
        weights = [self._weights(place, term) for place, term in enumerate(terms)]
        sums = [(each * torch.where(each != 0, term.values, 0.0)).sum() for each, term in zip(weights, terms, strict=True)]
        return torch.stack(sums).sum()

    def _weights(self, place: int, term: LossTerm) -> Tensor:
        """Returns what the host multiplies each value by: the derivative of its sum, which is linear."""
        if place in self.weights:
            return self.weights[place]
        values = torch.zeros(term.values.shape, requires_grad=True)
        with torch.enable_grad():
            total = self.reducer.reduce(replace(term, values=values), self.rows, self.corrections, self.subject.info.name)
            self.weights[place] = torch.autograd.grad(total, values)[0].double()
        return self.weights[place]

    @contextlib.contextmanager
    def moved(self, direction: Sequence[Tensor], by: float) -> Iterator[None]:
        """Has the parameters ``by`` times further in a direction."""
        starts = [parameter.detach().clone() for parameter in self.model.parameters]
        with torch.no_grad():
            for parameter, way in zip(self.model.parameters, direction, strict=True):
                parameter.add_(way, alpha=by)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, start in zip(self.model.parameters, starts, strict=True):
                    parameter.copy_(start)

    def gradient(self) -> list[Tensor]:
        """Returns what autograd computes."""
        found = gradients_of(self.value(), self.model.parameters)
        message = f"the loss of {self.role} has no gradient: it does not depend on the model"
        expect(any(bool(one.any()) for one in found), message)
        return found


def _error(loss: _Loss, analytic: list[Tensor], value: Callable[[], Tensor]) -> float:
    """The largest error of ``gradient·direction`` against central differences of ``value``, relative to the gradient's length.

    Directions are normal, so an error anywhere in the gradient is seen along nearly all of them.
    """
    random, length, errors = torch.Generator().manual_seed(0), math.hypot(*(float(one.norm()) for one in analytic)), []
    for _ in range(DIRECTIONS):
        direction = [torch.randn(one.shape, generator=random, dtype=one.dtype) for one in analytic]
        ends = []
        for side in (STEP, -STEP):
            with loss.moved(direction, side):
                ends.append(value().item())
        expected = sum(float((one * way).sum()) for one, way in zip(analytic, direction, strict=True))
        errors.append(abs(expected - (ends[0] - ends[1]) / (2 * STEP)) / length)
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _holding(loss: _Loss) -> Callable[[], Tensor]:
    """The same loss with all that it stops fixed at its value here: what has no gradient though it is made of what has one."""
    stopped: list[Any] = []
    with _Stopped(stopped):
        loss.value()

    def value() -> Tensor:
        with _Stopped(stopped, again=True):
            return loss.value()

    return value


class _Stopped(TorchFunctionMode):
    """Keeps, or gives again, the results of calls in which gradients are stopped: ``detach``, and all under ``no_grad``."""

    def __init__(self, values: list[Any], again: bool = False):
        super().__init__()
        self.values, self.given = values, iter(values) if again else None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        stops = isinstance(result, Tensor) and not result.requires_grad and _differentiable(args, kwargs)
        if not stops or _inside_a_function():
            return result
        if self.given is None:
            self.values.append(result.clone())
            return result
        try:
            return next(self.given)
        except StopIteration:
            raise Broken("the loss takes another way through its code where its model moves by a hair") from None


def _differentiable(args: Any, kwargs: Mapping[str, Any] | None) -> bool:
    values = [*args, *(kwargs or {}).values()]
    nested = (inner for value in values for inner in (value if isinstance(value, list | tuple) else (value,)))
    return any(isinstance(value, Tensor) and value.requires_grad for value in nested)


def _inside_a_function() -> bool:
    """Returns True within the ``forward`` of an ``autograd.Function``: it has no gradient there, and one outside."""
    apply, frame = torch.autograd.Function.apply.__func__.__code__, sys._getframe(1)  # type: ignore[attr-defined]
    while frame is not None:
        if frame.f_code is apply:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False

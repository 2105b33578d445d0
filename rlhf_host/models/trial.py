"""Trials: does a layout, a twin or a decoder give what the model itself gives for each row alone?

The oracle is the untouched model over one row at a time, without padding and without a mask. What was tried at a length serves rows
up to that length, so windows, sparse attention and rotary positions that change with length need no list of families here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_host.errors import UserError
from rlhf_host.models.heads import scalar_head
from rlhf_host.models.layouts import Layout, padded_layout, shared_layout
from rlhf_host.models.loading import context_length, first_line

EXACT = 1e-4
"""Largest relative distance of a position's hidden state, where everything is computed in 32 bits."""
ROUGH = 5e-2
"""Largest mean of it in 16 bits, where rounding may send a token to another expert."""

WIDE = (torch.float32, torch.float64)
"""Types in which results must agree exactly, but for the order of sums."""

FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, StopIteration)
"""What models raise for input that they do not take."""

Hidden = Callable[[nn.Module, Layout], Tensor]
"""``hidden(module, layout)``: hidden states at the places that predict, then at the rows' last ones."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which module computes rows of a length rightly in each layout; ``None``: neither the twin nor the model."""

    shared: nn.Module | None
    padded: nn.Module | None
    problems: tuple[str, ...] = ()

    def and_also(self, other: Verdict, model: nn.Module) -> Verdict:
        """What both allow; the model itself where they allow different modules."""

        def of_both(own: nn.Module | None, others: nn.Module | None) -> nn.Module | None:
            return own if own is others or own is None else None if others is None else model

        problems = tuple(dict.fromkeys(self.problems + other.problems))
        return Verdict(of_both(self.shared, other.shared), of_both(self.padded, other.padded), problems)


@dataclass(frozen=True, slots=True)
class Sample:
    """Three rows, two of which share a prompt. The third is always short: what changes with a row's length shows beside it."""

    prompt_ids: list[list[int]]
    completions: Tensor
    lengths: list[int]
    sharing: list[int] = field(default_factory=lambda: [0, 0, 1])

    @classmethod
    def of(cls, length: int, config: Any) -> Sample:
        """The longest row has ``length`` tokens."""
        generator = torch.Generator().manual_seed(length)
        sizes = [length - length // 2, max(1, min(8, length // 3))]
        lengths = [length // 2, max(1, length // 4), max(1, min(8, length // 5))]
        first, second = (random_text(config, size, generator) for size in sizes)
        return cls([first, first, second], torch.tensor(random_text(config, sum(lengths), generator)), lengths)

    def alone(self) -> list[Layout]:
        parts = self.completions.split(self.lengths)
        return [padded_layout([ids], part, [len(part)]) for ids, part in zip(self.prompt_ids, parts, strict=True)]

    def padded(self) -> Layout:
        return padded_layout(self.prompt_ids, self.completions, self.lengths)

    def shared(self) -> Layout:
        return shared_layout(self.prompt_ids, self.completions, self.lengths, self.sharing)


def random_text(config: Any, length: int, generator: torch.Generator) -> list[int]:
    """Tokens, the padding token among them: it may end turns too, and some models skip it."""
    tokens = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
    tokens[length // 2] = (getattr(config, "pad_token_id", None) or 0) % config.vocab_size
    return tokens


@torch.no_grad()
def try_layouts(hidden: Hidden, model: Any, twin: nn.Module, length: int, *, exact: bool, with_shared: bool = True) -> Verdict:
    """Try rows of ``length`` tokens, or as many as the model has positions for.

    Args:
        hidden: runs a module over a layout.
        model: the oracle.
        twin: kernels' twin of it, or the model itself.
        exact: everything is computed in 32 bits.
        with_shared: try the shared layout too.

    Raises:
        UserError: the model does not run over rows without padding and mask, or it sees what comes after a token.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    length = min(length, context_length(model))
    sample = Sample.of(length, config)
    try:
        rows = [hidden(model, layout) for layout in sample.alone()]
    except FAILURES as error:
        raise UserError(
            f"{name} does not run over plain rows of tokens: {type(error).__name__}: {first_line(error)}"
        ) from error
    expected = torch.cat([row[:-1] for row in rows] + [row[-1:] for row in rows])
    if not bool(torch.isfinite(expected).all()):
        return Verdict(None, twin)  # weights that have diverged tell nothing; the loss will say so
    modules = list(dict.fromkeys((twin, model)))
    padded_gap, problems = 0.0, list[str]()
    chosen: dict[str, nn.Module | None] = {}
    layouts = {"padded": sample.padded} | ({"shared": sample.shared} if with_shared else {})
    for layout, make in layouts.items():
        chosen[layout] = None
        if layout == "shared" and (kernel := config._attn_implementation) != "sdpa":
            problems.append(f"attn_implementation {kernel} cannot share prompts, sdpa can")
            break
        for module in modules:
            who = name if module is model else f"the kernels' {type(module).__name__}"
            try:
                gap = distance(hidden(module, make()), expected, exact)
            except FAILURES as error:
                problems.append(f"{who} does not take the {layout} layout: {first_line(error)}")
                continue
            tolerance = EXACT if exact else 3 * max(padded_gap, ROUGH / 3) if layout == "shared" else ROUGH
            if gap <= tolerance:
                padded_gap = gap if layout == "padded" else padded_gap
                chosen[layout] = module
                break
            problems.append(f"{who} gives other results in the {layout} layout for rows of {length} tokens (by {gap:.1e})")
    if chosen["padded"] is None:
        if scalar_head(model) is None and _looks_ahead(partial(hidden, model), sample.alone()[0], exact):
            raise UserError(f"{name} sees later tokens, so it is not a causal language model (for an encoder, set is_decoder)")
        problems.append(f"rows of {name} run one by one, because rows of a batch affect each other")
    elif with_shared and chosen["shared"] is None:
        problems.append(f"a group's prompt is computed for every completion of {name}")
    return Verdict(chosen.get("shared"), chosen["padded"], tuple(problems))


def _looks_ahead(hidden: Callable[[Layout], Tensor], row: Layout, exact: bool) -> bool:
    """Whether a row's last token changes what is before it."""
    other = row.input_ids.clone()
    other[0, -1] = 1 - other[0, -1].clamp(max=1)
    before, changed = hidden(row)[:-1], hidden(replace(row, input_ids=other))[:-1]
    return not distance(changed, before, exact) <= (EXACT if exact else ROUGH)


def distance(values: Tensor, expected: Tensor, exact: bool) -> float:
    """Relative distance of each row of ``[N, H]``: the largest, or in 16 bits the mean. NaN counts as infinite."""
    expected = expected.float()
    gaps = (values.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    gap = float(gaps.max() if exact else gaps.mean())
    return gap if gap == gap else float("inf")


def same_gradients(hidden: Hidden, model: nn.Module, twin: nn.Module, *, exact: bool, length: int = 16) -> str | None:
    """Why the twin's gradients are not the model's, over rows of ``length`` tokens; ``None``: they are.

    Of the parameters in the first and the last layer, which have all that layers have.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    parts = layers[:1] + layers[-1:] if layers else [model]
    parameters = list(dict.fromkeys(weight for part in parts for weight in part.parameters() if weight.requires_grad))
    if not parameters:
        return None
    sample = Sample.of(length, model.config.get_text_config())  # type: ignore[operator,union-attr]
    for layout in (sample.padded(), sample.shared()):
        gradients = []
        for module in (model, twin):
            with torch.inference_mode(False), torch.enable_grad():
                states = hidden(module, layout).float()
                weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states.device)
                loss = (states * weights).sum()
                gradients.append(torch.autograd.grad(loss, parameters, allow_unused=True))
        for own, other in zip(*gradients, strict=True):
            if (own is None) != (other is None):
                return "a parameter's gradient is missing"
            if own is not None and other is not None:
                gap = float((own.float() - other.float()).norm() / own.float().norm().clamp(min=1e-30))
                if not gap <= (EXACT if exact else ROUGH):
                    return f"a parameter's gradient differs by {gap:.1e}"
    return None


def structure(model: nn.Module) -> tuple[Any, ...]:
    """Equal while the model holds the same parameters, on the same device, in the same types, in as many modules."""
    parameters = ((id(weight), weight.device, weight.dtype, weight.requires_grad) for weight in model.parameters())
    return (sum(1 for _ in model.modules()), *itertools.chain(parameters))


def appearance(model: nn.Module) -> tuple[Any, ...]:
    """Equal while nobody changes the model: its configuration, its modules' code and hooks, its weights."""
    modules = [
        (type(module), vars(module).get("forward"), len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
    ]
    saved = model.state_dict(keep_vars=True).values()
    versions = [(id(tensor), None if tensor.is_inference() else tensor._version) for tensor in saved]
    config: Any = model.config
    return config.to_dict(), config._attn_implementation, modules, versions

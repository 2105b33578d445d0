"""Checks of layouts: each must compute the same as the model itself for each row alone.

The oracle is the untouched model over one row at a time, without padding and without a mask. A check at a length is valid for
rows up to that length, so no list of model families is needed for windows, sparse attention and rotary positions that change
with length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host.errors import UserError, beyond, first_line
from rlhf_host.models import attention
from rlhf_host.models.heads import decoder_of, scalar_head
from rlhf_host.models.layouts import Layout, padded_layout, shared_layout, to_device
from rlhf_host.models.loading import context_length
from rlhf_host.models.pictures import Sight, noise
from rlhf_host.models.precision import evaluation, without_tf32
from rlhf_host.records.pictures import Shown

EXACT = 1e-4
"""Largest relative distance of a position's hidden state, if everything is computed in 32 bits."""
ROUGH = 5e-2
"""Largest mean distance in 16 bits, where rounding may send a token to another expert."""

WIDE = (torch.float32, torch.float64)
"""Types in which results must agree exactly, except for the order of sums."""

SHORTEST = 3
"""Tokens of the shortest row that is tried: effects of a row's length may begin at its fourth token."""

FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, StopIteration)
"""Exceptions that models raise for input they do not accept."""

Hidden = Callable[[nn.Module, Layout], Tensor]
"""``hidden(module, layout)``: hidden states at the places that predict, then at the rows' last ones."""


class DoesNotRun(UserError):
    """The model does not run over rows without padding and mask."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Module that computes rows of a length correctly in each layout; None: neither the twin nor the model."""

    shared: nn.Module | None
    padded: nn.Module | None
    problems: tuple[str, ...] = ()

    def and_also(self, other: Verdict, model: nn.Module) -> Verdict:
        """Returns what both verdicts allow; the model itself if they allow different modules."""

        def of_both(own: nn.Module | None, others: nn.Module | None) -> nn.Module | None:
            return own if own is others or own is None else None if others is None else model

        problems = tuple(dict.fromkeys(self.problems + other.problems))
        return Verdict(of_both(self.shared, other.shared), of_both(self.padded, other.padded), problems)


@dataclass(frozen=True, slots=True)
class Sample:
    """Four rows, two of which share a prompt. The others are always short, so that effects of a row's length show beside them."""

    prompt_ids: list[list[int]]
    completions: Tensor
    lengths: list[int]
    sharing: list[int] = field(default_factory=lambda: [0, 0, 1, 2])
    images: list[list[Shown]] | None = None
    """The pictures of each row."""
    sight: Sight | None = None

    @classmethod
    def of(cls, length: int, config: Any) -> Sample:
        """Returns a sample whose longest row has ``length`` tokens."""
        generator = torch.Generator().manual_seed(length)
        sizes = [length - length // 2, max(1, min(8, length // 3)), SHORTEST - 1]
        lengths = [length // 2, max(1, length // 4), max(1, min(8, length // 5)), 1]
        first, second, third = (random_text(config, size, generator) for size in sizes)
        completions = torch.tensor(random_text(config, sum(lengths), generator))
        return cls([first, first, second, third], completions, lengths)

    def seeing(self, sight: Sight) -> Sample:
        """Returns the sample with pictures: one in the prompt that rows share, one among the words of an answer, two in another
        prompt, of which one was seen before. The last row has none.
        """
        one, two = noise(1), noise(2)
        tokens = {picture: list(sight.reader.tokens(picture)) for picture in (one, two)}
        first, _, second, third = map(sight.words, self.prompt_ids)
        first, second = [first[0], *tokens[one], *first[1:]], [*tokens[two], *second[:1], *tokens[one], *second[1:]]
        tensors = [sight.words(part.tolist()) for part in self.tensors()]
        tensors[1] = [*tensors[1][:1], *tokens[two], *tensors[1][1:], 1]
        images = [[(0, picture) for picture in row] for row in ([one], [one, two], [two, one], [])]
        completions = torch.tensor([token for part in tensors for token in part])
        return Sample([first, first, second, third], completions, [len(part) for part in tensors], self.sharing, images, sight)

    def tensors(self) -> Sequence[Tensor]:
        """Returns the completion of each row."""
        return self.completions.split(self.lengths)

    def alone(self) -> list[Layout]:
        layouts = [padded_layout([ids], part, [len(part)]) for ids, part in zip(self.prompt_ids, self.tensors(), strict=True)]
        return [self.by_itself(row, layout) for row, layout in enumerate(layouts)]

    def by_itself(self, row: int, layout: Layout) -> Layout:
        """Returns a row's own layout in the form that the model computes by itself."""
        if self.sight is None or self.images is None:
            return layout
        return self.sight.by_itself(layout, self.images[row])

    def padded(self) -> Layout:
        return self._placed(padded_layout(self.prompt_ids, self.completions, self.lengths))

    def shared(self) -> Layout:
        return self._placed(shared_layout(self.prompt_ids, self.completions, self.lengths, self.sharing))

    def _placed(self, layout: Layout) -> Layout:
        if self.sight is None or self.images is None:
            return layout
        return self.sight.placed(layout, self.images, seen=self.sight.see(self.images))


def random_text(config: Any, length: int, generator: torch.Generator) -> list[int]:
    """Returns tokens, including the padding token: it may end turns too, and some models skip it."""
    tokens = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
    tokens[length // 2] = (getattr(config, "pad_token_id", None) or 0) % config.vocab_size
    return tokens


@torch.no_grad()
@without_tf32()
def check_layouts(
    hidden: Hidden,
    model: Any,
    twin: nn.Module,
    length: int,
    *,
    exact: bool,
    with_shared: bool = True,
    sight: Sight | None = None,
) -> Verdict:
    """Tries rows of ``length`` tokens, or as many as the model has positions for.

    Args:
        hidden: runs a module over a layout.
        model: the oracle.
        twin: the model with kernels, or the model itself.
        exact: everything is computed in 32 bits.
        with_shared: tries the shared layout too.
        sight: tries rows with pictures.

    Raises:
        DoesNotRun: the model does not run, even over rows without padding and mask.
        UserError: the model sees tokens that come after a token.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    length = min(length, context_length(model))
    sample = Sample.of(length, config)
    if sight is not None:
        sample = sample.seeing(sight)
    try:
        rows = [hidden(model, layout) for layout in sample.alone()]
    except FAILURES as error:
        what = "plain rows of tokens" if sight is None else "rows with pictures"
        raise DoesNotRun(f"{name} does not run over {what}: {type(error).__name__}: {first_line(error)}") from error
    expected = torch.cat([row[:-1] for row in rows] + [row[-1:] for row in rows])
    if not bool(torch.isfinite(expected).all()):
        return Verdict(None, twin)  # weights that have diverged tell nothing; the loss will say so
    if sight is not None:
        _refuse_other_sight(partial(hidden, model), sample, rows, name, exact)
    modules = {module: name if module is model else f"the kernels' {type(module).__name__}" for module in (twin, model)}
    compare = partial(_first_equal, hidden, modules, expected, length, exact)
    padded, gap, problems = compare("padded", sample.padded, ROUGH)
    chosen = {"padded": padded}
    if with_shared and (kernel := config._attn_implementation) not in attention.SHARING:
        problems.append(f"attn_implementation {kernel} cannot share prompts, {' and '.join(attention.SHARING)} can")
    elif with_shared:
        chosen["shared"], _, more = compare("shared", sample.shared, 3 * max(gap, ROUGH / 3))
        problems += more
    if chosen["padded"] is not None and _follows_length(partial(hidden, model), sample, rows, exact):
        problems.append(f"the result of {name} for a token changes with the length of its row")
        chosen = {"padded": None}
    if chosen["padded"] is None:
        if scalar_head(model) is None and _looks_ahead(partial(hidden, model), sample.alone()[0], exact):
            raise UserError(f"{name} sees later tokens, so it is not a causal language model (for an encoder, set is_decoder)")
        problems.append(f"rows of {name} run one by one, because rows of a batch affect each other")
    elif with_shared and chosen.get("shared") is None:
        problems.append(f"a group's prompt is computed for every completion of {name}")
    return Verdict(chosen.get("shared"), chosen["padded"], tuple(problems))


def _first_equal(
    hidden: Hidden,
    modules: Mapping[nn.Module, str],
    expected: Tensor,
    length: int,
    exact: bool,
    name: str,
    make: Callable[[], Layout],
    rough: float,
) -> tuple[nn.Module | None, float, list[str]]:
    """Returns the first module that gives the expected results in a layout, how far it is from them (0: none is near), and what is
    wrong with those before it.

    Args:
        modules: with what they are called.
        make: returns the layout, anew for each module.
        rough: tolerance where something is computed in 16 bits.
    """
    tolerance, problems = EXACT if exact else rough, list[str]()
    for module, who in modules.items():
        try:
            gap = distance(hidden(module, make()), expected, exact)
        except FAILURES as error:
            problems.append(f"{who} does not take the {name} layout: {first_line(error)}")
            continue
        if gap <= tolerance:
            return module, gap, problems
        away = beyond(gap, tolerance)
        problems.append(f"{who} gives other results in the {name} layout for rows of {length} tokens (by {away})")
    return None, 0.0, problems


def _follows_length(hidden: Callable[[Layout], Tensor], sample: Sample, rows: list[Tensor], exact: bool) -> bool:
    """Returns True if the presence of a row's last token changes earlier results; passes leave that token out if nothing is
    read from it.
    """
    row = 2  # of a length at which passes leave tokens out
    size = sample.lengths[row]
    if size < 2:
        return False
    own = sample.tensors()[row]
    shorter = hidden(sample.by_itself(row, padded_layout([sample.prompt_ids[row]], own[:-1], [size - 1])))
    return not distance(shorter[:-1], rows[row][: size - 1], exact) <= (EXACT if exact else ROUGH)


def _refuse_other_sight(hidden: Callable[[Layout], Tensor], sample: Sample, rows: list[Tensor], name: str, exact: bool) -> None:
    """Raises ``UserError`` if features that were computed before do not give what the model gives by itself."""
    assert sample.sight is not None
    assert sample.images is not None
    if _looks_ahead(hidden, sample.alone()[0], exact):
        raise UserError(
            f"pictures of {name} cannot be used here: with them it sees later tokens, so it is no causal language model"
        )
    seen = sample.sight.see(sample.images)  # a tower may mix the pictures of a pass
    for number, expected in enumerate(rows):
        own = sample.images[number]
        layout = padded_layout([sample.prompt_ids[number]], sample.tensors()[number], [sample.lengths[number]])
        try:
            gap = distance(hidden(sample.sight.placed(layout, [own], seen=seen)), expected, exact)
        except FAILURES as error:
            raise UserError(f"pictures of {name} cannot be used here: {type(error).__name__}: {first_line(error)}") from error
        # A wrong sight is off by a half and more, a right one in a deep tower on a GPU by its rounding.
        if not gap <= (most := 10 * EXACT if exact else ROUGH):
            raise UserError(
                f"pictures of {name} cannot be used here: with features that are computed once for all rows its results are others"
                f" (by {beyond(gap, most)})"
            )


def _looks_ahead(hidden: Callable[[Layout], Tensor], row: Layout, exact: bool) -> bool:
    """Returns True if the value of a row's last token changes earlier results."""
    other = row.input_ids.clone()
    other[0, -1] = 1 - other[0, -1].clamp(max=1)
    before, changed = hidden(row)[:-1], hidden(replace(row, input_ids=other))[:-1]
    return not distance(changed, before, exact) <= (EXACT if exact else ROUGH)


def distance(values: Tensor, expected: Tensor, exact: bool) -> float:
    """Returns the relative distance between the rows of two ``[N, H]``: the largest, or in 16 bits the mean. NaN counts as
    infinite.
    """
    expected = expected.float()
    gaps = (values.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    gap = float(gaps.max() if exact else gaps.mean())
    return gap if gap == gap else float("inf")


def example_layouts(model: Any, longest: int = 64) -> list[Layout]:
    """Returns made-up rows of up to ``longest`` tokens, or as many as the model has positions for: padded, and sharing a prompt."""
    attention.enable_shared_rows()
    sample = Sample.of(min(longest, context_length(model)), model.config.get_text_config())
    return [sample.padded(), sample.shared()]


def hidden_states(module: Any, layout: Layout) -> Tensor:
    """Returns ``[N, H]`` of a module's own forward: at the places that predict, then at the rows' last ones."""
    layout = to_device(layout, next(module.parameters()).device)
    with evaluation(module):
        states = decoder_of(module)(**layout.inputs(), use_cache=False).last_hidden_state.flatten(0, 1)
    return states[torch.cat([layout.predicts, layout.last])]


def structure(model: nn.Module) -> tuple[Any, ...]:
    """Returns a value that stays equal while the model holds the same parameters, on the same device, in the same types, in as
    many modules.
    """
    parameters = ((id(weight), weight.device, weight.dtype, weight.requires_grad) for weight in model.parameters())
    return (sum(1 for _ in model.modules()), *itertools.chain(parameters))

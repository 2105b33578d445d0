"""One forward pass for every use: π, π_old, the reference, critics and reward models."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_host.errors import UserError
from rlhf_host.models.blocks import fuse_blocks, release_blocks
from rlhf_host.models.heads import Head, find_head
from rlhf_host.models.layouts import (
    Layout,
    enable_shared_rows,
    padded_layout,
    padded_tokens,
    shared_layout,
    shared_tokens,
    sharing_of,
    to_device,
)
from rlhf_host.models.logprobs import logprobs_of_logits, token_logprobs
from rlhf_host.models.norms import fuse_norms
from rlhf_host.records.tensors import Outputs

SharedPrefix = Literal["auto", "on", "off"]

WORTHWHILE = 0.95
"""``auto`` shares prompts when that leaves fewer than this part of the padded tokens; gathering rows costs something too."""


def forward(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Tensor,
    completion_mask: Tensor,
    group_id: Tensor | None = None,
    *,
    temperature: float = 1.0,
    outputs: frozenset[str] = frozenset({"logprobs"}),
    shared_prefix: SharedPrefix = "auto",
    entropy_grad: bool = False,
    autocast_dtype: torch.dtype | None = None,
) -> Outputs:
    """What ``outputs`` names, of what the model's head can give: ``logprobs``, ``entropy`` and ``logits`` for a language model,
    ``values`` and ``scores`` for a scalar one. The rest stays ``None``.

    The model runs as in evaluation (no dropout), with gradients where they are enabled. Only positions that predict completion
    tokens reach the head. ``logits`` are the model's own, before the temperature.

    Args:
        prompt_ids: per row; rows of one group (all rows, without ``group_id``) with equal prompts may share its computation.
        completion_ids: ``[B, T]``, right-padded.
        completion_mask: ``[B, T]`` bool, true on real tokens; what lies elsewhere in ``completion_ids`` does not matter.
        group_id: ``[B]``.
        temperature: divides the logits before the softmax.
        shared_prefix: ``on`` and ``off`` fix the layout; ``auto`` picks the one with less to compute.
        entropy_grad: let gradients through the entropy.
        autocast_dtype: of matrix products; the log-softmax is in float32 whatever it is.

    Returns:
        ``[B, T]`` float32 (``scores [B]``, ``logits [B, T, V]``) on the model's device, 0 outside ``completion_mask``.

    Raises:
        UserError: an empty prompt, a temperature of 0, or ``shared_prefix="on"`` with a model that cannot.
    """
    if temperature <= 0:
        raise UserError(f"temperature {temperature:g} has no log-probabilities to train on: set rollout.temperature above 0")
    if empty := [row for row, ids in enumerate(prompt_ids) if not len(ids)]:
        raise UserError(f"the prompt of row {empty[0]} has no tokens: the first completion token needs one before it")
    traits = _traits_of(model)
    device = next(model.parameters()).device
    mask = completion_mask.bool().cpu()
    lengths = mask.sum(-1).tolist()
    if not lengths:
        return _empty(traits, outputs, completion_ids.shape, device)
    completions = completion_ids.cpu()[mask]
    sharing = sharing_of(prompt_ids, None if group_id is None else group_id.tolist())
    held, read_last = lengths, "scores" in outputs
    if not read_last:
        held = _all_but_last(lengths)
    shares = _shares(model, traits, prompt_ids, held, sharing, shared_prefix)
    make = partial(shared_layout, sharing=sharing) if shares else padded_layout
    layout = make(prompt_ids, completions, lengths) if read_last else _without_last(make, prompt_ids, completions, lengths)
    layout, mask, targets = to_device(layout, device), mask.to(device), completions.to(device)

    def read(places: Tensor) -> dict[str, Tensor]:
        """What the head makes of the hidden states (or logits, where there is no head) of all places."""
        predicting = places.index_select(0, layout.predicts)
        found: dict[str, Tensor] = {}
        if traits.scalar is not None:
            if "values" in outputs:
                found["values"] = _scalars(traits.scalar, predicting)
            if "scores" in outputs:
                found["scores"] = _scalars(traits.scalar, places.index_select(0, layout.last))
            return found
        with_entropy = "entropy" in outputs
        if outputs & {"logprobs", "entropy"}:
            if traits.head is None:
                logprobs, entropy = logprobs_of_logits(predicting, targets, temperature, with_entropy, entropy_grad)
            else:
                logprobs, entropy = token_logprobs(
                    predicting,
                    traits.head.weight,
                    traits.head.bias,
                    targets,
                    temperature,
                    scale=traits.head.scale,
                    softcap=traits.head.softcap,
                    compute_dtype=autocast_dtype,
                    with_entropy=with_entropy,
                    entropy_grad=entropy_grad,
                )
            found["logprobs"] = logprobs
            if entropy is not None:
                found["entropy"] = entropy
        if "logits" in outputs:
            found["logits"] = predicting.float() if traits.head is None else traits.head(predicting, autocast_dtype)
        return found

    def run() -> dict[str, Tensor]:
        with _evaluation(model), torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            if traits.scalar is None and traits.head is None:
                places = model(**layout.inputs(), use_cache=False).logits.flatten(0, 1)
            else:
                places = traits.decoder(**layout.inputs(), use_cache=False).last_hidden_state.flatten(0, 1)
        return traits.route.head(read, places)

    found = traits.route.passes(run)
    return Outputs(**{name: value if name == "scores" else _spread(value, mask) for name, value in found.items()})


def row_cost(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    completion_lens: Sequence[int],
    group_id: Sequence[int] | None = None,
    *,
    shared_prefix: SharedPrefix = "auto",
) -> int:
    """Tokens that one ``forward`` over these rows computes, padding included, in the layout it will choose; at most, of a model
    with a scalar head."""
    sharing, traits = sharing_of(prompt_ids, group_id), _traits_of(model)
    if traits.scalar is None:
        completion_lens = _all_but_last(completion_lens)
    if _shares(model, traits, prompt_ids, completion_lens, sharing, shared_prefix):
        return shared_tokens(prompt_ids, completion_lens, sharing)
    return padded_tokens(prompt_ids, completion_lens)


def _all_but_last(lengths: Sequence[int]) -> list[int]:
    return [max(0, length - 1) for length in lengths]


def _without_last(
    make: Callable[[Sequence[Sequence[int]], Tensor, Sequence[int]], Layout],
    prompt_ids: Sequence[Sequence[int]],
    completions: Tensor,
    lengths: Sequence[int],
) -> Layout:
    """A layout without each row's last token, from which nothing is read: it is predicted from the last place that is left."""
    sizes = torch.tensor(lengths)
    is_last = torch.zeros(len(completions), dtype=torch.bool)
    is_last[sizes.cumsum(0)[sizes > 0] - 1] = True
    layout = make(prompt_ids, completions[~is_last], _all_but_last(lengths))
    predicts = torch.empty(len(completions), dtype=torch.int64)
    predicts[is_last] = layout.last[sizes > 0]
    predicts[~is_last] = layout.predicts
    return replace(layout, predicts=predicts)


# --- weights that lie elsewhere -----------------------------------------------------------------


def _plainly(compute: Callable[..., dict[str, Tensor]], *inputs: Tensor) -> dict[str, Tensor]:
    return compute(*inputs)


@dataclass(frozen=True, slots=True)
class Route:
    """What passes go through where a model's weights are spread over ranks (ZeRO) and come only for the modules that run.

    Each is given ``(compute, *inputs)`` and returns ``compute(*inputs)``, called inside a module that brings what it needs.
    Every pass goes once through ``passes`` and once through ``head``, whatever its outputs, so that ranks stay in step.
    """

    passes: Callable[..., dict[str, Tensor]] = _plainly
    """Around the whole pass."""
    head: Callable[..., dict[str, Tensor]] = _plainly
    """Around the head, whose weights are used outside of its own module's forward."""


def examine(model: Any) -> list[nn.Parameter]:
    """Find out what passes over a model need now, while its weights are whole, and return its head's parameters."""
    traits = _traits_of(model)
    if traits.cannot_share is None:
        traits.cannot_share = _why_not_share(model, traits)
    head = traits.scalar if traits.head is None else traits.head.linear
    return [] if head is None else list(head.parameters())


def set_route(model: Any, route: Route) -> None:
    """Have all passes over an ``examine``d model go this way from now on."""
    release_blocks(model)
    _traits_of(model).route = route


# --- what a model can do ------------------------------------------------------------------------


@dataclass(slots=True)
class _Traits:
    """What was found out about a model once."""

    decoder: Any
    head: Head | None
    """Of a language model; ``None`` when only its own ``logits`` will do."""
    scalar: nn.Linear | None
    window: int | None
    """Longest row in which every token sees all before it."""
    cannot_share: str | None = None
    """Why prompts cannot be shared; empty once tried and found right."""
    route: Route = Route()


_known: weakref.WeakKeyDictionary[nn.Module, _Traits] = weakref.WeakKeyDictionary()


def _traits_of(model: Any) -> _Traits:
    if model not in _known:
        with _evaluation(model):
            fuse_norms(model)
            fuse_blocks(model)
        score = getattr(model, "score", None)
        scalar = score if isinstance(score, nn.Linear) and score.out_features == 1 else None
        decoder = model.base_model if scalar is not None else model.get_decoder()
        with torch.no_grad(), _evaluation(model):
            head = None if scalar is not None else find_head(model, decoder)
        if head is None and scalar is None:
            warnings.warn(
                f"the head of {type(model).__name__} is more than a matrix product: all its logits are held in memory",
                stacklevel=3,
            )
        logits_only = "" if head or scalar else f"{type(model).__name__} gives only its own logits"
        _known[model] = _Traits(decoder, head, scalar, _window(model.config), logits_only or None)
    return _known[model]


def _window(config: Any) -> int | None:
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if getattr(text, "use_sliding_window", True) is False:
        sizes[0] = None
    return min((size for size in sizes if size), default=None)


def _shares(
    model: Any,
    traits: _Traits,
    prompt_ids: Sequence[Sequence[int]],
    lengths: Sequence[int],
    sharing: Sequence[int],
    wanted: SharedPrefix,
) -> bool:
    if wanted == "off" or not lengths:
        return False
    if wanted == "auto" and shared_tokens(prompt_ids, lengths, sharing) > WORTHWHILE * padded_tokens(prompt_ids, lengths):
        return False
    if traits.cannot_share is None:
        traits.cannot_share = _why_not_share(model, traits)
        if traits.cannot_share and wanted == "auto":
            warnings.warn(f"a group's prompt is computed for every completion: {traits.cannot_share}", stacklevel=3)
    if traits.cannot_share:
        if wanted == "on":
            raise UserError(f"train.shared_prefix is on, but {traits.cannot_share}; set it to auto")
        return False
    longest = max(len(ids) + length for ids, length in zip(prompt_ids, lengths, strict=True))
    return traits.window is None or longest <= traits.window


@torch.no_grad()
def _why_not_share(model: Any, traits: _Traits) -> str:
    """Try both layouts on a few tokens: whatever mixes tokens outside of attention, or ignores the rows, shows."""
    name = type(model).__name__
    kernel = model.config._attn_implementation
    if kernel != "sdpa":
        return f"attn_implementation {kernel} cannot share prompts, sdpa can"
    enable_shared_rows()
    vocabulary = model.config.get_text_config().vocab_size
    sharing, lengths = [0, 1, 0, 1, 1], [3, 1, 5, 2, 0]
    prompt_ids = [[[1, 3, 2, 4], [2, 1, 4, 3, 1, 5, 2]][number] for number in sharing]
    prompt_ids = [[token % vocabulary for token in ids] for ids in prompt_ids]
    completions = torch.arange(sum(lengths)) * 7 % vocabulary
    device = next(model.parameters()).device
    found: list[Tensor] = []
    for layout in (padded_layout(prompt_ids, completions, lengths), shared_layout(prompt_ids, completions, lengths, sharing)):
        layout = to_device(layout, device)
        try:
            with _evaluation(model):
                hidden = traits.decoder(**layout.inputs(), use_cache=False).last_hidden_state.flatten(0, 1)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            return f"{name} does not take the shared layout ({type(error).__name__})"
        found.append(hidden[torch.cat([layout.predicts, layout.last])].float())
    tolerance = 1e-4 if next(model.parameters()).dtype == torch.float32 else 5e-2
    gap = (found[0] - found[1]).abs().max() / found[0].abs().max()
    return "" if gap <= tolerance else f"{name} does not give the same result with a shared prompt"


# --- parts of the pass --------------------------------------------------------------------------


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, but for layers that recompute in the backward pass: those look at their training flag."""
    if model.training:
        model.eval()
    recomputing = []
    if torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        recomputing = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in recomputing:
        layer.training = True
    try:
        yield
    finally:
        for layer in recomputing:
            layer.training = False


def _scalars(score: nn.Linear, hidden: Tensor) -> Tensor:
    bias = None if score.bias is None else score.bias.float()
    return F.linear(hidden.float(), score.weight.float(), bias).squeeze(-1)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """``[C, ...]`` → ``[B, T, ...]``, zeros elsewhere."""
    if values.shape[0] == mask.numel():
        return values.view(*mask.shape, *values.shape[1:])
    rows, columns = mask.nonzero(as_tuple=True)
    return values.new_zeros(*mask.shape, *values.shape[1:]).index_put((rows, columns), values)


def _empty(traits: _Traits, outputs: frozenset[str], shape: Sequence[int], device: torch.device) -> Outputs:
    """For no rows at all."""
    zeros = torch.zeros(tuple(shape), device=device)
    if traits.scalar is not None:
        return Outputs(values=zeros if "values" in outputs else None, scores=zeros.sum(-1) if "scores" in outputs else None)
    return Outputs(logprobs=zeros, entropy=zeros if "entropy" in outputs else None)

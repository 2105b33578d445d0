"""Outputs of a pass from hidden states: log-probabilities of a language-model head, or the numbers of a scalar one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_host.models.heads import Head
from rlhf_host.models.layouts import Line
from rlhf_host.models.logprobs import logprobs_of_logits, token_logprobs, top_logprobs
from rlhf_host.protocols import Tensors, TokenLogprobs
from rlhf_host.records.tensors import AT_TOKENS, OF_ROWS, Outputs, TopK


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Requested outputs of a pass; see ``Passes.forward``."""

    outputs: frozenset[str]
    temperature: float
    entropy_grad: bool
    others: Mapping[str, TopK]
    keep_logits: bool = False


class ScalarHead:
    """One number per token: values of states, scores of rows."""

    scalar, reads_logits = True, False
    autocast: torch.dtype | None = None

    def __init__(self, linear: nn.Linear):
        self.parameters = tuple(linear.parameters())
        self._score = Head(linear)

    def computed(self, completion_lens: Sequence[int]) -> list[int]:
        """Returns how many completion tokens of each row the model must compute: all, because each may have its own score."""
        return list(completion_lens)

    def read(self, line: Line, wanted: Wanted, states: Tensor) -> Tensors:
        """Returns ``[C]`` for completion tokens, and ``[B]`` for rows."""
        places = {"values": line.predicts, "scores": line.scored, "bootstrap": line.last, "token_scores": line.own}
        hidden = {name: states.index_select(0, at) for name, at in places.items() if name in wanted.outputs}
        return {name: self._score(at_places, torch.float32).squeeze(-1) for name, at_places in hidden.items()}

    def nothing(self, outputs: frozenset[str], zeros: Tensor) -> Outputs:
        """Returns the outputs of a pass without rows. ``zeros``: ``[B, T]``."""
        asked = outputs & {"values", *AT_TOKENS}
        empty: dict[str, Any] = {name: zeros.sum(-1) if name in OF_ROWS else zeros for name in asked}
        return Outputs(**empty)


class LanguageHead:
    """Log-probabilities of tokens.

    Args:
        head: None if the model's own logits are read, because its head is more than a matrix product.
        autocast: type of the matrix product; default: that of the states.
        compute: the function that computes log-probabilities.
    """

    scalar = False

    def __init__(self, head: Head | None, autocast: torch.dtype | None, compute: TokenLogprobs = token_logprobs):
        self.reads_logits = head is None
        self.parameters = () if head is None else tuple(head.linear.parameters())
        self._head, self.autocast, self._compute = head, autocast, compute

    def computed(self, completion_lens: Sequence[int]) -> list[int]:
        """Returns how many completion tokens of each row the model must compute: nothing is predicted from the last one."""
        return [max(0, length - 1) for length in completion_lens]

    def read(self, line: Line, wanted: Wanted, states: Tensor) -> Tensors:
        """Returns ``[C, ...]`` for completion tokens, from hidden states, or from logits without a head. The log-probabilities
        of a role in ``wanted.others`` are called ``of ROLE``.
        """
        hidden, targets, results, head = states.index_select(0, line.predicts), line.targets, dict[str, Tensor](), self._head
        limits: dict[str, Any] = {} if line.support is None else {"support": line.support}
        if others := wanted.others:
            theirs = (topk.ids.cpu()[line.mask].to(targets.device, non_blocking=True) for topk in others.values())
            columns = [targets.unsqueeze(-1), *theirs]
            targets = targets if limits else torch.cat(columns, -1)
        if wanted.outputs & {"logprobs", "entropy", "collision"}:
            settings: dict[str, Any] = {"with_entropy": "entropy" in wanted.outputs, "entropy_grad": wanted.entropy_grad}
            if head is None:
                compute: Callable[..., tuple[Tensor, Tensor | None]] = partial(logprobs_of_logits, hidden)
            else:
                settings |= {"scale": head.scale, "softcap": head.softcap, "compute_dtype": self.autocast}
                settings["keep_logits"] = wanted.keep_logits
                compute = partial(token_logprobs if limits else self._compute, hidden, head.linear.weight, head.linear.bias)
            logprobs, entropy = compute(targets, wanted.temperature, **settings, **limits)
            results = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
            if "collision" in wanted.outputs:  # Σ p² = p(y)² / q(y) for any token y, q being p at half the temperature
                results["collision"] = (2 * logprobs - compute(targets, wanted.temperature / 2, **settings, **limits)[0]).exp()
            if others and limits:  # those of other roles are of whole distributions
                settings |= {"with_entropy": False, "entropy_grad": False}
                whole = compute(torch.cat(columns[1:], -1), wanted.temperature, **settings)[0]
                results["logprobs"] = torch.cat([logprobs.unsqueeze(-1), whole], -1)
        if others:
            logprobs, *own = results["logprobs"].split([column.shape[-1] for column in columns], -1)
            results["logprobs"] = logprobs.squeeze(-1)
            results |= {f"of {role}": values for role, values in zip(others, own, strict=True)}
        if "logits" in wanted.outputs:
            results["logits"] = hidden.float() if head is None else head(hidden, self.autocast)
        return results

    def topk(self, line: Line, states: Tensor, k: int, temperature: float) -> Tensors:
        """Returns ``[C, k]``: the likeliest tokens at every completion token."""
        hidden = states.index_select(0, line.predicts)
        if (head := self._head) is None:
            logprobs, ids = F.log_softmax(hidden.float() / temperature, dim=-1).topk(k)
        else:
            settings: dict[str, Any] = {"scale": head.scale, "softcap": head.softcap, "compute_dtype": self.autocast}
            logprobs, ids = top_logprobs(hidden, head.linear.weight, head.linear.bias, k, temperature, **settings)
        return {"logprobs": logprobs, "ids": ids}

    def nothing(self, outputs: frozenset[str], zeros: Tensor) -> Outputs:
        """Returns the outputs of a pass without rows. ``zeros``: ``[B, T]``."""
        return Outputs(logprobs=zeros, entropy=zeros if "entropy" in outputs else None, collision=zeros)

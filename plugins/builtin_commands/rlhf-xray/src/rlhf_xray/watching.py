"""An algorithm that is watched: how its whole loss changes with the log-probability of each token."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from rlhf_session.losses import OF_A_RUN
from torch import Tensor

from rlhf_host import Batch, Experience, Outputs, hookimpl

ROW = "xray_row"
"""Column of a batch: the number of each row."""
_MARK = f"{hookimpl.project_name}_impl"
"""Attribute of methods that are hooks."""


class Watched:
    """An algorithm's hooks, with what its loss does to each token.

    The tensor of log-probabilities that its loss reads gets a hook of autograd. What arrives there is the derivative of the whole
    loss, so advantages, masks, ratios, clips and reduction are in one number.
    """

    def __init__(self, name: str, algorithm: Any):
        self.__name__ = name
        for attribute in (each for each in dir(algorithm) if not each.startswith("__")):
            marks = getattr(inspect.getattr_static(algorithm, attribute), _MARK, None)
            hook = None if marks is None else marks.get("specname") or attribute
            if hook == "compute_loss":
                self._watched = attribute
            elif hook is not None and hook not in OF_A_RUN:  # an X-ray has one batch
                setattr(self, attribute, getattr(algorithm, attribute))
        self._algorithm = algorithm

    def begin(self, batch: Experience) -> None:
        """Numbers the rows of the batch, and forgets those of another."""
        batch.columns[ROW] = torch.arange(len(batch), dtype=torch.float32)
        self.push = torch.zeros(batch.completion_ids.shape)
        """``[B, T]``: minus the derivative: above 0 for a token that a step makes likelier."""
        self.logprobs = torch.zeros(batch.completion_ids.shape)
        """``[B, T]``: by the model, 0 at padding."""

    @hookimpl
    def compute_loss(self, role: str, outputs: Outputs, batch: Batch) -> Any:
        if role == "actor" and outputs.logprobs is not None:
            self._watch(outputs.logprobs, batch.columns[ROW].long().cpu())
        given = {"role": role, "outputs": outputs, "batch": batch}
        loss = getattr(self._algorithm, self._watched)
        return loss(**{name: given[name] for name in inspect.signature(loss).parameters})

    def _watch(self, logprobs: Tensor, rows: Tensor) -> None:
        width = logprobs.shape[1]
        self.logprobs[rows, :width] = logprobs.detach().float().cpu()

        def arrives(gradient: Tensor) -> None:
            self.push[rows, :width] -= gradient.detach().float().cpu()

        if logprobs.requires_grad:
            logprobs.register_hook(arrives)

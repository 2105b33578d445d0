"""Tinker's losses: sums over tokens, as its documentation defines them (tinker-docs.thinkingmachines.ai/losses)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_host import Batch, LossTerm, Needs, Output, Outputs, RoleNeed, hookimpl
from rlhf_host.functional import PolicyLossOptions, policy_losses

ROW = "tinker_row"
"""Column of a row's number among the data of its request."""
Inputs = Mapping[str, Tensor]


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    return _clipped((logprobs - inputs["logprobs"]).exp(), inputs["advantages"], config)


def cispo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp()
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -clipped.detach() * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    options = PolicyLossOptions.model_construct(dro_beta=config["beta"])  # of any sign, as the request has it
    everywhere = torch.ones_like(logprobs, dtype=torch.bool)
    return policy_losses["dro"](logprobs, inputs["logprobs"], inputs["advantages"], everywhere, options)[0]


def gspo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    """The token-level variant (arXiv:2507.18071): the ratio of a sequence, with the gradient of each token."""
    inside = inputs["sequence_ratio_mask"] != 0
    log_ratio = (logprobs.detach() - inputs["logprobs"])[inside].mean()
    return _clipped((log_ratio + logprobs - logprobs.detach()).exp(), inputs["advantages"], config)


def _clipped(ratio: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


@dataclass(frozen=True, slots=True)
class Formula:
    """A loss of each token, and what it is computed from."""

    values: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]
    inputs: tuple[str, ...]
    """Names of inputs beside ``target_tokens``."""
    config: Mapping[str, float | None] = field(default_factory=dict)
    """Settings and their defaults; None: the request must give it."""


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SAMPLED = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Formula(cross_entropy, ("weights",)),
    "importance_sampling": Formula(importance_sampling, SAMPLED),
    "ppo": Formula(ppo, SAMPLED, CLIP),
    "cispo": Formula(cispo, SAMPLED, CLIP),
    "dro": Formula(dro, SAMPLED, {"beta": None}),
    "gspo": Formula(gspo, (*SAMPLED, "sequence_ratio_mask"), dict.fromkeys(CLIP)),
}
NOT_HERE = {
    "stable_reinforce": "it needs what Tinker's own engine records while it samples; others are importance_sampling, ppo, cispo",
    "custom": "uploaded losses run in Tinker's own service; a function for forward_backward_custom runs in the client",
}
"""Losses that the client names and this server refuses → why."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A checked datum of ``N`` tokens."""

    tokens: np.ndarray
    """``[N]``: the model's input."""
    targets: np.ndarray
    """``[N]`` or ``[N, K]``."""
    inputs: dict[str, np.ndarray]
    """Arrays of the shape of the targets, float32."""

    @property
    def follows(self) -> bool:
        """True if each target is the token that follows in the input."""
        return self.targets.ndim == 1 and bool((self.targets[:-1] == self.tokens[1:]).all())


@dataclass(slots=True)
class Job:
    """One request: data, their loss, and the results of the passes."""

    data: list[Datum]
    loss: str
    config: Mapping[str, float]
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def follows(self) -> bool:
        return all(datum.follows for datum in self.data)

    @property
    def tokens(self) -> int:
        return sum(len(datum.targets) for datum in self.data)


class TinkerLoss:
    """The plugin with the loss of a request.

    Args:
        whole: takes log-probabilities of any targets, from all logits; else those of the tokens that follow.
    """

    def __init__(self, whole: bool):
        self.whole = whole
        self.job: Job | None = None

    @hookimpl
    def needs(self) -> Needs:
        outputs = (Output("logits"),) if self.whole else ()
        return Needs(roles=(RoleNeed("actor", trainable=True),), rewards=False, outputs=outputs)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm]:
        job = self.job
        assert job is not None
        formula, width = LOSSES[job.loss], batch.loss_mask.shape[1]
        rows = []
        for place, number in enumerate(batch.columns[ROW].long().tolist()):
            datum = job.data[number]
            logprobs = self._logprobs(outputs, place, datum)
            inputs = {name: torch.tensor(values, device=logprobs.device) for name, values in datum.inputs.items()}
            losses = formula.values(logprobs, inputs, job.config)
            job.logprobs[number] = logprobs.detach().float().cpu().numpy()
            job.losses[number] = float(losses.detach().double().sum())
            losses = losses.sum(-1) if losses.dim() > 1 else losses
            rows.append(F.pad(losses, (0, width - len(losses))))
        # The host takes the mean over the tokens of the whole batch.
        yield LossTerm("tinker", torch.stack(rows), coefficient=float(job.tokens))

    def _logprobs(self, outputs: Outputs, place: int, datum: Datum) -> Tensor:
        """Returns those of a datum's targets, in their shape."""
        count = len(datum.targets)
        if not self.whole:
            assert outputs.logprobs is not None
            return outputs.logprobs[place, :count]
        assert outputs.logits is not None
        logits = outputs.logits[place, :count].float()
        targets = torch.tensor(datum.targets, device=logits.device)
        return logits.log_softmax(-1).gather(-1, targets.reshape(count, -1)).reshape(targets.shape)


def metrics_of(job: Job) -> dict[str, float]:
    return {"loss:sum": sum(job.losses.values())}


def checked_config(loss: str, given: Mapping[str, Any]) -> dict[str, float]:
    """Returns the settings of a loss, complete. Raises ``ValueError`` for unknown, missing and wrong ones."""
    if (formula := LOSSES.get(loss)) is None:
        why = NOT_HERE.get(loss) or f"there are {', '.join(LOSSES)}"
        raise ValueError(f"the loss {loss[:40]!r} is not here: {why}")
    config = dict(formula.config)
    for name, value in given.items():
        if name not in config:
            takes = f"takes {', '.join(config)}" if config else "takes none"
            raise ValueError(f"loss_fn_config: {loss} has no setting {name[:40]!r}; it {takes}")
        if isinstance(value, str) or not np.isfinite(value):
            raise ValueError(f"loss_fn_config: {name} is {str(value)[:40]!r}, and should be a finite number")
        config[name] = float(value)
    if missing := [name for name, value in config.items() if value is None]:
        raise ValueError(f"loss_fn_config: {loss} needs {' and '.join(missing)}")
    complete = {name: float(value) for name, value in config.items() if value is not None}
    if "clip_low_threshold" in complete and not 0 <= complete["clip_low_threshold"] <= complete["clip_high_threshold"]:
        raise ValueError("loss_fn_config: the thresholds are ratios, such as 0.8 and 1.2, the low one first")
    return complete


def checked_datum(loss: str, tokens: np.ndarray, given: Mapping[str, np.ndarray], vocabulary: int | None, room: int) -> Datum:
    """Returns a datum that the loss can be computed of. Raises ``ValueError`` for any other.

    Args:
        given: ``loss_fn_inputs``.
        room: number of tokens that the model can read.
    """
    needed = ("target_tokens", *LOSSES[loss].inputs)
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"loss_fn_inputs has no {missing[0]}, which {loss} needs")
    if odd := [name for name in given if name not in needed]:
        raise ValueError(f"loss_fn_inputs has {odd[0][:40]!r}, which {loss} does not read; it reads {', '.join(needed)}")
    if not len(tokens):
        raise ValueError("model_input is empty")
    if len(tokens) >= room:
        raise ValueError(f"model_input has {len(tokens)} tokens, and with its last target the model has room for {room}")
    targets = given["target_tokens"]
    if targets.dtype.kind != "i":
        raise ValueError("target_tokens are whole numbers (int64)")
    if len(targets) != len(tokens) or not targets.size:
        raise ValueError(f"model_input has {len(tokens)} tokens, and target_tokens {len(targets)}: one target for each")
    if targets.ndim > 1 and loss == "gspo":
        raise ValueError("gspo has one target for each token")
    inputs = {}
    for name in needed[1:]:
        values = given[name]
        if values.shape != targets.shape:
            shapes = f"{list(values.shape)}, and target_tokens {list(targets.shape)}"
            raise ValueError(f"{name} has the shape {shapes}: they are the same")
        if not np.isfinite(values).all():
            raise ValueError(f"{name} has a value that is not finite")
        inputs[name] = values.astype(np.float32)
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise ValueError("sequence_ratio_mask marks no token")
    for name, ids in (("model_input", tokens), ("target_tokens", targets)):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            raise ValueError(f"{name} has the token {low if low < 0 else high}, and the model {vocabulary} tokens")
    return Datum(tokens, targets, inputs)

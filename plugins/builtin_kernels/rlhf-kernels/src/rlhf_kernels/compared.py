"""The run's kernels: of each model the twin of the first plugin that suits and computes the same, else the plain path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rlhf_host import RunError
from rlhf_host.commands import first_line
from rlhf_host.comparison import WIDE, decoder_problem, structure
from rlhf_host.protocols import Decoder, Kernels, KernelsPlugin, TokenLogprobs, Use
from rlhf_kernels.differences import appearance, gradients_problem
from rlhf_kernels.heads import head_problem
from rlhf_kernels.measured import times_as_fast

log = logging.getLogger("rlhf_host.kernels")


class ComparedKernels:
    """Twins and decoders of models, from the first of ``candidates`` that suits a model and computes the same as the model.

    Args:
        candidates: name and plugin, in the order in which they are asked.
        plain: decodes what no candidate decodes.
        faster: twins to train are used only where they are measured to be faster than the model.
    """

    def __init__(self, candidates: Sequence[tuple[str, KernelsPlugin]], plain: Kernels, *, faster: bool = False):
        self._candidates, self._plain, self._faster = candidates, plain, faster
        self._twins: dict[tuple[int, Use], tuple[Any, nn.Module]] = {}
        self._decoders: dict[tuple[int, Use], tuple[Any, dict[int, Decoder | None]]] = {}
        self._heads: dict[Use, TokenLogprobs] = {}
        self.reports: list[str] = []
        """Lines about the chosen kernels, and about the others with the reason."""

    def module(self, model: nn.Module, use: Use) -> nn.Module:
        """Returns a twin to train, or the model itself."""
        stamp, twin = self._twins.get((id(model), use), (None, model))
        if stamp != structure(model):
            _, twin = self._twin(model, use, partial(gradients_problem, model, exact=use.dtype in WIDE))
            twin = model if twin is None else twin
            self._twins[id(model), use] = structure(model), twin
        return twin

    def like(self, probe: nn.Module, model: nn.Module, use: Use) -> tuple[nn.Module, nn.Module]:
        """Returns twins to train of a small model, which is compared, and of a large one of the same kind; or both themselves."""
        if self._faster:
            self._report(f"no kernels are used to train {type(model).__name__}: its weights are not here to be measured with")
            return probe, model
        plugin, twin = self._twin(probe, use, partial(gradients_problem, probe, exact=use.dtype in WIDE))
        return (probe, model) if plugin is None else (twin, plugin.twin(model, use))

    def token_logprobs(self, use: Use) -> TokenLogprobs:
        """Returns the function of heads: of the first plugin that has one and computes the same as the host's own, or that."""
        if use not in self._heads:
            self._heads[use] = self._find_token_logprobs(use)
        return self._heads[use]

    def _find_token_logprobs(self, use: Use) -> TokenLogprobs:
        for name, plugin in self._candidates:
            try:
                function: TokenLogprobs | None = getattr(plugin, "token_logprobs", _none)(use)
                if function is None:
                    continue
                problem = head_problem(function, use)
                if problem is None:
                    self._report(f"kernels {name!r} compute log-probabilities")
                    return function
            except Exception as error:
                problem = f"{type(error).__name__}: {first_line(error)}"
            self._report(f"kernels {name!r} do not compute log-probabilities: {problem}")
        return self._plain.token_logprobs(use)

    def decoder(self, model: nn.Module, use: Use, longest: int, pictured: bool = False) -> Decoder:
        """Returns a twin's decoder for rows of up to ``longest`` tokens, or that of the plain path.

        Args:
            pictured: prompts have pictures, which kernels do not decode.
        """
        if pictured:
            return self._plain.decoder(model, use, longest, pictured)
        stamp, decoders = self._decoders.get((id(model), use), (None, {}))
        if stamp != structure(model):
            stamp, decoders = self._decoders[id(model), use] = structure(model), {}
        length = 1 << max(5, (longest - 1).bit_length())
        if length not in decoders:
            decoders[length] = self._find_decoder(model, use, length, decoders)
        return decoders[length] or self._plain.decoder(model, use, longest)

    @torch.inference_mode()
    def _find_decoder(self, model: nn.Module, use: Use, length: int, known: dict[int, Decoder | None]) -> Decoder | None:
        """Returns a twin's decoder; None: the plain path decodes. One of other lengths is kept if it is right at this one too."""
        if use.autocast is None and use.dtype in WIDE:
            for decoder in dict.fromkeys(known.values()):
                if decoder is None or decoder_problem(decoder, model, use, length) is None:
                    return decoder
        twin: Decoder | None = self._twin(model, use, partial(_problem_of_decoder, model, use, length))[1]
        return twin

    def _twin(self, model: nn.Module, use: Use, problem_of: Callable[[Any], str | None]) -> tuple[Any, Any]:
        """Returns the first plugin that suits, and its twin; twice None if none does."""
        frozen = use.purpose == "train" and not any(weight.requires_grad for weight in model.parameters())
        purpose = f"{'for log-probabilities of' if frozen else f'to {use.purpose}'} {type(model).__name__}"
        for name, plugin in self._candidates:
            before, speed = appearance(model), ""
            try:
                problem = plugin.unsuited(model, use)
                if problem is None:
                    twin = plugin.twin(model, use)
                    problem = problem_of(twin)
                if problem is None and self._faster and isinstance(twin, nn.Module):
                    times = round(times_as_fast(model, twin, use), 2)
                    speed = f"measured: {times:.2f} times as fast as the plain path"
                    problem = None if times > 1 else speed
            except Exception as error:
                problem = f"{type(error).__name__}: {first_line(error)}"
            if appearance(model) != before:
                raise RunError(
                    f"kernels {name!r} changed the model itself while they were tried {purpose}: choose other --kernels"
                )
            if problem is None:
                self._report("; ".join(filter(None, (f"kernels {name!r} are used {purpose}", speed))))
                return plugin, twin
            self._report(f"kernels {name!r} are not used {purpose}: {problem}")
        return None, None

    def _report(self, line: str) -> None:
        if line not in self.reports:
            self.reports.append(line)
            log.warning("%s", line)  # whoever runs it sees what computes


def _none(use: Use) -> None:
    """What plugins have that leave heads to the host."""


def _problem_of_decoder(model: nn.Module, use: Use, length: int, twin: Any) -> str | None:
    """Returns what is wrong with a decoder, also with other weights, because kernels may derive something from them."""
    if not hasattr(twin, "prefill"):
        return "they only train"
    problem = decoder_problem(twin, model, use, length)
    if problem is None:
        _negate(model)
        try:
            problem = decoder_problem(twin, model, use, length)
        finally:
            _negate(model)
            twin.refresh()
        problem = problem and f"after the weights have changed {problem}"
    return problem


def _negate(model: nn.Module) -> None:
    """Negates the weights in the same memory; doing it twice restores them bit for bit."""
    for weight in model.parameters():
        weight.data.neg_()
    torch.clear_autocast_cache()

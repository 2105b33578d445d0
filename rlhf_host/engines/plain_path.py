"""The plain path: models compute themselves, and decode with the first of the host's decoders that gives what they give."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host.engines.decoding import GenericDecoder, PlainDecoder, RepeatingDecoder
from rlhf_host.engines.pictured_decoding import PicturedDecoder, PicturedGenericDecoder
from rlhf_host.errors import UserError, beyond
from rlhf_host.models import attention
from rlhf_host.models.heads import decoder_of, find_head
from rlhf_host.models.layout_check import EXACT, FAILURES, ROUGH, SHORTEST, WIDE, distance, random_text, structure
from rlhf_host.models.layouts import padded_layout, to_device
from rlhf_host.models.loading import context_length
from rlhf_host.models.logprobs import token_logprobs
from rlhf_host.models.pictures import Sight, noise
from rlhf_host.models.pictures import inputs as pictured_inputs
from rlhf_host.models.precision import evaluation, in_32_bits, without_tf32
from rlhf_host.phases import slow_phase
from rlhf_host.protocols import Decoder, TokenLogprobs, Use
from rlhf_host.records.pictures import Pictured, shown_in

log = logging.getLogger(__name__)

STEPS = 8
"""Number of tokens that are decoded to compare, after prompts that are nearly as long as the rows."""


class PlainKernels:
    """The run's ``Kernels`` where no package makes any."""

    def __init__(self) -> None:
        attention.enable_shared_rows()
        self._decoders: dict[tuple[int, Use, bool], tuple[Any, dict[int, Decoder]]] = {}

    def module(self, model: nn.Module, use: Use) -> nn.Module:
        """Returns the model."""
        return model

    def like(self, probe: nn.Module, model: nn.Module, use: Use) -> tuple[nn.Module, nn.Module]:
        """Returns both."""
        return probe, model

    def token_logprobs(self, use: Use) -> TokenLogprobs:
        """Returns the host's own."""
        return token_logprobs

    def decoder(self, model: nn.Module, use: Use, longest: int, pictured: bool = False) -> Decoder:
        """Returns a decoder for rows of up to ``longest`` tokens: the plain one, or one with the model's own cache.

        Args:
            pictured: prompts have pictures.

        Raises:
            UserError: none of them computes the same as the model.
        """
        stamp, decoders = self._decoders.get((id(model), use, pictured), (None, {}))
        if stamp != structure(model):
            stamp, decoders = self._decoders[id(model), use, pictured] = structure(model), {}
        tried = 1 << max(5, (longest - 1).bit_length())
        if tried not in decoders:
            sight = Sight.of(model) if pictured else None
            with _comparing(model, use, tried):
                decoders[tried] = self._find_decoder(model, use, tried, decoders, sight)
        return decoders[tried]

    def _find_decoder(
        self, model: Any, use: Use, length: int, known: dict[int, Decoder], sight: Sight | None = None
    ) -> Decoder:
        """Finds a decoder. One that was found for other lengths is kept if it is correct at this one too."""
        head = find_head(model)
        oracle, rounded = _WholeRows(model, head, use, length, sight), not _is_exact(use)
        for decoder in () if rounded else dict.fromkeys(known.values()):
            if oracle.problem(decoder) is None:
                return decoder
        oracles = [oracle]
        if rounded:  # rounding to 16 bits would hide that some positions are wrong
            oracle = _WholeRows(model, head, replace(use, dtype=torch.float32, autocast=None), length, sight)
            oracles = [oracle, *oracles] if oracle.runs else oracles
        problems: list[str] = []
        makes: tuple[Callable[[Use], Any], ...] = (
            lambda use: PlainDecoder(model, head, use.autocast),
            lambda use: GenericDecoder(model),
            lambda use: GenericDecoder(model, positions=False),
            lambda use: RepeatingDecoder(model),
        )
        if sight is not None:
            makes = (
                lambda use: PicturedDecoder(model, head, sight, use.autocast),
                lambda use: PicturedGenericDecoder(model, sight),
            )
        for make in makes:
            problem = None
            try:
                for oracle in oracles:
                    with _precision(model, oracle.use):
                        decoder = make(oracle.use)
                        problem = problem or oracle.problem(decoder)
            except FAILURES as error:
                problem = f"{type(error).__name__}: {error}"
            if problem is None:
                if problems:
                    log.info(f"{type(model).__name__} decodes with a cache of its own: {problems[0]}")
                return decoder
            problems.append(problem)
        raise UserError(
            f"{type(model).__name__} cannot be sampled here: decoding token by token gives other results than whole rows of"
            f" {length} tokens ({problems[-1]}); choose another --engine, or shorter rows (--rollout.max-tokens)"
        )


def decoder_problem(decoder: Decoder, model: Any, use: Use, length: int) -> str | None:
    """Returns why the decoder does not give what the model gives for whole rows of ``length`` tokens; None if it does."""
    with _comparing(model, use, length):
        return _WholeRows(model, find_head(model), use, length).problem(decoder)


@contextlib.contextmanager
def _comparing(model: nn.Module, use: Use, length: int) -> Iterator[None]:
    """Sets what decoders are compared under inside the block."""
    line = f"Comparing decoders with the whole {type(model).__name__}, on rows of {length} tokens"
    with slow_phase(line), torch.inference_mode(), without_tf32(), evaluation(model), _precision(model, use):
        yield


class _WholeRows:
    """Results of the model for three whole rows, two of which share a prompt: the reference for decoders."""

    def __init__(self, model: Any, head: Any, use: Use, length: int, sight: Sight | None = None):
        self.model, self.head, self.use, self.length, self.sight = model, head, use, length, sight
        length = min(length, context_length(model))
        self.steps = min(STEPS, length - 1)
        text = partial(random_text, model.config.get_text_config(), generator=torch.Generator().manual_seed(length))
        self.tails, self.prompt_of_row = [text(self.steps) for _ in range(3)], [0, 0, 1]
        long = text(length - self.steps)
        self.ragged: list[Sequence[int]] = [long, text(max(1, min(8, len(long) // 3)))]
        self.even: list[Sequence[int]] = [long, text(len(long))]
        if sight is not None:
            self.ragged, self.even = self._seeing(sight, self.ragged), self._seeing(sight, self.even)
            self.tails = list(map(sight.words, self.tails))
        self._expected: dict[bool, Tensor] = {}

    def problem(self, decoder: Decoder) -> str | None:
        """Returns why the decoder is not correct; None if it is."""
        prompts, exact = self.ragged if decoder.ragged else self.even, _is_exact(self.use)
        if decoder.ragged not in self._expected:
            self._expected[decoder.ragged] = torch.stack(
                [self._row(prompts[n], tail) for n, tail in zip(self.prompt_of_row, self.tails, strict=True)]
            )
        expected = self._expected[decoder.ragged]
        rows, tails = (torch.tensor(values, device=self.use.device) for values in (self.prompt_of_row, self.tails))
        decoder.refresh()
        pairs = [(decoder.prefill(prompts)[rows], expected[:, 0])]
        decoder.start(rows, self.steps)
        for place in range(self.steps):
            if place == self.steps // 2:
                left = torch.tensor([0, 2], device=self.use.device)
                decoder.keep(left)
                tails, expected = tails[left], expected[left]
            pairs.append((decoder.step(tails[:, place]), expected[:, place + 1]))
        logits, wanted = map(torch.cat, zip(*pairs, strict=True))
        if not bool(torch.isfinite(wanted).all()):
            return None  # weights that have diverged tell nothing; sampling will say so
        if self.changes_with_length:
            return "its result for a token changes with the length of its row"
        gap = distance(logits, wanted, exact)
        # A recurrence step by step and the parallel scan of a whole row agree less well than attention does.
        tolerance = ROUGH if not exact else EXACT if decoder.ragged else 10 * EXACT
        return None if gap <= tolerance else f"its logits differ by {beyond(gap, tolerance)}"

    @cached_property
    def runs(self) -> bool:
        """True if the model runs at all: attention may work in 16 bits only."""
        try:
            with _precision(self.model, self.use):
                self._row(self.even[0], self.tails[0])
        except FAILURES:
            return False
        return True

    @cached_property
    def changes_with_length(self) -> bool:
        """True if results change with length, as with rotary positions that depend on it; no cache of keys can follow that."""
        ids, exact = torch.tensor([list(self.even[0])], device=self.use.device), _is_exact(self.use)
        whole, *starts = (
            decoder_of(self.model)(input_ids=part, use_cache=False).last_hidden_state[0]
            for part in (ids, ids[:, :STEPS], ids[:, :SHORTEST])
        )
        gaps = [distance(start, whole[: len(start)], exact) for start in starts]
        return not max(gaps) <= (10 * EXACT if exact else ROUGH)

    def _seeing(self, sight: Sight, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Returns the prompts with a picture each, of the same size."""
        seeing: list[Sequence[int]] = []
        for prompt, picture in zip(prompts, (noise(1), noise(3)), strict=True):
            others = sight.words(prompt)
            seeing.append(Pictured([others[0], *sight.reader.tokens(picture), *others[1:]], [picture]))
        return seeing

    def _row(self, prompt: Sequence[int], tail: Sequence[int]) -> Tensor:
        """Returns ``[steps + 1, V]`` logits."""
        ids = torch.tensor([[*prompt, *tail]], device=self.use.device)
        count = self.steps + 1
        base, given = decoder_of(self.model), {"input_ids": ids}
        if self.sight is not None:
            layout = padded_layout([[*prompt]], ids[0, len(prompt) :].cpu(), [len(tail)])
            layout = to_device(self.sight.by_itself(layout, shown_in(prompt)), self.use.device)
            base, given = self.sight.base, pictured_inputs(self.sight.base, layout, None)
        if self.head is not None:
            return self.head(base(**given, use_cache=False).last_hidden_state[0, -count:], self.use.autocast)
        last = {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        return self.model(**given, use_cache=False, **last).logits[0, -count:]


@contextlib.contextmanager
def _precision(model: nn.Module, use: Use) -> Iterator[None]:
    """Sets the precision of ``use`` inside the block: the model's weights may have fewer bits."""
    autocast = torch.autocast(use.device.type, use.autocast, enabled=use.autocast is not None)
    with autocast, in_32_bits(model) if _is_exact(use) else contextlib.nullcontext():
        yield


def _is_exact(use: Use) -> bool:
    return use.autocast is None and use.dtype in WIDE

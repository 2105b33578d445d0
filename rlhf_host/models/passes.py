"""Forward passes over one role's model, for every use: π, π_old, the reference, critics and reward models."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rlhf_host.errors import RunError, UserError
from rlhf_host.models import attention
from rlhf_host.models.activation_memory import gathered
from rlhf_host.models.adapters import using
from rlhf_host.models.balance import Balance
from rlhf_host.models.examination import examine
from rlhf_host.models.flops import ModelFlops
from rlhf_host.models.heads import blocks_of, decoder_of
from rlhf_host.models.layout_check import WIDE, DoesNotRun, Verdict, check_layouts, structure
from rlhf_host.models.layouts import Layout, Line, Rows, padded_layout, shared_layout, sharing_of, to_device, without_last
from rlhf_host.models.output_heads import LanguageHead, Wanted
from rlhf_host.models.pictures import Reader, Sight, base_of, features_of, first_pictures
from rlhf_host.models.pictures import inputs as pictured_inputs
from rlhf_host.models.precision import evaluation, in_32_bits, is_narrow
from rlhf_host.models.preparation import recompute
from rlhf_host.protocols import Kernels, Ranks, RunsPasses, Slices, Tensors, Use
from rlhf_host.records.pictures import Shown
from rlhf_host.records.tensors import AT_TOKENS, OF_ROWS, Distribution, Outputs, TopK
from rlhf_host.records.token_sets import of_completions

SharedPrefix = Literal["auto", "on", "off"]
Traces: TypeAlias = Sequence[Mapping[str, Any]] | None

WORTHWHILE = 0.95
"""Share of the padded tokens below which ``auto`` shares prompts; gathering rows costs something too."""


class Passes:
    """Passes over rows of prompt and completion; they return log-probabilities, entropy, values and scores.

    A batch uses the layout with the least to compute, among those that the model computes correctly. That is tested for each
    new power of two of the longest row (``models/layout_check.py``). The model is in evaluation mode, and only
    adapters have dropout (``models/adapter_dropout.py``).

    Args:
        model: a model with a language-model head, or a scalar one (``model.score``).
        kernels: default: none, the model's own computation.
        shared_prefix: ``on`` and ``off`` fix the layout; ``auto`` picks the one with less to compute.
        autocast: type of matrix products; the log-softmax is in float32 in any case.
        even_passes: as in ``BackendTraits``.
        balance: passes with gradients also return ``router_loss``.
        reader: turns pictures into tensors; default: the processor beside the model's files.
        slices: this process computes a part of every line of rows, and all processes of them get the same results.
        probe: a small model of the same kind, which is examined in place of a model without weights (``ShardedModel``).
    """

    def __init__(
        self,
        model: Any,
        *,
        kernels: Kernels | None = None,
        shared_prefix: SharedPrefix = "auto",
        autocast: torch.dtype | None = None,
        even_passes: bool = False,
        balance: Balance | None = None,
        slices: Slices | None = None,
        probe: Any = None,
        reader: Reader | None = None,
    ):
        attention.enable_shared_rows()
        self._reader = reader
        self.watched: Callable[[int], AbstractContextManager[Any]] = contextlib.nullcontext
        """Called with the tokens of a pass, around its layers."""
        self.around: Callable[..., AbstractContextManager[Any]] = lambda **_: contextlib.nullcontext()
        """Called as ``around_pass`` with the module that computes, the rows' lengths and their traces, around its layers."""
        self.keep_logits = False
        """Logits are kept for the backward pass in place of computing them twice."""
        self.model, self.balance, self.slices = model, balance, slices
        self.shared_prefix = shared_prefix
        self.autocast = autocast
        self._kernels = kernels
        self._even_passes = even_passes
        self._backend: RunsPasses | None = None
        self._ranks: Ranks | None = None
        self._adapter: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self._examine(probe)
        self.model_flops = ModelFlops.of(model, () if self.head.scalar else self.head.parameters)

    def under(self, adapter: str | None) -> Passes:
        """Returns the same passes with another adapter of the model, or with none. Nothing of the model is held twice."""
        passes = copy(self)
        passes._adapter = lambda: using(adapter, passes.model, passes.compute)
        return passes

    def _examine(self, probe: Any = None) -> None:
        """Examines the parts of the model, whose weights must be whole now, or of a probe."""
        model, examined = self.model, self.model if probe is None else probe
        weight = next(examined.parameters())
        self.device = weight.device
        self._structure = structure(model)
        use = Use(
            purpose="train", device=self.device, dtype=weight.dtype, autocast=self.autocast, even_passes=self._even_passes
        )
        self.compute, self.head, modules = examine(model, use, self._kernels, probe)
        if self.head.reads_logits:
            warnings.warn(
                f"the head of {type(model).__name__} is more than a matrix product: all its logits are held in memory",
                stacklevel=4,
            )
        self.exact = self.autocast is None and weight.dtype in WIDE
        plain = copy(self)
        plain.model, plain.balance, plain.slices = examined, None, None
        depth = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
        self._gathered = {
            module: gathered(partial(plain._hidden, other, exact=False), examined, depth)
            for module, other in (modules if self.shared_prefix != "off" or self.slices is not None else {}).items()
        }
        self._verdicts: dict[tuple[int, bool], Verdict] = {}
        self._verdict: Verdict | None = None
        self._prepared_for = 0, False
        self.one_by_one = False
        """Rows beside each other would change each other, so that each needs its own pass."""

    def recompute(self, count: int) -> None:
        """Lets the first ``count`` layers compute again in the backward pass (``gradient_checkpointing``)."""
        for module in {self.model, self.compute}:
            recompute(module, count)

    @property
    def recomputed(self) -> tuple[int, int]:
        """The number of layers that do, and that of all."""
        layers = blocks_of(self.model).values()
        return sum(bool(getattr(layer, "gradient_checkpointing", False)) for layer in layers), len(layers)

    def go_through(self, backend: RunsPasses, ranks: Ranks) -> None:
        """Sends every pass through the backend, once per pass, whatever its outputs: weights are whole only there. One that
        computes in 16 bits does so by its weights, without autocast.
        """
        self._backend, self._ranks = backend, ranks
        if not backend.exact:
            self.autocast = self.head.autocast = None
            self.exact = False

    def prepare(self, longest: int, pictured: bool = False) -> None:
        """Prepares for rows of up to ``longest`` tokens: tries the layouts on such rows, if that was not done yet.

        Under a backend that runs passes this is collective, and every rank must pass the same arguments.

        Args:
            pictured: rows may have pictures.

        Raises:
            UserError: ``shared_prefix`` is ``on`` and the model cannot, or the model does not run at all.
        """
        if self._backend is None and structure(self.model) != self._structure:
            self._examine()
        tried = 1 << max(4, (longest - 1).bit_length())
        sound = [
            length
            for (length, others), verdict in self._verdicts.items()
            if length > tried and others == pictured and not verdict.problems
        ]
        key = min(sound, default=tried), pictured
        if key not in self._verdicts:
            self._verdicts[key] = self._try(*key)
        self._verdict = verdict = self._verdicts[key]
        self._prepared_for = longest, pictured
        self.one_by_one = verdict.padded is None and verdict.shared is None

    def _try(self, length: int, pictured: bool) -> Verdict:
        verdict = self._verdict_of(length, pictured, exact=self.exact)
        if not self.exact and (self._backend is None or (self._backend.exact and not is_narrow(self.model))):
            # Rounding to 16 bits would hide that some positions are wrong; the layouts are the same without it. Inside a backend
            # weights cannot be widened one by one.
            with contextlib.suppress(DoesNotRun):  # its attention may be for 16 bits alone
                verdict = verdict.and_also(self._verdict_of(length, pictured, exact=True), self.model)
        if self._ranks is not None:  # a rank on other hardware may see a gap where the others see none
            verdicts = self._ranks.gather((verdict.shared is None, verdict.padded is None))
            shared, padded = (any(refused) for refused in zip(*verdicts, strict=True))
            verdict = replace(verdict, shared=None if shared else verdict.shared, padded=None if padded else verdict.padded)
        if verdict.problems:
            warnings.warn("; ".join(verdict.problems), stacklevel=5)
        if self.shared_prefix == "on" and verdict.shared is None:
            raise UserError(f"train.shared_prefix is on, but {verdict.problems[0]}; set it to auto")
        if self.slices is not None and verdict.shared is None:
            raise UserError(f"sequence_parallel computes parts of lines of rows, but {verdict.problems[0]}; leave it out")
        return verdict

    def _verdict_of(self, length: int, pictured: bool, exact: bool) -> Verdict:
        oracle = self.model if self._backend is None else self.compute
        with_shared = self.shared_prefix != "off" or self.slices is not None
        hidden = partial(self._hidden, exact=exact)
        sight = self.sight if pictured else None
        return check_layouts(hidden, oracle, self.compute, length, exact=exact, with_shared=with_shared, sight=sight)

    @cached_property
    def sight(self) -> Sight:
        """The model's way to see pictures. Raises ``UserError`` if it sees none here."""
        if self.slices is not None:
            raise UserError("sequence_parallel does not split pictures: leave it out for rows with pictures")
        return Sight.of(self.compute, self._reader)

    def tokens(
        self, prompt_ids: Sequence[Sequence[int]], completion_lens: Sequence[int], group_id: Sequence[int] | None = None
    ) -> int:
        """Returns the number of tokens that one ``forward`` over these rows computes here, padding included; the maximum, for a
        model with a scalar head.
        """
        shares, line, padded = self._layout(prompt_ids, self.head.computed(completion_lens), self._share(prompt_ids, group_id))
        return self._here(line if shares else padded)

    def cost(
        self, prompt_ids: Sequence[Sequence[int]], completion_lens: Sequence[int], group_id: Sequence[int] | None = None
    ) -> int:
        """Returns how many tokens in padded rows need as much memory as one ``forward`` over these rows, with its backward pass:
        ``tokens``, and what attention gathers of shared prompts for each row (``models/activation_memory.py``).
        """
        shares, line, padded = self._layout(prompt_ids, self.head.computed(completion_lens), self._share(prompt_ids, group_id))
        if not shares:
            return padded
        compute = self.compute if self._verdict is None or self._verdict.shared is None else self._verdict.shared
        return self._here(self._gathered[compute].cost(line, padded))

    def _here(self, tokens: int) -> int:
        """Returns this process's part of tokens that are computed."""
        return tokens if self.slices is None else self.slices.size(tokens)

    def _share(
        self,
        prompt_ids: Sequence[Sequence[int]],
        group_id: Sequence[int] | None,
        images: Sequence[Sequence[Shown]] | None = None,
    ) -> list[int]:
        """Returns as ``sharing_of``, where prompts may be shared; else every row has its own."""
        return [*range(len(prompt_ids))] if self.shared_prefix == "off" else sharing_of(prompt_ids, group_id, images)

    def flops(
        self, prompt_ids: Sequence[Sequence[int]], completion_lens: Sequence[int], group_id: Sequence[int] | None = None
    ) -> float:
        """Returns the operations of training on these rows in one pass (``ModelFlops``), without padding; NaN if unknown."""
        if self.model_flops is None:
            return math.nan
        sharing, counts = self._share(prompt_ids, group_id), self.head.computed(completion_lens)
        rows = [(len(ids) + count, count) for ids, count in zip(prompt_ids, counts, strict=True)]
        prompts = [*dict(zip(sharing, map(len, prompt_ids), strict=True)).values()]
        if not self._layout(prompt_ids, counts, sharing)[0]:
            prompts, rows = [], [(length, length) for length, _ in rows]
        return self.model_flops.training(prompts, rows, sum(completion_lens))

    def _layout(
        self, prompt_ids: Sequence[Sequence[int]], lengths: Sequence[int], sharing: Sequence[int]
    ) -> tuple[bool, int, int]:
        """Returns True if the rows share prompts in the layout with the least to compute, and the tokens of a shared line and
        of padded rows.
        """
        prompts = {number: len(ids) for number, ids in zip(sharing, prompt_ids, strict=True)}
        longest = max((len(ids) + length for ids, length in zip(prompt_ids, lengths, strict=True)), default=0)
        line, padded = sum(prompts.values()) + sum(lengths), len(lengths) * longest
        sliced, verdict = self.slices is not None, self._verdict
        if not sliced and (self.shared_prefix == "off" or (verdict is not None and verdict.shared is None)):
            return False, line, padded
        always = sliced or self.shared_prefix == "on" or (verdict is not None and verdict.padded is None)
        return always or line <= WORTHWHILE * padded, line, padded

    def forward(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Tensor,
        completion_mask: Tensor,
        group_id: Tensor | None = None,
        *,
        temperature: float = 1.0,
        outputs: frozenset[str] = frozenset({"logprobs"}),
        entropy_grad: bool = False,
        others: Mapping[str, TopK] | None = None,
        images: Sequence[Sequence[Shown]] | None = None,
        traces: Traces = None,
    ) -> Outputs:
        """Returns the requested ``outputs``, as far as the model's head has them: ``logprobs``, ``entropy`` and ``logits`` for
        a language model; ``values``, ``scores``, ``token_scores`` and ``bootstrap`` for a scalar head. Others are None. Outputs
        have gradients if these are enabled.

        Only positions that predict completion tokens reach the head. ``logits`` are the model's own, before the temperature.

        Args:
            prompt_ids: one per row; rows of one group (all rows, without ``group_id``) with equal prompts may share its
                computation.
            completion_ids: ``[B, T]``, right-padded. Tensors are best on the CPU: layouts are made there.
            completion_mask: ``[B, T]`` bool, true on real tokens; other values of ``completion_ids`` do not matter.
            group_id: ``[B]``.
            temperature: divides the logits before the softmax.
            entropy_grad: gradients flow through the entropy.
            others: role → tokens whose log-probabilities under this model are compared with that role's: ``Outputs.others``.
            images: the pictures of each row, prompt and completion, in the order of their tokens, each after a place before
                which these are not; None: no rank has any.
            traces: as in ``Batch.traces``.

        Returns:
            ``[B, T]`` float32 (``OF_ROWS``: ``[B]``, ``logits [B, T, V]``) on the model's device, 0 outside
            ``completion_mask``.

        Raises:
            UserError: an empty prompt, a temperature of 0, and as ``prepare``.
        """
        others = others or {}
        vocabulary = self.model.config.get_text_config().vocab_size
        if unknown := [role for role, topk in others.items() if topk.ids.numel() and int(topk.ids.max()) >= vocabulary]:
            raise UserError(
                f"the role {unknown[0]!r} has tokens beyond this model's {vocabulary}: give one with the same tokens"
            )
        read_whole = not outputs.isdisjoint(AT_TOKENS)
        rows = (prompt_ids, completion_ids, completion_mask, group_id)
        line = self._line(*rows, temperature=temperature, images=images, traces=traces, whole=read_whole)
        if line is None:
            return self.head.nothing(outputs, torch.zeros(tuple(completion_ids.shape), device=self.device))
        wanted = Wanted(
            outputs=outputs, temperature=temperature, entropy_grad=entropy_grad, others=others, keep_logits=self.keep_logits
        )
        read: Callable[[Tensor], Tensors] = self._reading(line, lambda own, states: self.head.read(own, wanted, states))
        if self.balance is not None and not self.head.scalar and torch.is_grad_enabled():
            read = partial(self._read_routed, read)
        results = read(self._states(line)) if self._backend is None else self._through(line, read)
        whole = (*OF_ROWS, "router_loss")
        results = {name: value if name in whole else line.spread(value) for name, value in results.items()}
        move = partial(Tensor.to, device=self.device, non_blocking=True)
        distributions = {
            role: Distribution(move(topk.logprobs), results.pop(f"of {role}"), move(topk.ids)) for role, topk in others.items()
        }
        return Outputs(**results, others=distributions)

    def _read_routed(self, read: Callable[[Tensor], Tensors], states: Tensor) -> Tensors:
        """Adds the loss of the routers to what ``read`` returns."""
        assert self.balance is not None
        return {**read(states), "router_loss": self.balance.loss()}

    def topk(
        self,
        k: int,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Tensor,
        *rows: Any,
        temperature: float = 1.0,
        **more: Any,
    ) -> TopK:
        """Returns the ``k`` likeliest tokens at every completion token, ``[B, T, k]``, without gradient; otherwise as
        ``forward``.
        """
        if k > (vocabulary := self.model.config.get_text_config().vocab_size):
            raise UserError(f"the {k} likeliest tokens are wanted of a model that has {vocabulary}: ask for fewer")
        line = self._line(prompt_ids, completion_ids, *rows, temperature=temperature, **more)
        if line is None:
            empty = completion_ids.new_zeros((*completion_ids.shape, k))
            return TopK(empty.float(), empty)
        head = self.head
        assert isinstance(head, LanguageHead)
        with torch.no_grad():
            results = self._through(line, self._reading(line, lambda own, states: head.topk(own, states, k, temperature)))
        return TopK(*(line.spread(results[name]) for name in ("logprobs", "ids")))

    def _line(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Tensor,
        completion_mask: Tensor,
        group_id: Tensor | None = None,
        *,
        temperature: float,
        images: Sequence[Sequence[Shown]] | None = None,
        traces: Traces = None,
        whole: bool = False,
    ) -> Line | None:
        """Returns the rows in the layout with the least to compute; None without rows. ``whole``: with each row's last token."""
        if temperature <= 0:
            raise UserError(
                f"temperature {temperature:g} has no log-probabilities to train on: set rollout.temperature above 0"
            )
        if empty := [row for row, ids in enumerate(prompt_ids) if not len(ids)]:
            raise UserError(f"the prompt of row {empty[0]} has no tokens: the first completion token needs one before it")
        mask = completion_mask.bool().cpu()
        lengths = mask.sum(-1).tolist()
        if not lengths:
            return None
        longest = max(len(ids) + length for ids, length in zip(prompt_ids, lengths, strict=True))
        pictured = images is not None
        if longest > self._prepared_for[0] or pictured != self._prepared_for[1]:
            self.prepare(longest, pictured)
        assert self._verdict is not None
        place = prompts_see = None
        if images is not None:
            seen = self.sight.see(images)
            prompts_see = [first_pictures(ids, own, seen) for ids, own in zip(prompt_ids, images, strict=True)]
            place = partial(self.sight.placed, seen=seen)
        sharing = self._share(prompt_ids, None if group_id is None else group_id.tolist(), prompts_see)
        read_whole, whole = whole, whole or self.one_by_one  # where a row's length matters
        make: Callable[..., Layout] = padded_layout
        compute = self._verdict.padded
        if self._layout(prompt_ids, lengths if whole else [max(0, length - 1) for length in lengths], sharing)[0]:
            make, compute = partial(shared_layout, sharing=sharing), self._verdict.shared
        make = make if whole else partial(without_last, make)
        pad = getattr(self.model.config.get_text_config(), "pad_token_id", None)
        rows = Rows(prompt_ids, completion_ids.cpu()[mask], mask, read_whole, pad, images, place)
        line = rows.line(compute or self.model, make, alone=compute is None, device=self.device)
        whole_lengths = [len(ids) + length for ids, length in zip(prompt_ids, lengths, strict=True)]
        around = partial(self.around, model=line.compute, lengths=whole_lengths, traces=traces)
        return replace(line, around=around, support=of_completions(traces, lengths))

    def _states(self, line: Line) -> Tensor:
        """Returns ``[places, H]`` hidden states, or ``[places, V]`` logits if no head is known."""
        bare, autocast = self.head.reads_logits, None if line.exact else self.autocast
        routed, slices = self.balance if torch.is_grad_enabled() else None, self.slices
        asked = {} if routed is None else {"output_router_logits": True}
        precision = torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None)
        tokens = self._here(sum(layout.input_ids.numel() for layout in line.layouts))
        with evaluation(line.compute), self._adapter(), precision, self.watched(tokens), line.around():
            inputs: Callable[[Layout], dict[str, Any]]
            if (places := line.layouts[0].pictures) is None:
                model = line.compute if bare else decoder_of(line.compute)
                inputs = slices.inputs if slices is not None and line.shares else Layout.inputs
            else:
                base = base_of(line.compute)
                model = line.compute if bare else base
                features = None if places.alone is not None else features_of(base, places.seen, self.device)
                inputs = partial(pictured_inputs, base, features=features)
            try:
                passes = [model(**inputs(layout), use_cache=False, **asked) for layout in line.layouts]
            except Exception as error:
                if line.compute is self.model or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise RunError(
                    f"kernels failed in a pass after they had passed the trial: {type(error).__name__}: {error};"
                    " continue without them: rlhf train --resume with --kernels none"
                ) from error
        if routed is not None:
            routed.take(passes, line.layouts)
        states = [(output.logits if bare else output.last_hidden_state).flatten(0, 1) for output in passes]
        return torch.cat(states) if len(states) > 1 else states[0]

    def _reading(self, line: Line, read: Callable[[Line, Tensor], Tensors]) -> Callable[[Tensor], Tensors]:
        """Returns ``read`` for the states that this process has; what it returns is of all processes."""
        return partial(read, line) if self.slices is None or not line.shares else self.slices.reading(line, read)

    def _through(self, line: Line, read: Callable[[Tensor], Tensors]) -> Tensors:
        """Applies ``read`` to the hidden states, inside the backend's pass if weights are whole only there."""
        if (backend := self._backend) is None:
            return read(self._states(line))
        return backend.run_pass(lambda: backend.run_head(read, self._states(line)))

    def _hidden(self, compute: nn.Module, layout: Layout, exact: bool) -> Tensor:
        """Returns ``_states`` at the places that predict, then at the last ones, for trials."""
        at = to_device(layout, self.device)
        places = torch.cat([at.predicts, at.last])
        numbers = torch.arange(len(places), device=self.device)
        mask = torch.ones(len(places), dtype=torch.bool)
        line = Line(compute, [at], places, at.last, at.last, places, mask, numbers, places, exact=exact)
        read = self._reading(line, lambda own, states: {"states": states[own.predicts]})
        # A backend that runs passes keeps the weights in pieces, which nothing may widen.
        with in_32_bits(self.model) if exact and self._backend is None else contextlib.nullcontext():
            return self._through(line, read)["states"]

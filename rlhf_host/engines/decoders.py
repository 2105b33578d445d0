"""Prompts in, next-token logits out, one token a row and step: a fast decoder and one for any model with a cache."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_host.engines.attention import NAME, SharedPrefixCache, Unsupported, active
from rlhf_host.engines.lean import LeanModel, lean_model
from rlhf_host.engines.packing import PackedLinears
from rlhf_host.errors import UserError
from rlhf_host.models.norms import fuse_norms

log = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass: what bounds its activations."""
PACK_ROWS = 4
PACK_TOKENS = 512
"""Packing costs about as much as it saves over this many tokens."""


class Decoder(Protocol):
    """``prefill``, ``start``, then ``step`` and ``keep`` at will. Everything runs in inference mode."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits ``[G, V]`` after each prompt."""
        ...

    def start(self, groups: Tensor, longest: int) -> None:
        """Rows that continue the prompts ``groups`` ``[B]`` (sorted), by at most ``longest`` tokens."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` ``[B]``; logits ``[B, V]`` of what follows."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Only ``rows`` (sorted) go on."""
        ...


class Twin:
    """The model's modules once more, around the same parameters.

    Generation has its own evaluation mode, attention function and buffers, so the trainer's modules are never touched, whatever
    thread they run in. What a batch can use many times is made once and kept until the weights change: their bfloat16 casts
    under autocast, their packed layout on CPUs.
    """

    def __init__(self, model: nn.Module):
        self.source = model
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self.dtypes = [parameter.dtype for parameter in self.parameters]
        shared: dict[int, Any] = {id(parameter): parameter for parameter in self.parameters}
        persistent = set(model.state_dict(keep_vars=True))
        shared |= {id(buffer): buffer for name, buffer in model.named_buffers() if name in persistent}
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self.model: PreTrainedModel = copy.deepcopy(inner, shared)
        self.model.eval()
        fuse_norms(self.model)
        self.casts: list[tuple[nn.Module, Tensor]] = []
        self.packed = PackedLinears(self.model) if PackedLinears.available(self.device) else None
        self.lean: LeanModel | None = None
        self.prepared = False
        """Whether the batch runs from derived weights (packed or lean)."""
        self.stamp: tuple[int, ...] | None = None
        self.native = self.model.config._attn_implementation

    def current(self) -> bool:
        """Whether the model still holds the parameters that this twin was made around, on the same device, in the same types."""
        parameters = list(self.source.parameters())
        if parameters[0].device != self.device or [one.dtype for one in parameters] != self.dtypes:
            return False
        return len(parameters) == len(self.parameters) and all(a is b for a, b in zip(parameters, self.parameters, strict=True))

    def attention(self, name: str) -> None:
        for config in _configs(self.model):
            config._attn_implementation = name

    def refresh(self, version: int, dtype: torch.dtype | None, rows: int, tokens: int) -> None:
        """Be ready to decode a batch of ``rows`` rows and ``tokens`` tokens in all with the weights as they are now."""
        # By the batch alone: what an earlier one left behind would make a resumed run differ in the last bit.
        self.prepared = dtype is None and rows >= PACK_ROWS and tokens >= PACK_TOKENS
        self.renew(version, dtype)

    def renew(self, version: int, dtype: torch.dtype | None) -> None:
        """The weights changed, perhaps under a batch, which goes on in the way it began."""
        self._update(version, dtype)
        if dtype is None and self.packed is not None and self.lean is None:
            self.packed.use(self.prepared)

    def _update(self, version: int, dtype: torch.dtype | None) -> None:
        stamp = (version, sum(parameter._version for parameter in self.parameters))
        if stamp == self.stamp:
            return
        if dtype is not None:
            self._cast(dtype)
        elif not self.prepared:
            return
        elif self.lean is not None:
            self.lean.refresh()
        elif self.packed is not None:
            self.packed.refresh()
        self.stamp = stamp

    def _cast(self, dtype: torch.dtype) -> None:
        """Give the matrix products weights in ``dtype``, copied from the parameters."""
        if not self.casts:
            for module in self.model.modules():
                if isinstance(module, nn.Linear | Conv1D) and module.weight.dtype == torch.float32:
                    self.casts.append((module, module.weight))
                    module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)
        else:
            for module, source in self.casts:
                module.weight.copy_(source)  # type: ignore[operator]


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation") and id(config) not in seen:
            seen.add(id(config))
            yield config


class FastDecoder:
    """Shared prompts, caches written in place, own attention: for models that use transformers' attention interface."""

    def __init__(self, twin: Twin, cache_dtype: torch.dtype | None, copies: bool = True):
        self.copies = copies
        self.model, self.device, self.cache_dtype = twin.model, twin.device, cache_dtype
        # sdpa in transformers ignores softcapping, and then so does the trainer.
        self.softcaps = twin.native != "sdpa"
        twin.attention(NAME)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self.cache = SharedPrefixCache(
            [len(prompt) for prompt in prompts], self.device, self.cache_dtype, self.softcaps, self.copies
        )
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        pieces, begin = [], 0
        while begin < len(order):
            count = max(1, PREFILL_TOKENS // len(prompts[order[begin]]))
            pieces.append(self._prefill(order[begin : begin + count], prompts))
            begin += count
        return torch.cat(pieces)[torch.tensor(order, device=self.device).argsort()]

    def _prefill(self, places: list[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        width = len(prompts[places[0]])
        ids = torch.tensor([[*prompts[i], *[0] * (width - len(prompts[i]))] for i in places], device=self.device)
        positions = torch.arange(width, device=self.device).expand(len(places), -1)
        self.cache.places = torch.tensor(places, device=self.device)
        last = self.cache.prompt_lens[self.cache.places] - 1
        return self._logits_at(ids, positions, last)

    def _logits_at(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """``ids`` and ``positions`` ``[G, P]``, ``last`` ``[G]`` → ``[G, V]``."""
        with active(self.cache), _head_sees_only(self.model, last):
            return self.model(input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True).logits[:, 0]

    def start(self, groups: Tensor, longest: int) -> None:
        self.positions = self.cache.prompt_lens[groups, None]
        self.cache.start(groups, longest)

    def step(self, tokens: Tensor) -> Tensor:
        logits = self._next_logits(tokens[:, None])
        self.cache.advance()
        self.positions = self.positions + 1
        return logits

    def _next_logits(self, ids: Tensor) -> Tensor:
        """``[B, 1]`` → ``[B, V]``."""
        with active(self.cache):
            out = self.model(input_ids=ids, position_ids=self.positions, past_key_values=self.cache, use_cache=True)
        return out.logits[:, 0]

    def keep(self, rows: Tensor) -> None:
        self.positions = self.positions[rows]
        self.cache.keep(rows)


class LeanDecoder(FastDecoder):
    """The same over the operators of ``LeanModel``."""

    def __init__(self, twin: Twin, copies: bool = True):
        super().__init__(twin, None, copies)
        assert twin.lean is not None
        self.lean = twin.lean

    def start(self, groups: Tensor, longest: int) -> None:
        super().start(groups, longest)
        self.turns = self.lean.turns(self.cache.width + longest)

    def _logits_at(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        turns = self.lean.turns(ids.shape[1])[: ids.shape[1], None]
        hidden = self.lean.hidden(ids, turns, self.cache)
        return self.lean.logits(hidden[torch.arange(len(last)), last])

    def _next_logits(self, ids: Tensor) -> Tensor:
        hidden = self.lean.hidden(ids, self.turns[self.positions][:, :, None], self.cache)
        return self.lean.logits(hidden[:, 0])


@contextmanager
def _head_sees_only(model: PreTrainedModel, positions: Tensor) -> Iterator[None]:
    """The output head gets one position a row, so prompts never cost ``[G, P, V]`` logits; what follows the head stays."""
    head = model.get_output_embeddings()
    if head is None:
        raise Unsupported("a model without an output head")
    rows = torch.arange(len(positions), device=positions.device)
    handle = head.register_forward_pre_hook(lambda _, args: (args[0][rows, positions][:, None],))
    try:
        yield
    finally:
        handle.remove()


class GenericDecoder:
    """Any causal language model with a transformers cache, with its own attention. Prompts must be equally long: then nothing
    is padded, which recurrent layers and unusual masks could not bear."""

    def __init__(self, twin: Twin):
        self.model, self.device = twin.model, twin.device
        twin.attention(twin.native)
        takes = inspect.signature(twin.model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in takes else "past_key_values"
        self.last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        return self._forward(torch.tensor(prompts, device=self.device), None)

    def _forward(self, ids: Tensor, cache: Cache | None) -> Tensor:
        out = self.model(input_ids=ids, use_cache=True, **{self.cache_name: cache}, **self.last)
        self.cache = out.get(self.cache_name)
        if not isinstance(self.cache, Cache):
            raise UserError(
                f"engine transformers: {type(self.model).__name__} returns no key-value cache, so it cannot generate"
            )
        return out.logits[:, -1]

    def start(self, groups: Tensor, longest: int) -> None:
        self.keep(groups)

    def step(self, tokens: Tensor) -> Tensor:
        return self._forward(tokens[:, None], self.cache)

    def keep(self, rows: Tensor) -> None:
        assert self.cache is not None
        self.cache.reorder_cache(rows)


def make_decoder(twin: Twin, cache_dtype: torch.dtype | None, fast: bool, copies: bool) -> Decoder:
    if not fast:
        return GenericDecoder(twin)
    lean = twin.lean is not None and twin.prepared and cache_dtype is None
    return LeanDecoder(twin, copies) if lean else FastDecoder(twin, cache_dtype, copies)


def fast_path_problem(twin: Twin, cache_dtype: torch.dtype | None) -> str | None:
    """Why ``FastDecoder`` is not for this model, or ``None``: tried on a few tokens against the model's own full forward."""
    model = twin.model
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not getattr(model, "_supports_attention_backend", False):
        return "the model has its own attention code"
    if kinds - {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return f"layers of kind {', '.join(sorted(kinds))}"
    try:
        decoder = FastDecoder(twin, cache_dtype)
        ratio = _deviation(twin, decoder)
    except (Unsupported, RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as problem:
        return f"{type(problem).__name__}: {problem}"
    if decoder.cache.windows != _windows(config, len(decoder.cache.windows)):
        return "sliding windows that do not reach the attention function"
    exact = cache_dtype is None and all(parameter.dtype == torch.float32 for parameter in twin.parameters)
    return None if ratio <= (1e-4 if exact else 5e-2) else f"logits differ from the model's own by {ratio:.1e}"


def prepare_lean(twin: Twin) -> None:
    """Set ``twin.lean`` for a model that ``FastDecoder`` can decode, where the lean way gives the same logits."""
    config = twin.model.config.get_text_config()
    try:
        twin.lean = lean_model(twin.model, _windows(config, config.num_hidden_layers))
        if twin.lean is not None:
            twin.lean.refresh()
            if _deviation(twin, LeanDecoder(twin)) <= 1e-5:
                return
            log.debug("lean decoding of %s gives other logits", type(twin.model).__name__)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as problem:
        log.debug("no lean decoding of %s: %s", type(twin.model).__name__, problem)
    twin.lean = None


@torch.inference_mode()
def _deviation(twin: Twin, decoder: FastDecoder) -> float:
    """Largest relative distance of the decoder's logits from the model's own, over a few rows that share prompts."""
    vocabulary = int(twin.model.get_input_embeddings().weight.shape[0])  # type: ignore[index,arg-type]

    def text(length: int, salt: int) -> list[int]:
        return [(7 * i + salt) % vocabulary for i in range(length)]

    prompts, tails, groups = [text(3, 5), text(5, 1)], [text(3, 2), text(3, 11), text(3, 4)], [0, 0, 1]
    try:
        found = [decoder.prefill(prompts)[groups]]
        decoder.start(torch.tensor(groups, device=decoder.device), len(tails[0]))
        found += [decoder.step(torch.tensor(column, device=decoder.device)) for column in zip(*tails, strict=True)]
    finally:
        twin.attention(twin.native)
    ratio = 0.0
    for row, (group, tail) in enumerate(zip(groups, tails, strict=True)):
        whole = torch.tensor([prompts[group] + tail], device=decoder.device)
        expected = twin.model(input_ids=whole, use_cache=False).logits[0, len(prompts[group]) - 1 :].float()
        error = torch.stack([step[row] for step in found]).float() - expected
        ratio = max(ratio, float(error.norm() / expected.norm().clamp(min=1e-30)))
    return ratio


def _windows(config: Any, layers: int) -> dict[int, int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return {layer: window if kind == "sliding_attention" else None for layer, kind in enumerate(kinds)}

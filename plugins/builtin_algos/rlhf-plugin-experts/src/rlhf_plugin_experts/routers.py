"""The layers of a model that choose experts: their choice is seen, and replaced, in the model's own code.

A layer chooses by one ``topk`` of a score for every expert. Only that ``topk`` is replaced, by the scores of the experts that are
replayed. What becomes of these scores (softmax, bias, groups, a sum of 1) is the model's own, and so is its gradient.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlhf_host import UserError
from rlhf_host.internals import blocks_of, decoder_of
from rlhf_plugin_experts.passes import Pass

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
"""Names that configurations use for the number of experts, and for that of each token."""
_ROUTES = re.compile("expert|router|topkgate", re.IGNORECASE)
_TOPK = (torch.topk, torch.Tensor.topk)


class Routers:
    """The layers of one module that choose experts. Its hooks stay: layers that the backward pass computes again need them.

    Raises:
        UserError: it has none, or its configuration does not say how many experts there are.
    """

    def __init__(self, model: Any):
        config = model.config.get_text_config()
        self.model = type(model).__name__
        self.experts, self.per_token = (
            next((int(value) for name in names if isinstance(value := getattr(config, name, None), int) and value), 0)
            for names in (EXPERTS, CHOSEN)
        )
        blocks = blocks_of(model)
        parts = {number: routing_parts(block) for number, block in enumerate(blocks.values())}
        self.count, self.layers = len(blocks), [number for number, own in parts.items() if own]
        if not self.layers or not self.experts or not self.per_token:
            raise UserError(f"{self.model} has no layers that choose experts, as far as its configuration tells")
        self._open: Pass | None = None
        self._trained: Pass | None = None
        """The last pass with gradients, whose layers the backward pass may compute again."""
        self._entered: list[_Choice | None] = []
        self._proved: set[int] = set()
        """Layers whose choice was given to a part of them as it is: so it is one of experts, and nothing else."""
        self._looking: list[Any] = []
        """Hooks that look for that, until the end of the first pass."""
        decoder_of(model).register_forward_pre_hook(self._begin, with_kwargs=True)
        for number, own in parts.items():
            for part in own:
                part.register_forward_pre_hook(partial(self._enter, number))
                part.register_forward_hook(self._leave, always_call=True)
                for inner in part.modules():
                    self._looking.append(inner.register_forward_pre_hook(partial(self._look, number), with_kwargs=True))

    @contextmanager
    def during(
        self, lengths: Sequence[int], traces: Sequence[Mapping[str, Any]] | None = None, *, counts: bool = False
    ) -> Iterator[Pass]:
        """Sees one pass, which runs inside. Several may surround the same pass.

        Args:
            traces: of rows whose experts are replayed.
            counts: tokens of each expert are counted.

        Raises:
            UserError: a layer did not choose exactly once, so that it is unknown what was replaced.
            RunError: the experts are not of this model.
        """
        outer = self._open
        own = outer or Pass(lengths)
        if traces is not None:
            own.traces = traces
            own.refuse_misfits(self.model, self.count, self.experts, self.per_token)
        own.counts = own.counts or counts
        self._open = own
        if torch.is_grad_enabled():
            self._trained = own
        try:
            yield own
        finally:
            self._open = outer
        if outer is None:
            self._refuse_odd(own)

    def examine(self, model: Any) -> None:
        """Raises ``UserError`` as ``during`` does, for a model without weights (on ``meta``), if it runs that way."""
        own = self._open = Pass([4])
        try:
            with torch.no_grad():
                decoder_of(model)(input_ids=torch.zeros(1, 4, dtype=torch.int64, device="meta"), use_cache=False)
        except Exception:  # some experts need values; the first pass with weights will tell
            return
        finally:
            self._open = None
        self._refuse_odd(own)

    def _refuse_odd(self, own: Pass) -> None:
        odd = [layer for layer in self.layers if own.chosen[layer] != own.calls]
        if odd or (odd := [layer for layer in self.layers if layer not in self._proved]):
            raise UserError(
                f"{self.model} does not choose experts by one topk of all their scores, in layer {odd[0]}, so they can be neither"
                " seen nor replayed (with kernels: try --kernels none)"
            )
        while self._looking:
            self._looking.pop().remove()

    def _look(self, layer: int, part: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        if self._open is not None and (chosen := self._open.latest) is not None:
            given = [each for each in (*inputs, *named.values()) if isinstance(each, Tensor) and each.shape == chosen.shape]
            if any(each is chosen or (not chosen.is_meta and each.data_ptr() == chosen.data_ptr()) for each in given):
                self._proved.add(layer)

    def _begin(self, decoder: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        if self._open is not None:
            self._open.begin({"input_ids": inputs[0], **named} if inputs else named)

    def _enter(self, layer: int, part: nn.Module, inputs: Any) -> None:
        again = torch._C._current_graph_task_id() != -1  # in the backward pass
        own = self._trained if again else self._open
        if again and own is not None and own.calls > 1:
            raise UserError(
                f"{self.model} computes rows one by one, and layers again in the backward pass, where the experts of a row are"
                " not known: set actor.gradient_checkpointing to false"
            )
        choice = None if own is None else _Choice(self, own, layer, again)
        if choice is not None:
            choice.__enter__()
        self._entered.append(choice)

    def _leave(self, part: nn.Module, inputs: Any, output: Any) -> None:
        if self._entered and (choice := self._entered.pop()) is not None:
            choice.__exit__(None, None, None)


class _Choice(TorchFunctionMode):
    """Watches the ``topk`` of one layer."""

    def __init__(self, routers: Routers, own: Pass, layer: int, again: bool):
        super().__init__()
        self._routers, self._own, self._layer, self._again = routers, own, layer, again

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        if function not in _TOPK:
            return answer
        scores: Tensor = args[0] if args else kwargs["input"]
        routers, tokens = self._routers, len(self._own.real)
        if scores.shape != (tokens, routers.experts) or answer.indices.shape[-1] != routers.per_token:
            return answer  # of groups of experts, say
        return self._own.choose(self._layer, scores, answer, again=self._again)


def routing_parts(block: nn.Module) -> list[nn.Module]:
    """Returns the parts of a layer in which experts are chosen: without its attention."""

    def routes(module: nn.Module) -> bool:
        names = [type(module).__name__, *(name for name, _ in module.named_children())]
        return any(_ROUTES.search(name) for name in names)

    return [part for part in block.children() if any(routes(module) for module in part.modules())]


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Routers] = weakref.WeakKeyDictionary()


def refuse_other(config: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for a run whose model has no experts that can be seen, as far as its configuration tells."""
    from rlhf_host.internals import meta_model
    from rlhf_host.settings import RoleConfig

    role = RoleConfig.model_validate(config["roles"]["actor"])
    if (outline := meta_model(role, head="lm", trainable=True, weights=False)) is not None:
        Routers(outline).examine(outline)


def routers_of(model: nn.Module) -> Routers:
    """Returns the routers of a module, which are found once. Raises as ``Routers``."""
    if model not in _KNOWN:
        _KNOWN[model] = Routers(model)
    return _KNOWN[model]

"""The choice of recomputed layers and kept logits in a run: by memory before the first update, corrected before the second."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf_host import UserError
from rlhf_host.commands import first_line
from rlhf_host.internals import (
    Role,
    chunk_bytes,
    container_memory,
    context_length,
    forget_peak,
    kept_bytes,
    machine_memory,
    meta_model,
    recorded,
)
from rlhf_host.protocols import CountsTraining, Ranks, TrainingMemory
from rlhf_host.settings import TrainConfig
from rlhf_plan.footprint import footprint
from rlhf_plan.items import GB
from rlhf_plan.pass_memory import USABLE, PassMemory, budget_rows
from rlhf_plan.phases import CountedModel, plain

log = logging.getLogger(__name__)

NOTHING = TrainingMemory(weights=0, gradients=0, optimizer=0)
USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
"""Files with the memory that a container uses, in the two versions of control groups."""


def memory_plan(roles: Mapping[str, Role], train: TrainConfig, ranks: Ranks) -> Plan:
    """The entry point in the group ``rlhf.memory_plans``."""
    return Plan([Passing.of(role, train, ranks) for role in roles.values() if role.backend is not None], ranks)


@dataclass(slots=True)
class Plan:
    """The trained roles of one process."""

    roles: list[Passing]
    ranks: Ranks

    def __call__(self, role: Role) -> AbstractContextManager[None]:
        """Returns what one update of the role runs in."""
        own = next(each for each in self.roles if each.role is role)
        if own.choices > 1:
            return nullcontext()
        device = role.passes.device
        free = free_memory(device)
        if free is not None:
            free -= sum(each.coming for each in self.roles if not each.choices)
            free /= self.ranks.processes if device.type == "cpu" else 1  # which may be on this machine
        return own.update(free, self.ranks)


@dataclass(slots=True, kw_only=True)
class Passing:
    """What one role's passes keep for the backward pass."""

    role: Role
    budget: int
    """Tokens of a micro-batch."""
    longest: int
    """Tokens of the longest row."""
    layers: bool
    """The number of recomputed layers is chosen."""
    logits: bool
    """Whether logits are kept is chosen."""
    needed: TrainingMemory = NOTHING
    coming: float = 0.0
    """Bytes between steps that are there only after the first one: the optimizer's."""
    memory: PassMemory | None = None
    """None: unknown, or not asked for."""
    head: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``chunk_bytes`` beside the tokens; empty: a scalar head."""
    scale: float = 1.0
    """Bytes that layers kept in the first update, over those that were computed."""
    taken: float | None = None
    """Bytes of a pass over all tokens of the budget, by the peak of the first update on a GPU."""
    choices: int = 0
    """Number of choices so far."""

    @classmethod
    def of(cls, role: Role, train: TrainConfig, ranks: Ranks) -> Passing:
        passes, settings, plugin = role.passes, role.settings, role.plugin
        assert settings is not None
        on_gpu = passes.device.type == "cuda"
        own = cls(
            role=role,
            budget=train.max_tokens_per_microbatch,
            longest=context_length(passes.model),
            layers=settings.gradient_checkpointing == "auto",
            logits=train.keep_logits == "auto" and on_gpu and not passes.head.reads_logits,
        )
        if not isinstance(plugin, CountsTraining):
            return own
        try:
            lone = plain(settings)
            outline = meta_model(lone, head="scalar" if passes.head.scalar else "lm", trainable=True)
            model = CountedModel.of(lone, outline)
            masters = {weight.master for weight in passes.model.parameters() if hasattr(weight, "master")}
            rounded = bool(masters)
            own.needed = plugin.memory(model.counted(ranks.processes, "cuda" if on_gpu else "cpu", rounded=rounded))
            autocast = passes.autocast is not None
            narrow = autocast or own.needed.width == 2
            if own.layers:
                own.memory = footprint(outline, width=own.needed.width, autocast=autocast).passed
        except UserError as error:
            log.warning("%s: its memory is not known before the first step: %s", role.name, first_line(error))
            return own
        held = {*passes.model.parameters(), *passes.model.buffers(), *masters}
        there = sum(getattr(weight, "_local_tensor", weight).nbytes for weight in held)
        own.coming = max(0.0, own.needed.weights + own.needed.optimizer + own.needed.between - there)
        if not passes.head.reads_logits:
            own.head = {
                "vocabulary": model.vocabulary,
                "hidden": model.hidden,
                "narrow": narrow,
                "cast": autocast,
                "trained": model.head_trained,
                "device": passes.device.type,
            }
        return own

    @contextmanager
    def update(self, free: float | None, ranks: Ranks) -> Iterator[None]:
        """Chooses for an update, which runs inside, and all later ones; measures it if it is the first. Collective.

        Args:
            free: bytes of the device that passes may take on top of what is there between steps; None: unknown.
        """
        self._choose(free, ranks)
        if self.choices > 1:
            yield
            return
        passes = self.role.passes
        on_gpu = passes.device.type == "cuda"
        before = forget_peak(passes.device) if on_gpu else 0
        tokens, kept = [0], [0.0]
        passes.watched = partial(self._watch, tokens=tokens, kept=kept)
        try:
            yield
        finally:
            passes.watched = nullcontext
        if not (most := max(tokens)):
            return
        if on_gpu:
            taken = torch.cuda.max_memory_allocated(passes.device) - before
            self.taken = taken * max(1.0, self.budget / most)
            kept.append(taken - self._step - self._logits(most, passes.keep_logits))
        if self.memory is not None and max(kept):
            length = min(most, self.longest)
            computed = self.memory.copies + self.memory.kept(most / length, length, passes.recomputed[0])
            self.scale = max(kept) / computed

    def _choose(self, free: float | None, ranks: Ranks) -> None:
        passes, (before, depth) = self.role.passes, self.role.passes.recomputed
        count = before
        if self.layers:
            count = next((fewer for fewer in range(depth) if self._fits(free, fewer, keep=False)), depth)
        keep = bool(self.head) and self._fits(free, count, keep=True)
        counts, keeps = zip(*ranks.gather((count, keep)), strict=True)
        chosen, changed = [], not self.choices
        if self.layers:
            passes.recompute(count := max(counts))
            chosen.append(f"recomputes {count} of {depth} layers in the backward pass")
            changed |= count != before
        if self.logits:
            changed |= passes.keep_logits != all(keeps)
            passes.keep_logits = all(keeps)
            chosen.append("keeps logits for it" if all(keeps) else "computes logits twice")
        self.choices += 1
        if chosen and changed and ranks.process == 0:
            why, needed = "what memory it needs is not known yet", self._needed(count, passes.keep_logits)
            if free is not None and needed is not None:
                why = f"a pass of {self.budget:,} tokens needs {needed / GB:.3g} GB of the {free / GB:.3g} GB that are free"
            log.warning("%s %s: %s", self.role.name, " and ".join(chosen), why)

    def _fits(self, free: float | None, count: int, *, keep: bool) -> bool:
        needed = self._needed(count, keep)
        return free is not None and needed is not None and needed <= free

    @property
    def _step(self) -> float:
        """Bytes of gradients and gathered weights that are there in a step alone."""
        return self.needed.gradients - self.needed.between + self.needed.gathered

    def _needed(self, count: int, keep: bool) -> float | None:
        """Returns the bytes of a pass, by the number of recomputed layers, and with or without kept logits; None: unknown."""
        rows, length = budget_rows(self.budget, min(self.budget, self.longest))
        if self.memory is not None:
            layers = self.memory.copies + self.memory.kept(rows, length, count)
            return self._step + self.scale * layers + self._logits(rows * length, keep)
        if self.taken is None or self.layers:
            return None
        return self.taken + (self._logits(rows * length, keep) - self._logits(rows * length, False))

    def _logits(self, tokens: int, keep: bool) -> float:
        if not self.head:
            return 0.0
        capped = getattr(self.role.passes.model.config.get_text_config(), "final_logit_softcapping", None) is not None
        kept = kept_bytes(tokens, self.head["vocabulary"], narrow=self.head["narrow"], capped=capped) if keep else 0
        return kept + chunk_bytes(tokens=tokens, **self.head)

    @contextmanager
    def _watch(self, own: int, *, tokens: list[int], kept: list[float]) -> Iterator[None]:
        """Notes the tokens of a pass with gradients, and on a CPU the bytes that its layers keep, where these can be told from
        gathered weights.
        """
        if not torch.is_grad_enabled():
            yield
            return
        tokens.append(own)
        passes = self.role.passes
        counts = passes.device.type != "cuda" and self.memory is not None and not self.role.traits.sharded
        with recorded(passes.compute) if counts else nullcontext({}) as bytes_of:
            yield
        kept.append(sum(bytes_of.values()))


def free_memory(device: torch.device) -> float | None:
    """Returns the bytes that this process may still take of a device, of its ``USABLE`` share; None: unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused - (1 - USABLE) * total
    sizes, allowed = machine_memory(), container_memory()
    if device.type != "cpu" or "MemAvailable" not in sizes:
        return None
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    if allowed is not None and allowed < total:
        free, total = min(free, allowed - _used()), allowed
    return free - (1 - USABLE) * total


def _used() -> int:
    for file in USED:
        try:
            return int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return 0

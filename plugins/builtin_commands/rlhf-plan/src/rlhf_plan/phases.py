"""The bytes on each device in each phase of a run, from its settings and models' ``config.json`` alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_host import RoleNeed, UserError
from rlhf_host.commands import first_line
from rlhf_host.internals import (
    blocks_of,
    chunk_bytes,
    context_length,
    find_model,
    in_backend,
    kept_bytes,
    meta_model,
    role_flag,
    role_views,
    weights_of,
)
from rlhf_host.protocols import (
    CountsServing,
    CountsTraining,
    DeviceGroup,
    DeviceKind,
    Grouping,
    RuntimeStart,
    ServedModel,
    ServingMemory,
    TrainedModel,
    TrainingMemory,
)
from rlhf_host.settings import RoleConfig
from rlhf_plan.footprint import Footprint, footprint
from rlhf_plan.items import GB, PARTS
from rlhf_plan.pass_memory import USABLE, budget_rows

START, LOAD, TRAIN, SYNC, SAMPLE = "engines start", "models are loaded", "training", "weights are sent", "sampling"
BESIDE = 0.05
"""Share of a device that others may take of it beside an engine that takes a share of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a role's passes keep for the backward pass."""

    layers: int
    recomputed: int
    auto: bool
    """Memory decides the number of recomputed layers."""
    kept_logits: float = 0.0
    """Bytes of logits that are kept, which is only done where they fit and not in the sum; 0: they are computed twice."""

    memory_known: bool = True

    def __str__(self) -> str:
        unknown = "" if self.memory_known else ", because the memory of the devices is not known (--memory-gb)"
        recomputes = [f"recomputes {self.recomputed} of {self.layers} layers{unknown}"] if self.auto else []
        keeps = [f"keeps its logits, for which {self.kept_logits / GB:.1f} GB are free"] if self.kept_logits else []
        return " and ".join(recomputes + keeps)


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes on each device of a group, in one phase."""

    group: DeviceGroup
    name: str
    parts: Mapping[str, float]
    usable: float
    """Share of a device that it may take."""
    choices: Mapping[str, Choice] = field(default_factory=dict)
    """Role → what memory decides of its passes."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Demands of a run on its engines, and the way of weights to them."""

    answers: int
    """Answers that are sampled at once, by all engines."""
    longest: int
    """Tokens of the longest, with its prompt where a setting limits that."""
    row: int | None
    """Tokens of the longest row that is trained on; None: no setting limits it."""
    answer: int
    """Tokens that an answer may have, which is a row of its own where it is longer than a micro-batch; 0: nothing is sampled."""
    bucket_bytes: int
    """Weights that are on their way to engines at once, at each end."""
    remote: bool
    """Roles and engines are in processes of their own."""


@dataclass(slots=True, kw_only=True)
class Planner:
    """Makes plans for settings that differ little: what was measured of a model is kept."""

    sampling: Sampling
    device: DeviceKind
    device_bytes: float | None = None
    overrides: Mapping[str, float] = field(default_factory=dict)
    """Part → its bytes, wherever there are any, in place of what is computed."""
    _measured: dict[Any, Any] = field(default_factory=dict)
    _outlines: dict[Any, Any] = field(default_factory=dict)

    def plan(self, start: RuntimeStart, runtime: Any) -> list[Phase]:
        """Returns the phases on each group of devices.

        Raises:
            UserError: a model that is no directory with a ``config.json``, or cannot be made without its weights; a plugin that
                does not tell what it needs.
        """
        if not isinstance(runtime, Grouping):
            raise UserError("the runtime does not tell which roles share devices (groups): no memory can be planned")
        return [phase for group in runtime.groups(start) for phase in self._phases(start, group)]

    def _phases(self, start: RuntimeStart, group: DeviceGroup) -> Iterator[Phase]:
        device = group.device or self.device
        views = role_views([(need, start.roles[need.name]) for need in start.needs.roles])
        needs = [need for need in start.needs.roles if need.name in group.roles and need.name not in views]
        roles = [self._role(start, need, group, device) for need in needs]
        served, (in_place, sleeps) = self._served(start, group), self._ways(start)
        samples = bool(served)
        engine = self._engine(start, group, device)  # after the roles, whose passes are measured then
        turns = sleeps and bool(roles) and device != "cpu"
        serving = {"engine": engine.weights, "cache": engine.cache} if samples else {}
        beside = {} if turns or in_place else serving  # in place there is no cache before answers
        held = _sum(*(role.held for role in roles))
        sync = {} if in_place else {"sync": 2.0 * self.sampling.bucket_bytes}
        if samples and not in_place:
            yield self._phase(group, START, engine.share, serving)
        if roles:
            yield self._phase(group, LOAD, engine.share, beside, {"weights": sum(role.loaded for role in roles)})
        if trained := [role for role in roles if role.trained]:
            size = self.device_bytes
            free = None if size is None else USABLE * size - self._phase(group, TRAIN, engine.share, beside, held).total
            chosen = {role.name: role.chosen(free) for role in trained}
            busy = max((parts for parts, _ in chosen.values()), key=lambda parts: sum(parts.values()))
            phase = self._phase(group, TRAIN, engine.share, beside, held, busy)
            choices = {name: choice for name, (_, choice) in chosen.items() if str(choice)}
            yield replace(phase, choices=choices)
        synced = any(need.name == "actor" for models in served for need in models) or "actor" in group.roles
        if start.engine is not None and sync and synced:
            woken = {"engine": engine.weights} if turns else beside
            yield self._phase(group, SYNC, engine.share, held, woken if samples else {}, sync)
        if samples:
            stays = _sum(*(role.stays for role in roles)) if turns else held
            copies = next((role.copies for role in roles if role.name == "actor"), 0.0)
            more = {"gathered": copies} if in_place and engine.autocast else {}
            yield self._phase(group, SAMPLE, engine.share, serving, stays, more)

    def _phase(self, group: DeviceGroup, name: str, share: float, *parts: Mapping[str, float]) -> Phase:
        """``share``: of an engine whose cache is there."""
        found = _sum(*parts)
        amounts = {part: self.overrides.get(part, found[part]) for part in PARTS if found.get(part)}
        return Phase(group, name, amounts, max(USABLE, share + BESIDE) if amounts.get("cache") else USABLE)

    def _role(self, start: RuntimeStart, need: RoleNeed, group: DeviceGroup, device: DeviceKind) -> _Role:
        model, settings = self._model(start, need), start.roles[need.name]
        backend: Any = start.backend.build()
        traits = backend.traits
        in_16_bits = _in_16_bits(start, device)
        if not in_backend(need, settings, traits, group.devices):
            # As Role.of has it: what engines sample from is left as it is, and what moves has masters.
            rounds = in_16_bits and not need.generates and need.name != "actor"
            whole, own = model.counts.bytes, model.frozen_rounded + (4 * model.counts.frozen if need.moves else 0)
            parts = {"weights": own if rounds else whole}
            return _Role(need.name, max(whole, parts["weights"]), parts, parts)
        if not isinstance(backend, CountsTraining):
            raise UserError(
                f"backend {start.backend.name} does not tell what memory it needs (memory): no memory can be planned"
            )
        counted = model.counted(group.devices, device, rounded=in_16_bits and traits.masters and need.trainable)
        needed, loaded = backend.memory(counted), model.counts.bytes
        if counted.rounded:
            loaded = max(loaded, needed.weights + 4 * counted.trained)
        if traits.loads_shards and not settings.quantize:
            # Kernels are tried on a model of few layers; it is gone when the weights come, block by block.
            width = counted.bytes / counted.numbers
            loaded = width * counted.block + max(width * counted.outside, needed.weights)
        if not need.trainable:
            parts = {"weights": needed.weights}
            return _Role(need.name, loaded, parts, parts)
        narrow = needed.width == 2
        autocast = not narrow and in_16_bits
        budget = start.train.max_tokens_per_microbatch
        longest = min(self.sampling.row or max(budget, self.sampling.answer), model.context)
        rows, length = budget_rows(budget, longest)
        passed = self._footprint(start, need, needed.width, autocast).passed
        depth, asked = len(passed.layers), settings.gradient_checkpointing
        flag = f"--{role_flag(need.name)}.gradient-checkpointing {str(asked).lower()}"
        if asked and not model.recomputes:
            raise UserError(f"{flag}: {model.kind} does not support gradient checkpointing: set it to false")
        if asked == "auto" and not model.recomputed_alone:
            raise UserError(f"{flag}: {model.kind} has no layers that can be recomputed one by one; true recomputes all")
        if isinstance(asked, int) and asked is not True and asked > model.recomputed_alone:
            layers = f"{model.recomputed_alone} layers that can be recomputed one by one"
            raise UserError(f"{flag}: {model.kind} has {layers}; true recomputes all")
        counts = range(depth + 1) if asked == "auto" else [depth if asked is True else int(asked)]
        logits = 0.0
        if need.head == "lm":
            logits = chunk_bytes(
                tokens=rows * length,
                vocabulary=model.vocabulary,
                hidden=model.hidden,
                narrow=narrow or autocast,
                cast=autocast,
                trained=model.head_trained,
                device=device,
            )
        kept = kept_bytes(rows * length, model.vocabulary, narrow=narrow or autocast, capped=model.capped)
        if need.head != "lm":
            kept = 0
        elif start.train.keep_logits == "on":
            logits, kept = logits + kept, 0
        elif start.train.keep_logits == "off" or device != "cuda":
            kept = 0
        return _Role.of(
            need.name,
            loaded,
            needed,
            {count: passed.kept(rows, length, count) for count in counts},
            passed.copies,
            logits,
            Choice(layers=depth, recomputed=depth, auto=asked == "auto"),
            kept,
        )

    def _engine(self, start: RuntimeStart, group: DeviceGroup, device: DeviceKind) -> ServingMemory:
        """Returns the memory of the engines on these devices; none, if there is no engine."""
        engines = [[self._serving(start, need, group, device) for need in models] for models in self._served(start, group)]
        caches = [sum(each.cache for each in own) for own in engines]
        in_place = self._ways(start)[0]  # in one process one decodes after the other
        every = [each for own in engines for each in own]
        return ServingMemory(
            weights=sum(each.weights for each in every),
            cache=max(caches, default=0.0) if in_place else sum(caches),
            share=sum(each.share for each in every),
            autocast=any(each.autocast for each in every),
        )

    @staticmethod
    def _served(start: RuntimeStart, group: DeviceGroup) -> list[list[RoleNeed]]:
        """Returns the models of each kind of engine on these devices: the actor's, and those of frozen roles that generate, in a
        mixture both.
        """
        if start.engine is None:
            return []
        actor = next(need for need in start.needs.roles if need.name == "actor")
        frozen = [need for need in start.needs.roles if need.generates and need.name in group.roles]
        own = [[actor]] if group.engines else []
        return own + [[need] if need.mixes is None else [need, actor] for need in frozen]

    def _serving(self, start: RuntimeStart, need: RoleNeed, group: DeviceGroup, device: DeviceKind) -> ServingMemory:
        assert start.engine is not None
        plugin = start.engine.build()
        if not isinstance(plugin, CountsServing):
            raise UserError(f"engine {start.engine.name} does not tell what memory it needs (memory): no memory can be planned")
        model = self._model(start, need)
        return plugin.memory(
            ServedModel(
                numbers=model.counts.numbers,
                cached=self._footprint(start, need).cached,
                rows=math.ceil(self.sampling.answers / (group.engines or group.devices // plugin.traits.devices)),
                tokens=min(self.sampling.longest, model.context),
                in_place=self._ways(start)[0],
                rounded=_in_16_bits(start, device) and need.trainable and start.backend.build().traits.masters,
                device=device,
                device_bytes=self.device_bytes,
                linear=model.linear,
            )
        )

    def _ways(self, start: RuntimeStart) -> tuple[bool, bool]:
        """Returns True if the engine samples from the trainer's own module, and True if it sleeps while the trainer works."""
        if start.engine is None:
            return False, False
        traits = start.engine.build().traits
        return traits.takes == "module" and not self.sampling.remote, traits.sleeps and self.sampling.remote

    def _outline(self, need: RoleNeed, role: RoleConfig) -> Any:
        if (outlined := self._outlines.pop((need.name, role.model_dump_json()), None)) is not None:
            return outlined
        if find_model(role.model, weights=False).gguf:
            raise UserError(
                f"{role.model} is a GGUF file, and a plan of memory is made from a config.json: give the directory of the model"
                " that it was made from"
            )
        model = meta_model(role, head=need.head, trainable=need.trainable, weights=False)
        if model is None:
            raise UserError(
                f"the model {role.model!r} cannot be made without its weights, so no memory can be planned for it{_unread(role)}"
            )
        return model

    def _model(self, start: RuntimeStart, need: RoleNeed) -> CountedModel:
        role = start.roles[need.name]
        key = need.name, plain(role).model_dump_json()
        if key not in self._measured:
            outlined = self._outline(need, plain(role))
            self._measured[key] = CountedModel.of(role, outlined)
            self._outlines[key] = outlined
        found: CountedModel = self._measured[key]
        return found

    def _footprint(
        self, start: RuntimeStart, need: RoleNeed, width: int | None = None, autocast: bool | None = None
    ) -> Footprint:
        """``autocast``: None: any that was measured will do."""
        lone = plain(start.roles[need.name])
        measured: dict[Any, Footprint] = self._measured.setdefault(("footprints", need.name, lone.model_dump_json()), {})
        key = next(iter(measured), (width, False)) if autocast is None else (width, autocast)
        if key not in measured:
            measured[key] = footprint(self._outline(need, lone), width=key[0], autocast=key[1])
        return measured[key]


@dataclass(frozen=True, slots=True)
class _Role:
    """Bytes of a role on each device."""

    name: str
    loaded: float
    held: Mapping[str, float]
    """Between steps."""
    stays: Mapping[str, float]
    """While engines sample, where these take turns with the trainer."""
    training: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Number of recomputed layers → bytes in a step, beside ``held``; the fewest layers first."""
    copies: float = 0.0
    choice: Choice | None = None
    logits: float = 0.0
    """Bytes of logits that are kept if there is room."""

    @classmethod
    def of(
        cls,
        name: str,
        loaded: float,
        needed: TrainingMemory,
        kept: Mapping[int, float],
        copies: float,
        chunk: float,
        choice: Choice,
        logits: float,
    ) -> _Role:
        held = {"weights": needed.weights, "gradients": needed.between, "optimizer": needed.optimizer}
        training = {
            count: {
                "gradients": needed.gradients - needed.between,
                "gathered": max(needed.gathered + copies, needed.ending - layers - chunk),
                "activations": layers,
                "logits": chunk,
            }
            for count, layers in kept.items()
        }
        stays = held if needed.stays is None else {"weights": needed.stays}
        return cls(name, loaded, held, stays, training, copies, choice, logits)

    @property
    def trained(self) -> bool:
        return bool(self.training)

    def chosen(self, free: float | None) -> tuple[Mapping[str, float], Choice]:
        """Returns the bytes with the fewest recomputed layers that fit, or with all, and what passes keep then."""
        assert self.choice is not None
        needed = {count: sum(parts.values()) for count, parts in self.training.items()}
        fitting = [count for count, bytes_ in needed.items() if free is not None and bytes_ <= free]
        count = min(fitting, default=max(needed))
        fits = free is not None and needed[count] + self.logits <= free
        return self.training[count], replace(
            self.choice, recomputed=count, kept_logits=self.logits if fits else 0.0, memory_known=free is not None
        )


@dataclass(frozen=True, slots=True)
class CountedModel:
    """Counts of a role's model."""

    counts: TrainedModel
    """Of one process."""
    frozen_rounded: float
    """Bytes of what is frozen, with at most 2 for each number."""
    vocabulary: int
    hidden: int
    context: int
    head_trained: bool
    capped: bool
    """Logits go through a softcap."""
    kind: str
    """The class of transformers."""
    recomputes: bool
    """It supports gradient checkpointing."""
    recomputed_alone: int
    """Number of layers that can be recomputed one by one."""
    linear: int
    """Numbers of linear layers in blocks."""

    @classmethod
    def of(cls, role: Any, model: Any) -> CountedModel:
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "context": context_length(model)}
        for name, size in sizes.items():
            if not 1 <= size < 10**9:
                raise UserError(f"the config.json of {role.model!r} has an impossible {name}: {size}")
        return cls(
            _counts(role, model),
            sum(weight.numel() * min(2, width) for weight, width in weights_of(role, model) if not weight.requires_grad),
            config.vocab_size,
            config.hidden_size,
            context_length(model),
            head is not None and head.weight.requires_grad,
            getattr(config, "final_logit_softcapping", None) is not None,
            type(model).__name__,
            model.supports_gradient_checkpointing,
            sum(isinstance(layer, GradientCheckpointingLayer) for layer in blocks_of(model).values()),
            sum(
                part.in_features * part.out_features
                for block in blocks_of(model).values()
                for part in block.modules()
                if isinstance(part, nn.Linear)
            ),
        )

    def counted(self, processes: int, device: DeviceKind, *, rounded: bool) -> TrainedModel:
        """Returns what a backend is told."""
        frozen = self.frozen_rounded if rounded else self.counts.frozen_bytes
        return replace(self.counts, processes=processes, device=device, frozen_bytes=frozen, rounded=rounded)


def _in_16_bits(start: RuntimeStart, device: DeviceKind) -> bool:
    return start.train.autocast == "bfloat16" or (start.train.autocast == "auto" and device == "cuda")


def _counts(role: Any, model: Any) -> TrainedModel:
    def numbers(part: Any) -> tuple[int, int]:
        weights = list(part.parameters())
        return sum(each.numel() for each in weights), sum(each.numel() for each in weights if each.requires_grad)

    whole, trained = numbers(model)
    frozen = [(weight.numel(), width) for weight, width in weights_of(role, model) if not weight.requires_grad]
    parts = list(blocks_of(model).values())
    blocks = [numbers(block) for block in parts]
    block, trained_block = max(blocks, default=(whole, trained))
    largest = max(parts, key=numbers, default=model)
    experts = [numbers(part) for part in largest.modules() if hasattr(part, "_is_expert_parallel")]
    count = sum(count for count, _ in frozen)
    return TrainedModel(
        trained=trained,
        frozen=count,
        frozen_bytes=sum(count * width for count, width in frozen),
        block=block,
        outside=trained + count - sum(count for count, _ in blocks) if blocks else 0,
        trained_block=trained_block,
        trained_outside=trained - sum(count for _, count in blocks) if blocks else 0,
        processes=1,
        device="cuda",
        experts=sum(count for count, _ in experts),
        trained_experts=sum(count for _, count in experts),
    )


def plain(role: RoleConfig) -> RoleConfig:
    """Returns the role without recomputed blocks, which change no count, and with an attention that runs without data."""
    flex = role.attn_implementation == "flex_attention"
    kernel = "sdpa" if flex else role.attn_implementation
    return role.model_copy(update={"gradient_checkpointing": False, "attn_implementation": kernel})


def _unread(role: RoleConfig) -> str:
    """Returns what is wrong with its ``config.json``, if that cannot be read."""
    try:
        AutoConfig.from_pretrained(find_model(role.model, weights=False).path, trust_remote_code=role.trust_remote_code)
    except Exception as error:
        return f": {first_line(error)}"
    return ""


def _sum(*parts: Mapping[str, float]) -> dict[str, float]:
    total = defaultdict[str, float](float)
    for each in parts:
        for name, amount in each.items():
            total[name] += amount
    return total

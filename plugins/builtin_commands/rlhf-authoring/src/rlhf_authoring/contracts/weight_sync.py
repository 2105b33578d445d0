"""Checks of weight syncs: every engine has the trainer's weights and their version, and is let go at the end."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_authoring.contracts.session import LoopThread
from rlhf_authoring.contracts.subject import Broken, Subject, Unusable, check, expect
from rlhf_authoring.contracts.traces import leaves_nothing
from rlhf_authoring.engines import ModuleEngine, module_source
from rlhf_host import RunError, UserError
from rlhf_host.protocols import SyncTarget, WeightSync, WeightSyncStart, WeightSyncTraits


def _model() -> nn.Module:
    """A model with parameters and a buffer."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    model.register_buffer("scale", torch.ones(3))
    return model


@dataclass(slots=True)
class _Synced:
    """A fresh weight sync, and two engines that share the trainer's module or hold copies of it."""

    weight_sync: WeightSync
    loop: LoopThread
    model: nn.Module
    shared: bool
    engines: Sequence[ModuleEngine] = ()

    def connect(self) -> None:
        """To new engines."""
        self.engines = [ModuleEngine(self.model if self.shared else copy.deepcopy(self.model)) for _ in range(2)]
        targets = [SyncTarget(f"engine-{n}", engine, in_place=self.shared) for n, engine in enumerate(self.engines)]
        self.loop.wait(self.weight_sync.connect(targets), "connect")

    def send(self, version: int) -> None:
        self.loop.wait(self.weight_sync.send(module_source(self.model), version), "send")

    def close(self) -> None:
        self.loop.wait(self.weight_sync.close(), "close")


@contextlib.contextmanager
def _started(subject: Subject, *, shared: bool) -> Iterator[_Synced]:
    loop = LoopThread(subject.deadline_s)
    try:
        weight_sync = subject.build().start(WeightSyncStart(run_dir=None))
        synced = _Synced(weight_sync, loop, _model(), shared)
        yield synced
        synced.close()
    finally:
        loop.close()


def _sorts(subject: Subject) -> tuple[bool, ...]:
    """Returns the sorts of engines that its traits are for: those that share the trainer's module (true), and others (false)."""
    return {None: (True, False), True: (True,), False: (False,)}[subject.traits(WeightSyncTraits).in_place]


def _served(subject: Subject) -> Iterator[_Synced]:
    """One instance per sort of engine that it serves, which have version 1. Raises ``Unusable`` when it serves none here."""
    refusals = []
    for shared in _sorts(subject):
        with _started(subject, shared=shared) as synced:
            try:
                synced.connect()
                synced.send(1)
            except (RunError, UserError) as error:
                refusals.append(str(error))
                continue
            yield synced
    if len(refusals) == len(_sorts(subject)):
        raise Unusable("served", f"it serves no engine in this process: {refusals[-1]}")


@check()
def methods_are_coroutines(subject: Subject) -> None:
    """``start`` returns an object whose ``connect``, ``send`` and ``close`` are awaited."""
    subject.traits(WeightSyncTraits)
    weight_sync = subject.build().start(WeightSyncStart(run_dir=None))
    for name in ("connect", "send", "close"):
        method = getattr(weight_sync, name, None)
        expect(callable(method), f"what start returns has no {name}: rlhf_host.protocols.WeightSync says what it has")
        expect(inspect.iscoroutinefunction(method), f"{name} is not awaited: write async def {name}")


@check()
def engines_get_the_version(subject: Subject) -> None:
    """After ``send`` every connected engine has the version: tokens sampled from then on carry it."""
    for synced in _served(subject):
        for version in (2, 3):
            synced.send(version)
            versions = [engine.version for engine in synced.engines]
            message = f"after version {version} the engines have {versions}; call engine.set_version(version) on each"
            expect(versions == [version, version], message)


@check()
def engines_get_the_weights(subject: Subject) -> None:
    """After ``send`` every connected engine holds the trainer's parameters and buffers, at every version."""
    for synced in _served(subject):
        for version in (2, 3):
            weights = synced.model.state_dict()
            for tensor in weights.values():
                tensor += 1.0
            synced.send(version)
            for engine in synced.engines:
                copies = engine.model.state_dict()
                wrong = [name for name, value in weights.items() if not torch.equal(copies[name], value)]
                expect(not wrong, f"at version {version} an engine holds old values of {', '.join(wrong)}")


def _language_models() -> dict[str, nn.Module]:
    """Tiny language models: a dense one with a tied head, and one with experts."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    experts: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return {
            "a dense model with a tied head": LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)),
            "a model with experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)),
        }


@check()
def dense_models_and_experts_arrive_whole(subject: Subject) -> None:
    """Every weight of a dense model with a tied head, and of one with experts, reaches the engine, bit by bit."""
    for kind, model in _language_models().items():
        for shared in _sorts(subject):
            with _started(subject, shared=shared) as synced:
                synced.model = model
                try:
                    synced.connect()
                except (RunError, UserError):
                    continue  # ``engines_get_the_weights`` says so
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter))
                synced.send(1)
                for engine in synced.engines:
                    copies = engine.model.state_dict()
                    wrong = [name for name, value in model.state_dict().items() if not torch.equal(copies[name], value)]
                    expect(not wrong, f"of {kind}, an engine holds old values of {', '.join(wrong[:3])} ({len(wrong)} in all)")


@check()
def the_trainer_is_left_alone(subject: Subject) -> None:
    """The trainer's module keeps its values, its gradients' switch and its mode, and shares no memory with an engine's copy."""
    before = _model()
    for synced in _served(subject):
        for (name, was), (_, now) in zip(before.named_parameters(), synced.model.named_parameters(), strict=True):
            expect(torch.equal(was, now), f"syncing changes the trainer's {name}")
            expect(was.requires_grad == now.requires_grad, f"syncing changes requires_grad of the trainer's {name}")
        expect(before.training == synced.model.training, "syncing changes the mode of the trainer's module (train, eval)")
        if not synced.shared:
            modules = (synced.model, synced.engines[0].model)
            own, theirs = ({value.data_ptr() for value in module.state_dict().values()} for module in modules)
            expect(not own & theirs, "an engine's copy shares memory with the trainer: its weights would change mid-rollout")


@check()
def engines_are_let_go(subject: Subject) -> None:
    """After ``close`` the engines are left alone, and others can be connected; two instances know nothing of each other."""
    for synced in _served(subject):
        first = synced.engines
        synced.close()
        synced.connect()
        synced.send(9)
        expect([engine.version for engine in first] == [1, 1], "engines of before close still get versions")
        expect([engine.version for engine in synced.engines] == [9, 9], "engines connected after close get no version")
        with _started(subject, shared=synced.shared) as other:
            other.connect()
            other.send(4)
        expect([engine.version for engine in synced.engines] == [9, 9], "engines of one instance get versions of another")


@check()
def closing_early_and_twice_is_survived(subject: Subject) -> None:
    """``close`` is called however a run ends: before any engine was connected, and again."""
    with _started(subject, shared=_sorts(subject)[0]) as synced:
        try:
            for _ in range(2):
                synced.close()
        except Exception as error:
            raise Broken(f"close without connect: {type(error).__name__}: {error}") from error


@check()
def closing_leaves_no_trace(subject: Subject) -> None:
    """After ``close`` no process, and no thread that would keep the interpreter alive, is left."""
    with leaves_nothing("close", "end it in close"):
        for synced in _served(subject):
            synced.send(2)

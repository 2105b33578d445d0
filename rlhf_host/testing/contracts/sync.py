"""Checks of weight sync: every engine has the trainer's weights and their version, and is let go at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import SyncTarget
from rlhf_host.testing.contracts.session import Session
from rlhf_host.testing.contracts.subject import Broken, Subject, Unusable, expect
from rlhf_host.testing.contracts.suite import check
from rlhf_host.testing.weights import ModuleEngine, module_source


def made_up_model() -> nn.Module:
    """A model with parameters and a buffer."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    model.register_buffer("scale", torch.ones(3))
    return model


class _Synced:
    """A fresh instance, connected to engines that share the trainer's module or hold copies of it."""

    def __init__(self, session: Session, source: nn.Module, engines: list[ModuleEngine]):
        self.session, self.source, self.engines = session, source, engines
        self.trainer = module_source(source)
        self.before = copy.deepcopy(source)

    def connect(self) -> None:
        targets = [
            SyncTarget(f"engine-{number}", engine, in_place=engine.model is self.source)
            for number, engine in enumerate(self.engines)
        ]
        self._hook("sync_connect", targets=targets)

    def sync(self, version: int) -> None:
        self._hook("sync_weights", source=self.trainer, version=version)

    def close(self) -> None:
        self._hook("sync_close")

    def train(self) -> None:
        """The trainer's weights move."""
        with torch.no_grad():
            for tensor in self.source.state_dict().values():
                tensor.add_(1.0)

    def _hook(self, hook: str, **arguments: Any) -> None:
        session = self.session
        session.wait(session.manager.acall(session.subject.key, hook, **arguments), hook)


def _refuses(error: Exception) -> bool:
    """Whether the plugin itself said no, as it may to engines that it does not serve."""
    return isinstance(error.__cause__, RunError | UserError)


def _served(subject: Subject) -> Iterator[_Synced]:
    """One connected instance per sort of engine that it serves. Raises ``Unusable`` when it serves neither."""
    refusals = []
    for shares in (True, False):
        source = made_up_model()
        engines = [ModuleEngine(source if shares else copy.deepcopy(source)) for _ in range(2)]
        with Session(subject) as session:
            synced = _Synced(session, source, engines)
            try:
                synced.connect()
                synced.sync(1)
            except (RunError, UserError) as error:
                if not _refuses(error):
                    raise Broken(str(error)) from error
                refusals.append(str(error))
                continue
            yield synced
            synced.close()
    if len(refusals) == 2:
        raise Unusable("served", f"it serves no engine in this process: {refusals[-1]}")


@check("sync_weights")
def engines_get_the_version(subject: Subject) -> None:
    """After ``sync_weights`` every connected engine has the version: tokens sampled from then on carry it."""
    for synced in _served(subject):
        for version in (2, 3):
            synced.sync(version)
            told = [engine.version for engine in synced.engines]
            expect(
                told == [version] * 2,
                f"after version {version} the engines have {told}; call engine.set_version(version) on each",
            )


@check("sync_weights")
def engines_get_the_weights(subject: Subject) -> None:
    """After ``sync_weights`` every connected engine holds the trainer's parameters and buffers, at every version."""
    for synced in _served(subject):
        for version in (2, 3):
            synced.train()
            synced.sync(version)
            for engine in synced.engines:
                held = engine.model.state_dict()
                wrong = [name for name, value in synced.source.state_dict().items() if not torch.equal(held[name], value)]
                expect(not wrong, f"at version {version} an engine holds old values of {', '.join(wrong)}")


@check("sync_weights")
def the_trainer_is_left_alone(subject: Subject) -> None:
    """The trainer's module keeps its values, its gradients' switch and its mode, and shares no memory with an engine's copy."""
    for synced in _served(subject):
        before, shared = synced.before, synced.engines[0].model is synced.source
        for (name, was), (_, now) in zip(before.named_parameters(), synced.source.named_parameters(), strict=True):
            expect(torch.equal(was, now), f"syncing changes the trainer's {name}")
            expect(was.requires_grad == now.requires_grad, f"syncing changes requires_grad of the trainer's {name}")
        expect(before.training == synced.source.training, "syncing changes the mode of the trainer's module (train, eval)")
        if not shared:
            own = {value.data_ptr() for value in synced.source.state_dict().values()}
            theirs = {value.data_ptr() for value in synced.engines[0].model.state_dict().values()}
            expect(not own & theirs, "an engine's copy shares memory with the trainer: its weights would change mid-rollout")


@check("sync_weights")
def engines_are_let_go(subject: Subject) -> None:
    """After ``sync_close`` the engines are left alone, and others can be connected."""
    for synced in _served(subject):
        first, source = synced.engines, synced.source
        synced.close()
        synced.engines = [ModuleEngine(source if engine.model is source else copy.deepcopy(source)) for engine in first]
        synced.connect()
        synced.sync(9)
        expect([engine.version for engine in first] == [1, 1], "engines of before sync_close still get versions")
        expect([engine.version for engine in synced.engines] == [9, 9], "engines connected after sync_close get no version")


@check("sync_weights")
def closing_early_and_twice_is_survived(subject: Subject) -> None:
    """``sync_close`` is called however a run ends: before any engine was connected, and again."""
    with Session(subject) as session:
        synced = _Synced(session, made_up_model(), [])
        try:
            synced.close()
            synced.close()
        except (RunError, UserError) as error:
            raise Broken(f"sync_close without sync_connect: {error}") from error

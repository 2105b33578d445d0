"""Checks of weight sync: every engine has the trainer's weights and their version, and is let go at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rlhf_authoring.contracts.session import Session, check_running, running
from rlhf_authoring.contracts.subject import Broken, Subject, Unusable, check, expect
from rlhf_authoring.engines import ModuleEngine, module_source
from rlhf_host import RunError, UserError
from rlhf_host.protocols import SyncTarget


def _model() -> nn.Module:
    """A model with parameters and a buffer."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    model.register_buffer("scale", torch.ones(3))
    return model


@dataclass(slots=True)
class _Synced:
    """A fresh instance, connected to two engines that share the trainer's module or hold copies of it."""

    session: Session
    model: nn.Module
    shared: bool
    engines: list[ModuleEngine]

    def connect(self) -> None:
        """To new engines."""
        self.engines = [ModuleEngine(self.model if self.shared else copy.deepcopy(self.model)) for _ in range(2)]
        targets = [SyncTarget(f"engine-{n}", engine, in_place=self.shared) for n, engine in enumerate(self.engines)]
        self.session.call("sync_connect", targets=targets)

    def sync(self, version: int) -> None:
        self.session.call("sync_weights", source=module_source(self.model), version=version)


def _served(subject: Subject) -> Iterator[_Synced]:
    """One instance per sort of engine that it serves, which have version 1. Raises ``Unusable`` when it serves neither."""
    refusals = []
    for shared in (True, False):
        with running(subject) as session:
            synced = _Synced(session, _model(), shared, [])
            try:
                synced.connect()
                synced.sync(1)
            except (RunError, UserError) as error:
                if not isinstance(error.__cause__, RunError | UserError):  # otherwise the plugin itself refuses such engines
                    raise Broken(str(error)) from error
                refusals.append(str(error))
                continue
            yield synced
            session.call("sync_close")
    if len(refusals) == 2:
        raise Unusable("served", f"it serves no engine in this process: {refusals[-1]}")


@check("sync_weights")
def engines_get_the_version(subject: Subject) -> None:
    """After ``sync_weights`` every connected engine has the version: tokens sampled from then on carry it."""
    for synced in _served(subject):
        for version in (2, 3):
            synced.sync(version)
            versions = [engine.version for engine in synced.engines]
            message = f"after version {version} the engines have {versions}; call engine.set_version(version) on each"
            expect(versions == [version, version], message)


@check("sync_weights")
def engines_get_the_weights(subject: Subject) -> None:
    """After ``sync_weights`` every connected engine holds the trainer's parameters and buffers, at every version."""
    for synced in _served(subject):
        for version in (2, 3):
            weights = synced.model.state_dict()
            for tensor in weights.values():
                tensor += 1.0
            synced.sync(version)
            for engine in synced.engines:
                copies = engine.model.state_dict()
                wrong = [name for name, value in weights.items() if not torch.equal(copies[name], value)]
                expect(not wrong, f"at version {version} an engine holds old values of {', '.join(wrong)}")


@check("sync_weights")
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


@check("sync_weights")
def engines_are_let_go(subject: Subject) -> None:
    """After ``sync_close`` the engines are left alone, and others can be connected."""
    for synced in _served(subject):
        first = synced.engines
        synced.session.call("sync_close")
        synced.connect()
        synced.sync(9)
        expect([engine.version for engine in first] == [1, 1], "engines of before sync_close still get versions")
        expect([engine.version for engine in synced.engines] == [9, 9], "engines connected after sync_close get no version")


@check_running("sync_weights")
def closing_early_and_twice_is_survived(session: Session) -> None:
    """``sync_close`` is called however a run ends: before any engine was connected, and again."""
    try:
        for _ in range(2):
            session.call("sync_close")
    except (RunError, UserError) as error:
        raise Broken(f"sync_close without sync_connect: {error}") from error

"""Who failed is named, and nobody is waited for beyond the deadline."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlhf_host.distributed.sync import remote
from rlhf_host.distributed.sync.plugin import IPC, Broadcast
from rlhf_host.distributed.sync.remote import OtherEndGone, together
from rlhf_host.distributed.sync.transfer_plan import Place, Route
from rlhf_host.errors import PluginError, RunError, UserError
from rlhf_host.protocols import SyncTarget
from rlhf_host.weight_sync.local_source import LocalSource


async def succeed():
    return "done"


async def fail(message, kind=RunError):
    raise kind(message)


async def hang():
    await asyncio.Event().wait()


def test_all_results_come_back_by_name():
    assert asyncio.run(together("sync", {"trainer": succeed(), "e0": succeed()}, 60)) == {"trainer": "done", "e0": "done"}


@pytest.mark.parametrize(("at_fault", "shown"), [("trainer", "the trainer"), ("e1", "engine e1")])
def test_who_is_at_fault_is_named_and_not_those_it_took_along(at_fault, shown, monkeypatch):
    monkeypatch.setattr(remote, "GRACE_S", 0.01)
    jobs = {name: fail("connection closed", OtherEndGone) for name in ("trainer", "e0", "e1")}
    jobs[at_fault].close()
    with pytest.raises(RunError) as raised:
        asyncio.run(together("sync", jobs | {at_fault: fail("out of memory"), "e2": hang()}, 60))
    assert str(raised.value) == f"sync failed: {shown}: out of memory"


def test_those_not_done_by_the_deadline_are_named():
    with pytest.raises(RunError, match=r"sync was not done after 0.05 s: still waiting for engine e1 \(--sync.timeout-s\)"):
        asyncio.run(together("sync", {"trainer": succeed(), "e0": succeed(), "e1": hang()}, 0.05))


class Stub:
    """An engine as far as a sync of this process is concerned."""

    def __init__(self, model=None, machine="here"):
        self.model, self.version, self.machine = model, -1, machine

    def set_version(self, version):
        self.version = version

    async def run(self, function, **arguments):
        return [{"place": {"machine": self.machine, "device": "cpu"}, "kept": None}]


def test_sending_to_an_engine_that_shares_the_module_is_refused():
    model = torch.nn.Linear(2, 2)

    async def scenario():
        plugin = Broadcast(Broadcast.Options())
        await plugin.connect([SyncTarget("local", Stub(model), in_place=True)])
        await plugin.send(LocalSource(model), 0)

    with pytest.raises(UserError, match=r"engine local samples from the trainer's own weights.*--sync in_process"):
        asyncio.run(scenario())


def test_ipc_refuses_an_engine_on_another_machine():
    async def scenario():
        plugin = IPC(IPC.Options())
        await plugin.connect([SyncTarget("e0", Stub(machine="elsewhere"))])
        await plugin.send(LocalSource(torch.nn.Linear(2, 2)), 0)

    with pytest.raises(UserError, match=r"engine e0 is not on the trainer's machine.*--sync broadcast"):
        asyncio.run(scenario())


def test_an_engine_that_returns_no_list_is_a_defect_of_its_plugin():
    class Old(Stub):
        async def run(self, function, **arguments):
            return {"machine": "here"}

    async def scenario():
        plugin = IPC(IPC.Options())
        await plugin.connect([SyncTarget("e0", Old())])
        await plugin.send(LocalSource(torch.nn.Linear(2, 2)), 0)

    with pytest.raises(PluginError, match=r"engine e0: run returned a dict, not a list .*returns \[result\]"):
        asyncio.run(scenario())


def test_a_backend_that_is_asked_for_carries_everything():
    gpus = [Place("m", "cuda", name) for name in "ab"]
    for backend in ("gloo", "nccl"):
        plugin = Broadcast(Broadcast.Options(backend=backend))
        assert plugin.plan(gpus[:1], gpus, ["e0", "e1"]) == [Route(backend, 0, (0, 1))]


def test_a_detour_through_main_memory_is_said_once_with_its_reason(caplog):
    plugin = Broadcast(Broadcast.Options())
    places = [Place("m", "cuda", "a"), Place("m", "cpu")]
    for _ in range(2):
        plugin._say_detours(plugin.plan(places[:1], places[1:], ["e0"]), ["e0"], places)
    said = "weight sync broadcast: weights reach engine e0 through main memory (gloo): the engine takes weights on cpu"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [said]

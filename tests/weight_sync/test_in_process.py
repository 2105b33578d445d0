"""The sync ``in_process``, for engines that sample from the trainer's own module."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlhf_host.errors import RunError
from rlhf_host.protocols import SyncTarget
from rlhf_host.weight_sync.in_process import InProcess
from rlhf_host.weight_sync.local_source import LocalSource


class Stub:
    """An engine as far as a sync of this process is concerned."""

    version = -1

    def set_version(self, version):
        self.version = version


def test_in_process_moves_nothing_but_the_version():
    model = torch.nn.Linear(2, 2)
    plugin, engine = InProcess(None), Stub()
    asyncio.run(plugin.connect([SyncTarget("local", engine, in_place=True)]))
    asyncio.run(plugin.send(LocalSource(model), 3))
    assert engine.version == 3


def test_in_process_refuses_engines_with_weights_of_their_own():
    plugin, engine = InProcess(None), Stub()
    asyncio.run(plugin.connect([SyncTarget("e0", engine)]))
    with pytest.raises(
        RunError, match="engine e0 holds weights of its own: in_process cannot update it; choose another --sync"
    ):
        asyncio.run(plugin.send(LocalSource(torch.nn.Linear(2, 2)), 3))
    assert engine.version == -1

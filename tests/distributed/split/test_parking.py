"""Host memory in which the bytes of a device wait."""

import torch

from rlhf_host.distributed.split import parking


def test_it_is_pinned_for_gpus(monkeypatch):
    asked = []
    monkeypatch.setattr(parking.torch, "empty", lambda *sizes, **named: asked.append(named["pin_memory"]))
    for device in ("cuda", "cpu"):
        parking.new_buffer(torch.device(device))
    assert asked == [True, False]

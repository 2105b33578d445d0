"""Prints as JSON what waits for a device while the embedded engine decodes, and the steps; ``far_device`` stands for the device."""

from __future__ import annotations

import json
import sys

import far_device
import torch
from rlhf_kernels import choose
from rlhf_kernels_graphs import GraphKernels, Options, capture

from rlhf_host.engines.sampling import Sampler
from rlhf_host.records.episodes import Sampling
from tests.engines.conftest import build
from tests.engines.embedded_rig import PlainKernels, Request, engine_for, sample


def sampled(kernels: str, device: str):
    """Generations of the engine, and what waited between the first token and the last."""

    model = build("llama").to(device)
    engine = engine_for(model, max_batch_size=16)
    if kernels == "graphs":
        engine._kernels = choose([("graphs", GraphKernels(Options()))], PlainKernels())
    requests = [
        Request((3, 5, 7, 4 + i)[: 2 + i % 3], Sampling(60 + i, top_p=(1.0, 0.9)[i % 2], stop_token_ids=(7 + i,)), (i, j))
        for i in range(8)
        for j in range(4)
    ]
    sample(engine, requests[-1:])  # compares decoders
    waits, draw, counts = far_device.Reach.waits, Sampler.draw, [0]

    def drawing(self, logits, uniforms):
        counts[0] += 1
        return draw(self, logits, uniforms)

    Sampler.draw = drawing
    waits.clear()
    answers = sample(engine, requests)
    Sampler.draw = draw
    return [(one.token_ids, one.finish_reason) for one in answers], counts[0], list(waits)


def main() -> None:
    kernels = sys.argv[1]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    far_device.register()
    capture.CAPTURES[far_device.NAME] = lambda work: work
    near, steps, _ = sampled("none", "cpu")
    with far_device.Reach():
        far, far_steps, waits = sampled(kernels, far_device.NAME)
    print(json.dumps({"same": near == far, "steps": [steps, far_steps], "waits": waits}))


if __name__ == "__main__":
    main()

"""Prints as JSON what waits for a device in an update, by micro-batch; ``far_device`` stands for the device."""

from __future__ import annotations

import json
import sys

import far_device
import torch
from test_worker import Policy, Weights, batch, manager, worker_for
from transformers import AutoModelForCausalLM

from rlhf_host import LossTerm, Metric, Needs, hookimpl
from rlhf_host.config.schema import TrainConfig
from rlhf_host.records.needs import Output
from rlhf_host.records.tensors import TopK
from rlhf_host.training.update import Accumulation


class Measuring:
    """Metrics of all kinds, a loss per row, and a distribution of another role."""

    @hookimpl
    def needs(self):
        return Needs(outputs=(Output("distribution", role="teacher", top=2),))

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        for reduce in ("mean", "sum", "min", "max", "ess"):
            yield Metric(f"own_{reduce}", outputs.logprobs, batch.loss_mask, reduce=reduce)
        yield Metric("own_calibration", outputs.logprobs.exp(), batch.loss_mask, reduce="calibration")
        yield Metric("number", 2.0)
        other = outputs.others["teacher"]
        yield LossTerm("kl", (other.logprobs.exp() * (other.logprobs - other.own)).sum(-1), coefficient=0.1)
        yield LossTerm("rows", outputs.logprobs.sum(-1), coefficient=0.1)


def made(model_dir: str, device: str, settings: TrainConfig):
    """A worker on the device, and its batch."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).to(device)
    data = batch("recompute")
    shape = (*data.completion_mask.shape, 2)
    data.distributions["teacher"] = TopK(torch.full(shape, -1.0), torch.ones(shape, dtype=torch.int64))
    worker = worker_for(model, manager(Policy(), Weights(), Measuring()), settings)
    worker.roles["actor"].passes.prepare(64)
    return worker, data


def main() -> None:
    model_dir, shared_prefix, mode = sys.argv[1:]
    settings = TrainConfig(max_tokens_per_microbatch=40, shared_prefix=shared_prefix, old_logprobs=mode)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    far_device.register()  # before the first backward pass, which counts the devices
    worker, data = made(model_dir, "cpu", settings)
    near = {"metrics": worker.update(data).metrics.result(), "sum": float(worker.outputs("actor", "logprobs", data).sum())}

    waits, passes, inner = far_device.Reach.waits, [], Accumulation._pass

    def watched(*arguments):
        waits.clear()
        inner(*arguments)
        passes.append(list(waits))
        waits.clear()

    with far_device.Reach():
        worker, data = made(model_dir, far_device.NAME, settings)
        Accumulation._pass = watched
        metrics = worker.update(data).metrics.result()
        after = list(waits)
        waits.clear()
        far = {"metrics": metrics, "sum": float(worker.outputs("actor", "logprobs", data).sum())}
    print(json.dumps({"passes": passes, "after": after, "outputs": list(waits), "near": near, "far": far}))


if __name__ == "__main__":
    main()

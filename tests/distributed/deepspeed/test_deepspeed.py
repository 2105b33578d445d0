"""The DeepSpeed backend from the outside: its options, what it says when something is missing, and a run in one process."""

import hashlib
import json
import os
import shutil
import sys

import pytest
import torch
from pydantic import ValidationError

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.config.schema import RoleConfig
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.distributed.deepspeed.setup import configuration, on_device
from rlhf_host.errors import PluginError, UserError
from rlhf_host.protocols import BackendStart
from rlhf_host.training.checkpoints import MANIFEST

Options = DeepSpeed.Options


def started(options):
    model = torch.nn.Linear(1, 1)
    return DeepSpeed(options).start(
        BackendStart(model=model, compute=model, head=(), role=RoleConfig(), total_updates=1, ranks=OneProcess())
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 0, "precision": "bf16"}, "precision bf16 needs zero_stage 1 to 3"),
        ({"zero_stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer needs zero_stage 1 to 3"),
        ({"zero_stage": 2, "offload_param": "cpu"}, "offload_param needs zero_stage 3"),
        ({"zero_stage": 1, "zero_quantized_weights": True}, "zero_quantized_weights needs zero_stage 3"),
        ({"zero_stage": 3, "autotp_size": 2}, "autotp_size 2 needs zero_stage 1 or 2"),
        ({"extra": {"gradient_clipping": 3.0}}, "extra sets gradient_clipping, which follows from the role"),
    ],
)
def test_options_that_cannot_be_together_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(ValidationError, match=message):
        Options(**options)


@pytest.mark.parametrize(
    ("stage", "device", "bf16", "used"),
    [(3, "cuda", True, "bf16"), (3, "cuda", False, "fp32"), (3, "cpu", True, "fp32"), (2, "cuda", True, "fp32")],
)
def test_gathered_weights_on_gpus_are_in_16_bits_unless_a_precision_is_set(stage, device, bf16, used, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    assert on_device(Options(zero_stage=stage), torch.device(device)).precision == used
    assert on_device(Options(zero_stage=stage, precision="fp32"), torch.device(device)).precision == "fp32"


def test_the_configuration_passes_options_through_and_extra_goes_over_it():
    options = Options(
        zero_stage=3,
        precision="bf16",
        offload_param="cpu",
        zero_hpz_partition_size=8,
        extra={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 7}, "wall_clock_breakdown": True},
    )
    made = configuration(options, RoleConfig(max_grad_norm=0.3))
    assert made["gradient_clipping"] == 0.3
    assert made["bf16"]["enabled"]
    assert configuration(Options(autotp_size=2), RoleConfig())["tensor_parallel"] == {"autotp_size": 2}
    assert made["wall_clock_breakdown"]
    zero = made["zero_optimization"]
    assert (zero["stage"], zero["offload_param"], zero["zero_hpz_partition_size"]) == (3, {"device": "cpu"}, 8)
    assert (zero["overlap_comm"], zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (True, 7, 50_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 2, "precision": "fp16"}, "precision fp16 needs a GPU: use bf16 or fp32"),
        (
            {"zero_stage": 3, "zero_quantized_weights": True},
            "zero_quantized_weights needs GPUs, because DeepSpeed quantizes by",
        ),
        ({"zero_stage": 3, "zero_quantized_gradients": True}, "zero_quantized_gradients needs GPUs, because DeepSpeed"),
        ({"zero_stage": 3, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size 2 does not divide the 1 ranks"),
        ({"zero_stage": 1, "autotp_size": 2}, "use --runtime ray and place the role on 2 devices or a multiple"),
    ],
)
def test_what_this_device_or_so_few_processes_cannot_do_is_refused_in_one_line(options, message):
    with pytest.raises(UserError, match=message) as refused:
        started(Options(**options))
    assert "\n" not in str(refused.value)


def test_a_missing_library_is_one_line_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(PluginError, match=r"needs the package deepspeed: pip install 'rlhf-host\[deepspeed\]'"):
        started(Options())


def test_a_run_in_one_process_learns_as_with_the_embedded_backend_and_resumes(rlhf, small_run, tmp_path):
    def curve(name):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        names = ("loss", "grad_norm", "lr", "entropy", "mismatch/max", "kl/update")
        return [{name: row[name] for name in names} for row in rows if "loss" in row]

    flags = [*small_run, "--train.steps", "3", "--checkpoint.every", "2", "--train.minibatches", "2"]
    rlhf.run(*flags, "--run-dir", tmp_path / "torch")
    rlhf.run(*flags, "--run-dir", tmp_path / "zero", "--backend", "deepspeed", "--backend.zero-stage", "2")
    found = curve("zero")
    assert len(found) == 3
    assert found == [pytest.approx(row, rel=1e-2, abs=1e-4) for row in curve("torch")]
    shutil.rmtree(tmp_path / "zero" / "checkpoints" / "step-000003")
    rlhf.run("train", "--resume", tmp_path / "zero")
    assert curve("zero") == found


@pytest.mark.parametrize("stage", ["2", "1"])  # the second goes through DeepSpeed's universal form
def test_a_foreign_pickle_is_refused_in_one_line_and_does_not_run(rlhf, small_run, tmp_path, stage):
    zero = ("--run-dir", tmp_path / "run", "--backend", "deepspeed", "--backend.zero-stage", "2")
    rlhf.run(*small_run, "--train.steps", "1", *zero)
    checkpoint = tmp_path / "run/checkpoints/step-000001"
    files = sorted((checkpoint / "optimizers").rglob("*.pt"))
    assert len(files) == 2

    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    for file in files:
        torch.save({"module": Runs(), "optimizer_state_dict": Runs()}, file)
    names = [line.split("  ", 1)[1] for line in (checkpoint / MANIFEST).read_text().splitlines()]
    hashes = [hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names]
    (checkpoint / MANIFEST).write_text("".join(f"{each}  {name}\n" for each, name in zip(hashes, names, strict=True)))
    more = ("--train.steps", "2", "--backend.zero-stage", stage)
    refused = rlhf.run("train", "--resume", tmp_path / "run", *more, code=2)
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("Error")]
    assert "holds more than plain values and tensors" in line
    assert "weights_only" not in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "ran").exists()


def test_stage_3_needs_an_engine_with_weights_of_its_own(rlhf, small_run, tmp_path):
    flags = ("--run-dir", tmp_path / "run", "--backend", "deepspeed", "--backend.zero-stage", "3")
    result = rlhf.run(*small_run, *flags, code=2)
    assert "backend deepspeed splits the actor's weights" in result.stderr
    assert "(--engine)" in result.stderr

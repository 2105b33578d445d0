"""A micro-batch on a GPU waits for nothing that the host computes, so the queue of kernels seldom runs dry."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(("shared_prefix", "mode"), [("on", "recompute"), ("off", "sampler")])
def test_micro_batches_do_not_wait_for_their_device(tiny_model, shared_prefix, mode):
    command = [sys.executable, str(HERE / "far_update.py"), str(tiny_model), shared_prefix, mode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    count = len(found["passes"])
    assert count > 1
    # transformers looks whether padded rows are packed ones; a shared line says so itself.
    of_model = [["aten._local_scalar_dense", "passes.py, <listcomp>"]] if shared_prefix == "off" else []
    assert found["passes"] == [of_model] * count
    # Once for metrics, losses and checks, once for the norm; and where a role's outputs go to the CPU, once per micro-batch.
    assert [place for _, place in found["after"]] == ["readings.py, read", "torch_backend.py, step"]
    assert found["outputs"] == [*of_model, ["read", "worker.py, _fill"]] * count
    assert found["far"]["sum"] == pytest.approx(found["near"]["sum"], rel=1e-4)
    assert found["far"]["metrics"] == pytest.approx(found["near"]["metrics"], rel=1e-3, abs=1e-6)

"""Files in a checkpoint that no run wrote, although the manifest has their hashes: one line, and nothing in them runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_host.training.checkpoints import MANIFEST


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def as_torch(path, ran):
    torch.save({"plugins": Runs(ran), "optimizer": Runs(ran)}, path)


def as_old_torch(path, ran):
    torch.save({"plugins": Runs(ran)}, path, _use_new_zipfile_serialization=False)


def as_pickle(path, ran):
    path.write_bytes(pickle.dumps({"plugins": Runs(ran)}))


def as_numpy(path, ran):
    torch.save({"plugins": np.ones(3), "optimizer": np.ones(3)}, path)


def as_nothing(path, ran):
    path.write_bytes(b"")


def cut_off(path, ran):
    path.write_bytes(path.read_bytes()[:999])


def as_a_list(path, ran):
    torch.save([1, 2], path)


def with_another_random_state(path, ran):
    torch.save({"plugins": {}, "torch_rng": torch.ones(3)}, path)


def of_another_model(path, ran):
    state = torch.load(path, weights_only=True)
    for kept in state["optimizer"]["state"].values():
        kept["exp_avg"] = torch.ones(3, 3)
    torch.save(state, path)


def of_another_optimizer(path, ran):
    state = torch.load(path, weights_only=True)
    state["optimizer"]["param_groups"].pop()
    torch.save(state, path)


def without_a_stream(path, ran):
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "stream"}))


def no_json(path, ran):
    path.write_text("{")


def without_a_weight(path, ran):
    weights = load_file(path)
    weights.pop(sorted(weights)[0])
    save_file(weights, path)


@pytest.fixture(scope="module")
def finished(rlhf, tiny_model, prompts, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    lora = ("--actor.lora.rank", "2", "--actor.lr", "1e-3")
    model = ("--algo", "rloo", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts, *lora)
    short = ("--rollout.n", "2", "--rollout.max-new-tokens", "4", "--train.batch-size", "2", "--train.steps", "1")
    rlhf.run("train", *model, *short, "--run-dir", run_dir)
    return run_dir


def signed(checkpoint: Path) -> None:
    """Write the manifest anew."""
    names = [line.split("  ", 1)[1] for line in (checkpoint / MANIFEST).read_text().splitlines()]
    hashes = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}
    (checkpoint / MANIFEST).write_text("".join(f"{digest}  {name}\n" for name, digest in hashes.items()))


TRAINER, OPTIMIZER, ADAPTER = "trainer.pt", "optimizers/actor/optimizer.pt", "model/adapter_model.safetensors"


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        *((file, harm, "holds more than plain values") for file in (TRAINER, OPTIMIZER) for harm in (as_torch, as_numpy)),
        *((TRAINER, harm, "holds more than plain values") for harm in (as_old_torch, as_pickle)),
        *((file, cut_off, "is not a file of tensors that can be read") for file in (TRAINER, OPTIMIZER)),
        (TRAINER, as_nothing, "is not a file of tensors that can be read"),
        (TRAINER, as_a_list, "it needs plugins and torch_rng"),
        (OPTIMIZER, as_a_list, "it needs optimizer and updates"),
        (TRAINER, with_another_random_state, "has no random state of PyTorch"),
        (OPTIMIZER, of_another_model, "is of another model: it has averages of shape [3, 3]"),
        (OPTIMIZER, of_another_optimizer, "is of another optimizer"),
        ("state.json", without_a_stream, "state.json needs stream"),
        ("state.json", no_json, "is not JSON"),
        (ADAPTER, as_pickle, "cannot be read"),
        (ADAPTER, without_a_weight, "does not fit"),
    ],
)
def test_what_no_run_wrote_is_refused_in_one_line(rlhf, finished, tmp_path, file, harm, message):
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    checkpoint = tmp_path / "run/checkpoints/step-000001"
    harm(checkpoint / file, tmp_path / "ran")
    signed(checkpoint)
    refused = rlhf.run("train", "--resume", tmp_path / "run", "--train.steps", "2", code=2)
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("Error")]
    assert message in line
    assert str(tmp_path / "run/checkpoints/step-000001") in line
    assert "weights_only" not in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "ran").exists()

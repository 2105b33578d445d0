"""``RUN@STEP``: a run's model after a step, of a checkpoint or written by a package with an entry point in ``rlhf.step_models``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import RunError, UserError
from rlhf_host.models.locations import find_model, with_base
from rlhf_host.plugins import selection
from rlhf_host.plugins.catalogue import Offer
from rlhf_host.plugins.discovery import discover
from rlhf_host.runs import at_step, model_steps, run_model, run_of, step_models

KEEPS = """
import json
class Keeps:
    def steps(self, run):
        return [int(path.stem) for path in (run / "mine").glob("*.json")]
    def write(self, run, step, directory):
        {write}
kept = Keeps()
"""
WRITE = 'content = (run / "mine" / f"{step}.json").read_text(); (directory / "config.json").write_text(content)'


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "rlhf-sync-delta:delta")
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(step_models, "_WRITTEN", {})


@pytest.fixture
def run(tmp_path):
    """A finished run with checkpoints of steps 0 and 4, whose final model is that of step 6."""
    run = tmp_path / "run"
    for model in ("model", "checkpoints/step-000000/model", "checkpoints/step-000004/model"):
        (run / model).mkdir(parents=True)
        (run / model / "config.json").write_text(json.dumps({"of": model}))
        (run / model / "model.safetensors").touch()
        if "step" in model:
            (run / model).with_name("state.json").write_text("{}")
    (run / "config.yaml").write_text("{}")
    (run / "run.json").write_text(json.dumps({"status": "finished", "step": 6}))
    (run / "mine").mkdir()
    for step in (2, 4):
        (run / f"mine/{step}.json").write_text(json.dumps({"of": f"mine {step}"}))
    return run


def install(site, write=WRITE, name="keeper-a"):
    module = name.replace("-", "_")
    site.install(name, {"rlhf.step_models": f"mine = {module}:kept"}, {f"{module}.py": KEEPS.replace("{write}", write)})


def of(model):
    return json.loads((Path(model.path) / "config.json").read_text())["of"]


def at(run, step):
    return Path(f"{run}@{step}")


def test_checkpoints_and_the_final_model_need_no_package(run):
    assert [of(run_model(at(run, step))) for step in (0, 4, 6)] == [
        "checkpoints/step-000000/model",
        "checkpoints/step-000004/model",
        "model",
    ]
    assert model_steps(run) == [0, 4, 6]
    with pytest.raises(UserError, match=r"run has no checkpoint of step 2; it has those of steps 0, 4, 6$"):
        run_model(at(run, 2))


def test_a_package_writes_the_others(here, run):
    install(here)
    assert model_steps(run) == [0, 2, 4, 6]
    model = run_model(at(run, 2))
    assert (of(model), model.run, model.step) == ("mine 2", run, 2)
    assert run_model(run, "2").path == model.path, "written once"
    assert of(run_model(at(run, 4))) == "checkpoints/step-000004/model"
    assert not [info for info in discover(disabled=True) if info.distribution == "keeper-a"]
    with pytest.raises(UserError, match="has no checkpoint of step 3; it has those of steps 0, 2, 4, 6"):
        run_model(at(run, 3))


def test_a_run_whose_weight_sync_is_not_installed_says_what_to_install(run, monkeypatch):
    keeper = Offer("keeper-a", "keeper-a", "pip install keeper-a")
    monkeypatch.setattr(selection, "offered", lambda: {"weight_sync": {"keeper": keeper}})
    install = ". More may be kept by its weight sync: no weight_sync named 'keeper' is installed; pip install keeper-a"
    for settings, said in (("sync: {name: checkpoint}", ""), ("sync: {name: keeper}", install), ("sync: [", ""), ("[]", "")):
        (run / "config.yaml").write_text(settings)
        with pytest.raises(UserError) as raised:
            run_model(at(run, 2))
        assert str(raised.value) == f"{run} has no checkpoint of step 2; it has those of steps 0, 4, 6{said}"


@pytest.mark.parametrize(
    ("write", "kind", "said"),
    [
        ("raise KeyError('x')", RunError, "step_model 'mine' from keeper-a 1.0 failed in write: KeyError: 'x'"),
        ("from rlhf_host import UserError; raise UserError('it is damaged')", UserError, "it is damaged"),
    ],
)
def test_a_package_that_fails_leaves_nothing(here, run, tmp_path, write, kind, said):
    install(here, write)
    with pytest.raises(kind) as caught:
        run_model(at(run, 2))
    assert str(caught.value) == said
    assert list((tmp_path / "cache/steps").iterdir()) == []


def test_other_names_with_an_at_sign_are_as_before(run, tmp_path):
    for name in ("owner/model@main", str(tmp_path / "nowhere@3"), f"{run}@", "@3", f"{run}/model@3"):
        assert at_step(Path(name)) == (Path(name), None)
    shutil.copytree(run, odd := tmp_path / "run@4")
    assert at_step(odd) == (odd, None), "a directory of this name"
    assert at_step(at(run, "last")) == (run, "last")
    assert run_of(at(run, 0)) == run
    with pytest.raises(UserError, match=r"nowhere@3: no such directory"):
        run_model(tmp_path / "nowhere@3")


def test_mistakes_are_refused(run):
    with pytest.raises(UserError, match=r"--checkpoint 4: .*run@4 names a step already: leave one of them out"):
        run_model(at(run, 4), "4")
    for step in ("lats", "-1", "1e3", "٣", "9" * 100):
        with pytest.raises(UserError, match=rf"^{run}@{step}: should be best, last or a step"):
            run_model(at(run, step))
    with pytest.raises(UserError, match=r"^--checkpoint lats: should be best, last or a step"):
        run_model(run, "lats")
    with pytest.raises(UserError, match="has no checkpoint of step 2"):
        run_model(at(run, 2), role="critic")


def test_every_model_of_a_run_can_be_named_that_way(here, run):
    install(here)
    assert find_model(f"{run}@4").path == str(run / "checkpoints/step-000004/model")
    role = with_base(RoleConfig(model=f"{run}@4", revision="x"))
    assert (role.model, role.revision) == (str(run / "checkpoints/step-000004/model"), None)
    adapter = run / "checkpoints/step-000004/model"
    for name in ("config.json", "model.safetensors"):
        (adapter / name).unlink()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(run / "model"), "peft_type": "LORA"})
    )
    save_file({"weight": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    role = with_base(RoleConfig(model=f"{run}@4"))
    assert (role.model, role.adapter) == (str(run / "model"), str(adapter)), "an adapter is not lost"

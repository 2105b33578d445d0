"""Checkpoint directories: whole or not at all, kept by rule, and only what can be read back."""

import resource
import shutil
import subprocess
from collections import Counter, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlhf_host.config.schema import RunConfig
from rlhf_host.directories import new_directory
from rlhf_host.errors import RunError, UserError, blaming
from rlhf_host.hookspecs import hookimpl
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.runs.models import run_model
from rlhf_host.training.checkpoints import (
    MANIFEST,
    checkpoint_dirs,
    copy_checkpoint,
    keep_checkpoints,
    load_checkpoint,
    plain_state,
    refuse_damaged,
    take_back_replaced,
)
from rlhf_host.training.keeper import load_plugins, plugin_sources
from rlhf_host.training.run_files import write_start


def writes(name, text):
    def save(path):
        (path / name).write_text(text)

    return save


def save(run_dir, step, **state):
    return copy_checkpoint(
        run_dir,
        step,
        state,
        {"plugins": {"x": torch.ones(2)}, "torch_rng": torch.get_rng_state()},
        {"actor": writes("w", "w")},
        writes("actor", "optimizer"),
        lambda path: None,
    )()


def test_what_is_saved_comes_back(tmp_path):
    save(tmp_path, 3, version=4)
    found = load_checkpoint(tmp_path)
    assert (found.step, found.state["version"]) == (3, 4)
    assert found.tensors["plugins"]["x"].tolist() == [1.0, 1.0]
    assert (found.role("actor") / "w").read_text() == "w"
    assert load_checkpoint(tmp_path / "other") is None


def test_a_writer_that_fails_leaves_the_old_directory(tmp_path):
    target = tmp_path / "model"
    with new_directory(target) as path:
        (path / "a").write_text("old")

    def fails():
        with new_directory(target) as path:
            (path / "a").write_text("new")
            raise OSError("disk full")

    with pytest.raises(RunError, match=rf"{target} cannot be written: disk full; its disk has .* GB free"):
        fails()
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with new_directory(target) as path:
        (path / "b").write_text("new")
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path):
    path = save(tmp_path, 2, version=1)
    path.rename(path.with_name(".step-000002.old"))
    take_back_replaced(tmp_path)
    assert load_checkpoint(tmp_path).state["version"] == 1
    assert [step for step, _ in checkpoint_dirs(tmp_path)] == [2]


def test_half_written_ones_are_never_read(tmp_path):
    (tmp_path / "checkpoints" / ".step-000009.partial").mkdir(parents=True)
    save(tmp_path, 1)
    assert load_checkpoint(tmp_path).step == 1
    keep_checkpoints(tmp_path, 1, 2, ())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    keep_checkpoints(tmp_path, 5, 2, (1, None))
    assert [step for step, _ in checkpoint_dirs(tmp_path)] == [1, 4, 5]
    keep_checkpoints(tmp_path, 5, 0, ())
    assert len(checkpoint_dirs(tmp_path)) == 3


FILES = ["model/w", "optimizers/actor", "trainer.pt", "state.json", MANIFEST]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_the_newest_checkpoint_that_is_as_it_was_written_is_taken_up(tmp_path, caplog, harm, file):
    save(tmp_path, 1)
    harm(save(tmp_path, 2) / file)
    assert load_checkpoint(tmp_path).step == 1
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path}/checkpoints/step-000002 is damaged: ")
    assert line.endswith("; going on from step 1")
    save(tmp_path, 3)
    flip(tmp_path / "checkpoints/step-000003" / file)
    flip(tmp_path / "checkpoints/step-000001" / file)
    with pytest.raises(UserError, match=r"step-000003 is damaged(.|\n)*step-000001 is damaged(.|\n)*no other checkpoint"):
        load_checkpoint(tmp_path)


def test_a_checkpoint_under_another_step_s_name_is_damaged(tmp_path, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "checkpoints/step-000003")
    assert load_checkpoint(tmp_path).step == 1
    (line,) = caplog.messages
    assert line.endswith("step-000003 is damaged: its state.json is that of step 2; going on from step 1")


def test_a_file_that_the_manifest_leaves_out_is_damage(tmp_path):
    path = save(tmp_path, 1)
    (path / "optimizers/.universal").mkdir()
    (path / "optimizers/.universal/state").write_text("a killed resume made it")
    assert load_checkpoint(tmp_path).step == 1
    manifest = path / MANIFEST
    manifest.write_text("".join(line for line in manifest.read_text().splitlines(keepends=True) if "model/w" not in line))
    with pytest.raises(UserError, match=r"step-000001 is damaged: model/w is not in manifest.sha256"):
        load_checkpoint(tmp_path)


def test_a_link_is_replaced_or_removed_and_what_it_leads_to_stays(tmp_path):
    elsewhere = save(tmp_path, 1).rename(tmp_path / "elsewhere")
    folder = tmp_path / "checkpoints"
    for step, target in ((1, elsewhere), (2, "missing")):
        (folder / f"step-{step:06d}").symlink_to(target)
    assert load_checkpoint(tmp_path).step == 1
    save(tmp_path, 2)
    (folder / "step-000003").symlink_to("missing")
    keep_checkpoints(tmp_path, 2, 1, ())
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    assert load_checkpoint(tmp_path).step == 2
    assert (elsewhere / MANIFEST).exists()


def test_what_came_after_the_checkpoint_that_was_taken_up_goes_when_the_next_is_written(tmp_path):
    for step in (1, 4):
        save(tmp_path, step)
    save(tmp_path, 2)
    keep_checkpoints(tmp_path, 2, 1, ())
    assert [step for step, _ in checkpoint_dirs(tmp_path)] == [2]


def test_sha256sum_checks_a_checkpoint(tmp_path):
    if not shutil.which("sha256sum"):
        pytest.skip("no sha256sum here")
    path = save(tmp_path, 1)
    subprocess.run(["sha256sum", "--check", "--strict", MANIFEST], cwd=path, check=True, stdout=subprocess.DEVNULL)


def test_another_format_is_named(tmp_path):
    save(tmp_path, 2, format=99)
    with pytest.raises(UserError, match="checkpoint format 99"):
        load_checkpoint(tmp_path)


def test_a_removal_that_was_killed_never_comes_back(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)

    def killed(path, ignore_errors=False):
        if path.exists():
            (path / "model/w").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_checkpoints(tmp_path, 2, 1, ())
    assert load_checkpoint(tmp_path).step == 2
    assert [step for step, _ in checkpoint_dirs(tmp_path)] == [2]


BIG = {"w": torch.ones(9999)}
WRITERS = {"torch": lambda path: torch.save(BIG, path), "safetensors": lambda path: save_file(BIG, path)}


def by_plugin(path):
    with blaming("backend torch", "save_model"):
        save_file(BIG, path)


WRITERS["plugin"] = by_plugin


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_is_named_and_half_a_checkpoint_goes(tmp_path, write):
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RunError, match=r"checkpoints/step-000002 cannot be written: .*; its disk has .* GB free"):
            copy_checkpoint(
                tmp_path, 2, {}, {}, {"actor": lambda path: write(path / "w")}, lambda path: None, lambda path: None
            )()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_plugin_state_is_made_plain_or_refused_when_it_is_saved():
    state = {"a": np.float64(0.5), "b": [np.int64(3), (1, "x")], "c": np.arange(2), "d": torch.zeros(1)}
    plain = plain_state(state, "algo:x")
    assert type(plain["a"]) is float
    assert type(plain["b"][0]) is int
    assert plain["c"].tolist() == [0, 1]
    for odd in (Counter("aab"), defaultdict(int, a=1)):  # they would come back as plain dicts, and fail when a key is missing
        with pytest.raises(RunError, match=rf"algo:x gives a {type(odd).__name__} in state_dict; .*, not their subclasses"):
            plain_state({"seen": odd}, "algo:x")
    with pytest.raises(RunError, match="algo:x gives a deque in state_dict"):
        plain_state({"a": deque()}, "algo:x")


class Keeps:
    @hookimpl
    def state_dict(self):
        return {}

    @hookimpl
    def load_state_dict(self, state):
        self.state = state["state"]


def test_a_state_that_no_longer_loads_names_the_version_that_wrote_it(caplog):
    info = PluginInfo("extension", "keeps", "plugin-keeps", "2.0", "any", "ok", "", "keeps:Keeps")
    manager = PluginManager([Loaded("extension", "keeps", info, plugin := Keeps())])
    sources = plugin_sources(manager)
    assert sources == {"extension:keeps": "plugin-keeps 2.0"}
    load_plugins(manager, {"extension:keeps": {"state": 1}}, sources)
    assert (plugin.state, caplog.messages) == (1, [])
    with pytest.raises(RunError, match=r"KeyError: 'state'; its state was written by plugin-keeps 1.0: install that version"):
        load_plugins(manager, {"extension:keeps": {"old": 1}}, {"extension:keeps": "plugin-keeps 1.0"})
    assert caplog.messages == ["extension:keeps is of plugin-keeps 2.0 now; plugin-keeps 1.0 wrote the checkpoint"]


def test_what_a_run_began_with_stays_beside_what_it_goes_on_with(tmp_path):
    manager, config = PluginManager([]), RunConfig(sync={"name": "in_process"})
    write_start(config, manager, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "plugins.json", "requirements.txt"]
    first = (tmp_path / "config.yaml").read_text()
    write_start(config.model_copy(update={"seed": 3}), manager, tmp_path, step=4)
    assert (tmp_path / "config.yaml.until-step-000004").read_text() == first
    assert "seed: 3" in (tmp_path / "config.yaml").read_text()
    assert not (tmp_path / "plugins.json.until-step-000004").exists()


@pytest.mark.parametrize("asked", ["", "checkpoints/step-000001", "checkpoints/step-000001/model"])
def test_a_model_is_found_in_a_run_and_is_refused_once_it_is_damaged(tmp_path, asked):
    path = copy_checkpoint(
        tmp_path,
        1,
        {},
        {},
        {"actor": writes("config.json", "{}")},
        lambda path: None,
        lambda path: None,
    )()
    assert run_model(tmp_path / asked).path == path / "model"
    refuse_damaged(path / "model")
    flip(path / "model/config.json")
    with pytest.raises(UserError, match=r"step-000001 is damaged: model/config.json is not as it was written"):
        refuse_damaged(path / "model")

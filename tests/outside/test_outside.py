"""A distribution of somebody else's, built as a wheel and installed beside the host: its parts get what their traits say."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring import run_contract
from ruamel.yaml import YAML

HERE = Path(__file__).resolve().parent / "acme_parts"
PUBLIC = {
    "rlhf_host",
    "rlhf_host.distributed",
    "rlhf_host.protocols",
    "rlhf_host.errors",
    "rlhf_host.engines.loading",
    "rlhf_host.engines.requests",
    "rlhf_host.backends.torch_backend",
    "rlhf_host.backends.weights",
    "rlhf_host.runtimes.building",
    "rlhf_host.runtimes.compute",
}
"""Where the names are that authors of engines, backends and runtimes may use."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder in which pip has installed the wheel."""
    folder = tmp_path_factory.mktemp("outside")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder / "wheels", HERE]
    subprocess.run([*pip, *map(str, build)], check=True)
    (wheel,) = (folder / "wheels").glob("*.whl")
    install = ["install", "--no-deps", "--no-index", "--target", folder / "site", wheel]
    subprocess.run([*pip, *map(str, install)], check=True)
    return folder / "site"


@pytest.fixture
def here(site, monkeypatch) -> None:
    """The distribution on this process's path, and on that of processes it starts."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])))


@pytest.fixture
def rlhf(site, tmp_path):
    """The command line, with the distribution installed."""

    def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "rlhf_host.cli.main", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


QUICK = ("train", "--algo", "rloo", "--reward", "math_verifier", "--config", "quickstart")
BOXED = ("--runtime", "boxed")
SMALL = ("--train.batch-size", "8", "--eval.at-start", "false", "--eval.at-end", "false", "--checkpoint.every", "0")


def chosen(rlhf, *flags: str) -> dict[str, str]:
    """The engine, backend, runtime and sync of a run with these flags."""
    config = YAML(typ="safe").load(rlhf(*QUICK, *flags, "--print-config").stdout)
    names = {key: config[key] for key in ("engine", "backend", "runtime", "sync")}
    return {key: value["name"] for key, value in names.items()}


def test_it_uses_public_names_alone():
    for path in HERE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlhf_host"):
                assert node.module in PUBLIC, f"{path.name}: {node.module}"
                assert not any(name.name.startswith("_") for name in node.names)


# --- defaults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sync"),
    [
        ((), "in_process"),
        (("--engine", "acme"), "ipc"),
        (("--engine", "acme", "--engine.files-only", "true"), "checkpoint"),
        (("--runtime", "boxed"), "ipc"),
        (("--engine", "acme", "--runtime", "boxed"), "ipc"),
        (("--engine", "acme", "--sync", "broadcast"), "broadcast"),
    ],
)
def test_the_default_sync_follows_from_traits(rlhf, flags, sync):
    assert chosen(rlhf, *flags)["sync"] == sync


def test_debug_takes_the_default_ones_in_place_of_those_that_say_so(rlhf):
    flags = ("--engine", "acme", "--backend", "sgd", "--runtime", "boxed", "--debug")
    expected = {"engine": "transformers", "backend": "sgd", "runtime": "local", "sync": "in_process"}
    assert chosen(rlhf, *flags) == expected
    said = rlhf(*QUICK, *flags, "--print-config").stderr
    assert "a debugger cannot follow engine acme; transformers is used instead" in said
    assert "a debugger cannot follow runtime boxed; local is used instead" in said
    assert "backend" not in said


def test_a_missing_library_is_named_with_the_extra_that_brings_it(rlhf):
    done = rlhf(*QUICK, "--engine", "acme", "--engine.fast", "true", code=2)
    assert done.stderr.strip().endswith("engine 'acme' needs acme_accelerator: pip install 'acme-parts[fast]'")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--backend", "sgd", "--backend.pretend-sharded", "true"),
            "backend sgd splits the actor's weights, but engine transf",
        ),
        (("--engine", "acme", "--sync", "in_process"), "with engine acme they have their own weights"),
        (("--runtime", "boxed", "--sync", "in_process"), "with runtime boxed they have their own weights"),
        (("--sync", "broadcast"), "engine transformers samples from the trainer's own module and needs none"),
        (("--engine", "acme", "--engine.files-only", "true", "--sync", "ipc"), "engine acme does not work with sync ipc"),
        (("--runtime", "boxed", "--placement", "actor=2"), "runtime boxed has one process"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(rlhf, flags, reason, tmp_path):
    assert reason in rlhf(*QUICK, *flags, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_another_engine_brings_nothing(rlhf):
    done = rlhf(*QUICK, "--engine", "vllm", "--print-config", code=2)
    assert "engine 'vllm' is provided by" in done.stderr
    named = YAML(typ="safe").load(rlhf(*QUICK, "--engine", "acme-parts:vllm", "--print-config").stdout)
    plain = YAML(typ="safe").load(rlhf(*QUICK, "--engine", "acme", "--print-config").stdout)
    assert [config.pop("engine") != {} for config in (named, plain)] == [True, True]
    assert {**named, "run_dir": None} == {**plain, "run_dir": None}


# --- runs ---------------------------------------------------------------------------------------


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_quickstart_trains_in_the_box_as_it_does_here(rlhf, tmp_path):
    own = ("--engine", "acme", "--backend", "sgd", "--actor.lr", "0.1", "--train.steps", "3", *SMALL)
    rlhf(*QUICK, *own, "--run-dir", "here")
    rlhf(*QUICK, *own, *BOXED, "--run-dir", "boxed")
    here, boxed = metrics(tmp_path / "here"), metrics(tmp_path / "boxed")
    assert [row["version"] for row in boxed] == [1, 2, 3]
    for one, other in zip(here, boxed, strict=True):
        assert other["mismatch/max"] < 1e-4
        for name in ("reward/mean", "loss", "grad_norm", "lr", "length/mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    assert any(row["grad_norm"] > 0 for row in boxed)
    rlhf("train", "--resume", "boxed", "--train.steps", "4")
    assert [row["version"] for row in metrics(tmp_path / "boxed")] == [1, 2, 3, 4]
    assert "acme-parts==3.1" in (tmp_path / "boxed" / "requirements.txt").read_text()


def test_a_box_that_dies_ends_the_run_in_one_line(site, tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-m", "rlhf_host.cli.main", *QUICK, *SMALL, *BOXED, "--run-dir", tmp_path / "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 300
    while not (log.exists() and log.read_text()):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(int(pid), signal.SIGKILL)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "the box is lost" in errors
    assert "rlhf train --resume" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("kind", "name"), [("engine", "acme"), ("backend", "sgd"), ("runtime", "boxed")])
def test_its_parts_keep_their_contracts(here, kind, name):
    assert [result for result in run_contract(kind, name) if not result.passed] == []

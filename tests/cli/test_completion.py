"""Shell completion, by the protocol that the shells speak."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

import pytest
from click.testing import CliRunner

from rlhf_host.cli.main import main

SLOW = """
import time
from pydantic import BaseModel, Field
time.sleep(600)
class X:
    class Options(BaseModel):
        knob: int = Field(1, description="a knob")
"""
NOISY = """
print("plain,--surprise")
from pydantic import BaseModel, Field
from rlhf_host import hookimpl
class X:
    class Options(BaseModel):
        knob_one: int = Field(1, description="a knob")
        mode: str | None = None
    def __init__(self, options): ...
    @hookimpl
    def score(self, trajectories): ...
"""
HEAVY = {"torch", "transformers", "datasets", "ray", "vllm", "deepspeed", "numpy"}


@pytest.fixture
def offered(here, monkeypatch):
    """What bash is offered for the last word of a line, as ``type,value`` without the type where it is plain."""
    monkeypatch.chdir(here.folder)

    def complete(line, python=()):
        words = shlex.split(line) + ([""] if line.endswith(" ") else [])
        environment = {"_RLHF_COMPLETE": "bash_complete", "COMP_WORDS": shlex.join(words), "COMP_CWORD": str(len(words) - 1)}
        if python:
            done = here.rlhf_process(python=python, **environment)
            code = done.returncode
        else:
            done = CliRunner().invoke(main, env=environment, prog_name="rlhf")
            code = done.exit_code
        assert code == 0, done.stderr
        complete.stderr = done.stderr
        return [item.removeprefix("plain,") for item in done.stdout.splitlines() if item]

    return complete


def test_commands_and_their_flags(offered):
    assert {"train", "eval", "plugins", "doctor", "completion"} <= set(offered("rlhf "))
    assert offered("rlhf plugins u") == ["uninstall"]
    assert "--json" in offered("rlhf plugins --")
    assert offered("rlhf plugins --kind e") == ["extension", "engine"]
    assert offered("rlhf completion ") == ["bash", "zsh", "fish"]


def test_plugin_names(offered):
    assert offered("rlhf train --algo rl") == ["rloo"]
    assert offered("rlhf train --algo rloo --reward math") == ["math_verifier"]
    assert offered("rlhf train --with dynamic_filtering --with ti") == ["tis"]
    assert offered("rlhf train --eval.reward reward_") == ["reward_model"]
    assert offered("rlhf eval --disable rlo") == ["rloo"]
    assert offered("rlhf train --config cisp") == ["cispo", "file,cisp"]
    assert (offered("rlhf rollout -o a"), offered("rlhf train -o a")) == (["file,a"], ["dir,a"])
    assert offered("rlhf plugins show rloo_") == []
    assert offered("rlhf plugins check math") == ["math_verifier"]
    assert "rlhf-plugin-grpo" in offered("rlhf plugins install rlhf-plugin-g")
    assert "grpo" in offered("rlhf plugins uninstall g")


def test_names_after_an_alias_as_bash_and_as_zsh_split_it(offered):
    assert offered("rlhf train --reward strict = math") == ["math_verifier"]
    assert offered("rlhf train --algo = rl") == ["rloo"]
    assert offered("rlhf train --reward strict=math") == ["strict=math_verifier"]


def test_settings_of_the_schema_and_their_values(offered):
    assert offered("rlhf train --actor.attn") == ["--actor.attn-implementation"]
    assert offered("rlhf train --actor.attn_") == ["--actor.attn_implementation"]
    assert {"--reward-model.model", "--reward-model.dtype"} <= set(offered("rlhf train --reward-model."))
    assert offered("rlhf train --kl.place ") == ["reward", "loss"]
    assert offered("rlhf eval --data.shuffle ") == ["true", "false"]
    assert offered("rlhf train --resume ") == ["dir,"]
    assert offered("rlhf train --actor.model ") == ["file,"]
    assert offered("rlhf train --data ari") == ["arithmetic", "file,ari"]
    assert "--print-config" in offered("rlhf train --pri")
    assert "--print-config" not in offered("rlhf eval --pri")
    assert offered("rlhf replay ") == ["file,"]


def test_extensions_and_runtimes_by_their_own_names(offered):
    assert offered("rlhf train --dyn") == ["--dynamic-filtering"]
    assert offered("rlhf train --dynamic_filtering.lo") == ["--dynamic_filtering.low"]
    assert {"--kl", "--ray", "--tis"} <= set(offered("rlhf train --"))
    assert offered("rlhf train --kl.pl") == ["--kl.place"]
    assert offered("rlhf train --kl.coef 0.1 --kl.estimator un") == ["unbiased"]
    assert offered("rlhf train --with kl --with.kl.pl") == ["--with.kl.place"]
    assert offered("rlhf train --ray.num-c") == ["--ray.num-cpus"]
    assert "--engine.max-model-len" in offered("rlhf train --engine vllm --engine.max-m")
    assert offered("rlhf train --sync.verify ") == ["auto", "on", "off"]


def test_options_of_the_chosen_plugins_and_their_values(offered, site):
    assert "--algo.clip-eps" in offered("rlhf train --algo grpo --algo.cl")
    assert offered("rlhf train --algo.cl") == []
    assert "cispo" in offered("rlhf train --algo grpo --algo.loss ")
    assert "--reward.strict.weight" in offered("rlhf train --reward strict=math_verifier --reward.strict.w")
    (site.folder / "run.yaml").write_text("algo: grpo\n")
    assert "--algo.clip-eps" in offered("rlhf train --config run.yaml --algo.clip")


def test_a_plugin_that_prints_or_hangs_does_not_spoil_it(offered, site):
    site.install("cli-noisy", {"rlhf.rewards": "noisy = cli_noisy:X"}, {"cli_noisy.py": NOISY})
    site.install("cli-slow", {"rlhf.rewards": "slow = cli_slow:X"}, {"cli_slow.py": SLOW})
    assert offered("rlhf train --reward noisy --reward.noisy.") == [
        "--reward.noisy.weight",
        "--reward.noisy.knob-one",
        "--reward.noisy.mode",
    ]
    assert offered("rlhf train --reward slow --reward.slow.") == ["--reward.slow.weight"]


def test_mistakes_on_the_line_are_no_tracebacks(offered):
    for line in (
        "rlhf plugn ",
        "rlhf train stray --algo ",
        "rlhf train --algo nobody --algo.",
        "rlhf train --config none.yaml --al",
    ):
        offered(line)
        assert offered.stderr == ""


@pytest.mark.parametrize(
    "line", ["rlhf ", "rlhf plugins show ", "rlhf train --actor.", "rlhf train --algo grpo --algo.", "rlhf train --ray."]
)
def test_no_heavy_module_is_imported(offered, line):
    assert offered(line, python=["-X", "importtime"])
    imported = {row.rpartition("|")[2].strip() for row in offered.stderr.splitlines() if row.startswith("import time:")}
    assert "rlhf_host.errors" in imported
    assert not {name.partition(".")[0] for name in imported} & HEAVY


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_for_that_shell(site, shell):
    done = site.rlhf("completion", shell)
    assert done.returncode == 0
    assert f"_RLHF_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_takes_the_script_and_completes_with_it(site):
    import sys

    bin_folder = site.folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "rlhf").write_text(f"#!{sys.executable}\nfrom rlhf_host.cli.main import main\nmain(prog_name='rlhf')\n")
    (bin_folder / "rlhf").chmod(0o755)
    script = """
    eval "$(rlhf completion bash)" || exit 3
    COMP_WORDS=(rlhf train --algo rl) COMP_CWORD=3
    _rlhf_completion rlhf rl --algo && printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "rloo\n"), done.stderr

"""``FILE.py:NAME`` where NAME is a class: the plugin itself, with its options, hooks and state."""

from __future__ import annotations

import json
import re

import pytest
import yaml

import rlhf_host
from tests.conftest import ROOT
from tests.docs.conftest import blocks

(CURRICULUM,) = (block.body for block in blocks(ROOT / "docs/python.md") if block.title == "curriculum.py")

GAME = """
from near_by import Base
from rlhf_host import Needs, Step, hookimpl
from rlhf_plugin_rloo import RLOO


class Halved(RLOO):
    class Options(RLOO.Options):
        factor: float = 0.5

    @hookimpl
    def compute_advantages(self, experience):
        advantages = super().compute_advantages(experience)
        advantages.advantages = advantages.advantages * self.options.factor
        return advantages


class Sums(Base):
    @hookimpl
    def load_tasks(self, split, seed):
        return [{"prompt": f"{n}+1=", "label": str(n + 1)} for n in range(self.options.size)]


class Play:
    @hookimpl
    def needs(self):
        return Needs(rewards=False)

    @hookimpl
    def agent_reset(self, episode):
        return Step()

    @hookimpl
    def agent_step(self, episode, action):
        return Step(reward=float(len(action.token_ids)), done=True)


class Kept(Base):
    @hookimpl
    def keep_group(self, group):
        return len(group.trajectories) == self.options.size
"""
BESIDE = """
from pydantic import BaseModel


class Base:
    class Options(BaseModel):
        size: int = 4

    def __init__(self, options):
        self.options = options
"""
ODD = """
from pydantic import BaseModel
from rlhf_host import hookimpl

def Function(text, label): return 1.0
class Empty: pass
class Unmarked:
    def score(self, trajectories, context): ...
class Forgets:
    @hookimpl
    def score(self, trajectories, context): return [1.0] * len(trajectories)
    @hookimpl
    def state_dict(self): return {}
class Misspelled:
    @hookimpl
    def scor(self, trajectories): ...
class Mute:
    @hookimpl
    def run_started(self): ...
class Plain:
    Options = dict
    @hookimpl
    def score(self, trajectories): ...
class Bare:
    def __init__(self): ...
    @hookimpl
    def score(self, trajectories): ...
class Deaf:
    class Options(BaseModel):
        length: int = 3
    @hookimpl
    def score(self, trajectories): ...
"""
SMALL = (
    "--rollout.n",
    "4",
    "--rollout.max-new-tokens",
    "8",
    "--train.batch-size",
    "2",
    "--train.threads",
    "1",
    "--kernels",
    "none",
)
QUICK = ("--actor.model", "quickstart", "--actor.schedule", "constant", "--data", "arithmetic", *SMALL)
CLOSER = ("--reward", "curriculum.py:Closer", "--reward.Closer.tolerance", "1e3", "--reward.Closer.target", "0.2")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with the files."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"curriculum.py": CURRICULUM, "game.py": GAME, "near_by.py": BESIDE}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def tolerances(run):
    return [json.loads(line)["closer/tolerance"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_reward_of_the_page_has_options_and_a_state_that_a_resume_goes_on_from(rlhf_here, here, caplog):
    for run, steps in (("whole", 4), ("run", 2)):
        done = rlhf_here("train", "--algo", "rloo", *CLOSER, *QUICK, "--train.steps", steps, "--run-dir", run)
        assert done.exit_code == 0, done.output
    saved = yaml.safe_load((here / "run/config.yaml").read_text())["reward"]["Closer"]
    assert saved == {"name": f"{here}/curriculum.py:Closer", "weight": 1.0, "tolerance": 1e3, "target": 0.2}
    assert f"{here}/curriculum.py" in [plugin["distribution"] for plugin in json.loads((here / "run/plugins.json").read_text())]

    (here / "curriculum.py").write_text(CURRICULUM + "# another line\n")
    again = rlhf_here("train", "--resume", "run", "--train.steps", "4")
    assert again.exit_code == 0, again.output
    assert tolerances(here / "run") == tolerances(here / "whole")
    assert len(set(tolerances(here / "whole"))) > 2, "it is halved before the resume, and after it"
    assert re.search(
        r"reward:Closer is of .*curriculum.py \w{12} now; .*curriculum.py \w{12} wrote the checkpoint", caplog.text
    )

    (here / "curriculum.py").unlink()
    gone = rlhf_here("train", "--resume", "run", "--train.steps", "5")
    assert gone.exit_code == 2, gone.output
    lost = rf"reward 'Closer' of this run was in {here}/curriculum.py \w+, which is not there any more"
    assert re.search(lost, gone.output)
    judged = rlhf_here("eval", "--checkpoint", "run")
    assert judged.exit_code == 2, judged.output
    assert re.search(lost, judged.output)


def test_every_kind_with_hooks_may_be_a_class_in_a_file(here):
    """From Python, where names are read as on the command line."""
    settings = {"rollout.n": 4, "rollout.max_new_tokens": 8, "train.batch_size": 2, "train.threads": 1, "train.steps": 1}
    choices = {"algo": "game.py:Halved", "agent": "game.py:Play", "extensions": {"k": {"name": "game.py:Kept", "size": 4}}}
    run = rlhf_host.train(**choices, data="game.py:Sums", model="quickstart", **settings, **{"data.Sums.size": 6})
    infos = {plugin["kind"]: plugin for plugin in json.loads((run.run_dir / "plugins.json").read_text())}
    names = {kind: infos[kind]["name"] for kind in ("algo", "agent", "extension", "tasks")}
    assert names == {"algo": "Halved", "agent": "Play", "extension": "Kept", "tasks": "Sums"}
    [row] = run.metrics
    assert row["reward/agent"] == row["length/mean"]
    assert run.config.algo.options["factor"] == 0.5
    assert run.config.data.sources[0].options == {"size": 6}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--reward", "curriculum.py:Closer", "--reward.Closer.tolerence", "3"),
            "has no option 'tolerence'; did you mean 'tolerance'",
        ),
        (
            ("--reward", "curriculum.py:Closer", "--reward.Closer.target", "1"),
            "reward.Closer.target: should be less than 1, not '1'",
        ),
        (
            ("--reward", "curriculum.py:Closed", "--reward.Closed.target", "1"),
            "curriculum.py has no 'Closed'; did you mean 'Closer'",
        ),
        (
            ("--reward", "odd.py:Empty"),
            "Empty is a class that marks no method with @hookimpl$",
        ),
        (("--reward", "odd.py:Unmarked"), "Unmarked is a class that marks no method with @hookimpl: write it above def score"),
        (
            ("--reward", "odd.py:Forgets"),
            "has state_dict and no load_state_dict, .*: add load_state_dict",
        ),
        (("--reward", "odd.py:Misspelled"), r"implements 'scor', which is not a hook; did you mean 'score'"),
        (("--reward", "odd.py:Mute"), "has no score hook, so it scores nothing"),
        (("--reward", "odd.py:Plain"), "Options must be a subclass of pydantic.BaseModel"),
        (("--reward", "odd.py:Bare"), "Bare is made with its options alone; write def __init__"),
        (("--reward", "odd.py:Deaf"), r"has Options and takes none; give it def __init__\(self, options\)"),
        (("--with", "odd.py:Function"), "odd.py:Function is a function, not a class"),
        (("--with", "absent.py:Kept"), "extension 'Kept': there is no Python file .*absent.py"),
    ],
)
def test_a_class_that_will_not_do_is_refused_as_a_package_s(flags, message, rlhf_here, here):
    (here / "odd.py").write_text(ODD)
    given = () if flags[0] == "--reward" else ("--reward", "curriculum.py:Closer")
    done = rlhf_here("train", "--algo", "rloo", *flags, *given, *QUICK, "--run-dir", "run", "--dry-run")
    assert done.exit_code == 2, done.output
    assert re.search(message, done.output, re.M), done.output
    assert "Traceback" not in done.output


def test_a_class_may_be_a_reward_of_an_environment_with_options_among_its_settings(rlhf_here, here):
    options = 'settings = {"reward": {"Closer": {"tolerance": 8}}}'
    (here / "sums.py").write_text(
        f"from curriculum import Closer\nfrom game import Sums\nrewards = {{Closer: 0.5}}\n{options}\n"
    )
    shown = rlhf_here("train", "--algo", "rloo", "--config", "sums.py", *QUICK, "--print-config")
    assert shown.exit_code == 0, shown.output
    reward = yaml.safe_load(shown.stdout)["reward"]
    assert reward == {"Closer": {"name": f"{here}/sums.py:Closer", "weight": 0.5, "tolerance": 8.0, "target": 0.5}}


def test_help_shows_the_options_of_a_class_in_a_file(rlhf_here, here):
    shown = rlhf_here("train", "--reward", "curriculum.py:Closer", "--help").output
    assert re.search(r"Options of reward 'Closer' from .*curriculum.py \w{12}", shown)
    assert "share of near answers at which it is halved (float, default 0.5)" in shown

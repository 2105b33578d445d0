"""Every message on the page is brought about here, by what the page says brings it about."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhf_host.config.run_dir import locked
from tests.chat_models import save_chat_model

from .conftest import DOCS

HEADINGS = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)

TROUBLE = '''
"""Plugins that go wrong."""
import time
from rlhf_host import Needs, LossTerm, RoleNeed, Step, hookimpl

class Base:
    def __init__(self, options):
        self.options = options

class Unmarked(Base):
    @hookimpl
    def needs(self):
        return Needs("prompts", (RoleNeed("actor", trainable=True, source=None),))
    def compute_advantages(self, experience):
        ...
    @hookimpl
    def compute_loss(self, outputs):
        return []

class NaN(Base):
    @hookimpl
    def compute_loss(self, role, outputs):
        return [LossTerm("nan", outputs.logprobs * float("nan"))]

class Wide(Base):
    @hookimpl
    def loss_masks(self, experience):
        return experience.action_mask[:, :1]

class Slow(Base):
    @hookimpl
    def score(self, trajectories):
        time.sleep(3)
        return [0.0 for _ in trajectories]

class Flat(Base):
    @hookimpl
    def score(self, trajectories):
        return [0.0 for _ in trajectories]

class Silent(Base):
    @hookimpl
    def agent_reset(self):
        return Step()
    @hookimpl
    def agent_step(self):
        return Step()
'''
POINTS = """
[rlhf.algos]
unmarked = trouble:Unmarked
[rlhf.rewards]
slow = trouble:Slow
flat = trouble:Flat
broken_import = trouble_import:Reward
twice = trouble:Flat
[rlhf.extensions]
nan = trouble:NaN
wide = trouble:Wide
[rlhf.agents]
silent = trouble:Silent
"""


def distribution(site: Path, name: str, points: str, requires: str = "rlhf-host>=0.10,<0.11") -> None:
    about = site / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: Made up.\nRequires-Dist: {requires}\n"
    )
    about.joinpath("entry_points.txt").write_text(points)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trouble")
    (folder / "trouble.py").write_text(TROUBLE)
    (folder / "trouble_import.py").write_text("import a_module_that_is_not_there\n")
    distribution(folder, "trouble", POINTS)
    distribution(folder, "trouble-again", "[rlhf.rewards]\ntwice = trouble:Flat\n")
    distribution(folder, "trouble-of-tomorrow", "[rlhf.rewards]\ntomorrow = trouble:Flat\n", "rlhf-host>=2,<3")
    return folder


@pytest.fixture
def said(site, reward_plugins, tiny_model, prompts, tmp_path, monkeypatch):
    """What ``rlhf train`` says with a tiny model and flags on top."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(reward_plugins))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def train(*flags, run_dir=None):
        from rlhf_host.cli.main import main

        small = ["--rollout.n", "4", "--rollout.max-new-tokens", "4", "--train.batch-size", "4", "--train.steps", "1"]
        chosen = set(flags)
        start = [] if "--algo" in chosen else ["--algo", "rloo"]
        start += [] if {"--reward", "--agent"} & chosen else ["--reward", "vowels"]
        start += [] if "--data" in chosen else ["--data", prompts]
        start += [] if "--actor.model" in chosen else ["--actor.model", tiny_model]
        given = dict(zip(small[::2], small[1::2], strict=True)) | {"--run-dir": run_dir or tmp_path / "run"}
        left = [word for flag, value in given.items() if flag not in chosen for word in (flag, value)]
        return CliRunner().invoke(main, list(map(str, ["train", *start, *left, *flags]))).output

    yield train
    for name in ("trouble", "trouble_import"):
        sys.modules.pop(name, None)


def finished(said, tmp_path, *flags, before=lambda run_dir: None):
    said(run_dir=tmp_path / "done")
    from rlhf_host.cli.main import main

    before(tmp_path / "done")
    return CliRunner().invoke(main, ["train", "--resume", str(tmp_path / "done"), *flags]).output


def in_use(said, tmp_path):
    with locked(tmp_path / "run"):
        return said()


def damaged(said, tmp_path):
    return finished(said, tmp_path, before=lambda run_dir: (run_dir / "checkpoints/step-000001/trainer.pt").write_text(""))


def twice(said, tmp_path):
    said(run_dir=tmp_path / "done")
    return said(run_dir=tmp_path / "done")


def not_json(said, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": oh}\n')
    return said("--data", tmp_path / "rows.jsonl")


def rows_of(said, folder, **columns):
    (folder / "odd.jsonl").write_text(json.dumps(columns) + "\n")
    save_chat_model(folder / "chat")
    return said("--data", folder / "odd.jsonl", "--actor.model", folder / "chat", "--reward", "math_verifier")


def thoughts(said, folder):
    talk = [("user", "1+1="), ("assistant", "2"), ("user", "2+2=")]
    prompt = [{"role": role, "content": text, **({"reasoning": "hm"} if role == "assistant" else {})} for role, text in talk]
    return rows_of(said, folder, prompt=prompt, label="4")


CAUSES = {
    "cannot judge the row": lambda said, tmp: rows_of(said, tmp, prompt="1+1=", result="2"),
    "the chat template leaves out": thoughts,
    "is rendered already": lambda said, tmp: rows_of(said, tmp, prompt="<|im_start|>user\n1+1=<|im_end|>\n", label="2"),
    "no algo named": lambda said, tmp: said("--algo", "gropo"),
    "is provided by": lambda said, tmp: said("--reward", "twice"),
    "is for rlhf-host": lambda said, tmp: said("--reward", "tomorrow"),
    "failed: ModuleNotFoundError": lambda said, tmp: said("--reward", "broken_import"),
    "has no option": lambda said, tmp: said("--algo.clip-epss", "0.3"),
    "no chosen plugin": lambda said, tmp: said("--algo", "unmarked"),
    "needs groups of": lambda said, tmp: said("--rollout.n", "1"),
    "training has to know which tokens": lambda said, tmp: said("--engine", "vllm", "--rollout.top-p", "0.9"),
    "rollout.temperature is 0": lambda said, tmp: said("--rollout.temperature", "0"),
    "train.old_logprobs fused": lambda said, tmp: said("--train.old-logprobs", "fused", "--train.epochs", "2"),
    "no model 'gpt-7'": lambda said, tmp: said("--actor.model", "gpt-7"),
    "not valid JSON": not_json,
    "no tasks are left": lambda said, tmp: said("--data.max-prompt-tokens", "1"),
    "is not empty": twice,
    "is finished": finished,
    "is in use by": in_use,
    "cannot become": lambda said, tmp: finished(said, tmp, "--seed", "5"),
    "is damaged": damaged,
    "trajectories could not be judged": lambda said, tmp: said("--reward", "broken"),
    "no answer in": lambda said, tmp: said("--reward", "slow", "--rollout.score-timeout-s", "0.2"),
    "no group was kept": lambda said, tmp: said(
        "--with", "dynamic_filtering", "--reward", "flat_score=vowels", "--with.dynamic_filtering.high", "0.0001"
    ),
    "in every group": lambda said, tmp: said("--reward", "flat"),
    "the loss is nan": lambda said, tmp: said("--with", "nan"),
    "gave [4, 1]": lambda said, tmp: said("--with", "wide", "--train.batch-size", "1"),
    "gave neither an observation": lambda said, tmp: said("--agent", "silent", "--reward", "vowels"),
    "put the tools": lambda said, tmp: said(
        "--agent", "multi_turn", "--agent.tools", tools(tmp), "--agent.tool-format", "native", "--reward", "vowels"
    ),
}


def tools(folder: Path) -> str:
    file = folder / "tools.py"
    file.write_text('def now() -> str:\n    """Tells the time."""\n    return "noon"\n')
    return str(file)


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_of_the_page_is_what_is_said(heading, said, tmp_path):
    (cause,) = [cause for start, cause in CAUSES.items() if heading.startswith(start)]
    output = " ".join(cause(said, tmp_path).split())
    assert heading in output


def test_no_cause_is_without_its_message():
    assert len(HEADINGS) == len(CAUSES)

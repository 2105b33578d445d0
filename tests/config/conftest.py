"""Plugins of a distribution that exists only here, and the command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

PLUGINS = '''"""Plugins with every sort of option and need."""
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
from rlhf_host import Forbid, Needs, RoleNeed, hookimpl

class Plugin:
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
    def __init__(self, options):
        self.options = options

class Toy(Plugin):
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        clip_eps: float = Field(0.2, ge=0, lt=1, description="how far the ratio may go")
        dual_clip: float | None = Field(3.0, gt=1)
        layers: list[int] = []
        whiten: bool = False
        mode: Literal["fast", "slow"] = "fast"
    @hookimpl
    def needs(self):
        return Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),), min_group_size=2)
    @hookimpl
    def compute_advantages(self, experience): ...
    @hookimpl
    def compute_loss(self, role, outputs, batch): ...

class Picky(Toy):
    @hookimpl
    def needs(self):
        critic = RoleNeed("critic", head="scalar", trainable=True, source=None)
        roles = (RoleNeed("actor", trainable=True, source=None), critic)
        forbids = (Forbid("train.old_logprobs", "sampler", "made up"), Forbid("rollout.n", 16, "made up"))
        return Needs(data="prompts", roles=roles, min_group_size=4, forbids=forbids)

class Headless(Toy):
    @hookimpl
    def needs(self):
        return Needs()

class Pairs(Plugin):
    @hookimpl
    def needs(self):
        return Needs(data="preference", roles=(RoleNeed("actor", trainable=True, source=None),))

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        return []

class Length(Plugin):
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        timeout_s: float = 1.0
    @hookimpl
    def score(self, trajectories): ...

class Mute(Plugin):
    pass

class Judge(Length):
    @hookimpl
    def needs(self):
        return Needs(roles=(RoleNeed("reward_model", head="scalar", source=None),))

class Other(Plugin):
    """Wants the judge's model in another form."""
    @hookimpl
    def needs(self):
        return Needs(roles=(RoleNeed("reward_model", source=None),))

class Maze(Plugin):
    """Its steps give rewards."""
    @hookimpl
    def agent_run(self, episode, policy): ...

class Sums(Plugin):
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        largest: int = 9
    @hookimpl
    def load_tasks(self, split, seed):
        return [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(self.options.largest)]
'''

ENTRY_POINTS = """
[rlhf.algos]
toy = made_up.plugins:Toy
picky = made_up.plugins:Picky
headless = made_up.plugins:Headless
pairs = made_up.plugins:Pairs
[rlhf.rewards]
length = made_up.plugins:Length
mute = made_up.plugins:Mute
judge = made_up.plugins:Judge
[rlhf.agents]
maze = made_up.plugins:Maze
[rlhf.extensions]
sift = made_up.plugins:Toy
other = made_up.plugins:Other
[rlhf.tasks]
sums = made_up.plugins:Sums
[rlhf.presets]
paper = made_up_recipes:paper.yaml
"""


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    about, package, recipes = (root / name for name in ("made_up-1.0.dist-info", "made_up", "made_up_recipes"))
    for folder in (about, package, recipes):
        folder.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\nRequires-Dist: rlhf-host>=0.10,<0.11\n"
    )
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (package / "__init__.py").write_text("")
    (package / "plugins.py").write_text(PLUGINS)
    (recipes / "__init__.py").write_text("raise AssertionError('a preset is read without importing its package')\n")
    (recipes / "paper.yaml").write_text("algo: {name: toy, clip_eps: 0.1, mode: slow}\nrollout:\n  n: 16\nwith: [sift]\n")
    return root


@pytest.fixture(autouse=True)
def _installed(made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(made_up))
    monkeypatch.chdir(tmp_path)


class CommandLine:
    def __call__(self, *arguments: str | Path) -> Result:
        from rlhf_host.cli.main import main

        return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="rlhf")

    def refused(self, *arguments: str | Path) -> list[str]:
        """The lines of a refusal: exit code 2, no traceback, and nothing written."""
        result = self(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr.count("Error: ") == 1
        assert "Traceback" not in result.output
        assert not list(Path.cwd().glob("runs*"))
        return result.stderr.partition("Error: ")[2].splitlines()


@pytest.fixture
def rlhf() -> CommandLine:
    return CommandLine()

"""What many tests share: a tiny real model, prompts, reward plugins installed for real, and the real command line."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from rlhf_authoring.models import write_tiny_model

import rlhf_host

from . import schedule
from .forks import COMMAND, Forked, ForkServer

# Before torch is imported, here and in every process that a test starts: workers, ranks and engines share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ENVIRONMENT = dict(os.environ)
"""What the tests began with: libraries set variables as they are imported here, which a new process would not have."""

ROOT = Path(rlhf_host.__file__).parent.parent

REWARDS = '''"""Rewards for tests."""
from pydantic import BaseModel
from rlhf_host import Reward, hookimpl

class Base:
    class Options(BaseModel):
        pass
    def __init__(self, options):
        self.options = options

class Vowels(Base):
    """A dense reward that a random model can raise."""
    @hookimpl
    def score(self, trajectories):
        found = [sum(c in "aeiou" for c in t.text) / 8 for t in trajectories]
        return [Reward(value, score=float(value > 0.25)) for value in found]

class Broken(Base):
    @hookimpl
    def score(self, trajectories):
        raise ConnectionError("the judge is down")

class Picky(Base):
    """Cannot judge the first sample of every group."""
    @hookimpl
    def score(self, trajectories):
        return [None if t.sample == 0 else float(len(t.text)) for t in trajectories]
'''
ENTRY_POINTS = "[rlhf.rewards]\n" + "".join(f"{name.lower()} = test_rewards:{name}\n" for name in ("Vowels", "Broken", "Picky"))


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(schedule.__name__):  # make names it, for the tests of packages alone
        config.pluginmanager.register(schedule, schedule.__name__)


@dataclass(frozen=True)
class CommandLine:
    """The real ``rlhf``, forked or started."""

    environment: dict[str, str]
    begin: Callable[..., Forked | subprocess.Popen[str]]

    def start(self, *arguments: str | Path) -> Forked | subprocess.Popen[str]:
        return self.begin([*map(str, arguments)], self.environment)

    def run(self, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_process(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path | None = None,
    *,
    python: Sequence[str] = (),
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | None = None,
    program: str | Path = COMMAND,
    text: bool = True,
) -> subprocess.Popen[Any]:
    """The command in an interpreter of its own, to which the flags ``python`` are given; or a script."""
    begun = [str(program)] if str(program).endswith(".py") else ["-m", str(program)]
    pipes = {"stdin": None, "stdout": stdout, "stderr": stderr}
    pipes = {name: subprocess.PIPE if file is None else file for name, file in pipes.items()}
    return subprocess.Popen([sys.executable, *python, *begun, *arguments], env=environment, cwd=directory, text=text, **pipes)


@contextmanager
def in_background() -> Iterator[None]:
    """Processes that are started inside ignore Ctrl-C, as what a script starts with ``&``."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def fork() -> Iterator[Callable[..., Forked | subprocess.Popen[Any]]]:
    """``fork(arguments, environment, directory)``: the command, or another program, forked where that is safe: ``forks.py``."""
    if sys.platform != "linux":
        yield start_process
        return
    server = ForkServer(ENVIRONMENT)
    yield server.start
    server.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"{i}+{7 * i % 100}" + "a" * (i % 5) + "=", "label": str(i)} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def reward_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that, on the path, is an installed distribution of reward plugins."""
    root = tmp_path_factory.mktemp("plugins")
    about = root / "test_rewards-1.0.dist-info"
    about.mkdir()
    (root / "test_rewards.py").write_text(REWARDS)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: test-rewards\nVersion: 1.0\nRequires-Dist: rlhf-host>=0.10,<0.11\n"
    )
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (about / "RECORD").write_text("test_rewards.py,,\n")
    return root


@pytest.fixture(scope="session")
def environment(reward_plugins: Path) -> dict[str, str]:
    """What the command's processes inherit: the reward plugins are installed."""
    path = os.pathsep.join(filter(None, [str(reward_plugins), os.environ.get("PYTHONPATH", "")]))
    return {**ENVIRONMENT, "PYTHONPATH": path, "COLUMNS": "120"}


@pytest.fixture(scope="session")
def rlhf(environment: dict[str, str], fork: Callable[..., Any]) -> CommandLine:
    """The command line, forked: what is computed, printed and written."""
    return CommandLine(environment, fork)


@pytest.fixture(scope="session")
def rlhf_process(environment: dict[str, str]) -> CommandLine:
    """The command line, started: also how a command begins, and how it ends. Every command has a test with this one."""
    return CommandLine(environment, start_process)


@pytest.fixture
def small_run(tiny_model: Path, prompts: Path) -> Sequence[str | Path]:
    """Flags of a run that takes seconds: 4 prompts × 4 samples × 8 tokens."""
    return [
        *(
            "train",
            "--algo",
            "rloo",
            "--reward",
            "vowels",
            "--actor.model",
            tiny_model,
            "--data",
            prompts,
            "--actor.lr",
            "1e-3",
        ),
        *("--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.threads", "1"),
        *("--kernels", "none"),
    ]


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def rlhf_here(reward_plugins: Path, monkeypatch: pytest.MonkeyPatch):
    """The same commands in this process, where starting costs nothing."""
    from click.testing import CliRunner

    from rlhf_host.cli.main import main

    monkeypatch.syspath_prepend(str(reward_plugins))
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


# --- installed distributions: folders with a module and the metadata that pip would have left --------------------


class Site:
    """A folder that stands for site-packages."""

    def __init__(self, folder: Path, fork: Callable[..., Any] = start_process):
        self.folder, self.fork = folder, fork
        folder.mkdir(exist_ok=True)

    def install(
        self, distribution, entry_points, modules=None, requires=("rlhf-host>=0.10,<0.11",), version="1.0", summary="A summary."
    ):
        """``entry_points``: group → ``name = module:attribute`` lines; ``modules``: path → source."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        head = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nSummary: {summary}\n"
        (info / "METADATA").write_text(f"{head}{needs}\nLong description.\n")
        points = "".join(f"[{group}]\n{lines}\n\n" for group, lines in entry_points.items())
        (info / "entry_points.txt").write_text(points)
        for path, source in (modules or {}).items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return info

    def rlhf(self, *arguments, begin=None, **environment):
        """The real command line, this folder on its path: forked, or begun by ``begin``."""
        path = os.pathsep.join([str(self.folder), str(ROOT)])
        process = (begin or self.fork)(
            arguments, {**ENVIRONMENT, "PYTHONPATH": path, "COLUMNS": "80", **environment}, self.folder
        )
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def rlhf_process(self, *arguments, python=(), stdout=None, **environment):
        """The same in an interpreter of its own, with its flags."""
        return self.rlhf(*arguments, begin=partial(start_process, python=python, stdout=stdout), **environment)

    def listed(self, *arguments):
        """``rlhf plugins --json``: name → object of what the test installed."""
        done = self.rlhf("plugins", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return {row["name"]: row for row in json.loads(done.stdout) if row["distribution"].startswith("cmd-")}


@pytest.fixture
def site(tmp_path, fork):
    return Site(tmp_path / "site", fork)


@pytest.fixture
def here(site, monkeypatch):
    """The same, importable in this process too."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(site.folder))
    yield site
    for name in set(sys.modules) - before:
        if str(site.folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


JUDGE = """
from typing import Literal
from pydantic import BaseModel, Field
from rlhf_host import hookimpl

class Judge:
    class Options(BaseModel):
        timeout_s: float = Field(5.0, description="Seconds for one answer")
        mode: Literal["strict", "loose"]

    def __init__(self, options): ...

    @hookimpl
    def score(self, trajectories): ...

    @hookimpl
    def needs(self): ...
"""


@pytest.fixture
def shop(site):
    """One plugin of each status."""
    site.install("cmd-good", {"rlhf.rewards": "judge = cmd_good:Judge"}, {"cmd_good.py": JUDGE}, summary="Judges answers.")
    site.install("cmd-left", {"rlhf.algos": "twin = cmd_left:X"}, {"cmd_left.py": ""}, requires=[])
    site.install("cmd-right", {"rlhf.algos": "twin = cmd_right:X"}, {"cmd_right.py": ""}, requires=["rlhf-host"])
    site.install("cmd-old", {"rlhf.rewards": "old = cmd_old:X"}, {"cmd_old.py": ""}, requires=["rlhf-host<0.9"])
    site.install("cmd-gone", {"rlhf.rewards": "gone = cmd_gone:X"})
    site.install("cmd-broken", {"rlhf.rewards": "broken = cmd_broken:X"}, {"cmd_broken.py": "import no_such_module\n"})
    return site


# --- wheels and clean environments ----------------------------------------------------------------

OWN_VARIABLES = ("PYTHON", "VIRTUAL_ENV", "COV_")
"""Beginnings of the environment variables in which this process's Python is described."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, over the third-party packages that all of these share."""

    home: Path

    def __call__(self, program: str, *arguments: str | Path, cwd: Path, code: int = 0, **variables: str) -> str:
        """What one of its programs prints."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(OWN_VARIABLES)}
        command = [self.home / "bin" / program, *arguments]
        return _printed(command, code, cwd=cwd, env={**env, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **variables})

    def pip(self, *arguments: str | Path) -> None:
        # This environment's pip: one thing less to install, and nothing of it can be seen in there.
        _printed([sys.executable, "-m", "pip", "--python", self.home / "bin/python", "--disable-pip-version-check", *arguments])

    def put_before(self, folder: Path) -> None:
        """Make the packages in a folder count before those that all share."""
        (site,) = self.home.glob("lib/python*/site-packages")
        (site / "before.pth").write_text(f"{folder}\n")  # read in the order of names, before third-party.pth

    def install(self, *wheels: Path) -> None:
        """Install just these, in place of what is there of them."""
        self.pip("install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--force-reinstall", *wheels)


def _printed(command: Sequence[str | Path], code: int = 0, **settings: Any) -> str:
    """Standard output; what went wrong is shown where the command fails."""
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **settings)
    assert found.returncode == code, f"{command} gave {found.returncode}\n{found.stdout}\n{found.stderr}"
    return found.stdout


def build_wheel(project: Path, out: Path, *flags: str) -> Path:
    """The project's wheel, from its own source distribution; ``--wheel`` builds it from the folder itself."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *flags, project]
    _printed(command, env={**os.environ, "PYTHONPATH": ""})
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name → wheel, each built from its own source distribution, as a release would be."""
    out = tmp_path_factory.mktemp("dist")
    projects = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml")))]

    def build(project: Path) -> tuple[str, Path]:
        name = "rlhf-host" if project == ROOT else project.name
        return name, build_wheel(project, out / name)

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(build, projects))


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """This environment's packages without whatever of ours is among them: torch and all, read-only, nothing copied."""
    folder = tmp_path_factory.mktemp("third-party") / "site-packages"  # dill knows installed modules by this name
    folder.mkdir()
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            ours = "rlhf" in entry.name or entry.suffix == ".pth"
            if not ours and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


@pytest.fixture(scope="session")
def new_environment(third_party: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """``new_environment(*wheels)``: a clean environment in which just these are installed."""

    def make(*installed: Path) -> Environment:
        home = tmp_path_factory.mktemp("clean") / "venv"
        venv.create(home, with_pip=False, symlinks=True)
        (site,) = home.glob("lib/python*/site-packages")
        (site / "third-party.pth").write_text(f"{third_party}\n")
        environment = Environment(home)
        if installed:
            environment.install(*installed)
        return environment

    return make

"""The command line, and installed distributions: folders with modules and the metadata that pip would have left."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rlhf_host
from rlhf_host.commands import main

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Site:
    """A folder that stands for site-packages."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()

    def install(
        self,
        distribution: str,
        entry_points: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        requires: Sequence[str] = ("rlhf-host>=0.10,<0.11",),
        version: str = "1.0",
    ) -> None:
        """Put a distribution there.

        Args:
            entry_points: group → ``name = module:attribute`` lines.
            modules: path → source.
        """
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        head = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nSummary: A summary.\n"
        (info / "METADATA").write_text(f"{head}{needs}\nLong description.\n")
        (info / "entry_points.txt").write_text("".join(f"[{group}]\n{lines}\n\n" for group, lines in entry_points.items()))
        for path, source in (modules or {}).items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    def rlhf(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The command line in a process of its own, with this folder on its path."""
        command = [sys.executable, "-m", "rlhf_host.cli.main", *arguments]
        env = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "80", **environment}
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


@pytest.fixture
def here(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The same, importable in this process too."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(site.folder))
    yield site
    for name in set(sys.modules) - before:
        if str(site.folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def rlhf_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def repository() -> Path:
    """The clone of the repository, where the tests run in one."""
    root = Path(rlhf_host.__file__).parents[1]
    if not (root / "docs").is_dir():
        pytest.skip("needs a clone of the repository")
    return root


@pytest.fixture(scope="session")
def others() -> None:
    """The plugins that the project publishes beside this package, where they are installed too."""
    for module in ("rlhf_plugin_ppo", "rlhf_plugin_grpo", "rlhf_plugin_math_verifier", "rlhf_kernels_liger"):
        pytest.importorskip(module)

"""A small clone of two distributions, which the scripts for wheels and releases treat as the whole."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ABOUT = """
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
authors = [{ name = "rlhf-host contributors" }]
keywords = ["rlhf"]

[project.urls]
Homepage = "https://example.org"
Repository = "https://example.org"
Documentation = "https://example.org"
Issues = "https://example.org"
Changelog = "https://example.org"

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

"""
HOST = f"""[project]
name = "rlhf-host"
dynamic = ["version"]
description = "A host"
{ABOUT}
[tool.hatch.version]
path = "rlhf_host/__init__.py"

[tool.hatch.build.targets.wheel]
packages = ["rlhf_host"]
"""
PLUGIN = f"""[project]
name = "rlhf-plugin-one"
version = "0.10.0"
description = "A plugin"
dependencies = ["rlhf-host>=0.10,<0.11"]
{ABOUT}
[tool.hatch.build.targets.wheel]
packages = ["src/rlhf_plugin_one"]
"""
CHANGELOG = "# Changelog\n\n## Unreleased\n\nIt counts (>=0.10,<0.11).\n\n## 0.9.0 (2026-01-01)\n\nFirst.\n"
READ = (
    "In a clone:\n\n    pip install -c constraints/cpu.txt -c dist/wheels.txt rlhf-plugin-one\n\nNo package index has it yet.\n"
)
WORKFLOW = """steps:
  - run: one
{# until published #}
  - run: python rlhf-host/scripts/wheels.py rlhf-host/dist
{# /until published #}
  - run: pip install -c rlhf-host/dist/wheels.txt -e .
"""
STRAIGHT = """
from pathlib import Path
Path("docs/made.md").write_text("made\\n")
"""


def small_clone(folder: Path) -> Path:
    plugin = folder / "plugins/builtin_algos/rlhf-plugin-one"
    files = {
        "pyproject.toml": HOST,
        "README.md": READ,
        "rlhf_host/__init__.py": '__version__ = "0.10.0"\n',
        "rlhf_host/py.typed": "",
        "tests/test_host.py": "",
        "docs/changelog.md": CHANGELOG,
        "docs/plugins.md": "Write `rlhf-host>=0.10,<0.11`, which metadata has as `<0.11,>=0.10`.\n",
        "CITATION.cff": "cff-version: 1.2.0\nversion: 0.10.0\n",
        "template/test.yml": WORKFLOW,
        "scripts/generate_docs.py": textwrap.dedent(STRAIGHT),
        "scripts/docs_pages/catalogue.py": 'OPTIONS = "-c dist/wheels.txt"  # until a package index has them\n',
        ".gitignore": "build/\ndist/\n__pycache__/\n",
        f"{plugin.relative_to(folder)}/pyproject.toml": PLUGIN,
        f"{plugin.relative_to(folder)}/README.md": "# One\n",
        f"{plugin.relative_to(folder)}/src/rlhf_plugin_one/__init__.py": "",
        f"{plugin.relative_to(folder)}/src/rlhf_plugin_one/py.typed": "",
        f"{plugin.relative_to(folder)}/tests/test_one.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for place in (folder, plugin):
        shutil.copy(ROOT / "LICENSE", place)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
    return folder

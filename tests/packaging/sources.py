"""The files of Python code of the project."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_files():
    """Returns those that git tracks or would, without the template's, which are no Python yet."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py", ":!plugin_template"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()]

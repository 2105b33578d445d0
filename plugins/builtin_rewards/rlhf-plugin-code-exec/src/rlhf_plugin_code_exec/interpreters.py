"""Interpreters of contained programs: their packages, and our modules compiled for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

CONTAINED = Path(__file__).parent / "contained"
SHARED = ("__init__", "prelude", "semaphores", "values", "errors")
SIDES = {
    "program": ("program",),
    "solution": ("solution",),
    "judge": ("judge", "names", "compare", "remote", "changes", "imports", "pytest_tests", "collect", "rehearsal"),
}
"""Modules of each side beside the common ones."""
ASK = """
import json, marshal, os, sys, sysconfig
def compiled(texts):
    return marshal.dumps({name: compile(text, name, "exec", dont_inherit=True) for name, text in texts.items()}).hex()
packages = [path for path in sys.path if os.path.isdir(path) and path.endswith("-packages")]
places = [sys.executable, sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *packages]
modules = {side: compiled(texts) for side, texts in json.load(sys.stdin).items()}
print(json.dumps({"executable": sys.executable, "modules": modules, "packages": packages, "places": places}))
"""
"""Code that asks an interpreter about itself, started normally, with its packages. Programs are started without anything else
that a start may run.
"""
START = """
import marshal, sys
from importlib.machinery import ModuleSpec
with open(6, "rb") as file:
    CODE = marshal.load(file)

class Contained:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package="." not in name) if name in CODE else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(CODE[module.__name__], module.__dict__)

sys.meta_path.insert(0, Contained())
"""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/urandom", "/dev/null")
"""Paths that programs may read beside their interpreter."""
PATIENCE_S = 60


@dataclass(frozen=True, slots=True)
class Interpreter:
    executable: str
    starts: dict[str, str]
    """Side → code for ``-c``."""
    modules: dict[str, bytes]
    """Side → the compiled modules that this reads from descriptor 6."""
    readable: Sequence[str]
    """Paths that contained programs may read."""


@lru_cache(maxsize=8)
def interpreter_at(python: str) -> Interpreter:
    """Asks the interpreter about itself. Raises ``OSError`` if it does not answer."""
    command = [python, "-I", "-B", "-c", ASK]
    texts = json.dumps({side: {_module(name): _text(name) for name in (*SHARED, *names)} for side, names in SIDES.items()})
    try:
        asked = subprocess.run(command, input=texts, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        told = json.loads(asked.stdout)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{python} does not answer") from error
    except ValueError as error:
        raise OSError(f"{python} is no Python that starts: {asked.stderr[-300:].strip()}") from error
    starts = {side: f"{START}sys.path += {told['packages']!r}\nimport contained.{side}" for side in SIDES}
    places = dict.fromkeys((*SYSTEM, *map(os.path.realpath, told["places"])))
    yours = [os.path.realpath(each) for each in (os.path.expanduser("~"), os.getcwd())]
    for place in places:
        if not is_within(place, SYSTEM) and (seen := next((each for each in yours if is_within(each, [place])), None)):
            raise OSError(f"{python} is installed in {place}, all of which programs could read, with {seen}")
    modules = {side: bytes.fromhex(each) for side, each in told["modules"].items()}
    return Interpreter(told["executable"], starts, modules, [place for place in places if os.path.exists(place)])


def is_within(path: str, folders: Iterable[str]) -> bool:
    """Returns True if one of the folders is or has the path."""
    return any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _module(name: str) -> str:
    return "contained" if name == "__init__" else f"contained.{name}"


def _text(name: str) -> str:
    return (CONTAINED / f"{name}.py").read_text(encoding="utf-8")


def reachable_python() -> str:
    """Returns this interpreter, unless other users cannot reach it: then the system's."""
    ways = Path(sys.executable).parents, Path(os.path.realpath(sys.executable)).parents
    if os.getuid() != 0 or all(folder.stat().st_mode & 0o001 for way in ways for folder in way):
        return sys.executable
    return shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or sys.executable

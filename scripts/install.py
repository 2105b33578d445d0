"""Install into the environment of the Python that runs this, as ``pip install`` would: with uv where it can, else with pip.

    .venv/bin/python scripts/install.py -c constraints/cpu.txt [--no-deps] [--no-build-isolation] REQUIREMENT...

uv takes a third of pip's processor time. It is the one on the PATH, or pip installs it into the environment. uv reads none of
pip's settings, so it is told them: those of ``pip.conf`` and of ``PIP_...``. They say where packages come from. Where they name
no index, torch comes from PyTorch's own index of CPU builds, because PyPI's builds for Linux bring gigabytes of CUDA. Where a
setting has no counterpart in uv, or uv fails, pip installs, and one line says why.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# Compiling all of torch and transformers would take longer than installing them: Python compiles what is imported, as with uv.
PIP_INSTALL = (*PIP, "install", "--quiet", "--no-compile")
OLDEST_UV = (0, 8)
SECTIONS = ("global", "install", ":env:")
"""Sections of pip's settings that ``pip install`` obeys; a later one wins."""
IN_UV = {
    "cert": ("SSL_CERT_FILE",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "extra-index-url": ("UV_EXTRA_INDEX_URL",),
    "find-links": ("UV_FIND_LINKS",),
    "index-url": ("UV_INDEX_URL",),
    "no-cache-dir": ("UV_NO_CACHE",),
    "no-index": ("UV_NO_INDEX",),
    "pre": ("UV_PRERELEASE",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "trusted-host": ("UV_INSECURE_HOST",),
}
"""Setting of pip → the variables that tell uv."""
IN_PIP_ALONE = {
    "break-system-packages",
    "cache-dir",
    "compile",
    "config-file",  # pip has read it
    "debug",
    "disable-pip-version-check",
    "exists-action",
    "log",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-conflicts",
    "no-warn-script-location",
    "prefer-binary",  # versions are pinned
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "use-deprecated",
    "use-feature",
    "verbose",
}
"""Those that change nothing of what is installed, nor where it comes from."""
SOURCES = {"extra-index-url", "find-links", "index-url", "no-index"}
"""Those that say where it comes from."""


class OnlyPip(Exception):
    """Why uv does not install this."""


def main(arguments: list[str]) -> int:
    try:
        with_uv(arguments)
        return 0
    except OnlyPip as why:
        say(f"{why}: installing with pip, which takes longer")
    return run([*PIP_INSTALL, *arguments])


def with_uv(arguments: list[str]) -> None:
    settings = pip_settings()
    told, constraints = translate(settings)
    environment = {**os.environ, **told}
    command = [find_uv(arguments), "pip", "install", "--quiet", "--python", sys.executable, *constraints, *arguments]
    if builds_for_cpus(settings):
        if not run([*command, "--torch-backend", "cpu"], environment):
            return
        say("uv failed with PyTorch's index of CPU builds: trying without it")
    if run(command, environment):
        raise OnlyPip("uv failed")


def find_uv(arguments: list[str]) -> str:
    """The uv on the PATH, if it runs and is not too old, else the one of this environment, which pip installs there if need be."""
    own = str(Path(sys.executable).with_name("uv"))
    for uv in (shutil.which("uv"), own):
        if uv and is_usable(uv):
            return uv
    constraints = [word for flag, path in pairwise(arguments) if flag == "-c" for word in (flag, path)]
    if run([*PIP_INSTALL, *constraints, "uv"]) or not is_usable(own):
        raise OnlyPip("there is no uv, and pip could not install it")
    return own


def is_usable(uv: str) -> bool:
    """False, too, for what only stands in for a program that is missing."""
    try:
        said = subprocess.run([uv, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return False
    version = re.match(r"uv (\d+)\.(\d+)", said.stdout)
    return said.returncode == 0 and version is not None and (int(version[1]), int(version[2])) >= OLDEST_UV


def pip_settings() -> dict[str, str]:
    """What pip's files and its variables of the environment say to ``pip install``."""
    listed = subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True)
    if listed.returncode:
        raise OnlyPip("pip does not say how it is configured")
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found:
            found[section][key.lower().replace("_", "-")] = ast.literal_eval(value)
    return {key: value for section in SECTIONS for key, value in found[section].items() if value.strip()}


def translate(settings: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Pip's settings as variables, and constraints as flags: uv ignores its variable beside ``-c``."""
    told: dict[str, str] = {}
    constraints: list[str] = []
    for key, value in settings.items():
        if key == "constraint":
            constraints += [word for path in value.split() for word in ("-c", path)]
        elif key in IN_UV:
            told |= dict.fromkeys(IN_UV[key], in_uv(key, value))
        elif key not in IN_PIP_ALONE:
            raise OnlyPip(f"uv has no counterpart of pip's setting {key}")
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if bundle and "cert" not in settings:  # pip is built on requests
        told["SSL_CERT_DIR" if os.path.isdir(bundle) else "SSL_CERT_FILE"] = bundle
    if "extra-index-url" in settings:
        told["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's: the best version of all indexes
    return {
        name: value for name, value in told.items() if value and not (name.startswith("UV_") and name in os.environ)
    }, constraints


def in_uv(key: str, value: str) -> str:
    """A value as uv spells it; empty if the setting is off."""
    if key == "no-cache-dir":
        return "1"  # whatever it says: pip takes "false", too, for no cache
    if key in ("no-index", "pre"):
        on = value.lower() in ("1", "on", "t", "true", "y", "yes")
        return {"no-index": "1", "pre": "allow"}[key] if on else ""
    if key == "cert":
        return os.path.expanduser(value)
    if key == "find-links":
        return ",".join(map(os.path.expanduser, value.split()))
    return " ".join(value.split())


def builds_for_cpus(settings: dict[str, str]) -> bool:
    """True if torch may come from PyTorch's own index: nobody named another place to take packages from."""
    named = any(name.startswith("UV_") and re.search("INDEX|FIND_LINKS|OFFLINE|TORCH|CONFIG", name) for name in os.environ)
    return sys.platform == "linux" and not named and SOURCES.isdisjoint(settings)


def run(command: list[str], environment: dict[str, str] | None = None) -> int:
    """The exit code. What was interrupted is not tried in another way."""
    code = subprocess.run(command, env=environment).returncode
    if code < 0:
        sys.exit(128 - code)
    return code


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

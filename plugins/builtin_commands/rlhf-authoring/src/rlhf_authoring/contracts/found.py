"""Checks of everything that comes in by an entry point: how it is found and loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rlhf_authoring.contracts.subject import Subject, check, expect
from rlhf_host.installed import discover

HEAVY = ("torch", "transformers", "vllm", "ray", "deepspeed")
"""Libraries that lists of plugins and help pages must not wait for."""


@check(stage="find")
def entry_point_is_unique(subject: Subject) -> None:
    """Exactly one installed distribution provides the name, and its metadata fits this host."""
    info = subject.info
    sources = [other.source for other in discover() if (other.kind, other.name) == (info.kind, info.name)]
    expect(len(sources) == 1, f"{' and '.join(sources)} all provide {info.kind} {info.name!r}; rename one")


@check(stage="load")
def entry_point_loads(subject: Subject) -> None:
    """The entry point names a class that can be imported; of a command a ``click.Command``."""
    expect(subject.value is not None, f"{subject.info.value} is nothing")


@check()
def import_is_light(subject: Subject) -> None:
    """Importing the plugin's module loads none of torch, transformers, vllm, ray and deepspeed: help pages would wait."""
    program = (
        f"import importlib, json, sys; importlib.import_module({subject.info.module!r}); "
        f"print('\\n' + json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    _ = subject.value  # what cannot be loaded is another check's
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    expect(done.returncode == 0, f"importing {subject.info.module} in a process of its own failed: {done.stderr[-500:]}")
    heavy = ", ".join(json.loads(done.stdout.splitlines()[-1]))
    expect(not heavy, f"importing {subject.info.module} loads {heavy}; import it inside the functions that need it")


@check()
def host_dependency_is_bounded(subject: Subject) -> None:
    """The distribution requires rlhf-host with an upper bound: a later version may change a hook."""
    from packaging.specifiers import SpecifierSet

    info = subject.info
    specifiers = SpecifierSet("" if info.api in ("any", "unstated", "unreadable") else info.api)
    bounded = any(one.operator in ("<", "<=", "==", "~=") for one in specifiers)
    expect(bounded, f"{info.distribution} depends on rlhf-host {info.api}; write 'rlhf-host>=0.10,<0.11' in its dependencies")

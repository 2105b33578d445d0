"""Using a plugin a little, as a run would: so that checks of its state have some to look at."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from torch import nn

from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import SyncTarget
from rlhf_host.testing.calls import Calls
from rlhf_host.testing.contracts.session import running
from rlhf_host.testing.contracts.subject import Subject
from rlhf_host.testing.weights import ModuleEngine, module_source


def exercise(subject: Subject, manager: PluginManager) -> None:
    """One step of a run with every hook the plugin has; what a hook does wrong is for its own checks to report."""
    model = nn.Linear(3, 2)
    with (
        contextlib.suppress(Exception),
        tempfile.TemporaryDirectory() as folder,
        running(subject, manager, run_dir=Path(folder)) as session,
    ):
        calls = Calls(session, rows=6, judged=4, tokens=8)
        for hook in manager.hooks(subject.key):
            with contextlib.suppress(Exception):
                for call in calls.of(hook):
                    call.run(call.prepare())
        session.call("sync_connect", targets=[SyncTarget("engine-0", ModuleEngine(model), in_place=True)])
        session.call("sync_weights", source=module_source(model), version=1)
        session.call("sync_close")

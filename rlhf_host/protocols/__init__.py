"""Engines, backends, runtimes, kernels and both ends of a weight sync, as the host sees them. Imports no torch.

A plugin of these kinds is built as ``Plugin(options)``, which is light and has no effect. ``traits`` is read from that object, so
it may depend on the options; ``start`` does the work. Only the host makes the records given to ``start``: they may gain fields.

Errors mean the same everywhere. ``UserError``: the settings or the input cannot work; raised before anything runs. ``RunError``:
the run has to end. ``LostError``: a process is gone. Anything else counts as a defect of the plugin, and is shown with its name.
"""

from rlhf_host.protocols.backends import Backend, BackendPlugin, BackendStart, BackendTraits, Ranks, StepResult
from rlhf_host.protocols.common import NO_WEIGHTS, Bucket, Buckets, Compute, Tensors, Traits
from rlhf_host.protocols.engines import Engine, EnginePlugin, EngineStart, EngineTraits, Generator, SyncEnd
from rlhf_host.protocols.kernels import Decoder, Kernels, KernelsPlugin, SharedRows, Use
from rlhf_host.protocols.runtimes import Runtime, RuntimePlugin, RuntimeStart, RuntimeTraits, Trainer, Update
from rlhf_host.protocols.syncs import Bring, Loader, SyncTarget, Weights, WeightSource

# fmt: off
__all__ = [
    "NO_WEIGHTS", "Backend", "BackendPlugin", "BackendStart", "BackendTraits", "Bring", "Bucket", "Buckets", "Compute", "Decoder",
    "Engine", "EnginePlugin", "EngineStart", "EngineTraits", "Generator", "Kernels", "KernelsPlugin", "Loader", "Ranks", "Runtime",
    "RuntimePlugin", "RuntimeStart", "RuntimeTraits", "SharedRows", "StepResult", "SyncEnd", "SyncTarget", "Tensors", "Trainer",
    "Traits", "Update", "Use", "WeightSource", "Weights",
]
# fmt: on

"""Interfaces of engines, backends, runtimes, weight syncs, kernels, servers and data. Imports no torch.

The host creates a plugin of these kinds as ``Plugin(options)``. This must be cheap and have no side effects. The host reads
``traits`` from this object, so they may depend on the options. ``start`` does the work. Only the host creates the records that
it passes to ``start``, so they may get new fields. A server is created in another way: see ``ServerPlugin``.

Errors have one meaning everywhere. ``UserError``: the settings or the input cannot work; raised before anything runs.
``RunError``: the run has to end. ``LostError``: a process is gone. Every other error is a defect of the plugin: one in
``generate`` is reported with the engine's name, others end the run with a traceback.
"""

from rlhf_host.protocols.backends import (
    Backend,
    BackendPlugin,
    BackendStart,
    BackendTraits,
    Ranks,
    StepResult,
)
from rlhf_host.protocols.common import NO_WEIGHTS, Bucket, Buckets, Compute, Tensors, Traits, Writer
from rlhf_host.protocols.data import DataPlugin, GivenData
from rlhf_host.protocols.engines import (
    Counting,
    Engine,
    EnginePlugin,
    EngineStart,
    EngineTraits,
    Generator,
    Measured,
    SyncEnd,
    WakesInParts,
)
from rlhf_host.protocols.kernels import Decoder, Kernels, KernelsPlugin, SharedRows, Use
from rlhf_host.protocols.memory import (
    CountsServing,
    CountsTraining,
    DeviceGroup,
    DeviceKind,
    Grouping,
    ServedModel,
    ServingMemory,
    TrainedModel,
    TrainingMemory,
)
from rlhf_host.protocols.reward_forms import RewardForm
from rlhf_host.protocols.runtimes import Checking, Runtime, RuntimePlugin, RuntimeStart, RuntimeTraits, Trainer, Update
from rlhf_host.protocols.servers import Server, ServerPlugin, ServerSession
from rlhf_host.protocols.splits import LoadsShards, RunsPasses, ShardedModel, Slices, SplitsFrozen
from rlhf_host.protocols.step_models import StepModels
from rlhf_host.protocols.syncs import (
    Bring,
    CountsSent,
    Loader,
    SyncTarget,
    Weights,
    WeightSource,
    WeightSync,
    WeightSyncPlugin,
    WeightSyncStart,
    WeightSyncTraits,
    WeightTypes,
)

# fmt: off
__all__ = [
    "NO_WEIGHTS",
    "Backend",
    "BackendPlugin",
    "BackendStart",
    "BackendTraits",
    "Bring",
    "Bucket",
    "Buckets",
    "Checking",
    "Compute",
    "Counting",
    "CountsSent",
    "CountsServing",
    "CountsTraining",
    "DataPlugin",
    "Decoder",
    "DeviceGroup",
    "DeviceKind",
    "Engine",
    "EnginePlugin",
    "EngineStart",
    "EngineTraits",
    "Generator",
    "GivenData",
    "Grouping",
    "Kernels",
    "KernelsPlugin",
    "Loader",
    "LoadsShards",
    "Measured",
    "Ranks",
    "RewardForm",
    "RunsPasses",
    "Runtime",
    "RuntimePlugin",
    "RuntimeStart",
    "RuntimeTraits",
    "ServedModel",
    "Server",
    "ServerPlugin",
    "ServerSession",
    "ServingMemory",
    "ShardedModel",
    "SharedRows",
    "Slices",
    "SplitsFrozen",
    "StepModels",
    "StepResult",
    "SyncEnd",
    "SyncTarget",
    "Tensors",
    "TrainedModel",
    "Trainer",
    "TrainingMemory",
    "Traits",
    "Update",
    "Use",
    "WakesInParts",
    "WeightSource",
    "WeightSync",
    "WeightSyncPlugin",
    "WeightSyncStart",
    "WeightSyncTraits",
    "WeightTypes",
    "Weights",
    "Writer",
]
# fmt: on

"""Interfaces of engines, backends, runtimes, weight syncs, kernels, servers and data. Imports no torch.

The host creates a plugin of these kinds as ``Plugin(options)``. This must be cheap and have no side effects. The host reads
``traits`` from this object, so they may depend on the options. ``start`` does the work. Only the host creates the records that
it passes to ``start``, so they may get new fields. A server is created in another way: see ``ServerPlugin``.

Errors have one meaning everywhere. ``UserError``: the settings or the input cannot work; raised before anything runs.
``RunError``: the run has to end. ``LostError``: a process is gone. Every other error is a defect of the plugin: one in
``generate`` is reported with the engine's name, others end the run with a traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.protocols.backends import Backend as Backend
    from rlhf_host.protocols.backends import BackendPlugin as BackendPlugin
    from rlhf_host.protocols.backends import BackendStart as BackendStart
    from rlhf_host.protocols.backends import BackendTraits as BackendTraits
    from rlhf_host.protocols.backends import Ranks as Ranks
    from rlhf_host.protocols.backends import ShowsGradients as ShowsGradients
    from rlhf_host.protocols.backends import StepResult as StepResult
    from rlhf_host.protocols.common import NO_WEIGHTS as NO_WEIGHTS
    from rlhf_host.protocols.common import Bucket as Bucket
    from rlhf_host.protocols.common import Buckets as Buckets
    from rlhf_host.protocols.common import Compute as Compute
    from rlhf_host.protocols.common import Tensors as Tensors
    from rlhf_host.protocols.common import Traits as Traits
    from rlhf_host.protocols.common import Writer as Writer
    from rlhf_host.protocols.data import DataPlugin as DataPlugin
    from rlhf_host.protocols.data import GivenData as GivenData
    from rlhf_host.protocols.engines import Counting as Counting
    from rlhf_host.protocols.engines import Engine as Engine
    from rlhf_host.protocols.engines import EnginePlugin as EnginePlugin
    from rlhf_host.protocols.engines import EngineStart as EngineStart
    from rlhf_host.protocols.engines import EngineTraits as EngineTraits
    from rlhf_host.protocols.engines import Generator as Generator
    from rlhf_host.protocols.engines import Measured as Measured
    from rlhf_host.protocols.engines import SyncEnd as SyncEnd
    from rlhf_host.protocols.engines import WakesInParts as WakesInParts
    from rlhf_host.protocols.kernels import Decoder as Decoder
    from rlhf_host.protocols.kernels import Kernels as Kernels
    from rlhf_host.protocols.kernels import KernelsPlugin as KernelsPlugin
    from rlhf_host.protocols.kernels import RefilledDecoder as RefilledDecoder
    from rlhf_host.protocols.kernels import SharedRows as SharedRows
    from rlhf_host.protocols.kernels import TokenLogprobs as TokenLogprobs
    from rlhf_host.protocols.kernels import Use as Use
    from rlhf_host.protocols.memory import CountsServing as CountsServing
    from rlhf_host.protocols.memory import CountsTraining as CountsTraining
    from rlhf_host.protocols.memory import DeviceGroup as DeviceGroup
    from rlhf_host.protocols.memory import DeviceKind as DeviceKind
    from rlhf_host.protocols.memory import Grouping as Grouping
    from rlhf_host.protocols.memory import ServedModel as ServedModel
    from rlhf_host.protocols.memory import ServingMemory as ServingMemory
    from rlhf_host.protocols.memory import TrainedModel as TrainedModel
    from rlhf_host.protocols.memory import TrainingMemory as TrainingMemory
    from rlhf_host.protocols.reward_forms import RewardForm as RewardForm
    from rlhf_host.protocols.runtimes import Checking as Checking
    from rlhf_host.protocols.runtimes import Runtime as Runtime
    from rlhf_host.protocols.runtimes import RuntimePlugin as RuntimePlugin
    from rlhf_host.protocols.runtimes import RuntimeStart as RuntimeStart
    from rlhf_host.protocols.runtimes import RuntimeTraits as RuntimeTraits
    from rlhf_host.protocols.runtimes import Trainer as Trainer
    from rlhf_host.protocols.runtimes import Update as Update
    from rlhf_host.protocols.servers import Server as Server
    from rlhf_host.protocols.servers import ServerPlugin as ServerPlugin
    from rlhf_host.protocols.servers import ServerSession as ServerSession
    from rlhf_host.protocols.splits import LoadsShards as LoadsShards
    from rlhf_host.protocols.splits import RunsPasses as RunsPasses
    from rlhf_host.protocols.splits import ShardedModel as ShardedModel
    from rlhf_host.protocols.splits import Slices as Slices
    from rlhf_host.protocols.splits import SplitsFrozen as SplitsFrozen
    from rlhf_host.protocols.step_models import StepModels as StepModels
    from rlhf_host.protocols.syncs import Bring as Bring
    from rlhf_host.protocols.syncs import CountsSent as CountsSent
    from rlhf_host.protocols.syncs import Loader as Loader
    from rlhf_host.protocols.syncs import SyncTarget as SyncTarget
    from rlhf_host.protocols.syncs import Weights as Weights
    from rlhf_host.protocols.syncs import WeightSource as WeightSource
    from rlhf_host.protocols.syncs import WeightSync as WeightSync
    from rlhf_host.protocols.syncs import WeightSyncPlugin as WeightSyncPlugin
    from rlhf_host.protocols.syncs import WeightSyncStart as WeightSyncStart
    from rlhf_host.protocols.syncs import WeightSyncTraits as WeightSyncTraits
    from rlhf_host.protocols.syncs import WeightTypes as WeightTypes

__getattr__, __dir__, __all__ = lazily(__name__)

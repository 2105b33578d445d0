"""The schema of a RayJob, so far as ``examples/cluster/rayjob.yaml`` goes: what the manifest does not use is left out.

Source: the types of KubeRay's operator, ``ray-operator/apis/ray/v1/rayjob_types.go`` and ``raycluster_types.go``
(ray-project/kuberay), from which its custom resource definitions are generated, and of
``authOptions`` the release notes of 1.5.1. Pod templates are
Kubernetes' own: required names alone are looked at here, ``make test-clusters`` validates them whole.
"""

from __future__ import annotations

from typing import Any

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}


def _only(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


CONTAINER = _only(
    ["name", "image"],
    name={"type": "string"},
    image={"type": "string"},
    env={"type": "array", "items": _only(["name", "value"], name={"type": "string"}, value={"type": "string"})},
    resources=_only([], requests=STRINGS, limits=STRINGS),
    securityContext=_only([], capabilities=_only([], add={"type": "array", "items": {"type": "string"}})),
    volumeMounts={
        "type": "array",
        "items": _only(["name", "mountPath"], name={"type": "string"}, mountPath={"type": "string"}),
    },
)
VOLUME = _only(
    ["name"],
    name={"type": "string"},
    persistentVolumeClaim=_only(["claimName"], claimName={"type": "string"}),
    emptyDir=_only([], medium={"enum": ["", "Memory"]}, sizeLimit={"type": "string"}),
)
TEMPLATE = _only(
    ["spec"],
    spec=_only(["containers"], containers={"type": "array", "items": CONTAINER}, volumes={"type": "array", "items": VOLUME}),
)
WORKERS = _only(
    ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    groupName={"type": "string"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=STRINGS,
    template=TEMPLATE,
)
CLUSTER = _only(
    ["headGroupSpec"],
    rayVersion={"type": "string"},
    authOptions=_only([], mode={"enum": ["disabled", "token"]}),
    headGroupSpec=_only(["rayStartParams", "template"], rayStartParams=STRINGS, template=TEMPLATE),
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_JOB = _only(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_only(["name"], name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}),
    spec=_only(
        [],
        entrypoint={"type": "string"},
        entrypointNumCpus={"type": "number"},
        entrypointNumGpus={"type": "number"},
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        backoffLimit=COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=CLUSTER,
    ),
)

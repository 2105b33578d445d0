"""The filter of system calls, by itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf_plugin_code_exec import checks
from rlhf_plugin_code_exec.jail import filter as jail_filter
from rlhf_plugin_code_exec.jail import folders, syscalls

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"}
LISTS = ("ALLOWED", "SIGNALS", "MODES", "MODES_AT", "TIMES", "LOCKS", "UNSUPPORTED", "FORKS", "MAKES", "REMOVES")
SINGLE = ("CLONE", "MMAP", "OPEN", "OPENAT", "SOCKETPAIR", "PRLIMIT", "FCNTL", "IOCTL", "PRCTL")
SINCE = {"fchmodat2": 452}
"""Calls that are newer than some headers."""


@pytest.mark.skipif(not os.path.exists(HEADERS["x86_64"]), reason="needs the kernel's headers")
def test_numbers_of_system_calls_are_the_kernel_s():
    known = dict(re.findall(r"#define __NR_(\w+) (\d+)", Path(HEADERS["x86_64"]).read_text()))
    generic = Path("/usr/include/asm-generic/unistd.h").read_text()
    arm = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", generic)) | {"newfstatat": "79"}
    listed = " ".join(getattr(syscalls, name) for name in LISTS + SINGLE).split()
    assert len({each.split(":")[0] for each in listed}) == len(listed), "a call has one rule"
    for name, on_x86, on_arm in (each.split(":") for each in listed):
        assert known.get(name, str(SINCE.get(name))) == on_x86
        if on_arm != "-":
            assert arm.get(name, str(SINCE.get(name))) == on_arm, name


@pytest.mark.parametrize("own_signals", [False, True])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_s_program_is_whole(machine, own_signals):
    """Every jump lands inside, and every rule ends in an answer."""
    steps = jail_filter.program(machine, jail_filter.Rules(own_signals, *[not own_signals] * 5))
    assert len(steps) < 4096
    for place, (operation, jump, other, _) in enumerate(steps):
        assert max(jump, other) < 256
        assert operation == jail_filter.RETURN or place + 1 + max(jump, other) < len(steps)
    assert steps[-1][0] == jail_filter.RETURN


FILTERED = """
import ctypes, errno, fcntl, os, resource, socket, sys
sys.path.append({folder!r})
from jail import filter
library = ctypes.CDLL(None, use_errno=True)
filter.install(filter.Rules(own_signals=True))
answers = []
for attempt in {attempts}:
    try:
        told = attempt()
        answers.append(errno.errorcode.get(ctypes.get_errno(), "allowed") if told == -1 else "allowed")
    except OSError as error:
        answers.append(errno.errorcode[error.errno])
print(*answers)
"""


@pytest.mark.parametrize(
    ("attempts", "answer"),
    [
        (["resource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))", "resource.prlimit({pid}, resource.RLIMIT_CPU)"], "EPERM"),
        (["os.setpriority(os.PRIO_PROCESS, {pid}, 5)", "os.sched_setaffinity({pid}, [0])"], "EPERM"),
        (["os.sched_setscheduler({pid}, 0, os.sched_param(0))", "os.sched_setparam({pid}, os.sched_param(0))"], "EPERM"),
        (["library.shmget(0, 4096, 0o600)", "library.semget(0, 1, 0o600)", "library.msgget(0, 0o600)"], "EPERM"),
        (["library.mq_open(b'/rlhf', 0o102, 0o600, None)", "library.semop(0, None, 0)", "library.shmat(0, None, 0)"], "EPERM"),
        (
            ["fcntl.fcntl(0, 8, {pid})", "fcntl.fcntl(0, 15, bytes(8))", "fcntl.fcntl(0, 10, 9)", "fcntl.fcntl(0, 1024, 0)"],
            "EPERM",
        ),
        (
            ["fcntl.ioctl(os.pipe()[0], 0x8901, bytes(4))", "fcntl.ioctl(0, 0x40086602, bytes(8))", "fcntl.ioctl(0, 0x6685)"],
            "ENOTTY",
        ),
        (["library.truncate(b'/', 0)", "library.chroot(b'/')", "library.unshare(0)", "library.memfd_create(b'x', 0)"], "EPERM"),
        (["library.syscall(56, 0x10000011, 0, 0, 0, 0)", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"], "EPERM"),
        (
            ["library.syscall(435, 0, 0)", "library.syscall(437, 0, 0)", "library.syscall(425, 0, 0)", "library.syscall(500)"],
            "ENOSYS",
        ),
        (["os.setxattr('/', 'user.x', b'x')", "os.listxattr('/')", "os.getxattr('/', 'user.x')"], "ENOTSUP"),
        (["os.chown('/tmp', 0, 0)", "os.lchown('/tmp', 0, 0)", "os.fchown(0, 0, 0)", "os.setuid(0)"], "EPERM"),
        (["os.open('/', 3)", "os.open('/dev/null', os.O_TRUNC)"], "EPERM"),
        (
            [
                "os.chmod('/nowhere', 0)",
                "os.utime('/nowhere')",
                "fcntl.flock(0, fcntl.LOCK_EX)",
                "fcntl.lockf(0, fcntl.LOCK_EX)",
            ],
            "allowed",
        ),
        (
            ["resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", "resource.getrlimit(7)", "fcntl.fcntl(0, fcntl.F_GETFD)"],
            "allowed",
        ),
        (
            ["os.sched_getaffinity(0)", "os.getpriority(os.PRIO_PROCESS, 0)", "os.set_inheritable(os.pipe()[0], True)"],
            "allowed",
        ),
    ],
)
def test_system_calls_that_reach_others_are_refused_whoever_makes_them(attempts, answer):
    """By the filter alone: the user of this test may do it all."""
    with checks.outside() as place:
        calls = "[" + ", ".join(f"lambda: {attempt}" for attempt in attempts) + "]"
        code = FILTERED.format(
            folder=str(Path(folders.__file__).parents[1]), attempts=calls.replace("{pid}", str(place.decoy.pid))
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        assert out.stdout.replace("EOPNOTSUPP", "ENOTSUP").split() == [answer] * len(attempts)

"""A cell: one contained process with everything that it starts."""

import fcntl
import os
import resource
import select
import signal
import struct
from _socket import AF_UNIX, CMSG_LEN, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket, socketpair
from contextlib import suppress
from dataclasses import dataclass, field

from . import filter, landlock, leftovers, roots
from .kernel import (
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    control,
    unshare,
)

FIRST_USER, USERS = 61000, 2000
"""First number, and count, of users without a name that run programs which root starts, two for each jail: most containers have
no numbers above 65535.
"""
STATUS = 60
"""Descriptor on which a cell reports that it could not be set up, or sends the other end of its filter; closed in its program."""
RESERVED = 64 << 30
"""Bytes of addresses that a shell's programs have beyond their memory: ``node`` and ``java`` reserve many and use few."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "NUMEXPR")}


@dataclass
class Start:
    """State in which a shell's cell starts.

    Args:
        folder: where.
        variables: its environment variables, beside the usual ones.
        root: an empty folder, for a file system of its own.
        binds: path in this file system → folder, and True if it may write there; without any it has the usual paths.
        clean: a folder from which settings that others left are removed before.
        closed: folders into which none of its links may lead.
    """

    folder: str
    variables: dict
    root: str = ""
    binds: dict = field(default_factory=dict)
    clean: str = ""
    closed: list = field(default_factory=list)

    @property
    def writable(self) -> list:
        return [inside for inside, (_, writes) in self.binds.items() if writes]


class Cell:
    """One contained process.

    Args:
        job: level, limits, readable paths.
        user: user of the process, if root starts it.
        ends: its descriptors → ours.
        folder: the working folder, open, and its path.
        given: files and folders that it may open, too, such as those of ``/dev/stdin``.
        start: where and how it starts, if not in ``folder`` with the usual environment.
    """

    def __init__(
        self,
        job: dict,
        user: int,
        argv: list[str],
        ends: dict[int, int],
        folder: tuple[int, str],
        given: tuple[int, ...] = (),
        start: "Start | None" = None,
    ):
        self.folder, path = folder
        self.forked = start is not None
        self.removed = self.shared = self.refused = 0
        self.status, theirs = socketpair(AF_UNIX, SOCK_STREAM)
        jail = os.getpid()
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        try:
            places = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 100) for each in (self.folder, *given)]
            theirs = _arrange(ends, theirs, places[0])
            own = user != os.geteuid()
            counted = start is not None and (own or job["level"] == "A")
            _enter(job, user, jail, start, counted)
            variables = {"HOME": path, "TMPDIR": path}
            if start:
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                free = list(os.sched_getaffinity(0))
                os.sched_setaffinity(0, [free[(jail + each) % len(free)] for each in range(job["limits"]["cpus"])])
                os.chdir(start.folder)
                if start.clean:
                    leftovers.put_away(start.clean, [os.path.realpath(each) for each in start.closed])
                variables = start.variables
            if job["level"] != "none":
                own_paths = start.writable if start else []
                landlock.restrict([*job["readable"], *places[1:]], [places[0], "/dev/null", *own_paths])
                own_signals = job["level"] == "A" or landlock.version() >= 6
                users = os.getuid(), os.getgid()
                allowed = filter.Rules(own_signals, users=users)
                if start:
                    own_root = bool(own_paths)
                    allowed = filter.Rules(own_signals, own, own and own_root, own_root, not counted, False, users)
                asking = filter.install(allowed)
                theirs.sendmsg([b"."], [(SOL_SOCKET, SCM_RIGHTS, struct.pack("i", asking))])
            os.execve(argv[0], argv, {**ENVIRONMENT, **ONE_THREAD, **variables})
        except BaseException as error:
            with suppress(OSError):
                os.write(STATUS, f"{type(error).__name__}: {error}".encode()[:1000])
        finally:
            os._exit(99)


def hear(status: socket) -> tuple[bytes, list[int]]:
    """Returns the report of a cell, and descriptors that it sends; nothing once its program runs."""
    text, sent, _, _ = status.recvmsg(1000, CMSG_LEN(4))
    return text, [struct.unpack("i", data[:4])[0] for _, kind, data in sent if kind == SCM_RIGHTS]


def user_of(job: dict, number: int) -> int:
    """Returns the user of the job's cell ``number``."""
    if os.geteuid() != 0 or job["level"] == "none":
        return os.geteuid()
    return FIRST_USER + 2 * (os.getpid() % USERS) + number


def _arrange(ends: dict[int, int], status: socket, folder: int) -> socket:
    """Sets up a session, its descriptors and its folder."""
    # A run in the background ignores some, which a program would inherit: what it does may not depend on how the run was begun.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    kept = {target: fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 100) for target, end in ends.items()}
    os.dup2(status.fileno(), STATUS, inheritable=False)
    for target, end in kept.items():
        os.dup2(end, target)
    os.fchdir(folder)
    return socket(fileno=STATUS)


def _enter(job: dict, user: int, jail: int, start: "Start | None", counted: bool) -> None:
    """Enters another user, namespaces and limits, then another process, because the first process in a namespace ends it.
    Returns in that process.
    """
    if user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        control(PR_SET_DUMPABLE, 1)
    if job["level"] == "A":
        group = os.getegid()
        unshare(NEWUSER | NEWNET | NEWPID | NEWNS | NEWIPC | NEWUTS)
        control(PR_SET_DUMPABLE, 1)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        if start and start.binds:
            roots.enter(start.root, job["readable"], {inside: outside for inside, (outside, _) in start.binds.items()})
    limits = job["limits"]
    space = limits["memory"] + (RESERVED if start else 0)
    for name, value in (
        *(("AS", space), ("DATA", limits["memory"])),
        ("CPU", limits["cpu_s"]),
        ("FSIZE", limits["file"]),
        ("NOFILE", 64),
        ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if counted:  # the user has no others: those two wait
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"] + 2, limits["processes"] + 2))
    control(PR_SET_PDEATHSIG, signal.SIGKILL)  # only now: a new user or user namespace clears it
    if os.getppid() != jail:
        os._exit(99)
    outer_died, outer_lives = os.pipe()
    inner = os.fork()
    if inner:
        _wait(inner, outer_lives)
    control(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(outer_lives)
    if select.select([outer_died], [], [], 0)[0]:  # os.getppid() says nothing here: in a pid namespace it is 0
        os._exit(99)


def _wait(inner: int, lives: int) -> None:
    """Holds nothing that others wait for, and ends as the inner process does."""
    os.closerange(0, lives)
    os.closerange(lives + 1, 4096)
    code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    os._exit(code if code >= 0 else 128 - code)

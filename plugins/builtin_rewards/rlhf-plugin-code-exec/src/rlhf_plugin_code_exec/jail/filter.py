"""The filter of system calls (seccomp), and its other end, which answers counted calls."""

import ctypes
import errno
import fcntl
import struct
from contextlib import suppress
from dataclasses import dataclass

from . import syscalls
from .kernel import NEWCGROUP, NEWIPC, NEWNET, NEWNS, NEWPID, NEWUSER, NEWUTS, PR_SET_NO_NEW_PRIVS, call, control

LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
KILL, ALLOW, ASK = 0x80000000, 0x7FFF0000, 0x7FC00000
SECCOMP = {"x86_64": 317, "aarch64": 277}
NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
O_ACCMODE, O_CREAT, O_TRUNC, O_TMPFILE = 0o3, 0o100, 0o1000, 0o20000000
SPECIAL_MODES = 0o7000
"""Files that run as their owner."""
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF
RECEIVE, SEND, CONTINUE = 0xC0502100, 0xC0182101, 1
"""ioctls of the other end, and the answer with which the kernel continues the call."""


@dataclass
class Rules:
    """Permissions of a filter, where other means keep it inside.

    Args:
        own_signals: signals are kept inside.
        own_modes: the user owns no files outside, so modes may be changed.
        own_times: there are no files outside, either, that all may write: their times could be changed.
        own_sockets: there are no sockets of others, so those with paths may be used.
        asks_forks: new processes and threads are counted call by call; otherwise the kernel limits them for the user.
        asks_files: so are made and removed files, and shared memory; otherwise others look at them from time to time. A call
            that asks may fail with ``EINTR`` when a child ends, which some shells do not expect.
        users: the user and the group, which may be chosen.
    """

    own_signals: bool
    own_modes: bool = False
    own_times: bool = False
    own_sockets: bool = False
    asks_forks: bool = True
    asks_files: bool = True
    users: tuple[int, ...] = ()


def install(allowed: Rules) -> int:
    """Filters from now on, in this process and everything that it starts. Returns the descriptor at which calls ask."""
    steps = program(syscalls.MACHINE, allowed)
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    kept = ctypes.create_string_buffer(code, len(code))
    control(PR_SET_NO_NEW_PRIVS, 1)
    return call(SECCOMP[syscalls.MACHINE], 1, 8, struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(kept)))


def program(machine: str, allowed: Rules) -> list[tuple[int, int, int, int]]:
    """Returns the filter's steps: operation, jump if true, jump if false, value. Every rule for a call ends in an answer."""

    def rules(text: str, *body) -> list:
        return [step for n in syscalls.numbers(text, machine) for step in ((JUMP_EQUAL, 0, len(body), n), *body)]

    load_number = _argument_at(0)
    steps = [_argument_at(4), (JUMP_EQUAL, 1, 0, syscalls.ARCHITECTURES[machine]), _answer(KILL)]
    steps += [load_number, (JUMP_AT_LEAST, 0, 1, 0x40000000), _answer(KILL)]  # the other ABI of x86
    steps += rules(syscalls.ALLOWED + (syscalls.SIGNALS if allowed.own_signals else ""), _answer(ALLOW))
    fork, make = (_answer(ASK if asks else ALLOW) for asks in (allowed.asks_forks, allowed.asks_files))
    steps += rules(syscalls.FORKS, fork) + rules(syscalls.MAKES + syscalls.REMOVES, make)
    if allowed.own_modes:
        for place, calls in ((1, syscalls.MODES), (2, syscalls.MODES_AT)):
            steps += rules(calls, _argument(place), *_if_any_bit(SPECIAL_MODES, _fails(errno.EPERM)), _answer(ALLOW))
    else:
        steps += rules(syscalls.MODES + syscalls.MODES_AT, _fails(0))
    steps += rules(syscalls.TIMES, _answer(ALLOW) if allowed.own_times else _fails(0)) + rules(syscalls.LOCKS, _fails(0))
    for count, calls in enumerate(syscalls.USERS, 1):
        same = [
            step for place in range(count) for step in (_argument(place), *_unless_among(allowed.users, _fails(errno.EPERM)))
        ]
        steps += rules(calls, *same, _answer(ALLOW))
    if allowed.own_sockets:
        steps += rules(syscalls.SOCKETS, _answer(ALLOW)) + rules(syscalls.SETSOCKOPT, _fails(0))
        steps += rules(syscalls.SOCKET, *_stream(), _answer(ALLOW))
    steps += rules(syscalls.UNSUPPORTED, _fails(syscalls.NOT_SUPPORTED))
    steps += rules(syscalls.OPEN, *_opening(1, make)) + rules(syscalls.OPENAT, *_opening(2, make))
    steps += rules(syscalls.CLONE, _argument(0), *_if_any_bit(NAMESPACES, _fails(errno.EPERM)), fork)
    steps += rules(
        syscalls.MMAP,
        *(_argument(3), (AND, 0, 0, MAP_SHARED | MAP_ANONYMOUS)),
        *_if_among([MAP_SHARED | MAP_ANONYMOUS], make),
        _answer(ALLOW),
    )
    steps += rules(syscalls.SOCKETPAIR, *_stream(), _answer(ALLOW))
    steps += rules(syscalls.PRLIMIT, _argument(0), *_if_among([0], _answer(ALLOW)), _fails(errno.EPERM))
    steps += rules(syscalls.PRCTL, _argument(0), *_if_among(syscalls.PRCTL_ALLOWED, _answer(ALLOW)), _fails(errno.EPERM))
    steps += rules(
        syscalls.IOCTL, _argument(1), *_if_among(syscalls.IOCTL_ALLOWED, _answer(ALLOW)), _fails(syscalls.NO_TERMINAL)
    )
    steps += rules(
        syscalls.FCNTL,
        _argument(1),
        *_if_among(syscalls.FCNTL_ALLOWED, _answer(ALLOW)),
        *_if_among(syscalls.FCNTL_NOTHING, _fails(0)),
        _fails(errno.EPERM),
    )
    return [*steps, (JUMP_AT_LEAST, 0, 1, syscalls.NEWEST), _fails(errno.ENOSYS), _fails(errno.EPERM)]


def _opening(place: int, make) -> list:
    """Handles ``open`` by its flags: a call that may make a file asks. Older versions of Landlock do not see that reading
    truncates.
    """
    refused = _fails(errno.EPERM)
    return [
        *(_argument(place), *_if_any_bit(O_TMPFILE, _fails(syscalls.NOT_SUPPORTED))),
        *((AND, 0, 0, O_ACCMODE), *_if_among([O_ACCMODE], refused)),
        *(_argument(place), (AND, 0, 0, O_ACCMODE | O_TRUNC), *_if_among([O_TRUNC], refused)),
        *(_argument(place), *_if_any_bit(O_CREAT, make)),
        _answer(ALLOW),
    ]


def _stream() -> list:
    """Refuses sockets of other families and types: those could send to paths."""
    refused = _fails(errno.EPERM)
    return [
        *(_argument(0), (JUMP_EQUAL, 1, 0, AF_UNIX), refused),
        *(_argument(1), (AND, 0, 0, SOCK_TYPES), (JUMP_EQUAL, 1, 0, SOCK_STREAM), refused),
    ]


def _argument_at(offset: int) -> tuple[int, int, int, int]:
    return (LOAD, 0, 0, offset)


def _argument(place: int) -> tuple[int, int, int, int]:
    return _argument_at(16 + 8 * place)


def _answer(value: int) -> tuple[int, int, int, int]:
    return (RETURN, 0, 0, value)


def _fails(number: int) -> tuple[int, int, int, int]:
    """Returns the answer for failing with an error, or for the result 0."""
    return _answer(0x00050000 | number)


def _if_any_bit(bits: int, step) -> list:
    return [(JUMP_ANY_BIT, 0, 1, bits), step]


def _if_among(values, step) -> list:
    return [each for value in values for each in ((JUMP_EQUAL, 0, 1, value), step)]


def _unless_among(values, step) -> list:
    """Takes a step unless the argument is one of the values, or -1, which stands for no change."""
    among = [*values, 0xFFFFFFFF]
    return [*((JUMP_EQUAL, len(among) - place, 0, value) for place, value in enumerate(among)), step]


class Asked:
    """A counted call that waits for an answer."""

    def __init__(self, end: int):
        """Receives the call. Raises ``OSError`` if its process has ended meanwhile."""
        received = bytearray(80)
        fcntl.ioctl(end, RECEIVE, received)
        self.end = end
        self.id, _, _, self.number, _, _, *self.arguments = struct.unpack_from("=QIIiIQQQ", received)

    def answer(self, error: int = 0) -> None:
        """Lets the call happen, or fail."""
        with suppress(OSError):  # its process has ended meanwhile
            fcntl.ioctl(self.end, SEND, struct.pack("=QqiI", self.id, 0, -error, 0 if error else CONTINUE))

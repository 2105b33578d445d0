"""Contains programs by system calls alone. Runs as a script of its own, with the standard library alone: ``python -I -S jail.py``.

It reads a job as JSON from its standard input and writes what happened as JSON to its standard output. A *cell* is one contained
process with all that it starts. Level A: user, pid, mount, network and IPC namespaces of its own, Landlock, seccomp, and limits.
Level B, where namespaces are not allowed: the others, with every process that is left over killed by this one, their reaper. At
level ``none`` there are limits alone.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
NEWUSER, NEWNET, NEWPID, NEWNS, NEWIPC, NEWUTS = 0x10000000, 0x40000000, 0x20000000, 0x20000, 0x08000000, 0x04000000
FIRST_UID = 61000
"""Programs that root starts run as users of their own, one for each slot, so that limits of processes are their own too."""

# "deny": sockets, tracing, mounts, modules, keys, other namespaces, other processes' memory and priorities, memory, semaphores and
# messages that outlive a program, and what has a long list of holes. "some": refused if an argument is, or is not, one of these
# values: prlimit64 of another process, which ends it, and the fcntl and ioctl by which a file sends its signals to another process.
NUMBERS: dict[str, dict] = {
    "x86_64": {
        "arch": 0xC000003E,
        "deny": "29 30 31 41 42 43 49 50 64 65 66 67 68 69 70 71 101 141 142 144 155 161 165 166 167 168 169 175 176 203 220"
        " 240 241 242 243 244 245 246 248 249 250 251 256 272 279 288 298 303 304 308 310 311 312 313 314 320 321 323"
        " 424 425 426 427 428 429 430 431 432 433 434 438 440 442",
        "kill": "62 129 200 234 297",
        "some": [(302, 0, False, [0]), (72, 1, True, [8, 15]), (16, 1, True, [0x8901, 0x8902])],
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "deny": "30 39 40 41 51 97 104 105 106 117 118 119 122 140 142 180 181 182 183 184 185 186 187 188 189 190 191 192"
        " 193 194 195 196 197 198 200 201 202 203 217 218 219 224 225 238 241 242 256 264 265 268 270 271 272 273 274"
        " 280 282 424 425 426 427 428 429 430 431 432 433 434 438 440 442",
        "kill": "129 130 131 138 240",
        "some": [(261, 0, False, [0]), (25, 1, True, [8, 15]), (29, 1, True, [0x8901, 0x8902])],
    },
}
CLONE3 = 435
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute, read files, list directories
STATUS = 60
"""The file descriptor on which a cell says that it could not be set up; closed once its program runs."""


def call(number, *arguments):
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


def landlock_abi():
    """0: the kernel has none."""
    try:
        return call(LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def landlock(readable, writable):
    """From now on this process, and all that it starts, reach these paths alone; no TCP, no signals or abstract sockets outside."""
    abi = call(LANDLOCK_CREATE, None, 0, 1)
    files = (1 << 13) - 1
    files |= sum(1 << bit for bit, since in ((13, 2), (14, 3), (15, 5)) if abi >= since)
    rules = struct.pack("QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    rules = rules[: 8 if abi < 4 else 16 if abi < 6 else 24]
    handle = call(LANDLOCK_CREATE, rules, len(rules), 0)
    for path, access in [(path, READ) for path in readable] + [(path, files) for path in writable]:
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            access &= (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)
        call(LANDLOCK_ADD, handle, 1, struct.pack("=Qi", access & files, place), 0)
        os.close(place)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call(LANDLOCK_RESTRICT, handle, 0)
    os.close(handle)


def seccomp(own_signals):
    """Refuses system calls: EPERM, and ENOSYS for clone3, after which libraries use clone."""
    numbers = NUMBERS[platform.machine()]
    refuse = (0x06, 0, 0, 0x00050000 | errno.EPERM)
    deny = [int(number) for number in (numbers["deny"] + ("" if own_signals else " " + numbers["kill"])).split()]
    load_number = [(0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), (0x06, 0, 0, 0)]  # the other ABI of x86 has the same numbers
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, numbers["arch"]), (0x06, 0, 0, 0), *load_number]
    steps += [(0x15, 0, 1, CLONE3), (0x06, 0, 0, 0x00050000 | errno.ENOSYS)]
    for number in deny:
        steps += [(0x15, 0, 1, number), refuse]
    for number, argument, among, values in numbers["some"]:
        checks = [step for value in values for step in ((0x15, 0 if among else 1, 1 if among else 0, value), refuse)]
        steps += [(0x15, 0, len(checks) + 2, number), (0x20, 0, 0, 16 + 8 * argument), *checks, (0x20, 0, 0, 0)]
    steps.append((0x06, 0, 0, 0x7FFF0000))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if LIBC.prctl(PR_SET_SECCOMP, 2, struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(held)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def tasks_of(uid):
    """How many threads a user has."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return count


def enter(job):
    """Another user, namespaces, limits; for the cell's first process."""
    if os.getuid() == 0 and job["level"] != "none":
        uid = FIRST_UID + job["slot"]
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    uid, gid = os.getuid(), os.getgid()
    others = 0
    if job["level"] == "A":
        if LIBC.unshare(NEWUSER | NEWNET | NEWPID | NEWNS | NEWIPC | NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    elif uid == 0 or not job["root"]:
        others = tasks_of(uid)
    limits = job["limits"]
    for name, value in (
        ("AS", limits["memory"]),
        ("CPU", limits["cpu_s"]),
        ("FSIZE", limits["file"]),
        ("NOFILE", 64),
        ("CORE", 0),
        ("NPROC", others + limits["processes"]),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def cell(job, argv, ends, folder):
    """Start a contained process. ``ends``: its file descriptors → ours. The id of its first process, and a pipe on which setting it
    up fails."""
    read, write = os.pipe()
    jail = os.getpid()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        high = {number: fcntl.fcntl(end, fcntl.F_DUPFD, 100) for number, end in ends.items()}
        os.dup2(write, STATUS, inheritable=False)
        for number, end in high.items():
            os.dup2(end, number)
        os.closerange(max([2, *ends]) + 1, STATUS)
        os.closerange(STATUS + 1, 1024)
        os.chdir(folder)
        enter(job)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # only now: a new user or user namespace clears it
        if os.getppid() != jail:
            os._exit(99)
        outer_died, outer_lives = os.pipe()
        inner = os.fork()
        if inner:
            os.close(STATUS)
            os.close(outer_died)
            _, ended = os.waitpid(inner, 0)
            code = os.waitstatus_to_exitcode(ended)
            os._exit(code if code >= 0 else 128 - code)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.close(outer_lives)
        if select.select([outer_died], [], [], 0)[0]:  # os.getppid() says nothing here: in a pid namespace it is 0
            os._exit(99)
        if job["level"] != "none":
            landlock(job["readable"], [folder, "/dev/null"])
            seccomp(job["level"] == "A" or landlock_abi_was >= 6)
        os.execve(argv[0], argv, {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **THREADS})
    except BaseException as error:
        os.write(STATUS, f"{type(error).__name__}: {error}".encode()[:1000])
    finally:
        os._exit(99)


THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
landlock_abi_was = 0


def reap(pids):
    """End cells, and whatever is left of them."""
    for pid in pids:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            for child in children():
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)


def children():
    own = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == own:
                        found.append(int(name))
            except (OSError, ValueError, IndexError):
                pass
    return found


def watch(job, main, cells, pipes, feeds, until):
    """Until the cell ``main`` ends, the time is up, or there is too much output: why, its exit code, and what came out of pipes."""
    out = {name: b"" for name in pipes}
    open_ = {end: name for name, end in pipes.items()}
    feeding = {end: data for end, data in feeds.items()}
    for end in feeding:
        os.set_blocking(end, False)
    code = None
    while True:
        left = until - time.monotonic()
        if left <= 0:
            return "late", code, out
        readable, writable, _ = select.select(list(open_), list(feeding), [], min(left, 0.02))
        for end in writable:
            try:
                sent = os.write(end, feeding[end][: 1 << 16]) if feeding[end] else 0
                feeding[end] = feeding[end][sent:]
            except BlockingIOError:
                continue
            except OSError:
                feeding[end] = b""
            if not feeding[end]:
                os.close(end)
                del feeding[end]
        for end in readable:
            chunk = os.read(end, 1 << 16)
            name = open_[end]
            out[name] += chunk
            if not chunk:
                del open_[end]
            elif len(out[name]) > job["limits"]["output"]:
                return "output", code, out
        if code is None:
            pid, ended = os.waitpid(main, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(ended)
                until = min(until, time.monotonic() + 0.2)  # for what is still in its pipes; others may hold them for ever
        if code is not None and not open_:
            return "ended", code, out
        if code is not None and time.monotonic() >= until:
            return "ended", code, out


def settled(reads):
    """What went wrong in setting cells up: their first processes have said so, or are programs by now."""
    problem = ""
    for end in reads:
        text = os.read(end, 1000)
        os.close(end)
        problem = problem or text.decode("utf-8", "replace")
    return problem


def functions(job, folder, until):
    """A solution in one cell, tests in another that calls it; the verdict is the other's."""
    calls, answers, verdict, told = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    nothing = os.open("/dev/null", os.O_RDWR)
    parts = [job["solution"], job["judge"]]
    texts = [
        job["code"],
        json.dumps({"setup": job["setup"], "tests": job["tests"], "entry": job["entry"], "names": job["names"]}),
    ]
    inputs = [os.pipe(), os.pipe()]
    ends = {0: inputs[0][0], 1: nothing, 2: told[1], 3: calls[0], 4: answers[1]}
    first, first_ok = cell({**job, "slot": 2 * job["slot"]}, [*job["python"], "-c", parts[0]], ends, folder)
    ends = {0: inputs[1][0], 1: nothing, 2: nothing, 3: calls[1], 4: answers[0], 5: verdict[1]}
    second, second_ok = cell({**job, "slot": 2 * job["slot"] + 1}, [*job["python"], "-c", parts[1]], ends, folder)
    for end in (*calls, *answers, verdict[1], told[1], inputs[0][0], inputs[1][0], nothing):
        os.close(end)
    feeds = {inputs[0][1]: texts[0].encode("utf-8", "replace"), inputs[1][1]: texts[1].encode("utf-8", "replace")}
    # The judge's cell is the one that counts: once it is over, so is the solution's.
    why, code, out = watch(job, second, [first, second], {"verdict": verdict[0], "stderr": told[0]}, feeds, until)
    reap([first, second])
    problem = settled([first_ok, second_ok])
    if problem:
        return {"why": "jail", "problem": problem}
    text = out["verdict"].decode("utf-8", "replace")
    return {"why": why, "code": code, "verdict": text, "stderr": out["stderr"][-2000:].decode("utf-8", "replace")}


def program(job, folder, until, given):
    """A program that reads its standard input: what it wrote."""
    told, wrote, given_in = os.pipe(), os.pipe(), os.pipe()
    path = os.path.join(folder, "program.py")
    pid, ok = cell({**job, "slot": 2 * job["slot"]}, [*job["python"], path], {0: given_in[0], 1: wrote[1], 2: told[1]}, folder)
    for end in (told[1], wrote[1], given_in[0]):
        os.close(end)
    feeds = {given_in[1]: given.encode("utf-8", "replace")}
    why, code, out = watch(job, pid, [pid], {"stdout": wrote[0], "stderr": told[0]}, feeds, until)
    reap([pid])
    problem = settled([ok])
    if problem:
        return {"why": "jail", "problem": problem}
    return {"why": why, "code": code, **{name: data.decode("utf-8", "replace") for name, data in out.items()}}


def empty(folder):
    """Remove what programs left there, however deep it is and whatever its modes are."""
    os.chdir(folder)
    inside = []
    while True:
        deeper = None
        with os.scandir() as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    deeper = entry.name
                    break
                os.unlink(entry.name)
        if deeper:
            os.chmod(deeper, 0o700)
            os.chdir(deeper)
            inside.append(deeper)
        elif inside:
            os.chdir("..")
            os.rmdir(inside.pop())
        else:
            return


def stop(*_):
    """The run is over, or does not want the job any more: end it, and leave nothing behind."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def main():
    global landlock_abi_was
    signal.signal(signal.SIGTERM, stop)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    job = json.load(sys.stdin)
    if os.getppid() != job["parent"]:
        return
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    landlock_abi_was = landlock_abi()
    job["root"] = os.getuid() == 0
    if job["level"] != "none" and (platform.machine() not in NUMBERS or not landlock_abi_was):
        print(json.dumps({"why": "jail", "problem": f"no Landlock, or unknown system calls ({platform.machine()})"}))
        return
    started = time.monotonic()
    results = []
    folder = job["folder"]
    try:
        if "inputs" in job:
            with open(os.path.join(folder, "program.py"), "w", encoding="utf-8", errors="replace") as file:
                file.write(job["code"])
            for given in job["inputs"]:
                results.append(program(job, folder, time.monotonic() + job["seconds"], given))
                if results[-1]["why"] == "jail" or (job["first_only"] and results[-1]["why"] != "ended"):
                    break
        else:
            results.append(functions(job, folder, started + job["seconds"]))
    except Exception as error:
        results.append({"why": "jail", "problem": f"{type(error).__name__}: {error}"})
    finally:
        reap([])
        with contextlib.suppress(OSError):
            empty(folder)
    print(json.dumps({"results": results, "s": time.monotonic() - started}))


if __name__ == "__main__":
    main()

"""A shell: commands one after the other in the same folders. Each is a cell of its own, so nothing of it goes on when it is over;
the next one has its working folder, exported variables and functions.

Each request is a value of ``marshal`` on the standard input. Its answer is one on the standard output, after its length.
"""

import marshal
import os
import stat
import struct
import sys
import time
from contextlib import suppress

from .cell import Cell, Start, user_of
from .folders import Job, entries, used
from .roots import MEMORY
from .watch import Watch

SPACE, WORK, TEMPORARY, LOGS, ROOT = "space", "work", "tmp", "logs", "root"
HOME, SHARED = "empty-home", "shm"
"""Names of folders. The first has all but the root."""
START_S = 10.0
"""Seconds for a command's process to be set up, which do not count."""
STATE_END = 58
"""Descriptor on which a command reports what the next one has of it."""
STATE_BYTES = 100_000
"""Most bytes of this report: a longer one is dropped."""
COMMAND = "; ".join(
    (
        "__rlhf_end() { local code=$?; trap - EXIT",
        f"{{ printf 'cd -- %q\\n' \"$PWD\"; export -p; declare -f; }} 2>&- >&{STATE_END}",
        "exit $code; }",
        "trap __rlhf_end EXIT",
        "__rlhf_command=$1",
        'eval "$2" >&- 2>&-',
        "set --",
        'eval "$__rlhf_command"',
    )
)
"""Runs ``$1`` in the state ``$2``; in one line, so that messages of ``bash`` count the command's own lines."""
VARIABLES = {"GIT_CONFIG_NOSYSTEM": "1", "USER": "user", "LOGNAME": "user"}
GIT = {"core.hooksPath": "/dev/null", "core.fsmonitor": "false", "core.attributesFile": "/dev/null"}
FRESH = dict(
    [("GIT_CONFIG_COUNT", str(len(GIT))), ("GIT_NO_REPLACE_OBJECTS", "1")]
    + [(f"GIT_CONFIG_KEY_{number}", key) for number, key in enumerate(GIT)]
    + [(f"GIT_CONFIG_VALUE_{number}", value) for number, value in enumerate(GIT.values())]
)
"""Variables of a fresh command: hooks of repositories, which others left, do not run in it."""


class Shell:
    """The folders and the state of a shell.

    Args:
        job: level, limits, readable paths, ``bash``, and ``paths``: whether it has a file system of its own, and then at which
            path its working folder is.
    """

    def __init__(self, job: dict, place: Job):
        self.job, self.place = job, place
        self.user = user_of(job, 0)
        self.state = b""
        self.work = job["work"]
        self.space = place.folder(SPACE, self.user)
        self.folders = [SPACE]
        self.kept = (WORK, TEMPORARY, *([SHARED] if self.work and os.path.isdir(MEMORY) else []))
        self._restore()
        if self.work:
            os.mkdir(ROOT, 0o755, dir_fd=place.fd)

    def put(self, request: dict) -> dict:
        """Writes files into a new or the working folder: those that commands may change are their user's."""
        into, owns = request["into"], request["into"] == WORK
        if owns:
            top = self._open(self.space, WORK)
        else:
            os.mkdir(into, 0o750, dir_fd=self.place.fd)
            top = self._open(self.place.fd, into)
            self._give(top, owns)
            self.folders.append(into)
        try:
            for name, (content, runs) in request["files"].items():
                self._write(top, name.split("/"), content, runs, owns)
        finally:
            os.close(top)
        return {"why": "ended"}

    def logs(self, request: dict) -> dict:
        """Makes an empty folder for what tests report, whatever commands left at its place."""
        self._renew(LOGS)
        logs = self._open(self.space, LOGS)
        for name in request["folders"]:
            self._folder(logs, name)
        os.close(logs)
        return {"why": "ended"}

    def get(self, request: dict) -> dict:
        """Returns the beginning of a file in the space of commands; no links are followed. ``None``: there is no such file."""
        *folders, name = request["path"].split("/")
        opened = [os.dup(self.space)]
        try:
            for folder in folders:
                opened.append(self._open(opened[-1], folder))
            opened.append(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened[-1]))
            if not stat.S_ISREG(os.fstat(opened[-1]).st_mode):
                return {"why": "ended", "content": None}
            return {"why": "ended", "content": os.read(opened[-1], request["most"])}
        except OSError:
            return {"why": "ended", "content": None}
        finally:
            for each in opened:
                os.close(each)

    def run(self, request: dict) -> dict:
        """Runs a command. ``fresh``: it has nothing of earlier commands but files in the working folder, without settings, and
        leaves nothing but files.
        """
        self._restore()
        limits, why = self._limits()
        if why:
            return {"why": why, "code": None, "output": b"", "s": 0.0, "lost": False}
        fresh = request["fresh"]
        for name in (HOME, *self.kept[1:]) if fresh else ():
            self._renew(name)
        told, state, nothing = os.pipe(), os.pipe(), os.open("/dev/null", os.O_RDWR)
        for end in (told[1], state[1]):
            os.fchown(end, self.user, -1)  # a command may open /dev/stdout
        binds, folder, variables = self._places(request)
        always = {**VARIABLES, **FRESH} if fresh else VARIABLES
        start = Start(folder, {**always, **variables, **request["variables"]}, os.path.join(self.place.path, ROOT), binds)
        if fresh:
            start.clean = folder if self.work else os.path.join(self.place.path, SPACE)
            start.closed = [variables[name] for name in ("HOME", *(f"{each.upper()}_DIR" for each in request["sees"]))]
        text = "" if fresh else self.state.decode("utf-8", "surrogateescape")
        argv = [self.job["bash"], "--norc", "--noprofile", "-c", COMMAND, "bash", request["command"], text]
        given = [self._open(self.place.fd, name) for name in self.folders[1:] if name in request["sees"]]
        ends = {0: nothing, 1: told[1], 2: told[1], STATE_END: state[1]}
        space = os.dup(self.space)
        cell = Cell(self.job, self.user, argv, ends, (space, folder), tuple(given), start)
        for end in (told[1], state[1], nothing, *given):
            os.close(end)
        watch = Watch(limits, [cell], {"output": told[0], "state": state[0]}, self.job["level"] != "none")
        try:
            watch.start(START_S)
            began = time.monotonic()
            why = watch.until(began + request["seconds"])
        finally:
            watch.close()
            os.close(space)
        if watch.problem:
            return {"why": "jail", "problem": watch.problem}
        kept = watch.out["state"]
        if why == "ended" and not fresh and kept and len(kept) <= STATE_BYTES:
            self.state = kept
        lost = len(kept) > STATE_BYTES
        return {"why": why, "code": watch.code, "output": watch.out["output"], "s": time.monotonic() - began, "lost": lost}

    def _limits(self) -> tuple[dict, str]:
        """Returns the limits of the next command, and what is used up so far that there is none. Where a command went too far
        before it was ended, the next may remove files, but add none.
        """
        limits = dict(self.job["limits"])
        for name, has in (("files", entries(self.space, 2 * limits["files"])), ("disk", used(self.space))):
            if has >= 2 * limits[name]:
                return limits, name
            limits[name] = max(limits[name], has)
        return limits, ""

    def _places(self, request: dict) -> tuple[dict, str, dict]:
        """Returns folders at paths of its own, the path where a command starts, and variables with paths."""
        space = os.path.join(self.place.path, SPACE)
        own = (*self.kept, LOGS, HOME)
        inside = {name: os.path.join(space, name) for name in own}
        inside |= {name: os.path.join(self.place.path, name) for name in self.folders[1:]}
        binds = {}
        if self.work:
            shown = [*self.kept, *([HOME] if request["fresh"] else []), *([LOGS] if LOGS in request["sees"] else [])]
            shown += [name for name in self.folders[1:] if name in request["sees"]]
            paths = {name: {WORK: self.work, SHARED: MEMORY}.get(name, f"/{name}") for name in shown}
            binds = {paths[name]: (inside[name], name in own) for name in shown}
            inside |= paths
        variables = {"HOME": inside[HOME if request["fresh"] else WORK], "TMPDIR": inside[TEMPORARY]}
        for name in request["sees"]:
            variables[f"{name.upper()}_DIR"] = inside[name]
        return binds, inside[WORK], variables

    def _restore(self) -> None:
        """Makes folders that commands cannot do without, if they are not there or closed: a command may have done that."""
        os.fchmod(self.space, 0o700)
        for name in self.kept:
            try:
                place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.space)
            except OSError:
                self._renew(name)
            else:
                os.chmod(f"/proc/self/fd/{place}", 0o700)
                os.close(place)

    def _renew(self, name: str) -> None:
        """Makes an empty folder in the space, whatever commands left at its place."""
        with suppress(FileNotFoundError):
            os.rename(name, f"{name}-{os.urandom(8).hex()}", src_dir_fd=self.space, dst_dir_fd=self.space)
        self._folder(self.space, name)

    def _folder(self, parent: int, name: str) -> None:
        os.mkdir(name, 0o700, dir_fd=parent)
        opened = self._open(parent, name)
        self._give(opened, True)
        os.close(opened)

    def _write(self, top: int, parts: list[str], content: bytes, runs: bool, owns: bool) -> None:
        *folders, name = parts
        opened = [os.dup(top)]
        try:
            for folder in folders:
                with suppress(FileExistsError):
                    os.mkdir(folder, 0o750, dir_fd=opened[-1])
                    made = self._open(opened[-1], folder)
                    self._give(made, owns)
                    os.close(made)
                opened.append(self._open(opened[-1], folder))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(name, flags, 0o700, dir_fd=opened[-1]), "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), (0o750 if runs else 0o640) if not owns else (0o755 if runs else 0o644))
                self._give(file.fileno(), owns)
        finally:
            for each in opened:
                os.close(each)

    def _give(self, opened: int, owns: bool) -> None:
        """Gives an open file to the user of commands, to change it or to read it."""
        if self.user != os.geteuid():
            os.fchown(opened, self.user if owns else -1, self.user)

    @staticmethod
    def _open(parent: int, name: str) -> int:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def serve(job: dict, place: Job) -> None:
    """Answers requests until there are no more."""
    shell = Shell(job, place)
    answers = {"put": shell.put, "logs": shell.logs, "get": shell.get, "run": shell.run}
    _tell({"why": "ended"})
    while True:
        try:
            request = marshal.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = answers[request["do"]](request)
        except Exception as error:
            answer = {"why": "jail", "problem": f"{type(error).__name__}: {error}"}
        _tell(answer)


def _tell(answer: dict) -> None:
    data = marshal.dumps(answer)
    sys.stdout.buffer.write(struct.pack("<Q", len(data)) + data)
    sys.stdout.buffer.flush()

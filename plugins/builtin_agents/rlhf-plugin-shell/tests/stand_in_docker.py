"""A stand-in for ``docker``: it takes the command line that Docker documents, and nothing else, and runs containers in
namespaces of Linux, whose programs are this machine's. Everything is in the folder ``DOCKER_STAND_IN``:

    registry/NAME.json  what ``pull`` finds: the ``Config`` of an image
    images/, containers/, networks/, volumes/  what there is
    faults/COMMAND      how often a command fails before it works
    calls.jsonl         the command lines, in their order
"""

import ctypes
import fcntl
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import time
import uuid
from pathlib import Path

PLACE = Path(os.environ["DOCKER_STAND_IN"])
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)
USER, MOUNT, PID, NET, IPC, UTS = 0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000
BIND = 4096 | 16384  # MS_BIND | MS_REC
SHARED = ("usr", "bin", "sbin", "lib", "lib64", "etc/alternatives", "dev")
VALUE, SWITCH = True, False
FLAGS = {
    "ps": {"--all": SWITCH, "--quiet": SWITCH, "--filter": VALUE},
    "run": {
        **dict.fromkeys(("--network", "--label", "--memory", "--memory-swap", "--pids-limit", "--ulimit", "--cap-drop"), VALUE),
        **dict.fromkeys(("--cap-add", "--security-opt", "--cpus", "--entrypoint", "--pull"), VALUE),
        "--detach": SWITCH,
    },
    "exec": {"--user": VALUE, "--workdir": VALUE, "--env": VALUE},
    "cp": {},
    "inspect": {"--format": VALUE, "--size": SWITCH},
    "restart": {"-t": VALUE},
    "rm": {"--force": SWITCH, "--volumes": SWITCH},
    "pull": {"--quiet": SWITCH},
    "build": {
        **dict.fromkeys(("--tag", "--label", "--file", "--build-arg", "--target"), VALUE),
        "--quiet": SWITCH,
    },
    "image inspect": {"--format": VALUE},
    "network ls": {"--quiet": SWITCH, "--filter": VALUE},
    "network rm": {},
    "network inspect": {"--format": VALUE},
    "volume ls": {"--quiet": SWITCH, "--filter": VALUE},
    "volume rm": {"--force": SWITCH},
    "volume inspect": {"--format": VALUE},
    "compose": dict.fromkeys(("--project-name", "--project-directory", "--file"), VALUE),
    "compose up": {
        **dict.fromkeys(("--detach", "--no-build", "--wait"), SWITCH),
        **dict.fromkeys(("--pull", "--wait-timeout"), VALUE),
    },
    "compose ps": {"--quiet": SWITCH},
    "compose down": {"--volumes": SWITCH, "--remove-orphans": SWITCH, "--timeout": VALUE},
}
"""Command → the flags that are known, and whether they have a value."""
SERVICE = {
    *("image", "entrypoint", "command", "environment", "depends_on", "healthcheck", "working_dir", "networks", "volumes"),
    *(
        "labels",
        "pull_policy",
        "mem_limit",
        "memswap_limit",
        "pids_limit",
        "ulimits",
        "cap_drop",
        "cap_add",
        "security_opt",
        "cpus",
    ),
}


def fail(message, code=1):
    sys.stderr.write(f"{message}\n")
    sys.exit(code)


def parsed(command, arguments):
    """The flags of a command, and what follows them."""
    given, rest = {}, list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        name, equals, value = rest.pop(0).partition("=")
        if name not in FLAGS[command]:
            fail(f"unknown flag: {name}\nSee 'docker {command} --help'.", 125)
        if FLAGS[command][name] is SWITCH:
            value = True
        elif not equals:
            value = rest.pop(0) if rest else fail(f"flag needs an argument: {name}", 125)
        given.setdefault(name, []).append(value)
    return given, rest


def last(given, name, default=None):
    return given.get(name, [default])[-1]


def system(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# --- containers ---------------------------------------------------------------------------------


def folder(kind, name):
    return PLACE / kind / name.replace("/", "%").replace(":", "@")


def record(kind, name):
    try:
        return json.loads((folder(kind, name) / "about.json").read_text())
    except FileNotFoundError:
        fail(f"Error response from daemon: No such {kind[:-1]}: {name}")


def keep(kind, name, about):
    folder(kind, name).mkdir(parents=True, exist_ok=True)
    new = folder(kind, name) / f"about.{os.getpid()}"
    new.write_text(json.dumps(about))
    new.rename(folder(kind, name) / "about.json")


def names(kind):
    return [path.parent.name.replace("%", "/").replace("@", ":") for path in sorted(PLACE.glob(f"{kind}/*/about.json"))]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def limits_of(flags):
    """Limits as ``resource`` has them, from flags that are checked as Docker does."""
    found = {}
    for memory in ("--memory", "--memory-swap"):
        if not re.fullmatch(r"\d+[bkmg]?", last(flags, memory, "1g")):
            fail(f"invalid argument for {memory}: invalid size", 125)
    if not last(flags, "--pids-limit", "1").isdigit():
        fail("invalid argument for --pids-limit", 125)
    if not 0.01 <= float(last(flags, "--cpus", "1")) <= (os.cpu_count() or 1):
        fail(f"Error response from daemon: range of CPUs is from 0.01 to {os.cpu_count()}.00", 125)
    for each in flags.get("--ulimit", ()):
        name, _, value = each.partition("=")
        if name not in ("cpu", "fsize", "core", "nofile", "nproc") or not value.isdigit():
            fail(f"invalid ulimit argument: {each}", 125)
        found[getattr(resource, f"RLIMIT_{name.upper()}")] = int(value)
    for each in (*flags.get("--cap-add", ()), *flags.get("--cap-drop", ())):
        if not re.fullmatch(r"ALL|[A-Z_]+", each):
            fail(f"invalid capability: {each}", 125)
    for each in flags.get("--security-opt", ()):
        if each != "no-new-privileges":
            fail(f"invalid --security-opt: {each}", 125)
    if (memory := last(flags, "--memory")) is not None:
        found[resource.RLIMIT_AS] = int(memory.rstrip("bkmg"))
    if (most := last(flags, "--pids-limit")) is not None:
        found[resource.RLIMIT_NPROC] = int(most)
    return found


def enter(about):
    """Makes the caller a process that may use a container's namespaces, and in these namespaces."""
    opened = [os.open(f"/proc/{about['pid']}/ns/{name}", os.O_RDONLY) for name in ("user", "net", "ipc", "uts", "pid", "mnt")]
    become_nobody()
    for each in opened:
        system(LIBC.setns(each, 0))


def become_nobody():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    system(LIBC.prctl(4, 1, 0, 0, 0))


def limited(limits):
    for which, most in limits:
        resource.setrlimit(which, (most, most))


def begin(name, about):
    """Starts a container's first process."""
    root = folder("containers", name) / "root"
    for each in SHARED:
        here = Path("/", each)
        if here.is_symlink() and not (root / each).is_symlink():
            (root / each).symlink_to(os.readlink(here))
        elif here.exists() and not here.is_symlink():
            (root / each).mkdir(parents=True, exist_ok=True)
    for each, mode in (("proc", 0o755), ("tmp", 0o1777), ("etc", 0o755), ("root", 0o700)):
        (root / each).mkdir(exist_ok=True)
        (root / each).chmod(mode)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/hosts").write_text("".join(f"127.0.0.1 {host}\n" for host in ("localhost", *about["hosts"])))
    (root / about["workdir"].lstrip("/")).mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(root)], check=True)
    told, tells = os.pipe()
    if os.fork() == 0:
        os.setsid()
        nothing = os.open("/dev/null", os.O_RDWR)
        for each in range(3):
            os.dup2(nothing, each)
        try:
            if about["joins"]:
                joined = record("containers", about["joins"])
                opened = [os.open(f"/proc/{joined['pid']}/ns/{each}", os.O_RDONLY) for each in ("user", "net")]
                become_nobody()
                for each in opened:
                    system(LIBC.setns(each, 0))
                limited(about["limits"])
                system(LIBC.unshare(MOUNT | PID | IPC | UTS))
            else:
                become_nobody()
                limited(about["limits"])
                user, group = os.geteuid(), os.getegid()
                system(LIBC.unshare(USER | MOUNT | PID | NET | IPC | UTS))
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"0 {user} 1")
                Path("/proc/self/gid_map").write_text(f"0 {group} 1")
                with socket.socket() as up:  # the loopback interface
                    fcntl.ioctl(up, 0x8914, struct.pack("16sh14x", b"lo", 0x49))
            ready, readies = os.pipe()
            first = os.fork()
            if first:
                os.close(readies)
                os.read(ready, 1)
                os.write(tells, str(first).encode())
                os._exit(0)
            mounted(root)
            os.write(readies, b"1")
            os.execvpe(about["first"][0], about["first"], environment(about, {}))
        except BaseException as error:
            os.write(tells, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
    os.close(tells)
    pid = os.read(told, 1000).decode()
    if not pid.isdigit():
        fail(f"docker: Error response from daemon: failed to create task: {pid}", 125)
    about["pid"] = int(pid)
    keep("containers", name, about)


def mounted(root):
    def mount(source, target, kind=None, flags=0):
        system(LIBC.mount(source.encode(), str(target).encode(), kind, flags, None))

    system(LIBC.mount(None, b"/", None, 16384 | (1 << 18), None))  # private
    for each in SHARED:
        if (root / each).is_dir() and not (root / each).is_symlink():
            mount(f"/{each}", root / each, None, BIND)
    mount("proc", root / "proc", b"proc")
    os.chroot(root)
    os.chdir("/")


def environment(about, more):
    usual = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "HOSTNAME": "box"}
    return {**usual, **about["env"], **more}


def run(flags, rest):
    image, *command = rest or fail("docker: 'docker run' requires at least 1 argument", 125)
    if last(flags, "--network", "bridge") not in ("none", "bridge"):
        fail(f"Error response from daemon: network {last(flags, '--network')} not found", 125)
    if last(flags, "--pull", "missing") != "never" or not last(flags, "--detach"):
        fail("the stand-in knows --detach --pull never", 125)
    config = record("images", image)
    entry = [last(flags, "--entrypoint")] if "--entrypoint" in flags else config.get("Entrypoint") or []
    print(made(image, [*entry, *command], flags))


def made(image, first, flags, joins="", hosts=(), environ=(), workdir="", name=""):
    config = record("images", image)
    name = name or uuid.uuid4().hex * 2
    root = folder("containers", name) / "root"
    shutil.copytree(folder("images", image) / "root", root, symlinks=True)
    about = {
        "labels": dict(each.partition("=")[::2] for each in flags.get("--label", ())),
        "limits": [[which, most] for which, most in limits_of(flags).items()],
        "workdir": workdir or config.get("WorkingDir") or "/",
        "env": {**dict(each.partition("=")[::2] for each in config.get("Env") or ()), **dict(environ)},
        "network": last(flags, "--network", "bridge"),
        "image": image,
        "first": first,
        "joins": joins,
        "hosts": list(hosts),
        "base": size(folder("images", image) / "root"),
    }
    begin(name, about)
    return name


def size(root):
    total = 0
    for top, folders, files in os.walk(root):
        folders[:] = [each for each in folders if Path(top, each) not in {root / "proc", root / "dev"}]
        total += sum(Path(top, each).lstat().st_size for each in files if stat.S_ISREG(Path(top, each).lstat().st_mode))
    return total


def inside(about, argv, workdir="/", more=(), stdin=None, stdout=None):
    """Runs a command in a container. Returns its exit code."""
    if not alive(about["pid"]):
        fail("Error response from daemon: container is not running", 1)
    root = folder("containers", about["name"]) / "root"
    child = os.fork()
    if child == 0:
        try:
            enter(about)
            os.chroot(root)
            limited(about["limits"])
            code = -1
            try:
                last_one = os.fork()
            except OSError as error:
                sys.stdout.write(f"OCI runtime exec failed: exec failed: unable to start container process: {error}\n")
                sys.stdout.flush()
                os._exit(126)
            if last_one == 0:
                try:
                    os.chdir(workdir)
                    if stdin is None:
                        stdin = os.open("/dev/null", os.O_RDONLY)
                    os.dup2(stdin, 0)
                    if stdout is not None:
                        os.dup2(stdout, 1)
                    os.execvpe(argv[0], argv, environment(about, dict(more)))
                except OSError as error:
                    os.write(1, f"OCI runtime exec failed: exec failed: unable to start container process: {error}\n".encode())
                    os._exit(127 if error.errno == 2 else 126)
            code = os.waitstatus_to_exitcode(os.waitpid(last_one, 0)[1])
            os._exit(128 - code if code < 0 else code)
        except BaseException as error:
            os.write(2, f"Error response from daemon: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def execute(flags, rest):
    name, *argv = rest
    about = record("containers", name) | {"name": name}
    if last(flags, "--user", "0") not in ("0", "root"):
        fail(f"unable to find user {last(flags, '--user')}: no matching entries in passwd file", 126)
    more = [each.partition("=")[::2] for each in flags.get("--env", ())]
    sys.exit(inside(about, argv, last(flags, "--workdir", about["workdir"]), more))


def copy(flags, rest):
    source, target = rest
    if source == "-":
        name, _, path = target.partition(":")
        about = record("containers", name) | {"name": name}
        with tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read())) as packed:
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w") as again:
                for each in packed:
                    again.addfile(each, packed.extractfile(each))
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            with open(write, "wb") as out:
                out.write(content.getvalue())
            os._exit(0)
        os.close(write)
        sys.exit(inside(about, ["tar", "--no-same-owner", "-xpf", "-", "-C", path], stdin=read))
    if target != "-":
        fail("the stand-in copies archives")
    name, _, path = source.partition(":")
    about = record("containers", name) | {"name": name}
    code = inside(about, ["bash", "-c", '[ -e "$1" ] || [ -L "$1" ]', "x", path])
    if code:
        fail(f"Error response from daemon: Could not find the file {path} in container {name}")
    sys.exit(inside(about, ["tar", "-cf", "-", "-C", os.path.dirname(path), os.path.basename(path)]))


def stop(name):
    about = record("containers", name)
    if alive(about["pid"]):
        os.kill(about["pid"], signal.SIGKILL)
        while alive(about["pid"]):
            time.sleep(0.01)


def restart(flags, rest):
    for name in rest:
        stop(name)
        begin(name, record("containers", name))
        print(name)


def remove(flags, rest):
    for name in rest:
        about = record("containers", name)
        if alive(about["pid"]) and not last(flags, "--force"):
            fail("Error response from daemon: container is running: stop the container before removing or force remove")
        stop(name)
        shutil.rmtree(folder("containers", name), ignore_errors=True)
        print(name)


def listed(kind):
    def command(flags, rest):
        for name in names(kind):
            labels = record(kind, name)["labels"]
            wanted = [each.removeprefix("label=").partition("=") for each in flags.get("--filter", ())]
            if all(key in labels and value in ("", labels[key]) for key, _, value in wanted):
                print(name)

    return command


def shown(kind):
    def command(flags, rest):
        form = last(flags, "--format")
        for name in rest:
            about = record(kind, name)
            if form == "{{.State.Running}}":
                print(str(alive(about["pid"])).lower())
            elif form == "{{.SizeRw}}" and last(flags, "--size"):
                print(max(0, size(folder("containers", name) / "root") - about["base"]))
            elif found := re.fullmatch(r'\{\{index (\.Config)?\.Labels "([\w.]+)"\}\}', form):
                if bool(found[1]) != (kind == "containers"):
                    fail("template parsing error: map has no entry for key")
                print(about["labels"].get(found[2], ""))
            elif form == "{{.Id}}" and kind == "images":
                print(f"sha256:{name}")
            elif form == "{{json .Config}}" and kind == "images":
                print(json.dumps(about))
            else:
                fail(f"the stand-in knows no format {form}")

    return command


def pull(flags, rest):
    [name] = rest
    file = PLACE / "registry" / f"{name.replace('/', '%')}.json"
    if not file.is_file():
        fail(f"Error response from daemon: manifest for {name} not found: manifest unknown: manifest unknown")
    (folder("images", name) / "root").mkdir(parents=True, exist_ok=True)
    keep("images", name, json.loads(file.read_text()))
    print(name)


def build(flags, rest):
    [context] = rest
    steps = [line.split(maxsplit=1) for line in Path(last(flags, "--file")).read_text().splitlines() if line.strip()]
    tag, config, copies, runs, place = last(flags, "--tag"), {}, [], [], "/"
    for name, words in steps:
        match name:
            case "FROM":
                if not (folder("images", words) / "about.json").exists():
                    pull({}, [words])
                config = {"Env": [], "WorkingDir": "", **record("images", words)}
            case "WORKDIR":
                place = os.path.join(place, words)
                config["WorkingDir"] = place
            case "ENV":
                config["Env"] = [*config["Env"], words]
            case "COPY":
                source, target = words.split()
                copies.append((Path(context, source), os.path.join(place, target)))
            case "RUN":
                runs.append((place, words))
            case _:
                fail(f"dockerfile parse error: unknown instruction: {name}")
    root = folder("images", tag) / "root"
    root.mkdir(parents=True, exist_ok=True)
    for source, target in copies:
        path = root / target.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, path, dirs_exist_ok=True)
        else:
            if target.endswith(("/", ".")):
                path.mkdir(parents=True, exist_ok=True)
                path /= source.name
            shutil.copy(source, path)
    keep("images", tag, {**config, "labels": {}})
    if runs:
        name = made(tag, ["bash", "-c", "exec 3<> <(:) && while :; do (read -r -t 100 -u 3) & wait; done"], {})
        about = record("containers", name) | {"name": name}
        for where, words in runs:
            if code := inside(about, ["sh", "-c", f"mkdir -p {shlex.quote(where)}; cd {shlex.quote(where)}; {words}"]):
                remove({"--force": [True]}, [name])
                fail(f'ERROR: failed to solve: process "/bin/sh -c {words}" did not complete successfully: exit code: {code}')
        stop(name)
        shutil.rmtree(root)
        shutil.copytree(folder("containers", name) / "root", root, symlinks=True)
        shutil.rmtree(folder("containers", name))
    print(f"sha256:{tag}")


def drop(kind):
    def command(flags, rest):
        for name in rest:
            record(kind, name)
            shutil.rmtree(folder(kind, name))
            print(name)

    return command


def compose(flags, rest):
    action, *more = rest
    given, _ = parsed(f"compose {action}", more)
    project = last(flags, "--project-name")
    services = json.loads(Path(last(flags, "--file")).read_text())
    mine = [name for name in names("containers") if name.startswith(f"{project}-")]
    if action == "up":
        if not {"--detach", "--no-build", "--wait"} <= given.keys() or last(given, "--pull") != "never":
            fail("the stand-in knows --detach --no-build --wait --pull never")
        for kind in ("networks", "volumes"):
            for name, own in services[kind].items():
                keep(kind, f"{project}_{name}", {"labels": own["labels"], "internal": own.get("internal", False)})
        joins = ""
        for name, own in services["services"].items():
            if unknown := set(own) - SERVICE:
                fail(f"validating compose.json: services.{name} additional properties {sorted(unknown)} not allowed", 15)
            limits = {
                "--label": [f"{key}={value}" for key, value in own["labels"].items()],
                "--memory": [own["mem_limit"]],
                "--pids-limit": [str(own["pids_limit"])],
                "--ulimit": [f"{key}={value}" for key, value in own["ulimits"].items()],
                "--cap-drop": own["cap_drop"],
                "--cap-add": own["cap_add"],
                "--security-opt": own["security_opt"],
            }
            given_env = own.get("environment") or {}
            pairs = given_env.items() if isinstance(given_env, dict) else [each.partition("=")[::2] for each in given_env]
            words = [own.get("entrypoint") or [], own.get("command") or []]
            first = [word for part in words for word in (shlex.split(part) if isinstance(part, str) else part)]
            first = [word.replace("$$", "$") for word in first]
            if not first:
                fail(f"service {name}: the stand-in's images have no command")
            about = {
                "hosts": list(services["services"]),
                "environ": [(key, str(value).replace("$$", "$")) for key, value in pairs],
            }
            joined = made(
                own["image"], first, limits, joins, workdir=own.get("working_dir", ""), name=f"{project}-{name}", **about
            )
            joins = joins or joined
    elif action == "ps":
        print("\n".join(name for name in mine if name == f"{project}-{more[-1]}"))
    elif action == "down":
        for name in reversed(mine):
            remove({"--force": [True]}, [name])
        for kind in ("networks", "volumes"):
            for name in names(kind):
                if name.startswith(f"{project}_"):
                    shutil.rmtree(folder(kind, name))
    else:
        fail(f"unknown docker command: compose {action}")


COMMANDS = {
    "ps": listed("containers"),
    "run": run,
    "exec": execute,
    "cp": copy,
    "inspect": shown("containers"),
    "restart": restart,
    "rm": remove,
    "pull": pull,
    "build": build,
    "image inspect": shown("images"),
    "network ls": listed("networks"),
    "network rm": drop("networks"),
    "network inspect": shown("networks"),
    "volume ls": listed("volumes"),
    "volume rm": drop("volumes"),
    "volume inspect": shown("volumes"),
    "compose": compose,
}


def main():
    words = sys.argv[1:]
    with open(PLACE / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(words) + "\n")
    name = " ".join(words[:2]) if words and words[0] in ("image", "network", "volume") else (words or [""])[0]
    if name not in COMMANDS:
        fail(f"docker: unknown command: docker {name}")
    fault = PLACE / "faults" / name
    if fault.is_file() and (left := int(fault.read_text())) > 0:
        fault.write_text(str(left - 1))
        fail("Error response from daemon: no space left on device", 125)
    COMMANDS[name](*parsed(name, words[len(name.split()) :]))


if __name__ == "__main__":
    main()

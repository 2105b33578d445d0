"""A server that speaks E2B's API as its client does: sandboxes by REST, and in each of them ``envd`` (Connect with JSON, and
files). Its machines are containers of the stand-in for ``docker``, so commands really run; both users are root in them.
"""

import asyncio
import base64
import contextlib
import datetime
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from pathlib import Path

from aiohttp import web

STAND_IN = Path(__file__).parent / "stand_in_docker.py"
STAYS = "exec 3<> <(:) && while :; do (read -r -t 100 -u 3) & wait; done"
KEY = "e2b_0123456789abcdef"
BOX = web.RequestKey("box", dict)


class FakeE2B:
    """The server, in a thread.

    Attributes:
        place: folder of its machines.
        boxes: machines that run, by id.
        made: every machine that ever was.
        most: most machines that ran at once.
        calls: method and path of each request, in their order.
        faults: (method, beginning of a path) → what the next requests get: a status, ``drop`` or ``late`` (done, but the
            connection is lost).
        speed: seconds that pass here in a second.
        cpus, memory: of a machine.
    """

    def __init__(self, place):
        self.place, self.boxes, self.made, self.most = Path(place), {}, [], 0
        self.calls, self.faults, self.speed, self.cpus, self.memory = [], {}, 1.0, 2, 1024
        self.keys = {}
        self.pids = iter(range(1000, 10**9))
        for name in ("registry",):
            (self.place / name).mkdir(exist_ok=True)
        for template in ("base", "python-box"):
            (self.place / "registry" / f"{template}.json").write_text("{}")
            self.docker("pull", template)
        started = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self.thread.start()
        started.wait(20)

    def docker(self, *words, **more):
        command = [sys.executable, "-I", "-S", str(STAND_IN), *words]
        environ = {**os.environ, "DOCKER_STAND_IN": str(self.place)}
        return subprocess.run(command, env=environ, capture_output=True, check=True, **more).stdout.decode().strip()

    def stop(self):
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(20)
        for id in list(self.boxes):
            self.kill(id)

    def fail(self, method, path, *what):
        self.faults[method, path] = list(what)

    def kill(self, id):
        box = self.boxes.pop(id, None)
        if box is not None:
            box["ended"] = time.monotonic()
            self.docker("rm", "--force", "--volumes", box["container"])
        return box is not None

    def _serve(self, started):
        async def main():
            self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
            app = web.Application(middlewares=[self.watched], client_max_size=1 << 30)
            app.add_routes(
                [
                    web.post("/v2/sandboxes", self.create),
                    web.get("/v2/sandboxes", self.list),
                    web.get("/sandboxes/{id}", self.about),
                    web.delete("/sandboxes/{id}", self.end),
                    web.post("/sandboxes/{id}/timeout", self.renew),
                    web.get("/health", self.health),
                    web.post("/process.Process/Start", self.run),
                    web.post("/filesystem.Filesystem/Stat", self.look),
                    web.post("/files", self.write),
                    web.get("/files", self.read),
                ]
            )
            runner = web.AppRunner(app, handler_cancellation=False, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            reaps = asyncio.create_task(self.reap())
            started.set()
            await self.over.wait()
            reaps.cancel()
            await runner.cleanup()

        asyncio.run(main())

    async def reap(self):
        while True:
            await asyncio.sleep(0.05)
            for id, box in list(self.boxes.items()):
                if time.monotonic() > box["until"]:
                    await asyncio.to_thread(self.kill, id)

    @web.middleware
    async def watched(self, request, handler):
        self.calls.append(f"{request.method} {request.path}")
        what = None
        for (method, path), left in self.faults.items():
            if left and request.method == method and request.path.startswith(path):
                what = left.pop(0)
                break
        if what == "drop":
            request.transport.abort()
            return web.Response()
        if isinstance(what, int):
            said = f"no, {request.headers.get('X-API-KEY', 'nobody')}"
            return web.json_response({"code": what, "message": said}, status=what)
        inside = request.path.startswith(("/process", "/filesystem", "/files", "/health"))
        if not inside and request.headers.get("X-API-KEY") != KEY:
            return web.json_response({"code": 401, "message": f"bad key {request.headers.get('X-API-KEY')}"}, status=401)
        if inside:
            box = self.boxes.get(request.headers.get("E2b-Sandbox-Id", ""))
            if box is None:
                return web.json_response({"code": 502, "message": "The sandbox was not found"}, status=502)
            if request.headers.get("X-Access-Token") != box["token"]:
                return web.json_response({"code": "unauthenticated", "message": "unauthorized"}, status=401)
            request[BOX] = box
        answer = await handler(request)
        if what == "late":
            request.transport.abort()
        return answer

    # --- the service

    async def create(self, request):
        body = await request.json()
        key = request.headers.get("Idempotency-Key")
        if key in self.keys and self.keys[key] in self.boxes:
            return web.json_response(self.plain(self.keys[key]), status=201)
        if not (self.place / "registry" / f"{body['templateID']}.json").exists():
            return web.json_response({"code": 404, "message": f"template '{body['templateID']}' not found"}, status=404)
        id = uuid.uuid4().hex[:20]
        words = (
            "run",
            "--detach",
            "--pull",
            "never",
            "--network",
            "none",
            "--entrypoint",
            "bash",
            body["templateID"],
            "-c",
            STAYS,
        )
        container = await asyncio.to_thread(self.docker, *words)
        root = self.place / "containers" / container / "root"
        with open(root / "etc/passwd", "a") as users:
            users.write("user:x:0:0::/home/user:/bin/bash\n")
        (root / "home/user").mkdir(parents=True)
        if os.geteuid() == 0:
            for each in (root / "home", root / "home/user"):
                os.chown(each, 65534, 65534)
        self.boxes[id] = {
            "container": container,
            "root": root,
            "token": uuid.uuid4().hex,
            "until": time.monotonic() + body["timeout"] / self.speed,
            "asked": body,
            "began": time.monotonic(),
        }
        self.made.append(self.boxes[id])
        self.keys[key] = id
        self.most = max(self.most, len(self.boxes))
        return web.json_response(self.plain(id), status=201)

    def plain(self, id):
        box = self.boxes[id]
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return {
            "sandboxID": id,
            "templateID": box["asked"]["templateID"],
            "clientID": "c",
            "envdVersion": "0.6.5",
            "envdAccessToken": box["token"],
            "metadata": box["asked"].get("metadata", {}),
            "state": "running",
            "cpuCount": self.cpus,
            "memoryMB": self.memory,
            "diskSizeMB": 1024,
            "startedAt": now,
            "endAt": now,
        }

    async def list(self, request):
        asked = dict(urllib.parse.parse_qsl(request.query.get("metadata", "")))
        found = [id for id, box in self.boxes.items() if asked.items() <= box["asked"].get("metadata", {}).items()]
        first = int(request.query.get("nextToken") or 0)
        more = {"X-Next-Token": str(first + 2)} if first + 2 < len(found) else {}
        return web.json_response([self.plain(id) for id in found[first : first + 2]], headers=more)

    def missing(self):
        return web.json_response({"code": 404, "message": "no such sandbox"}, status=404)

    async def about(self, request):
        id = request.match_info["id"]
        return web.json_response(self.plain(id)) if id in self.boxes else self.missing()

    async def end(self, request):
        gone = await asyncio.to_thread(self.kill, request.match_info["id"])
        return web.Response(status=204) if gone else self.missing()

    async def renew(self, request):
        box = self.boxes.get(request.match_info["id"])
        if box is None:
            return self.missing()
        box["until"] = time.monotonic() + (await request.json())["timeout"] / self.speed
        return web.Response(status=204)

    # --- in a machine

    async def health(self, request):
        return web.Response(status=204)

    async def run(self, request):
        box = request[BOX]
        packed = await request.read()
        size = struct.unpack(">I", packed[1:5])[0]
        asked = json.loads(packed[5 : 5 + size])["process"]
        user = base64.b64decode(request.headers.get("Authorization", "Basic dXNlcjo=").split()[1]).decode().rstrip(":")
        if user not in ("root", "user"):
            return self.refused(401, "unauthenticated", f"invalid username: '{user}'")
        if asked.get("cwd") and not (box["root"] / asked["cwd"].lstrip("/")).is_dir():
            return self.refused(400, "invalid_argument", f"cwd '{asked['cwd']}' does not exist")
        home = {"root": "/root", "user": "/home/user"}[user]
        envs = {"HOME": home, "USER": user, "LOGNAME": user, **asked.get("envs", {})}
        given = [word for name, value in envs.items() for word in ("--env", f"{name}={value}")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(STAND_IN), "exec", "--user", "0", "--workdir", asked.get("cwd") or home, *given),
            *(box["container"], asked["cmd"], *asked.get("args", ())),
            env={**os.environ, "DOCKER_STAND_IN": str(self.place)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await answer.prepare(request)
        turn = asyncio.Lock()

        async def send(message, flags=0):
            body = json.dumps(message).encode()
            async with turn:
                await answer.write(struct.pack(">BI", flags, len(body)) + body)

        async def pass_on(stream, name):
            while part := await stream.read(1 << 15):
                await send({"event": {"data": {name: base64.b64encode(part).decode()}}})

        most = int(request.headers.get("Connect-Timeout-Ms", 0)) / 1000 or None
        try:
            await send({"event": {"start": {"pid": next(self.pids)}}})
            async with asyncio.timeout(most):
                await asyncio.gather(pass_on(process.stdout, "stdout"), pass_on(process.stderr, "stderr"))
                code = await process.wait()
            if not any(each is box for each in self.boxes.values()):
                if request.transport is not None:
                    request.transport.abort()  # the machine ended with its connections
                return answer
            await send({"event": {"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}}})
            await send({}, 2)
        except TimeoutError:
            await send({"error": {"code": "deadline_exceeded", "message": "deadline"}}, 2)
        except ConnectionError:
            pass
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process._transport.close()
        return answer

    def refused(self, status, code, message):
        return web.json_response({"code": code, "message": message}, status=status)

    def path(self, box, path):
        return box["root"] / path.lstrip("/")

    async def look(self, request):
        path = (await request.json())["path"]
        file = self.path(request[BOX], path)
        if not os.path.lexists(file):
            return self.refused(404, "not_found", f"file not found: {path}")
        about = file.lstat()
        kind = "FILE_TYPE_DIRECTORY" if stat.S_ISDIR(about.st_mode) else "FILE_TYPE_FILE" if stat.S_ISREG(about.st_mode) else ""
        link = {"isSymlink": True, "symlinkTarget": os.readlink(file)} if file.is_symlink() else {}
        entry = {"name": file.name, "path": path, "size": str(about.st_size), "mode": about.st_mode & 0o7777, **link}
        return web.json_response({"entry": {**entry, **({"type": kind} if kind else {})}})

    async def write(self, request):
        path = request.query["path"]
        file = self.path(request[BOX], path)
        if request.content_type.startswith("multipart"):
            part = await (await request.multipart()).next()
            content = await part.read()
        else:
            content = await request.read()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        if os.geteuid() == 0:
            os.chown(file, 65534, 65534)
        return web.json_response([{"name": file.name, "type": "file", "path": path}])

    async def read(self, request):
        file = self.path(request[BOX], request.query["path"])
        if not file.is_file():
            return self.refused(404, "not_found", "file not found")
        return web.Response(body=file.read_bytes())

"""Harbor's tasks with Dockerfiles, images and compose files: played in containers, or refused by name."""

import asyncio

import pytest
from rlhf_plugin_shell import HarborTasks, ShellAgent
from rlhf_plugin_shell.check import check
from rlhf_plugin_shell.directory import work_in
from rlhf_plugin_shell.images import Build

from rlhf_host import UserError

TOML = """version = "1.0"
[verifier]
timeout_sec = 20.0
[agent]
timeout_sec = 30.0
[environment]
cpus = 1
memory_mb = 512
env = {WHO = "world"}
"""
TEST = """#!/bin/bash
test "$(cat made/x)" = "it's made" && test "$(cat hello)" = "Hello, $WHO" && echo 1 > /logs/verifier/reward.txt
"""
DOCKERFILE = """FROM debian:12
WORKDIR /app
ENV SAID=made
COPY data ./
RUN mkdir made && echo "it's $SAID" > made/x
"""
FILES = {
    "instruction.md": "Write a greeting to hello.",
    "task.toml": TOML,
    "environment/Dockerfile": DOCKERFILE,
    "environment/data/given.txt": "given",
    "tests/test.sh": TEST,
    "solution/solve.sh": '#!/bin/bash\ntest -e given.txt && echo "Hello, $WHO" > hello\n',
}
COMPOSE = """
services:
  main:
    build:
      context: ${CONTEXT_DIR}
    image: ${MAIN_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - TEST_DIR=${TEST_DIR}
      - PRICE=$$5
    volumes:
      - ${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}
      - notes:/notes
    depends_on: [web]
    ports: ["8080:80"]
  web:
    image: debian:12
    entrypoint: ["python3", "-c"]
    command: ["import http.server as h; h.ThreadingHTTPServer(('', 8123), h.SimpleHTTPRequestHandler).serve_forever()"]
    environment: {A: "${B:-c}"}
volumes:
  notes:
"""
FETCH = """#!/bin/bash
test "$(cat hello)" = '<h1>Directory listing for /</h1> $5 /tests' || exit 1
echo '{"reward": 0.75, "more": 2}' > /logs/verifier/reward.json
"""
SOLVE = (
    'for try in $(seq 50); do page=$(python3 -c "import urllib.request as u;'
    " print(u.urlopen('http://web:8123/').read().decode())\" 2>/dev/null) && break; sleep 0.1; done;"
    ' echo "$(grep -o "<h1>.*" <<< "$page") $PRICE $TEST_DIR" > hello'
)


def write(folder, **changed):
    for name, text in (FILES | {name.replace("__", "/"): text for name, text in changed.items()}).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def agent(**options):
    return ShellAgent(ShellAgent.Options(sandbox="docker", sandbox_options=options))


def test_a_dockerfile_is_built_once_and_played(tmp_path, docker, play, capsys):
    folder = write(tmp_path / "tasks/hello")
    assert asyncio.run(check(str(tmp_path / "tasks"), "container", agent())) == 0
    assert capsys.readouterr().out == "hello: good\n"
    [task] = HarborTasks(HarborTasks.Options(directory=str(folder), environment="container")).load_tasks("train", 0)
    options = {"sandbox": "docker", "format": "line"}
    assert play(task, ["pwd; ls", 'echo "Hello, $WHO" > hello', "exit"], **options).reward == 1.0
    assert play(task, ["exit"], **options).reward == 0.0
    builds = [call for call in docker.calls if call[0] == "build"]
    assert len(builds) == 1
    tag = Build(folder / "environment", folder / "environment/Dockerfile").tag
    assert tag in builds[0]
    (folder / "environment/data/given.txt").write_text("other")
    assert Build(folder / "environment", folder / "environment/Dockerfile").tag != tag


def test_an_image_is_pulled_and_played(tmp_path, docker, play):
    docker.offer("some.registry/tasks/hello:1", WorkingDir="/srv", Env=["SAID=image"])
    toml = TOML + 'docker_image = "some.registry/tasks/hello:1"\n'
    test = '#!/bin/bash\ntest "$(cat x)" = "/srv image" && echo 1 > /logs/verifier/reward.txt'
    folder = write(tmp_path, **{"task.toml": toml, "tests/test.sh": test, "environment/Dockerfile": None})
    [task] = HarborTasks(HarborTasks.Options(directory=str(folder), environment="container")).load_tasks("train", 0)
    assert play(task, ['echo "$PWD $SAID" > x', "exit"], sandbox="docker", format="line").reward == 1.0


def test_services_of_a_compose_file_run_beside_and_go_with_it(tmp_path, docker, play):
    changed = {
        "environment/docker-compose.yaml": COMPOSE,
        "tests/test.sh": FETCH,
        "solution/solve.sh": f"#!/bin/bash\n{SOLVE}\n",
    }
    folder = write(tmp_path / "task", **changed)
    [task] = HarborTasks(HarborTasks.Options(directory=str(folder), environment="container")).load_tasks("train", 0)
    played = play(task, [SOLVE, "exit"], sandbox="docker", format="line", timeout_s=20)
    assert played.reward == 0.75, played.text
    assert played.row.metrics["shell/more"] == 2.0
    downs = [call for call in docker.calls if "down" in call]
    assert len(downs) == 1


def test_networks_are_closed_unless_the_run_and_the_task_allow_them(tmp_path):
    work = work_in(write(tmp_path), "container")
    assert work.network
    closed = TOML.replace("cpus = 1", "cpus = 1\nallow_internet = false")
    assert not work_in(write(tmp_path, **{"task.toml": closed}), "container").network
    closed = TOML.replace("[agent]", "[agent]\nnetwork_mode = 'no-network'")
    assert not work_in(write(tmp_path, **{"task.toml": closed}), "container").network


@pytest.mark.parametrize(("allowed", "network"), [(True, "bridge"), (False, "none")])
def test_a_network_is_asked_for(allowed, network, tmp_path, docker):
    work = work_in(write(tmp_path), "container")

    async def main():
        made = agent(network=allowed)
        try:
            box = await made.opened(work)
            about = docker.about(box.id)
            await box.close()
            return about
        finally:
            await made.sandboxes.close()

    assert asyncio.run(main())["network"] == network


def test_a_dockerfile_that_cannot_be_built_stops_the_run_before_it_samples(tmp_path, docker):
    folder = write(tmp_path, **{"environment/Dockerfile": "FROM debian:12\nRUN exit 3\n"})
    [task] = HarborTasks(HarborTasks.Options(directory=str(folder), environment="container")).load_tasks("train", 0)
    made = agent()
    assert made.check_labels([task]) == {}

    async def main():
        try:
            await made.sandboxes.prepare(list(made._works.values()))
        finally:
            await made.sandboxes.close()

    with pytest.raises(UserError, match=r"1 of 1 images of the tasks cannot be used: .*docker build: ERROR.* exit code: 3"):
        asyncio.run(main())


def service(more, **top):
    lines = ["services:", "  main:", "    environment: {A: b}", *[f"    {line}" for line in more.splitlines()]]
    return "\n".join([*lines, *top.get("end", "").splitlines()])


REFUSED = {
    "privileged": (service("privileged: true"), "services.main.privileged"),
    "a folder of this machine": (service("volumes: ['/:/host']"), "services.main.volumes: /:/host: a folder of this machine"),
    "the daemon": (service("volumes: ['/var/run/docker.sock:/s']"), "a folder of this machine"),
    "a folder beside": (service("volumes: ['./x:/x']"), "a folder of this machine"),
    "the home": (service("volumes: ['~/x:/x']"), "a folder of this machine"),
    "a bind": (service("volumes: [{type: bind, source: /, target: /x}]"), "only NAME:/path"),
    "a variable as folder": (service("volumes: ['${HOME}:/x']"), "only NAME:/path"),
    "the machine's network": (service("network_mode: host"), "services.main.network_mode"),
    "the machine's processes": (service("pid: host"), "services.main.pid"),
    "capabilities": (service("cap_add: [SYS_ADMIN]"), "services.main.cap_add"),
    "devices": (service("devices: ['/dev/sda:/dev/sda']"), "services.main.devices"),
    "security": (service("security_opt: ['seccomp:unconfined']"), "services.main.security_opt"),
    "files of variables": (service("env_file: /etc/passwd"), "services.main.env_file"),
    "another file": (service("extends: {file: ../x.yaml, service: y}"), "services.main.extends"),
    "an include": ("include: [../x.yaml]\n" + service(""), "include"),
    "secrets": (service("", end="secrets: {a: {file: /etc/passwd}}"), "secrets"),
    "a volume of a driver": (service("", end="volumes: {a: {driver_opts: {device: /, o: bind}}}"), "volumes.a.driver_opts"),
    "an external volume": (service("", end="volumes: {a: {external: true}}"), "volumes.a.external"),
    "an external network": (service("", end="networks: {a: {external: true}}"), "networks.a.external"),
    "a network of the machine": (service("", end="networks: {a: {driver: host}}"), "networks.a.driver host"),
    "a variable of yours": (service("command: echo ${API_KEY}"), r"services.main.command: .* variables of yours"),
    "a build elsewhere": (service("build: ../.."), "is not in environment/"),
    "a Dockerfile elsewhere": (service("build: {context: ., dockerfile: ../../x}"), "is not in environment/"),
    "a build with secrets": (service("build: {context: ., secrets: [a]}"), "services.main.build.secrets"),
    "no image": ("services: {main: {}, other: {command: x}}", "services.other has no image"),
    "no services": ("x: y", "it has no services"),
    "aliases of aliases": (
        "\n".join(
            [
                "x-0: &a0 [x, x]",
                *(f"x-{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 25)),
                "services: {main: {command: *a24}}",
            ]
        ),
        "it has more than 20,000 values",
    ),
    "an alias of itself": ("services: {main: {image: a, command: &a [*a]}}", "32 tables and lists within each other"),
    "a volume that is a table": (service("volumes: {a: b}"), "services.main.volumes is no list"),
    "a volume that is a number": (service("volumes: 3"), "services.main.volumes is no list"),
    "arguments that are a text": (
        service("build: {context: ., args: x}"),
        "services.main.build.args is neither a table nor a list",
    ),
    "a network that is a number": (service("", end="networks: {a: 3}"), "networks.a is no table"),
    "no YAML": ("services: [", "docker-compose.yaml: "),
    "an object": ("services: !!python/object/apply:os.system ['echo']", "docker-compose.yaml: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_reach_this_machine_is_refused_by_name(name, tmp_path):
    text, reason = REFUSED[name]
    with pytest.raises(ValueError, match=rf"environment/docker-compose\.yaml: .*{reason}|environment/{reason}"):
        work_in(write(tmp_path, **{"environment/docker-compose.yaml": text}), "container")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"environment/Dockerfile": None}, "environment/Dockerfile is missing"),
        ({"environment/Dockerfile": None, "environment/docker-compose.yaml": service("")}, "services.main has no image"),
        ({"environment/compose-more.yaml": "services: {}"}, "environment/compose-more.yaml"),
        ({"task.toml": TOML + "gpus = 1\n"}, "environment.gpus"),
        ({"task.toml": TOML + "workdir = 'app'\n"}, "the working folder is app"),
        ({"tests/test.sh": None}, "tests/test.sh is missing"),
    ],
)
def test_other_things_are_refused_as_without_containers(changed, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        work_in(write(tmp_path, **changed), "container")


def test_each_environment_names_the_sandbox_that_plays_it(tmp_path):
    [boxed] = HarborTasks(HarborTasks.Options(directory=str(write(tmp_path / "a")), environment="container")).load_tasks(
        "train", 0
    )
    told = ShellAgent(ShellAgent.Options()).check_labels([boxed])
    assert told == {0: "it needs a container (a Dockerfile that is built): --agent.sandbox docker or podman"}
    plain = write(tmp_path / "b", **{"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n"})
    [task] = HarborTasks(HarborTasks.Options(directory=str(plain))).load_tasks("train", 0)
    assert "--data.harbor.environment container" in agent().check_labels([task])[0]

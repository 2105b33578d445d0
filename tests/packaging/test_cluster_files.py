"""The Dockerfile and ``examples/cluster``: linters, schemas, one install line, and scripts that do what they say."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from .kuberay import RAY_JOB
from .test_constraints import CUDA, pins

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples/cluster"
SCRIPTS = [*sorted(CLUSTER.glob("*.sh")), CLUSTER / "slurm.sbatch"]
PROGRAMS = Path(sysconfig.get_path("scripts"))
INSTALL = re.compile(r"pip install -c constraints/cuda\.txt (.*)")


def lint(program: str, *arguments: str | Path, text: str | None = None) -> None:
    if not (PROGRAMS / program).exists():
        pytest.skip(f"needs {program}")
    done = subprocess.run([PROGRAMS / program, *arguments], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def manifest(name: str):
    return YAML(typ="safe").load((CLUSTER / name).read_text())


# --- what is written ---


def test_the_dockerfile_passes_its_linter():
    lint("hadolint", ROOT / "Dockerfile")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_bash_and_shellcheck(script):
    lint("shellcheck", script)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


@pytest.mark.parametrize("part", ["setup", "run"])
def test_the_shell_of_the_task_file_passes_shellcheck(part):
    lint("shellcheck", "--shell", "bash", "-", text=manifest("skypilot.yaml")[part])


def test_one_line_installs_everywhere():
    files = (ROOT / "docs/install-on-gpus.md", ROOT / "Dockerfile", CLUSTER / "skypilot.yaml")
    lines = {file.name: INSTALL.findall(file.read_text()) for file in files}
    assert all(len(set(found)) == 1 for found in lines.values()), lines
    assert len({found[0] for found in lines.values()}) == 1, lines


def test_the_image_has_the_cuda_of_torch_and_the_systems_packages_are_the_same():
    dockerfile, task = (ROOT / "Dockerfile").read_text(), manifest("skypilot.yaml")
    image = re.search(r"^FROM (\S+)$", dockerfile, re.M)[1]
    assert task["resources"]["image_id"] == f"docker:{image}"
    assert pins(CUDA)["nvidia-cuda-runtime"].split(".")[:2] == re.match(r"nvidia/cuda:(\d+\.\d+)\.", image)[1].split(".")
    packages = re.compile(r"apt-get install -y --no-install-recommends ([\w. -]*\w)")
    assert packages.search(dockerfile)[1] == packages.search(task["setup"])[1]


def test_what_the_image_installs_from_is_not_left_out_of_it():
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert not {"constraints", "plugins", "rlhf_host", "examples", "README.md", "LICENSE", "pyproject.toml"} & set(left_out)


@pytest.mark.parametrize("command", ["rayjob", "skypilot", "slurm.sbatch", "submit.sh"])
def test_the_runs_of_the_files_have_flags_that_there_are(command):
    from rlhf_host.cli.main import main

    text = {
        "rayjob": lambda: manifest("rayjob.yaml")["spec"]["entrypoint"],
        "skypilot": lambda: manifest("skypilot.yaml")["run"],
    }
    source = text.get(command, lambda: (CLUSTER / command).read_text())().replace("\\\n", " ")
    words = shlex.split(re.search(r"rlhf (train .*?)(?: &)?$", source, re.M)[1])
    words = [word for word in words if not word.startswith(("$@", "${flags"))]
    if "--config" in words:
        place = words.index("--config")
        del words[place : place + 2]
    done = CliRunner().invoke(main, [*words, "--algo", "rloo", "--reward", "math_verifier", "--print-config"])
    assert done.exit_code == 0, done.output
    assert "name: ray" in done.output


# --- Kubernetes ---


def test_the_ray_job_has_the_schema_of_kuberay():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(manifest("rayjob.yaml"), RAY_JOB)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-gpus"), 0),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "replica"), 2),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens"),
        (("spec", "entrypoint"), ["rlhf", "train"]),
    ],
)
def test_a_wrong_ray_job_does_not(where, value):
    jsonschema = pytest.importorskip("jsonschema")
    job = copy.deepcopy(manifest("rayjob.yaml"))
    inner = job
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, RAY_JOB)


def test_the_ray_job_fits_together():
    cluster = manifest("rayjob.yaml")["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pins(CUDA)["ray"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len({container["image"] for group in groups for container in group["template"]["spec"]["containers"]}) == 1
    for group in groups:
        spec = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounts.keys() == {"/shared", "/dev/shm"}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
        assert spec["containers"][0]["resources"]["requests"] == spec["containers"][0]["resources"]["limits"]


def test_the_task_writes_its_run_where_all_its_machines_look():
    task = manifest("skypilot.yaml")
    assert '--run-dir "$RUN_DIR"' in task["run"]
    assert any(task["envs"]["RUN_DIR"].startswith(f"{place}/") for place in task["volumes"])


# --- scripts, with stand-ins for what only a cluster has ---

RAY = """#!/bin/bash
trap 'echo "ray ended" >> "$CALLS"; exit 0' TERM
echo "ray $*" >> "$CALLS"
while true; do sleep 0.1; done
"""
SAVES = """#!/bin/bash
trap 'echo "rlhf saves" >> "$CALLS"; exit 1' TERM
echo "rlhf $*" >> "$CALLS"
while true; do sleep 0.1; done
"""
NOTED = """#!/bin/bash
echo "NAME $*" >> "$CALLS"
"""
PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then INLINE; fi
echo "python $*" >> "$CALLS"
until grep -q "^ray start" "$CALLS"; do /bin/sleep 0.02; done
exit CODE
"""
ADDRESSES = """#!/bin/bash
[ "$1" = -I ] && echo "127.0.0.1 10.0.0.1 "
"""
"""The loopback's address is never first; here it is, because something listens there."""


class Machine:
    """A machine where ``ray``, ``srun`` and others only write down how they are called."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.calls_file = folder / "calls"
        self.environment = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "RAY_AUTH_TOKEN": "t",
        }
        (folder / "bin").mkdir()
        self.program("ray", RAY)
        self.program("sleep", '#!/bin/bash\n[ "$1" = 2 ] && set -- 0.02\nexec /bin/sleep "$@"\n')
        self.program("srun", NOTED.replace("NAME", "srun"))
        self.python()

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def python(self, inline: str = "exit", code: int = 0) -> None:
        """A Python that runs ``inline`` for ``-c``, and else waits for Ray as ``wait_for_nodes.py`` does and ends with ``code``."""
        self.program("python", PYTHON.replace("INLINE", inline).replace("CODE", str(code)))

    def start(self, *words: str | Path, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(map(str, words)),
            cwd=ROOT,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def wait_for(self, call: str) -> None:
        end = time.monotonic() + 20
        while not any(line.startswith(call) for line in self.calls()):
            assert time.monotonic() < end, self.calls()
            time.sleep(0.05)


@pytest.fixture
def machine(tmp_path) -> Machine:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    return Machine(tmp_path)


NODE = CLUSTER / "node.sh"
HEAD = "ray start --head --node-ip-address 127.0.0.1 --port {} --include-dashboard false --dashboard-host 127.0.0.1 --block"


@pytest.fixture
def port():
    """Something listens there, as the first machine's Ray would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("code", [0, 3])
def test_the_first_machine_makes_the_cluster_runs_the_command_and_ends_it(machine, code, port):
    machine.program("rlhf", f"{NOTED.replace('NAME', 'rlhf')}exit {code}\n")
    process = machine.start(NODE, "0", "2", f"127.0.0.1:{port}", "rlhf", "train", "--config", "a b.yaml")
    process.communicate(timeout=30)
    assert process.returncode == code
    waited = f"python {CLUSTER}/wait_for_nodes.py 127.0.0.1:{port} 2"
    assert sorted(machine.calls()[:2]) == [waited, HEAD.format(port)]
    assert machine.calls()[2:] == ["rlhf train --config a b.yaml", "ray ended"]


def test_other_machines_join_when_the_first_listens(machine):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        process = machine.start(NODE, "1", "2", address, RAY_START="--num-gpus 4")
        time.sleep(0.5)
        assert machine.calls() == [], "nothing listens yet"
        server.listen()
        machine.wait_for("ray start")
    process.terminate()
    assert process.wait(timeout=20) == 0
    assert machine.calls() == [f"ray start --address {address} --block --num-gpus 4", "ray ended"]


def test_a_machine_gives_up_where_nothing_listens(machine):
    machine.program("sleep", "#!/bin/bash\n")
    _, err = (process := machine.start(NODE, "1", "2", "127.0.0.1:9")).communicate(timeout=60)
    assert (process.returncode, err) == (1, "nothing listens at 127.0.0.1:9\n")
    assert machine.calls() == []


def test_no_cluster_is_made_without_a_token(machine):
    process = machine.start(NODE, "0", "1", "10.0.0.1:6500", "rlhf", RAY_AUTH_TOKEN="")
    _, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "RAY_AUTH_TOKEN: must be set to the same long random text on all machines" in err
    assert machine.calls() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_command_which_has_time_to_save(machine, number, port):
    machine.program("rlhf", SAVES)
    process = machine.start(NODE, "0", "1", f"127.0.0.1:{port}", "rlhf", "train")
    machine.wait_for("rlhf train")
    time.sleep(0.3)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert machine.calls()[-2:] == ["rlhf saves", "ray ended"]


def test_a_command_never_begins_where_machines_are_missing(machine, port):
    machine.python(code=1)
    process = machine.start(NODE, "0", "2", f"127.0.0.1:{port}", "rlhf", "train")
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert machine.calls()[-1] == "ray ended"
    assert not [call for call in machine.calls() if call.startswith("rlhf")]


@pytest.fixture
def slurm():
    """Variables that SLURM sets, and something that listens at the port of this job."""
    for job in range(41234, 41334):
        try:
            server = socket.create_server(("127.0.0.1", 20000 + job % 20000))
        except OSError:
            continue
        with server:
            yield {"SLURM_JOB_ID": str(job), "SLURM_CPUS_ON_NODE": "96", "SLURMD_NODENAME": "n1"}
        return


@pytest.mark.parametrize(
    ("given", "run"),
    [(["run.yaml", "--seed", "3"], "train --config run.yaml --seed 3"), (["--resume", "runs/a"], "train --resume runs/a")],
)
def test_the_batch_script_runs_the_configuration_or_resumes(machine, given, run, slurm):
    machine.program("rlhf", NOTED.replace("NAME", "rlhf"))
    machine.program("hostname", ADDRESSES)
    process = machine.start("bash", CLUSTER / "slurm.sbatch", *given, SLURM_JOB_NUM_NODES="3", **slurm)
    process.communicate(timeout=30)
    assert process.returncode == 0
    calls, address = machine.calls(), f"127.0.0.1:{20000 + int(slurm['SLURM_JOB_ID']) % 20000}"
    joined = f"srun --nodes=2 --ntasks=2 --exclude=n1 --cpus-per-task=96 examples/cluster/node.sh 1 3 {address}"
    assert joined in calls
    assert f"rlhf {run} --runtime ray --ray.address {address} --ray.wait-s 300" in calls


def test_another_address_of_the_first_node_can_be_set(machine, slurm):
    machine.program("rlhf", NOTED.replace("NAME", "rlhf"))
    process = machine.start(
        "bash", CLUSTER / "slurm.sbatch", "run.yaml", SLURM_JOB_NUM_NODES="1", HEAD_ADDRESS="localhost", **slurm
    )
    process.communicate(timeout=30)
    assert f"--ray.address localhost:{20000 + int(slurm['SLURM_JOB_ID']) % 20000} " in machine.calls()[-2]


@pytest.mark.parametrize("script", ["node.sh", "slurm.sbatch", "submit.sh"])
def test_without_arguments_scripts_say_how_they_are_called(machine, script):
    process = machine.start("bash", CLUSTER / script, RAY_AUTH_TOKEN="")
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err.count("\n"), err.startswith("usage: ")) == (2, 1, True)


def test_the_batch_script_for_one_machine_asks_for_no_others(machine, slurm):
    machine.program("rlhf", NOTED.replace("NAME", "rlhf"))
    machine.program("hostname", ADDRESSES)
    process = machine.start("bash", CLUSTER / "slurm.sbatch", "run.yaml", SLURM_JOB_NUM_NODES="1", **slurm)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not [call for call in machine.calls() if call.startswith("srun")]


STEP = """#!/bin/bash
echo "srun $*" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
[ "$2" = 0 ] && exec "$@" || exit 0
"""
"""A step that runs where the test does, if it is the first machine's."""
INSIDE = """#!/bin/bash
echo "apptainer $*" >> "$CALLS"
shift 5
exec "$@"
"""


def test_in_containers_of_apptainer_every_machine_runs_in_one(machine, slurm):
    machine.program("rlhf", NOTED.replace("NAME", "rlhf"))
    machine.program("hostname", ADDRESSES)
    machine.program("apptainer", INSIDE)
    prefix = "apptainer exec --nv --bind /shared rlhf.sif"
    process = machine.start("bash", CLUSTER / "slurm.sbatch", "run.yaml", SLURM_JOB_NUM_NODES="2", CONTAINER=prefix, **slurm)
    process.communicate(timeout=30)
    assert process.returncode == 0
    first, others = f"{prefix} examples/cluster/node.sh 0 2 127.0.0.1:", f" {prefix} examples/cluster/node.sh 1 2 127.0.0.1:"
    assert [call.startswith("srun ") and others in call for call in machine.calls()].count(True) == 1
    assert [call.startswith(first) for call in machine.calls()].count(True) == 1
    assert any(call.startswith("rlhf train --config run.yaml ") for call in machine.calls())


def test_in_containers_of_pyxis_the_first_machine_is_a_step_of_srun_too(machine, slurm):
    machine.program("rlhf", SAVES)
    machine.program("hostname", ADDRESSES)
    machine.program("srun", STEP)
    flags = "--container-image=/shared/rlhf.sqsh --container-mounts=/shared:/shared"
    process = machine.start("bash", CLUSTER / "slurm.sbatch", "run.yaml", SLURM_JOB_NUM_NODES="2", SRUN_FLAGS=flags, **slurm)
    machine.wait_for("rlhf train")
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    steps = sorted(call for call in machine.calls() if call.startswith("srun "))
    assert [flags in step for step in steps] == [True, True]
    assert steps[0].startswith("srun --nodes=1 --ntasks=1 --exclude=n1 ")
    assert steps[1].startswith(
        f"srun --nodes=1 --ntasks=1 --nodelist=n1 --cpus-per-task=96 {flags} examples/cluster/node.sh 0 2 "
    )
    assert machine.calls()[-2:] == ["rlhf saves", "ray ended"]


def test_every_job_has_a_token_of_its_own(machine, slurm):
    machine.program("rlhf", f'{NOTED.replace("NAME", "rlhf")}echo "token $RAY_AUTH_TOKEN" >> "$CALLS"\n')
    machine.program("hostname", ADDRESSES)
    for _ in range(2):
        machine.start("bash", CLUSTER / "slurm.sbatch", "run.yaml", SLURM_JOB_NUM_NODES="1", **slurm).communicate(timeout=30)
    tokens = [call.removeprefix("token ") for call in machine.calls() if call.startswith("token ")]
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)
    assert len(set(tokens)) == 2


# --- the page ---

PAGE = ROOT / "docs/install-on-gpus.md"


def test_the_run_of_the_page_can_be_placed_on_one_machine_and_on_two(tiny_model, prompts, tmp_path, monkeypatch):
    from rlhf_host.cli.main import main

    monkeypatch.chdir(tmp_path)
    (written,) = re.findall(r'```yaml title="run.yaml"\n(.*?)```', PAGE.read_text(), re.S)
    (tmp_path / "run.yaml").write_text(written)
    shutil.copy(prompts, tmp_path / "train.jsonl")
    command = ["train", "--config", "run.yaml", "--actor.model", str(tiny_model), "--dry-run"]
    for more, placed in (([], "on 8 CPUs (8 engines)"), (["--placement", "actor+rollout=2x8"], "on 16 CPUs (16 engines)")):
        done = CliRunner().invoke(main, [*command, *more])
        assert done.exit_code == 0, done.output
        assert placed in done.output


def test_the_layouts_for_32_gpus_can_be_placed(tiny_model, prompts):
    from rlhf_host.cli.main import main

    rows = (ROOT / "docs/distributed.md").read_text().partition("| model | begin with")[2].partition("\n\n")[0]
    first, *others = re.findall(r"`(--.*?)`", rows)
    common = ["train", "--algo", "rloo", "--reward", "math_verifier", "--actor.model", str(tiny_model), "--data", str(prompts)]
    layouts = [first, *(f"{first} {flags}" for flags in others[:2]), f"--backend fsdp --engine vllm {others[2]} {others[3]}"]
    for layout, engines in zip(layouts, (32, 16, 4, 16), strict=True):
        done = CliRunner().invoke(main, [*common, "--runtime", "ray", *shlex.split(layout), "--dry-run"])
        assert done.exit_code == 0, done.output
        assert f"({engines} engine" in done.output or f"on {engines} CPUs" in done.output, done.output


def test_what_the_page_watches_are_metrics():
    section = PAGE.read_text().partition("| look at | for |")[2].partition("[Metrics]")[0]
    names = [name for row in section.splitlines() for name in re.findall(r"`([a-z_0-9/]+)`", row.partition(" | ")[0])]
    assert len(names) > 8
    metrics = (ROOT / "docs/reference/metrics.md").read_text()
    assert [name for name in names if f"`{name}`" not in metrics] == []

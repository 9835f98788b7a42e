"""The files for clusters: what SLURM and Kubernetes would start is started here, stops, ends and comes back.

SLURM's commands are stand-ins that do what the real ones do to a script: `srun` starts the command once for each node,
hands SIGUSR1 on and kills at SIGTERM; `scontrol` notes what it was asked for. In the quick tests the agent is one, too:
it leaves what a run would have left, and `python -m resilient_train status` reads it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from fork_server import ENVIRONMENT
from kills import checkpoints, stand, summary
from paused_run import held_at

from resilient_train.command import status
from resilient_train.command.config.compose import load
from resilient_train.durable.lock import DirectoryLock

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SBATCH = SCRIPTS / "slurm.sbatch"
CLAIM, JOB = yaml.safe_load_all((SCRIPTS / "kubernetes.yaml").read_text())
POD = JOB["spec"]["trainer"]

SRUN = """\
[[ -z ${NO_STEP:-} ]] || exit "$NO_STEP"
while [[ $1 == --* ]]; do shift; done
tasks=()
trap 'kill -USR1 "${tasks[@]}"' USR1
trap 'kill -KILL "${tasks[@]}"' TERM
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & tasks+=("$!"); done
ended=0
for task in "${tasks[@]}"; do
    until wait "$task" || ! kill -0 "$task" 2>/dev/null; do :; done
    wait "$task" || ended=$?
done
exit "$ended"
"""
SCONTROL = """\
case $1 in
    show) for ((node = 0; node < SLURM_NNODES; node++)); do echo "node$node"; done ;;
    *) echo "$*" >>"$PLACE/scontrol" ;;
esac
"""
AGENT = """\
if [[ $2 == torch.distributed.run ]]; then
    line=$(printf '%q ' "${SLURM_NODEID:-$PET_NODE_RANK}" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@")
    echo "$line" >>"$PLACE/agents" # at once: two agents write to it
    leave() { # STATUS EXIT_CODE
        mkdir -p "$RUN_DIR" && touch "$RUN_DIR/config.yaml"
        echo "{\\"status\\": \\"$1\\", \\"exit_code\\": $2, \\"steps\\": 7}" >"$RUN_DIR/summary.json.new"
        mv "$RUN_DIR/summary.json.new" "$RUN_DIR/summary.json"
    }
    eval "$RUN"
    exit
fi
exec "$REAL_PYTHON" "$@"
"""
UNTIL_ASKED = """\
trap 'leave preempted 75; exit 1' {}
touch "$PLACE/at_work$SLURM_NODEID"
for ((tenth = 0; tenth < 6000; tenth++)); do sleep 0.1; done
"""


@dataclass
class Cluster:
    """A place with the commands of a cluster, and what became of the jobs that were started in it."""

    place: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.place / "runs/job"

    @property
    def agents(self) -> list[list[str]]:
        """What was started on the nodes: the node's number, the agents' patience with processes, the command."""
        return sorted(shlex.split(line) for line in (self.place / "agents").read_text().splitlines())

    def at_work(self, nodes: int) -> bool:
        """Say whether agents that wait for a request are there on so many nodes."""
        return len(list(self.place.glob("at_work*"))) == nodes

    @property
    def requeued(self) -> list[str]:
        asked = self.place / "scontrol"
        return asked.read_text().splitlines() if asked.exists() else []

    def command(self, name: str, text: str) -> None:
        file = self.place / "bin" / name
        file.write_text(f"#!/usr/bin/env bash\n{text}")
        file.chmod(0o755)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.place, env=self.environment | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def job(self, *overrides: str, **environment: str) -> tuple[int, str]:
        """Run the script for SLURM to its end: its exit code, and what it said."""
        with self.start(str(SBATCH), *overrides, **environment) as started:
            said, _ = started.communicate(timeout=240)
        return started.returncode, said

    def pod(self, **environment: str) -> subprocess.Popen[str]:
        own = {one["name"]: one["value"] for one in POD["env"]} | {"RUN_DIR": str(self.run_dir)}
        return self.start(*POD["command"], *POD["args"], **{**own, **environment})


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": AGENT}.items():
        made.command(name, text)
    slurm = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "1"}
    pod = {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "resilient-node-0-0.resilient", "PET_MASTER_PORT": "29400"}
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PLACE": str(tmp_path), "REAL_PYTHON": sys.executable}
    made.environment = {**ENVIRONMENT, **slurm, **pod, **path}
    return made


def wait_for(holds: Callable[[], bool], started: subprocess.Popen[str]) -> None:
    while not holds():
        assert started.poll() is None, started.communicate()[0]
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------- the script


def test_the_scripts_know_the_line_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    lock, lines = DirectoryLock(tmp_path), []
    for _ in range(2):
        status.main([str(tmp_path)])
        lines.append(capsys.readouterr().out)
        lock.release()
    texts = (SBATCH.read_text(), POD["args"][0])
    patterns = [word for text in texts for word in re.findall(r'\$stands == \*"(.+?)"\*', text)]
    assert [[words in line for words in patterns] for line in lines] == [[True, True, False], [False, False, True]]


ENDINGS: dict[str, tuple[str, dict[str, str], int, bool]] = {
    # what the run leaves and its agent ends with, what else is so; the exit code, and whether the job is requeued
    "finished, but the agent choked on it": ("leave completed 0; exit 1", {}, 0, False),
    "asked to stop, the agent as well": ("leave preempted 75; exit 1", {}, 75, True),
    "killed": ("leave '' 1; rm $RUN_DIR/summary.json; exit 137", {}, 1, False),
    "refused before there was a run": ("exit 0", {}, 2, False),
    "requeued often enough": ("leave preempted 75", {"SLURM_RESTART_COUNT": "5", "REQUEUES": "5"}, 75, False),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_job_ends_as_its_run_did(how: str, cluster: Cluster) -> None:
    """With the run's own code, whatever the launcher made of it; back into the queue goes what ended with 75 only."""
    run, environment, code, is_requeued = ENDINGS[how]
    ended, said = cluster.job(RUN=run, **environment)
    assert ended == code, said
    assert cluster.requeued == ["requeue 41234"] * is_requeued


def test_a_job_that_never_came_to_its_run_is_not_taken_for_the_earlier_one(cluster: Cluster) -> None:
    """Else a broken node would put the job back into the queue for ever."""
    assert cluster.job(RUN="leave preempted 75")[0] == 75
    before = cluster.requeued
    for how in ({"NO_STEP": "127"}, {"RUN": "exit 127"}):
        ended, said = cluster.job(**how)
        assert ended == 127, said
        assert cluster.requeued == before


def test_each_node_gets_an_agent_of_the_same_group(cluster: Cluster) -> None:
    """The first one hosts the rendezvous; overrides arrive as they were typed; the run has a fixed directory."""
    ended, said = cluster.job(
        "model=gpt", "+model.note=two words", RUN="leave completed 0", SLURM_NNODES="2", GRACE="50"
    )
    assert ended == 0, said
    first, second = cluster.agents
    assert [agent[0] for agent in (first, second)] == ["0", "1"]
    assert "--rdzv-conf=is_host=1" in first
    assert "--rdzv-conf=is_host=0" in second
    assert {*first} ^ {*second} == {"0", "1", "--rdzv-conf=is_host=1", "--rdzv-conf=is_host=0"}
    assert {"--nnodes=2:2", "--rdzv-endpoint=node0:11234", "model=gpt", "+model.note=two words"} <= {*first}
    assert first[-1] == f"run.dir={cluster.run_dir}"
    assert int(first[1]) > 50, "agents wait for as long as the run may take"


def test_a_new_run_for_every_requeue_is_refused(cluster: Cluster) -> None:
    ended, said = cluster.job("run.resume=never")
    assert (ended, said.count("\n")) == (2, 1)
    assert not (cluster.place / "agents").exists()


@pytest.mark.parametrize(("number", "is_requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_request_to_stop_reaches_the_run(number: signal.Signals, is_requeued: bool, cluster: Cluster) -> None:
    """On every node; the time limit's early one brings the job back, a job that was cancelled stays cancelled."""
    with cluster.start(str(SBATCH), RUN=UNTIL_ASKED.format("USR1"), SLURM_NNODES="2") as started:
        wait_for(lambda: cluster.at_work(nodes=2), started)
        started.send_signal(number)
        said, _ = started.communicate(timeout=200)
    assert started.returncode == 75, said
    assert cluster.requeued == ["requeue 41234"] * is_requeued


def test_the_times_fit_together() -> None:
    """The early signal leaves time for the last update, and SLURM may send it a minute sooner or later."""
    text = SBATCH.read_text()
    patience = int(re.findall(r"GRACE \+ (\d+)\)", text)[0])
    grace = int(re.findall(r"GRACE:-(\d+)", text)[0])
    assert int(re.findall(r"--signal=B:USR1@(\d+)", text)[0]) >= grace + patience + 60
    own = {one["name"]: one["value"] for one in POD["env"]}
    assert grace < int(own["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod_spec(JOB)["terminationGracePeriodSeconds"] - 10


DIGITS = ["model=mlp", "data=digits", "objective=custom", "objective._target_=paused_run.cross_entropy"]
DIGITS += ["tracking=none", "accelerate.cpu=true", "run.steps=100", "run.log_every=100", "schedule=constant"]


def test_a_job_is_stopped_before_its_time_is_over_and_queued_again(cluster: Cluster) -> None:
    """The real thing: torchrun, the early signal, a state on disk, and the queue."""
    cluster.command("python", 'exec "$REAL_PYTHON" "$@"')
    cluster.command("scontrol", SCONTROL.replace("node$node", "localhost"))
    own = {"PROCESSES": "1", "SLURM_JOB_ID": (job := job_of_a_free_port())}
    with held_at(cluster.place, 90), cluster.start(str(SBATCH), *DIGITS, **own) as started:
        wait_for(lambda: stand(cluster.run_dir).tick >= 20, started)
        started.send_signal(signal.SIGUSR1)
        said, _ = started.communicate(timeout=240)
    assert started.returncode == 75, said
    stopped = summary(cluster.run_dir)
    assert (stopped["status"], 20 <= stopped["steps"] < 100) == ("preempted", True), said
    assert stopped["steps"] in checkpoints(cluster.run_dir)
    assert cluster.requeued == [f"requeue {job}"]


def job_of_a_free_port() -> str:
    """The script makes a port of the job's number, of those that systems do not hand out by themselves."""
    for job in range(os.getpid() % 20_000, 40_000):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", 10_000 + job % 20_000))
            return str(job)
    raise AssertionError("no port is free")


# ----------------------------------------------------------------------------------------------------- the manifest


def pod_spec(job: dict[str, Any]) -> dict[str, Any]:
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    spec: dict[str, Any] = node["template"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize(("run", "code"), [("leave completed 0", 0), ("leave gave_up 3; exit 1", 3), ("exit 1", 2)])
def test_a_pod_ends_as_the_run_did(run: str, code: int, cluster: Cluster) -> None:
    """So Kubernetes starts it again unless the run is complete."""
    with cluster.pod(RUN=run, PET_NODE_RANK="1") as started:
        said, _ = started.communicate(timeout=200)
    assert started.returncode == code, said
    (agent,) = cluster.agents
    assert {"--rdzv-conf=is_host=0", "--rdzv-endpoint=resilient-node-0-0.resilient:29400"} <= {*agent}
    assert agent[-3:] == [*POD["args"][2:], f"run.dir={cluster.run_dir}"]


def test_a_pod_that_is_deleted_hands_the_request_on(cluster: Cluster) -> None:
    """A shell as first process of a container would keep it to itself."""
    with cluster.pod(RUN=UNTIL_ASKED.format("TERM")) as started:
        wait_for(lambda: cluster.at_work(nodes=1), started)
        started.send_signal(signal.SIGTERM)
        said, _ = started.communicate(timeout=200)
    assert started.returncode == 75, said


def test_the_manifests_overrides_are_valid() -> None:
    """So is the command line that the script's examples show."""
    assert load(POD["args"][2:]).config.run.steps > 0
    for line in re.findall(r"^#   (?:\w+=\S+ )?sbatch .*?slurm\.sbatch (.*)$", SBATCH.read_text(), re.M):
        assert load(line.split()).config.run.steps > 0


# --------------------------------------------------------------------------------------------------------- sweeps


def test_a_sweep_is_refused_under_a_launcher(cluster: Cluster) -> None:
    """Of one process too: each process would make all of its runs."""
    words = ["-m", "resilient_train", "--multirun", *DIGITS, "run.seed=0,1"]
    with cluster.start(sys.executable, *words, WORLD_SIZE="1", RANK="0") as started:
        said, _ = started.communicate(timeout=240)
    assert started.returncode == 2, said
    assert "error: --multirun: a launcher's processes make one run" in said


def test_jobs_of_a_sweep_that_run_elsewhere_are_not_forgotten(cluster: Cluster) -> None:
    """By the launcher of submitit, here on this host: a job is refused, and the sweep ends with 1."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")
    own = ["hydra/launcher=submitit_local", *DIGITS, "run.steps=-1", "hydra.sweep.dir=sweep"]
    with cluster.start(sys.executable, "-m", "resilient_train", "--multirun", *own) as started:
        said, _ = started.communicate(timeout=240)
    assert started.returncode == 1, said
    assert "error: job 0 of the sweep ended with 2" in said
    assert "run.steps=-1: must be a whole number (at least 1)" in "".join(
        log.read_text() for log in cluster.place.glob(JOB_ERRORS)
    )


JOB_ERRORS = "sweep/.submitit/*/*_log.err"

"""Two hosts on one machine: a run that two agents make together, whose link is cut, and of which one host dies.

Each host is a set of namespaces of its own (network, processes, host name), joined by a pair of virtual network cards.
On each, `torchrun --nnodes 1:2 --rdzv-backend c10d` starts one agent, and the first host keeps the rendezvous. Then

  1. both train,
  2. the link is cut for a while, and comes back,
  3. one host dies: its link goes dead, and all its processes are killed at once; the other one goes on alone,
  4. another host comes in its place, and both go on,

and what was seen is printed. All of it ends with this process, however that ends, and leaves nothing behind but the
run directory in --place. It needs root, Linux, and ip, unshare, nsenter and mount; no other network is touched.

    scripts/two_hosts                          a minute or two
    scripts/two_hosts --cut 60                 longer than a step may take: the processes are started again
    scripts/two_hosts --victim first           the host dies that keeps the rendezvous, which ends the run
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from resilient_train.report.story import read_story  # noqa: E402

RUN = ["model=mlp", "data=digits", "objective=custom", "objective._target_=two_hosts.unhurried", "tracking=none"]
RUN += ["accelerate.cpu=true", "run.name=run", "run.log_every=1000", "run.steps=1000000"]
RUN += ["checkpoint.disk.every=20", "checkpoint.memory.every=10", "checkpoint.verify_after=12"]
NAMES, ADDRESSES, PORT = ("first", "second"), ("10.211.77.1", "10.211.77.2"), 29400
# An agent is taken for dead after three times two seconds without a word, and those that are there wait for others
# no longer than this: else each attempt would take half a minute more.
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=3,read_timeout=20"
# With one store over all attempts, processes that are restarted on several hosts meet what earlier ones left in it.
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def unhurried(model: Any, batch: Any) -> Any:
    """Make an update last about 20 ms, so that a host that is killed is killed in one."""
    import torch

    time.sleep(0.02)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def lacking() -> str:
    """What keeps this machine from having two hosts; empty if nothing does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"it needs {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"no namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """A machine of its own, as far as its processes can tell."""

    def __init__(self, number: int, place: Path, command: list[str], said: Mapping[str, str]) -> None:
        self.name, self.out, self._address = NAMES[number], place / f"{NAMES[number]}.txt", ADDRESSES[number]
        names = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True))
        (place / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        ready = place / f"{self.name}.ready"
        ready.unlink(missing_ok=True)
        os.mkfifo(ready)
        made = (
            f"hostname {self.name} && mount --bind {place}/hosts /etc/hosts && ip link set lo up && read -r _ <{ready}"
        )
        isolated = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/scripts", "OMP_NUM_THREADS": "1", **said}
        self._ready = ready
        with self.out.open("ab") as out:
            self._init = subprocess.Popen(
                [*isolated, "bash", "-c", f'{made} && "$@"; exit $?', "bash", *command],
                cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                preexec_fn=_exit_with_parent,
            )  # fmt: skip

    def plug_in(self) -> None:
        """Give its end of the pair an address."""
        self._at_home("ip", "address", "add", f"{self._address}/24", "dev", "card")
        self.link("up")

    def begin(self) -> None:
        """Let its agent begin."""
        self._ready.write_text("\n")

    def link(self, way: str) -> None:
        """Plug the cable in, `up`, or pull it, `down`."""
        self._at_home("ip", "link", "set", "card", way)

    def unplug(self) -> None:
        """Take its card out, if it did not go with the other one of the pair."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self._at_home("ip", "link", "delete", "card")

    def die(self) -> None:
        """All its processes end in the same moment, and nobody says goodbye."""
        self._init.kill()
        self._init.wait()

    def ended(self) -> int | None:
        """The exit code of its agent."""
        return self._init.poll()

    def wait_until_apart(self) -> None:
        """Wait for its namespaces: until then its process is in those of everybody."""
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._init.pid}/ns/net") == ours:
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        return self._init.pid

    def starts(self) -> list[str]:
        """What rank 0 said whenever it began here: how many processes it found, and on how many hosts."""
        said = self.out.read_text(errors="replace")
        return re.findall(r"^\d+ process(?:es)?(?=,| on)", said, re.MULTILINE)

    def _at_home(self, *command: str) -> None:
        subprocess.run(["nsenter", f"--target={self._init.pid}", "--net", *command], check=True)


def _exit_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)


class Hosts:
    """Two of them, and one run."""

    def __init__(self, place: Path, processes: int, arguments: list[str], said: Mapping[str, str]) -> None:
        self.place, self.began = place, time.monotonic()
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc_per_node={processes}"]
        agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint={NAMES[0]}:{PORT}", f"--rdzv-conf={RENDEZVOUS}"]
        agent += ["--rdzv-id=two-hosts", "--max-restarts=5", "-m", "resilient_train", *RUN, *arguments]
        self._agent, self._said = agent, said
        self.hosts = [Host(number, place, agent, said) for number in range(2)]

    def __enter__(self) -> Hosts:
        self._join()
        for host in self.hosts:
            host.begin()
        return self

    def replace(self, number: int) -> None:
        """Put another machine of the same name into the place of one that has died."""
        self.hosts[1 - number].unplug()
        self.hosts[number] = Host(number, self.place, self._agent, self._said)
        self._join()
        self.hosts[number].begin()

    def _join(self) -> None:
        for host in self.hosts:
            host.wait_until_apart()
        ends = [["name", "card", "netns", str(host.pid)] for host in self.hosts]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for host in self.hosts:
            host.plug_in()

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts:
            host.die()

    def step(self) -> int:
        """Accepted updates so far, as `python -m resilient_train status` tells them."""
        return read_story(self.place / "runs/run").step or 0

    def until(self, holds: Callable[[], bool], what: str, seconds: float) -> float:
        """Wait until something holds; return how long that took."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > seconds or all(host.ended() is not None for host in self.hosts):
                raise TimeoutError(f"{what}: not within {time.monotonic() - began:.0f} s, at step {self.step()}")
            time.sleep(0.3)
        return time.monotonic() - began

    def starts(self) -> list[str]:
        """What rank 0 said whenever it began, on either host."""
        return [start for host in self.hosts for start in host.starts()]

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", flush=True)


def trains(two: Hosts, patience: float) -> None:
    two.until(lambda: two.step() >= 30, "training on two hosts", patience)
    two.say(f"trains: {', '.join(two.starts())}; step {two.step()}")


def cut(two: Hosts, seconds: float, patience: float) -> None:
    said = len(two.starts())
    two.hosts[1].link("down")
    two.say(f"the link is cut at step {two.step()}")
    time.sleep(seconds)
    before = two.step()
    two.hosts[1].link("up")
    two.say(f"the link is back after {seconds:.0f} s, at step {before}")
    took = two.until(lambda: two.step() >= before + 30, "going on after the cut", patience)
    again = two.starts()[said:]
    how = f"after {len(again)} more starts ({', '.join(again)})" if again else "by itself"
    two.say(f"went on {how}: 30 steps further after {took:.1f} s, step {two.step()}")


def one_dies(two: Hosts, victim: int, patience: float, *, hangs_up: bool) -> None:
    before, said = two.step(), len(two.starts())
    if not hangs_up:
        two.hosts[victim].link("down")
    two.hosts[victim].die()
    two.say(f"the {NAMES[victim]} host died at step {before}")
    took = two.until(lambda: two.step() >= before + 30, "going on alone", patience)
    how = f"the other went on alone ({', '.join(two.starts()[said:])})"
    two.say(f"{how}: 30 steps further after {took:.1f} s, step {two.step()}")


def another_comes(two: Hosts, number: int, patience: float) -> None:
    """No agent counts this as a restart."""
    said = len(two.starts())
    two.replace(number)
    two.say(f"another {NAMES[number]} host comes at step {two.step()}")
    took = two.until(lambda: len(two.starts()) > said, "meeting the other", patience)
    before = two.step()
    took += two.until(lambda: two.step() >= before + 30, "going on with the other", patience)
    two.say(
        f"went on with it ({', '.join(two.starts()[said:])}): 30 steps further after {took:.1f} s, step {two.step()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="to each host")
    parser.add_argument("--cut", type=float, default=8.0, help="seconds that the link is cut; 0: not at all")
    parser.add_argument("--victim", choices=(*NAMES, "none"), default="second", help="the host that dies")
    parser.add_argument(
        "--hangs-up", action="store_true", help="its processes die, its kernel closes their connections"
    )
    parser.add_argument("--no-other", dest="another", action="store_false", help="nothing comes in its place")
    parser.add_argument("--step-timeout", type=float, default=20.0, help="run.step_timeout, in seconds")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds for each recovery")
    parser.add_argument("--place", type=Path, help="an empty directory for the run, which is kept")
    options, arguments = parser.parse_known_args()
    if why := lacking():
        sys.exit(f"scripts/two_hosts: {why}")
    place = options.place or Path(tempfile.mkdtemp(prefix="two-hosts-"))
    place.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.append(f"run.step_timeout={options.step_timeout}")
    with Hosts(place.resolve(), options.processes, arguments, OWN_STORES) as two:
        try:
            trains(two, options.patience)
            if options.cut:
                cut(two, options.cut, options.patience)
            if options.victim != "none":
                number = NAMES.index(options.victim)
                one_dies(two, number, options.patience, hangs_up=options.hangs_up)
                if options.another:
                    another_comes(two, number, options.patience)
        except TimeoutError as error:
            two.say(f"FAILED: {error}")
            for host in two.hosts:
                print(f"--- the last words of the {host.name} host", *host.out.read_text().splitlines()[-12:], sep="\n")
            sys.exit(1)
    if options.place is None:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()

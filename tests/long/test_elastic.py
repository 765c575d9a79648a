"""Elastic training: machines that die, come back, or lose the network. Each is a network namespace of this machine."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_files, checkpoint_step
from tests.cli.commands import environment, sequences, write, write_recipe

HOSTS = 3
START_SECONDS, RESTART_SECONDS = 240, 120
"""Upper bounds for a busy machine: with a load of 5 on 2 cores, a start took 28 s and a restart 28 to 50 s."""
PORT = 29400
STORE = f"""
import time
from torch.distributed import TCPStore
store = TCPStore("10.77.0.100", {PORT}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(600)
"""


VARIABLES = {
    "GLOO_SOCKET_IFNAME": "eth0",
    # torchrun 2.13 gives a host that joins later no address of the main process: it reuses that of the first round.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, encoding="utf-8")


def no_namespaces() -> str | None:
    """Why network namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs the commands ip (Debian: iproute2) and unshare"
    try:
        ip("netns", "add", f"probe-{os.getpid()}")
        try:
            ip("-n", f"probe-{os.getpid()}", "link", "add", "br0", "type", "bridge")
        finally:
            ip("netns", "del", f"probe-{os.getpid()}")
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    return None


REASON = no_namespaces()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


class Cluster:
    """Three hosts and a switch. The rendezvous store of torchrun is at the switch, which does not fail."""

    def __init__(self, folder: Path, stack: ExitStack, shared: bool) -> None:
        self.folder, self.stack, self.shared = folder, stack, shared
        self.name = f"regard-{os.getpid()}"
        self.torchrun: dict[int, subprocess.Popen[bytes]] = {}
        self._add(self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "addr", "add", "10.77.0.100/24", "dev", "br0")
        for device in ("lo", "br0"):
            ip("-n", self.switch, "link", "set", device, "up")
        for host in range(HOSTS):
            self._add(self.host(host))
            pair = ("eth0", "netns", self.host(host), "type", "veth", "peer", f"port{host}")
            ip("link", "add", *pair, "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"port{host}", "master", "br0", "up")
            ip("-n", self.host(host), "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", self.host(host), "link", "set", device, "up")
        store = self._start(self.switch, [sys.executable, "-c", STORE], stdout=subprocess.PIPE)
        assert store.stdout is not None
        with store.stdout:
            assert store.stdout.readline() == b"ready\n"

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def host(self, number: int) -> str:
        return f"{self.name}-{number}"

    def _add(self, name: str) -> None:
        ip("netns", "add", name)
        self.stack.callback(ip, "netns", "del", name)

    def _start(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        inside = ["ip", "netns", "exec", name, *command]
        process = subprocess.Popen(inside, **options)
        self.stack.callback(process.wait)
        self.stack.callback(self.kill, name)
        return process

    def kill(self, name: str) -> None:
        """Kill all processes of a namespace, as if it lost its power."""
        for _ in range(3):  # a process may just be starting another one
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=False)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)

    def cwd(self, host: int) -> Path:
        return self.folder if self.shared else self.folder / f"host-{host}"

    def train(self, host: int) -> None:
        """Start torchrun on a host."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{HOSTS}"]
        command += ["--nproc-per-node", "1", "--max-restarts", "10", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"10.77.0.100:{PORT}", "--rdzv-id", "job"]
        command += ["--rdzv-conf", "is_host=0,last_call_timeout=3,read_timeout=20"]
        command += ["--local-addr", f"10.77.0.{host + 1}"]
        command += ["-m", "regard", "train", "recipe.yaml", "--out", "run"]
        named = ["unshare", "--uts", "sh", "-c", f'hostname h{host}; exec "$@"', "sh", *command]
        with (self.folder / f"stderr-{host}.txt").open("ab") as stderr:
            self.torchrun[host] = self._start(
                self.host(host),
                named,
                cwd=self.cwd(host),
                env={**environment(), **VARIABLES},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def partition(self, host: int) -> None:
        """Cut the cable of a host: its packets get lost, and nobody is told."""
        ip("-n", self.switch, "link", "set", f"port{host}", "nomaster")

    def stderr(self, host: int) -> str:
        return (self.folder / f"stderr-{host}.txt").read_text()

    def starts(self, host: int = 0) -> list[dict[str, Any]]:
        """The log events of each start of the training."""
        run = RunDir(self.cwd(host) / "run")
        return [event for event in run.log() if event["event"] == "start"]

    def processes(self, host: int = 0) -> int:
        """The number of processes that train, by the log; 0 before the first start."""
        starts = self.starts(host)
        return int(starts[-1]["processes"]) if starts else 0

    def wait_for_processes(self, count: int) -> float:
        """Wait until this many hosts train and have saved a checkpoint; the seconds until they started."""
        number = len(self.starts())
        seconds = self.wait(
            f"{count} hosts train",
            lambda: len(self.starts()) > number and self.processes() == count,
            START_SECONDS if number == 0 else RESTART_SECONDS,
        )
        step = newest_step(self.cwd(0) / "run")
        self.wait("a checkpoint", lambda: newest_step(self.cwd(0) / "run") > step, RESTART_SECONDS)
        return seconds

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> float:
        """Wait until a condition holds; the seconds that this took."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > seconds:
                errors = "\n".join(self.stderr(host)[-3000:] for host in self.torchrun)
                pytest.fail(f"not within {seconds} s: {what}\n{self.starts()}\n{errors}")
            time.sleep(0.1)
        return time.monotonic() - start


def write_data(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    texts = [" ".join(one) for one in sequences(60, "abcdefgh", range(2, 7))]
    for name, lines in (("train", texts), ("valid", texts[:5])):
        write(folder / f"{name}.src", lines)
        write(folder / f"{name}.tgt", lines)
    training: dict[str, Any] = {
        "steps": 10**6,
        "tokens_per_batch": 96,
        "log_every": 10,
        "checkpoint_every": 20,
    }
    training |= {"validate_every": 10**6, "schedule": "constant", "learning_rate": 0.0001}
    write_recipe(folder, training=training)


def newest_step(run: Path) -> int:
    files = checkpoint_files(run / "checkpoints")
    return checkpoint_step(files[-1]) if files else 0


def test_hosts_die_return_and_lose_the_network(tmp_path: Path) -> None:
    write_data(tmp_path)
    run = tmp_path / "run"
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, shared=True)
        for host in range(HOSTS):
            cluster.train(host)
        seconds = {"started": cluster.wait_for_processes(3)}

        before = newest_step(run)
        cluster.kill(cluster.host(2))
        seconds["killed"] = cluster.wait_for_processes(2)
        assert cluster.starts()[-1]["step"] >= before

        before = newest_step(run)
        cluster.train(2)
        seconds["returned"] = cluster.wait_for_processes(3)
        assert cluster.starts()[-1]["step"] >= before

        main = int(re.sub(r"\D", "", cluster.starts()[-1]["host"]))
        before = newest_step(run)
        cluster.partition(main)
        seconds["partitioned"] = cluster.wait_for_processes(2)
        start = cluster.starts()[-1]
        assert start["step"] >= before
        assert start["host"] != f"h{main}"
        assert f" on {start['host']}," in RunDir(run).lock_file.read_text()
        assert "has lost the connection to another process" in cluster.stderr(main)
        print(json.dumps(seconds))  # for benchmarks/scaling/elastic.py


def test_the_main_host_dies_and_no_folder_is_shared(tmp_path: Path) -> None:
    for host in range(2):
        write_data(tmp_path / f"host-{host}")
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, shared=False)
        for host in range(2):
            cluster.train(host)
        cluster.wait("2 hosts train", lambda: cluster.processes(0) == 2, START_SECONDS)
        main = int(re.sub(r"\D", "", cluster.starts(0)[-1]["host"]))
        other = 1 - main
        run = cluster.cwd(other) / "run"
        cluster.wait("a copy of a checkpoint", lambda: newest_step(run) > 0, RESTART_SECONDS)
        cluster.kill(cluster.host(main))
        before = newest_step(run)
        cluster.wait(
            "the other host continues", lambda: cluster.processes(other) == 1, RESTART_SECONDS
        )
        assert cluster.starts(other)[-1]["step"] >= before > 0
        assert cluster.starts(other)[-1]["host"] == f"h{other}"
        cluster.wait("a checkpoint", lambda: newest_step(run) > before, RESTART_SECONDS)

"""Tensor parallelism, the set-up: how the ranks start, and how they hear of each other's end.

Every rank runs the same scheduler on the same requests (engine/runner/ranks.py). Activations go
over a torch ProcessGroup: NCCL between GPUs, gloo between CPUs. Everything else goes over one
connection between rank 0 and each worker, which also tells at once who died: its end closes.

    LLM(…, tensor_parallel_size=2)       rank 0 is this process, and starts the workers itself
    torchrun --nproc-per-node 2 -m …     the ranks are there; all but the first become workers

Each engine has connections and groups of its own, so several live in one process.
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from multiprocessing.connection import Client, Connection, Listener, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.config import EngineConfig
from engine.core.errors import ConfigError, TandemError
from engine.hub import Follower, Hub, ParallelError, Peer
from engine.layers.shard import Collectives, Shard
from engine.runner.device import pick_device

TIMEOUT = "TANDEM_RANK_TIMEOUT"  # seconds a rank may keep the others waiting in a step
LONGEST_TIMEOUT = 10**6  # 11 days
LOCAL = "127.0.0.1"
WORKER = """import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears of a Ctrl-C too, and ends us
from engine.runner.ranks import main
main()"""


def rank_timeout() -> timedelta:
    """How long an exchange of activations may take before the silent rank counts as lost."""
    text = os.environ.get(TIMEOUT, "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not -math.inf < seconds <= LONGEST_TIMEOUT:
        raise ConfigError(f"{TIMEOUT}={text!r} must be a number of seconds, at most "
                          f"{LONGEST_TIMEOUT}")
    return timedelta(seconds=max(1.0, seconds))


def under_torchrun() -> bool:
    """True in a process that torchrun started with others."""
    return ("RANK" in os.environ and "MASTER_ADDR" in os.environ
            and int(os.environ.get("WORLD_SIZE", "1")) > 1)


def with_world(config: EngineConfig) -> EngineConfig:
    """The config with torchrun's number of processes, if it started this one."""
    if not under_torchrun():
        return config
    world = int(os.environ["WORLD_SIZE"])
    if config.tensor_parallel_size not in (1, world):
        raise ConfigError(f"tensor_parallel_size={config.tensor_parallel_size}, but torchrun "
                          f"started {world} processes: leave it out, or make them equal")
    return replace(config, tensor_parallel_size=world)


class Lead:
    """Rank 0's side: the workers, a hub to talk to them, and the threads given up for them."""

    def __init__(self, config: EngineConfig, options: dict[str, Any]):
        """Start or meet the workers and tell them what to build. ConfigError if `options` hold
        what cannot be sent; ParallelError if a worker dies on the way."""
        self.size = config.tensor_parallel_size
        rank_timeout()  # a mistake shows before a worker starts
        boot = _pack_boot(config, options)
        if not under_torchrun():  # whose workers run the user's script, as we do
            _refuse_script_classes(boot)
        device = pick_device(config.device, Shard(0, self.size))
        self._threads = torch.get_num_threads()
        if under_torchrun():
            peers, self.store, port = _meet_workers(self.size), _torchrun_store(), 0
        else:
            torch.set_num_threads(max(1, self._threads // self.size))  # the ranks share the cores
            peers = [_spawn(rank, self.size) for rank in range(1, self.size)]
            self.store = dist.TCPStore(LOCAL, 0, None, True, wait_for_workers=False,
                                       timeout=rank_timeout())
            port = self.store.port
        self.hub = Hub(peers)
        self._finalizer = weakref.finalize(self, _end, self.hub, self._threads)
        self.hub.send("boot", boot, port)
        self.hub.gather("hello")  # all have imported torch and are about to connect
        self.shard = connect(self.store, 0, self.size, device)
        if device.type == "cuda":
            assert self.shard.wire is not None
            self.hub.on_lost = partial(_abort, self.shard.wire.group)

    def minimum(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        value = min(value, *self.hub.gather("minimum"))
        self.hub.send("minimum", value)
        return value

    def close(self) -> None:
        """End the workers, if need be by force. Safe to call twice, and from atexit."""
        self._finalizer()


def _end(hub: Hub, threads: int) -> None:
    hub.close()
    torch.set_num_threads(threads)


def _abort(group: Any) -> None:
    """End the exchanges that wait for a lost rank: on CUDA they are kernels, those of a recorded
    graph included, which nothing else ends, and the host waits for them. They then leave anything
    in their tensors, so whoever reads those asks the hub first."""
    with suppress(Exception):  # torch's watchdog was faster, or the communicator is in ruins
        group.abort()


def connect(store: Any, rank: int, size: int, device: torch.device) -> Shard:
    """This rank's shard, joined with the others over `store`. Returns when all have come."""
    timeout = rank_timeout()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        make: Any = dist.ProcessGroupGloo
        options = make._Options()
        options._timeout = timeout
        here = not under_torchrun() or one_node()
        options._devices = [make.create_device(hostname=LOCAL) if here
                            else make.create_default_device()]
        group = make(store, rank, size, options)
    return Shard(rank, size, Collectives(group))


# ------------------------------------------------------------------------ workers of our own

def _spawn(rank: int, size: int) -> Peer:
    """Start worker `rank`; it and we hold the two ends of a pipe that nobody else has."""
    ours, theirs = Pipe()
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *(path for path in sys.path if path and path != root)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths),
           "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(theirs.fileno()), str(rank), str(size)],
        pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    theirs.close()
    return Peer(rank, size, ours, process)


def _pack_boot(config: EngineConfig, options: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((config, options))
    except Exception as error:  # whatever an object's own pickling raises
        raise ConfigError(f"scheduler_options cannot be sent to the other ranks ({error}): "
                          f"take objects of importable classes, or names") from None


def _refuse_script_classes(boot: bytes) -> None:
    """ConfigError if an object's class is the running script's own: a worker does not run it."""
    words = [word for _, word, _ in pickletools.genops(boot) if isinstance(word, str)]
    for module, name in pairwise(words):
        if module == "__main__":
            raise ConfigError(f"scheduler_options cannot be sent to the other ranks: {name} is "
                              f"defined in the script that runs, which they do not run; put it "
                              f"into a module of its own and import it from there")


def spawned_follower(arguments: list[str]) -> Follower:
    """The worker's side of `_spawn`."""
    handle, rank, size = map(int, arguments)
    return Follower(rank, size, Connection(handle), quiet=True)


def follower_store(port: int) -> Any:
    """Where a worker meets the others."""
    if not port:
        return _torchrun_store()
    return dist.TCPStore(LOCAL, port, None, False, timeout=rank_timeout())


# ------------------------------------------------------------------------ workers of torchrun

_met = False  # torchrun's workers serve one engine


def one_node() -> bool:
    """True if all of torchrun's processes are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


@cache
def _torchrun_store() -> Any:
    """Where torchrun's processes meet. Without its agent, rank 0 keeps the store: only once."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=rank_timeout()))
    return dist.PrefixStore("tandem", store)


def _meet_workers(size: int) -> list[Peer]:
    """Wait for torchrun's other processes to call. If one dies before, torchrun ends us."""
    global _met
    if _met:
        raise ConfigError("under torchrun a process has one LLM: make further ones in a run of "
                          "their own")
    _met = True
    store, key = _torchrun_store(), os.urandom(16)
    with Listener((LOCAL if one_node() else "0.0.0.0", 0), authkey=key, backlog=size) as listener:
        host = LOCAL if one_node() else os.environ["MASTER_ADDR"]
        store.set("hub", pickle.dumps((host, listener.address[1], key)))
        peers = []
        for _ in range(size - 1):
            connection = listener.accept()
            _send_at_once(connection)
            rank, name = connection.recv()
            peers.append(Peer(rank, size, connection, None, name))
    return sorted(peers, key=lambda peer: peer.rank)


def torchrun_follower() -> Follower:
    """The worker's side of `_meet_workers`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port, key = pickle.loads(_torchrun_store().get("hub"))
    try:
        connection = Client((host, port), authkey=key)
    except OSError as error:
        raise ParallelError(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}") from None
    _send_at_once(connection)
    connection.send((rank, f"pid {os.getpid()} on {socket.gethostname()}"))
    return Follower(rank, size, connection)


def _send_at_once(connection: Any) -> None:
    """Small messages must not wait for the acknowledgement of the one before."""
    with suppress(OSError), socket.fromfd(
            connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def become_worker_if_told(config: EngineConfig) -> None:
    """In torchrun's processes but the first: serve until rank 0 is done, then end the process."""
    if not under_torchrun() or os.environ["RANK"] == "0":
        return
    from engine.runner.ranks import serve
    try:
        serve(torchrun_follower(), model=config.model)
    except TandemError as error:
        sys.exit(f"error: {error}")
    raise SystemExit(0)

"""Ranks: several processes that train one policy, on one machine or many, each with
environments of its own.

    torchrun --standalone --nproc-per-node=2 pufferl.py train breakout
    python pufferl.py train breakout --train.gpus 2         # the same
    torchrun --nnodes=2 ... pufferl.py train breakout       # several machines: docs/scale.md

The trainer calls `connect()`. When the algorithm needs a number of all agents, it calls one of
these methods:

    ranks = connect()
    ranks.sum(moments)                  # in place; twice a minibatch: the advantages' moments and the gradients
    ranks.any(flag)                     # so that all ranks decide alike in the same epoch
    ranks.merge_log(log)                # the episodes of all ranks as one
    ranks.first(function)               # rank 0 alone does it, as reading a file; all get its result or its error

All of them are collective: every rank calls them, in the same order. With one rank they return at
once, and torch's distributed package is not even initialised. Tensors on a CPU travel through gloo,
those on a GPU through NCCL.
"""

import atexit
import contextlib
import datetime
import json
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

import processes
from errors import RankError

# How long a rank waits for another one that does not answer but is still alive.
TIMEOUT = datetime.timedelta(minutes=10)


class Ranks:
    """This process's place among the ranks, and what they do together.

    rank: its number; count: how many there are; local_rank: its number on this machine; machines:
    how many those are. device: where the trainer's tensors are; numpy arrays travel from there as
    well, because NCCL adds up in few steps, and gloo in as many as there are ranks. seconds:
    time spent in collective operations since `take_seconds`, waiting for the slowest rank included.
    bytes: sent in sums so far.
    """

    def __init__(self, rank=0, count=1, local_rank=0, local_count=1, control=None):
        self.rank, self.count, self.local_rank, self.local_count = rank, count, local_rank, local_count
        self.machines = int(os.environ.get("GROUP_WORLD_SIZE", -(-count // local_count)))
        self.device, self.seconds, self.bytes = torch.device("cpu"), 0.0, 0
        self.given = False  # whether the user's script made the process group and chose GPUs
        # The process group for Python objects and numbers on the CPU; None: torch's default one.
        self._control = control
        self._names = []

    def _run(self, operation, *arguments, **options):
        begun = time.perf_counter()
        try:
            return operation(*arguments, **options)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.count}: another rank has ended or does not answer; what it "
                            f"printed says why. ({(str(error) or type(error).__name__).splitlines()[0]})") from None
        finally:
            self.seconds += time.perf_counter() - begun

    def take_seconds(self):
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def sum(self, values):
        """Add up a tensor, or a numpy array, over all ranks: in place and returned,
        the same bits everywhere."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values):
        """The largest of all ranks, element by element, in the same way."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values, operation):
        if self.count > 1:
            host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
            tensor = host.to(self.device) if isinstance(values, np.ndarray) else values
            self.bytes += tensor.nbytes
            self._run(dist.all_reduce, tensor, operation, group=self._group(tensor))
            if tensor is not host:
                host.copy_(tensor)
        return values

    def broadcast(self, tensor):
        """Overwrite a tensor with rank 0's."""
        if self.count > 1:
            self._run(dist.broadcast, tensor.data, 0, group=self._group(tensor))

    def choose_gpu(self):
        """The number of this rank's GPU, which becomes torch's current one: its own number on the
        machine, or the current one if it sees fewer (under Slurm one each). Raises RankError
        if ranks share one: NCCL refuses that."""
        if self.count > 1 and not self.given and self.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(self.local_rank)
        gpu = torch.cuda.current_device()
        chosen = self.gather((socket.gethostname(),
                              str(torch.cuda.get_device_properties(gpu).uuid)))
        if len(set(chosen)) < self.count:
            raise RankError(f"{self.count} ranks have {len(set(chosen))} GPUs; start one rank a "
                            "GPU (--train.gpus, or torchrun's --nproc-per-node), or "
                            "train on the CPU.")
        return gpu

    def _group(self, tensor):
        return self._control if tensor.device.type == "cpu" else None

    def any(self, flag):
        """Whether the flag is set on any rank."""
        return bool(flag) if self.count == 1 else bool(self.sum(np.array([float(flag)]))[0])

    def gather(self, value):
        """[value of rank 0, of rank 1, ...]; anything that pickles."""
        values = [value] * self.count
        if self.count > 1:
            self._run(dist.all_gather_object, values, value, group=self._control)
        return values

    def gather_to_first(self, value):
        """The same on rank 0; [] elsewhere."""
        if self.count == 1:
            return [value]
        values = [None] * self.count if self.rank == 0 else None
        self._run(dist.gather_object, value, values, group=self._control)
        return values or []

    def scatter(self, values):
        """values[rank] of rank 0's list."""
        if self.count == 1:
            return values[0]
        mine = [None]
        self._run(dist.scatter_object_list, mine, values if self.rank == 0 else None,
                  group=self._control)
        return mine[0]

    def share(self, value):
        """Rank 0's value."""
        box = [value]
        if self.count > 1:
            self._run(dist.broadcast_object_list, box, group=self._control)
        return box[0]

    def first(self, function):
        """function() of rank 0, for all ranks. An error is raised on all of them, with `.elsewhere`
        set on those on which it did not happen."""
        if self.count == 1:
            return function()
        result = problem = None
        if self.rank == 0:
            try:
                result = function()
            except (Exception, SystemExit) as error:
                problem = error
        told, result = self.share((None if problem is None else (type(problem), problem.args),
                                   result))
        if problem is not None:
            raise problem
        if told is not None:
            error = told[0](*told[1])
            error.elsewhere = True
            raise error
        return result

    def merge_log(self, log):
        """Every rank's means over its `n` finished episodes -> the means over all of them;
        {} if none finished."""
        if self.count == 1:
            return log
        while True:
            n, sums = log.get("n", 0), np.zeros((1 + len(self._names), 2))
            sums[0] = n, any(name not in self._names for name in log if name != "n")
            for row, name in zip(sums[1:], self._names, strict=True):
                row[:] = (n, log[name] * n) if name in log else 0
            self.sum(sums)
            if not sums[0, 1]:
                break
            # A rank's log has a new name: all ranks agree on the names, then sum again.
            names = [*self._names,
                     *(name for one in self.gather(list(log)) for name in one if name != "n")]
            self._names = list(dict.fromkeys(names))
        means = {name: total / n
                 for name, (n, total) in zip(self._names, sums[1:].tolist(), strict=True) if n}
        return {**means, "n": sums[0, 0].item()} if sums[0, 0] else {}

    def launchers(self):
        """[[machine and process, when it began], ...] of the torchruns that started the
        ranks; [] without torchrun."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return []
        parent = psutil.Process(os.getppid())
        found = dict(self.gather((f"{socket.gethostname()}:{parent.pid}", parent.create_time())))
        return [[name, began] for name, began in found.items()]

    def find_interrupted(self, data_dir, env_name):
        """The folder of the run that these torchruns had before they restarted their ranks, or
        None: the newest with a checkpoint whose `launch` is one of them."""
        launchers = self.launchers()

        def find():
            saved = Path(data_dir).glob(f"{env_name}_*/trainer_state.pt")
            for path in sorted(saved, key=lambda path: path.stat().st_mtime, reverse=True):
                with contextlib.suppress(OSError, ValueError, TypeError, AttributeError,
                                         RecursionError):
                    then = json.loads(path.with_name("config.json").read_text()).get("launch", [])
                    if any(name == other and abs(began - before) < 5
                           for name, began in launchers for other, before in then):
                        return str(path.parent)

        return self.first(find) if launchers else None

    def join(self, trainer, agents):
        """Called before a trainer's rollout arrays are made. Raises RankError if settings differ
        between ranks, gives each rank's environments other random numbers and all ranks rank 0's
        weights, and has rank 0 print whose each number is."""
        c, vecenv = trainer.config, trainer.vecenv
        c = {key: getattr(value, "__qualname__", str(type(value))) if callable(value) else value
             for key, value in c.items()}  # names, as functions of a script cannot be sent
        everybody = self.gather(c)
        for key in c.keys() - {"data_dir", "run_id", "log_interval", "keep"}:
            values = [other.get(key) for other in everybody]
            if any(value != c[key] for value in values):
                raise RankError(f"train.{key} must be the same on all ranks, but is "
                                f"{', '.join(map(str, values))}. (Ranks have random numbers of "
                                "their own without different seeds.)")
        vecenv.number_from(sum(self.gather(vecenv.num_envs)[: self.rank]))
        torch.manual_seed(c["seed"] + self.rank)  # for random numbers in a network, such as dropout
        for tensor in (*trainer.policy.parameters(), *trainer.policy.buffers()):
            self.broadcast(tensor)
        if self.rank == 0:
            drawn = trainer.segments * trainer.span
            processes.say(f"{self.count} ranks on {self.machines} machine{'s' * (self.machines > 1)}. "
                          f"Each (vec, env): {vecenv.num_envs:,} environments, {trainer.num_agents:,} "
                          f"agents, threads: {vecenv.num_threads}.\n"
                          f"Together (train): {sum(agents):,} agents × horizon "
                          f"{trainer.horizon} = a batch of {trainer.batch_size:,} steps; minibatch_size "
                          f"{c['minibatch_size']:,}, of which a rank draws {drawn:,} from its own; "
                          f"total_timesteps {c['total_timesteps']:,}.")

    def end_epoch(self, trainer, sums, log_due):
        """(loss statistics of all ranks, whether to log, as rank 0's clock says). Checks that the
        weights are equal, and makes a network's buffers rank 0's, as torch's
        DistributedDataParallel does."""
        both = self.sum(np.append(sums, float(log_due and self.rank == 0)))
        for buffer in trainer.policy.buffers():
            self.broadcast(buffer)
        if trainer.epoch == 1 or trainer.epoch % trainer.config["checkpoint_interval"] == 0:
            self.check_equal(trainer.arena.flat("weights"), f"epoch {trainer.epoch}: the weights")
        return both[:-1], bool(both[-1])

    def check_equal(self, flat, what):
        """RankError unless the bits of a flat float32 tensor are the same on all ranks."""
        if self.count == 1:
            return
        bits = flat.view(torch.int32).to(torch.int64)
        # Weighted by their places, so that the sum differs if two weights are swapped.
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        own = (bits.sum().item(), (bits * places).sum().item())
        others = self.gather(own)
        if any(other != own for other in others):
            different = [rank for rank, other in enumerate(others) if other != others[0]]
            raise RankError(f"{what} are not the same on all ranks: other than rank 0's on "
                            f"{', '.join(map(str, different))}. Ranks must run the same code, "
                            "packages and settings (a learning rate set on one only?) on the same "
                            "kind of device, with as many threads.")


_connected = None


def connect():
    """The ranks that torchrun, or another program that sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, has started; joins them at the first call. A process group that exists
    already is used as it is."""
    global _connected
    if _connected is not None:
        return _connected
    local_rank, local_count = (int(os.environ.get(name, default)) for name, default in
                               (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    given = dist.is_available() and dist.is_initialized()
    if not given:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "RANK" not in os.environ:
            _connected = Ranks()
            return _connected
        _die_with_launcher()
        gpu = torch.cuda.is_available() and dist.is_nccl_available()
        store, rank, count = _rendezvous()
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank,
                                world_size=count, timeout=TIMEOUT)
        atexit.register(_disconnect)
    control = (None if "gloo" in dist.get_backend_config()
               else dist.new_group(backend="gloo", timeout=TIMEOUT))
    _connected = Ranks(dist.get_rank(), dist.get_world_size(), local_rank, local_count, control)
    _connected.given = given
    return _connected


@contextlib.contextmanager
def alone():
    """Within it `connect` gives this process alone: rank 0 tries something before the others
    join."""
    global _connected
    before, _connected = connect(), Ranks()
    try:
        yield
    finally:
        _connected = before


def _rendezvous():
    """(store, rank, count). torchrun keeps one store over its restarts, so it holds addresses of
    ranks that are gone. Rank 0 therefore draws a new name for each start, and the group's keys go
    under that name."""
    store, rank, count = next(dist.rendezvous("env://", timeout=TIMEOUT))
    own, deadline = secrets.token_hex(8), time.monotonic() + TIMEOUT.total_seconds()
    if rank == 0:
        store.set("name", own)
        for other in range(1, count):
            answer = store.get(f"{own}/{other}").decode()
            store.set(f"{own}/{answer}", "go")
        return dist.PrefixStore(own, store), rank, count
    while True:
        name = store.get("name").decode()
        store.set(f"{name}/{rank}", own)
        try:
            store.wait([f"{name}/{own}"], datetime.timedelta(seconds=1))
            return dist.PrefixStore(name, store), rank, count
        except RuntimeError:  # the name is an earlier start's, or rank 0 is slow: try again
            if time.monotonic() > deadline:
                raise RankError(f"rank {rank} of {count}: rank 0 has not come for {TIMEOUT}.") from None


def _disconnect():
    # Not after an error, because the other ranks may never answer.
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _die_with_launcher():
    """Have Linux end this rank when its launcher is killed; else nothing could stop it. It ends
    with a checkpoint, unless the launcher would restart the other ranks without it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        again = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
        processes.die_with(os.getppid(), signal.SIGKILL if again else signal.SIGTERM)


def started():
    """Whether a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(count, command):
    """Run `command`, a script and its arguments, as `count` ranks on this machine,
    and return its exit code.

    SIGINT, SIGTERM and SIGHUP go on to the ranks, which decide what they mean; so there is no limit
    to how long saving takes. No rank outlives this process, even if some cannot be started.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def forward(number, frame):
        children = psutil.Process().children()
        if not children:
            sys.exit(128 + number)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    # The trainer chooses its threads itself; without this torchrun would print a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["--standalone", f"--nproc-per-node={count}", "--signals-to-handle=SIGQUIT",
               "--no-python"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        run.run(run.parse_args([*options, *processes.guarded([sys.executable, "-u", *command])]))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, RuntimeError) as error:
        print(f"train.gpus = {count}: not all ranks could be started ({error}). `ulimit -u` shows "
              "how many processes and threads you may have.", file=sys.stderr)
        return 1
    finally:
        processes.end_children()
    return 0

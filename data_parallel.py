"""Train one policy with several processes (ranks), each with its own environments.

    torchrun --standalone --nproc-per-node=2 pufferl.py train breakout
    python pufferl.py train breakout --train.gpus 2         # the same
    torchrun --nnodes=2 ... pufferl.py train breakout       # several machines: docs/scale.md

The trainer calls `connect()`, and these methods where the algorithm needs a number of all agents:

    ranks = connect()
    ranks.sum(moments)         # in place; twice a minibatch: the advantages' moments, the gradients
    ranks.any(flag)            # so that all ranks decide alike in the same epoch
    ranks.gather(log)          # of each rank, anything that pickles
    ranks.first(function)      # only rank 0 calls it, to read a file; all get its result or error

All of them are collective: every rank calls them, in the same order. With one rank the trainer
sums nothing, and torch.distributed is not initialized. Tensors on a CPU are sent with gloo, those
on a GPU with NCCL.
"""

import atexit
import contextlib
import dataclasses
import datetime
import os
import secrets
import signal
import socket
import sys
import time

import psutil
import torch
import torch.distributed as dist

import processes
from errors import RankError, require

TIMEOUT = datetime.timedelta(minutes=10)  # for a rank that does not answer


@dataclasses.dataclass
class Ranks:
    """This process's place among the ranks, and their collective operations.

    rank: its number. count: of all ranks. local_rank, local_count: on this machine. device: of the
    trainer's tensors; flags and sums are sent from there, because NCCL needs fewer messages than
    gloo. collective_seconds: spent in collective operations since take_seconds, including the wait
    for the slowest rank.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    control: object = None  # the group for Python objects; None: torch's default one
    has_user_group: bool = False  # a script's, which chose GPUs
    device: torch.device | str = "cpu"
    collective_seconds: float = 0.0

    def _run(self, operation, *arguments, **options):
        start = time.perf_counter()
        try:
            return operation(*arguments, **options)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.count}: another rank has ended or does not "
                            "answer. See its output. "
                            f"({(str(error) or type(error).__name__).splitlines()[0]})") from None
        finally:
            self.collective_seconds += time.perf_counter() - start

    def take_seconds(self):
        """Return the seconds in collective operations since the last call."""
        seconds, self.collective_seconds = self.collective_seconds, 0.0
        return seconds

    def sum(self, tensor):
        """Add a tensor over all ranks, in place; return it.

        All ranks get the same bits.
        """
        self._run(dist.all_reduce, tensor, group=self._group(tensor))
        return tensor

    def broadcast(self, tensor):
        """Overwrite a tensor with rank 0's."""
        self._run(dist.broadcast, tensor.data, 0, group=self._group(tensor))

    def _group(self, tensor):
        return self.control if tensor.device.type == "cpu" else None

    def choose_gpu(self):
        """Return the number of this rank's GPU, which becomes torch's current one.

        It is the rank's number on the machine, or the current GPU if the rank sees fewer (Slurm
        gives each rank one). Raises RankError if ranks share a GPU, which NCCL cannot.
        """
        if (self.count > 1 and not self.has_user_group
                and self.local_rank < torch.cuda.device_count()):
            torch.cuda.set_device(self.local_rank)
        gpu = torch.cuda.current_device()
        uuid = str(torch.cuda.get_device_properties(gpu).uuid)
        gpus = len(set(self.gather((socket.gethostname(), uuid))))
        require(gpus == self.count, f"{self.count} ranks have {gpus} GPUs. Start one rank per GPU "
                "(--train.gpus, or torchrun's --nproc-per-node), or train on the CPU.", RankError)
        return gpu

    def any(self, flag):
        """Return whether the flag is set on any rank."""
        if self.count == 1:
            return bool(flag)
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def _exchange(self, operation, values, *arguments):
        """Call one of torch's operations on a list of objects, and return the list."""
        if self.count > 1:
            self._run(operation, values, *arguments, group=self.control)
        return values

    def gather(self, value):
        """Return [value of rank 0, of rank 1, ...], of anything that pickles."""
        return self._exchange(dist.all_gather_object, [value] * self.count, value)

    def gather_to_first(self, value):
        """Return the same on rank 0, and [] on other ranks."""
        values = [value] * self.count if self.rank == 0 else None
        if self.count > 1:
            self._run(dist.gather_object, value, values, group=self.control)
        return values or []

    def scatter(self, values):
        """Return values[rank] of rank 0's list."""
        return self._exchange(dist.scatter_object_list, [values[0]], values)[0]

    def broadcast_object(self, value):
        """Return rank 0's value."""
        return self._exchange(dist.broadcast_object_list, [value])[0]

    def first(self, function):
        """Return rank 0's function(), or raise its error on all ranks.

        On the others the error has the attribute `elsewhere`.
        """
        if self.count == 1:
            return function()
        result = error = None
        if self.rank == 0:
            try:
                result = function()
            except (Exception, SystemExit) as problem:
                error = problem
        info, result = self.broadcast_object((error and (type(error), error.args), result))
        if info is not None:
            if self.rank > 0:
                error = info[0](*info[1])  # attributes may not pickle
                error.elsewhere = True
            raise error
        return result

    def join(self, trainer, agents):
        """Give all ranks rank 0's weights, and each its own random numbers.

        agents: of each rank. Rank 0 prints which settings are per rank. Raises RankError if
        settings differ. Called before the rollout's arrays are made.
        """
        vecenv = trainer.vecenv
        c = {key: getattr(value, "__qualname__", str(type(value))) if callable(value) else value
             for key, value in trainer.config.items()}  # names, because functions may not pickle
        configs = self.gather(c)
        for key in c.keys() - {"data_dir", "run_id", "log_interval", "keep"}:
            values = [config.get(key) for config in configs]
            require(all(value == c[key] for value in values),
                    f"train.{key} = {', '.join(map(str, values))}: must be the same on all ranks. "
                    "(They have different random numbers with one seed.)", RankError)
        vecenv.set_first_env(sum(self.gather(vecenv.num_envs)[: self.rank]))
        torch.manual_seed(c["seed"] + self.rank)  # for random numbers in a network, such as dropout
        for tensor in (*trainer.policy.parameters(), *trainer.policy.buffers()):
            self.broadcast(tensor)
        if self.rank == 0:
            drawn = trainer.segments * (1 if c["draw"] == "steps" else c["horizon"])
            count = int(os.environ.get("GROUP_WORLD_SIZE", -(-self.count // self.local_count)))
            processes.say(
                f"{self.count} ranks on {count} machine{'s' * (count > 1)}. Each (vec, env): "
                f"{vecenv.num_envs:,} environments, {trainer.num_agents:,} agents, threads: "
                f"{vecenv.num_threads}.\n"
                f"Together (train): {sum(agents):,} agents × horizon {trainer.horizon} = a batch "
                f"of {trainer.batch_size:,} steps; minibatch_size {c['minibatch_size']:,}, of "
                f"which a rank draws {drawn:,}; total_timesteps {c['total_timesteps']:,}.")

    def end_epoch(self, trainer, sums, log_due):
        """Return (loss statistics of all ranks, whether rank 0's clock says to log).

        Checks now and then that the weights are equal, and gives a network's buffers rank 0's
        values, as torch's DistributedDataParallel does.
        """
        sums = torch.tensor([*sums, log_due and self.rank == 0], dtype=torch.float64)
        sums = self.sum(sums.to(self.device)).cpu().numpy()
        for buffer in trainer.policy.buffers():
            self.broadcast(buffer)
        if trainer.epoch == 1 or trainer.epoch % trainer.config["checkpoint_interval"] == 0:
            self.check_equal(trainer.arena.flat("weights"), f"epoch {trainer.epoch}: the weights")
        return sums[:-1], bool(sums[-1])

    def check_equal(self, flat, name):
        """Check that the bits of a flat float32 tensor are the same on all ranks."""
        bits = flat.view(torch.int32).to(torch.int64)
        # Weighted by their places, so that the sum changes if two weights are swapped.
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        digests = self.gather((bits.sum().item(), (bits * places).sum().item()))
        different = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
        require(not different, f"{name} are not the same on all ranks: other than rank 0's on "
                f"{', '.join(different)}. Ranks must run the same code, packages and settings on "
                "the same kind of device, with as many threads.", RankError)


_connected = None


def connect():
    """Return the ranks; the first call joins them.

    They are started by torchrun, or another program that sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT. A process group that already exists is used.
    """
    global _connected
    if _connected is not None:
        return _connected
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group:
        if not started() or int(os.environ["WORLD_SIZE"]) == 1:
            _connected = Ranks()
            return _connected
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Nothing else ends this rank when its launcher is killed. SIGTERM saves a checkpoint; a
            # launcher that would restart the other ranks needs SIGKILL.
            restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
            processes.die_with(os.getppid(), signal.SIGKILL if restarts else signal.SIGTERM)
        gpu = torch.cuda.is_available() and dist.is_nccl_available()
        store, rank, count = _rendezvous()
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank,
                                world_size=count, timeout=TIMEOUT)
        atexit.register(_disconnect)
    control = (None if "gloo" in dist.get_backend_config()
               else dist.new_group(backend="gloo", timeout=TIMEOUT))
    _connected = Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0)),
                       int(os.environ.get("LOCAL_WORLD_SIZE", 1)), control, has_group)
    return _connected


@contextlib.contextmanager
def single_process():
    """Have `connect` return one rank, so that rank 0 can try something alone."""
    global _connected
    ranks, _connected = connect(), Ranks()
    try:
        yield
    finally:
        _connected = ranks


def _rendezvous():
    """Return (store, rank, count).

    torchrun keeps one store over its restarts, with the addresses of ranks that are gone. So rank 0
    draws a new name for each start, under which the group's keys are.
    """
    store, rank, count = next(dist.rendezvous("env://", timeout=TIMEOUT))
    token, deadline = secrets.token_hex(8), time.monotonic() + TIMEOUT.total_seconds()
    if rank == 0:
        store.set("name", token)
        for other in range(1, count):
            answer = store.get(f"{token}/{other}").decode()
            store.set(f"{token}/{answer}", "go")
        return dist.PrefixStore(token, store), rank, count
    while True:
        name = store.get("name").decode()
        store.set(f"{name}/{rank}", token)
        try:
            store.wait([f"{name}/{token}"], datetime.timedelta(seconds=1))
            return dist.PrefixStore(name, store), rank, count
        except RuntimeError:  # the name is an earlier start's, or rank 0 is slow: try again
            if time.monotonic() > deadline:
                raise RankError(f"rank {rank} of {count}: rank 0 did not join within "
                                f"{TIMEOUT}.") from None


def _disconnect():
    # Not after an error, because the other ranks may never answer.
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def started():
    """Return whether a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_ranks(verb):
    """Raise ConfigError if this process is one of several ranks."""
    require(int(os.environ.get("WORLD_SIZE", 1)) == 1,
            f"{verb} runs in one process; torchrun's are for train.")


def launch(count, device, command):
    """Run a script as `count` ranks on this machine; exit with status 1 if one fails.

    device: train.device. command: the script's path and arguments. SIGINT, SIGTERM and SIGHUP are
    forwarded to the ranks, which may take their time to save. No rank outlives this process, even
    if some cannot be started. Raises ConfigError for more ranks than this machine holds.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    limit = (gpus, f"this machine has {gpus} GPUs") if gpus else processes.processes_at_most()
    processes.check_count("train.gpus", count, *limit)

    def forward(number, frame):
        children = psutil.Process().children()
        if not children:
            sys.exit(128 + number)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    # The trainer chooses its threads itself; torchrun would print a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["--standalone", f"--nproc-per-node={count}", "--signals-to-handle=SIGQUIT",
               "--no-python"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        run.run(run.parse_args([*options, *processes.guarded([sys.executable, "-u", *command])]))
    except ChildFailedError as error:
        sys.exit(str(error))
    except (OSError, RuntimeError) as error:
        sys.exit(f"train.gpus = {count}: not all ranks could be started ({error}). `ulimit -u` "
                 "shows the limit of processes and threads.")
    finally:
        processes.end_children()

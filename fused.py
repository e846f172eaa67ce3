"""The engines of a GPU: streams, pinned memory and CUDA graphs, for any network and for the default one.

    python pufferl.py train breakout --train.device cuda

`Graphs` is engines.Autograd on a GPU: each worker of the rollout has a stream of its own, on which its copies, its
forward passes and its graphs follow one another; learning has the main stream. After some epochs the steps of the
rollout and the parts of a minibatch are captured as graphs and replayed. `Fused` does the same for the default network
with the kernels in the place of autograd, and replays a buffer's whole rollout without the interpreter. Whatever is
captured must read and write memory that stays in its place (the arena), take its changing numbers from there, and never
wait for the GPU. `Gpu` holds what CUDA wants for that:

    device = Gpu(torch.device("cuda"), workers=4)
    device.pin(array)                                   # so that copies from and to it overlap with everything else
    with device.worker(0):                              # on that worker's stream, in whatever thread
        device.play("step", function, argument)         # runs function(argument), until it has been captured
        device.wait()                                   # what this stream was given is done
    device.capture(0, [("step", function, (argument,))])    # from now on `play` replays it
    device.handles(0, [("step", function, (argument,))])    # for those who replay it without the interpreter
"""

import contextlib
import ctypes
import sys
import time
import weakref

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

import engines
import ranks
from compiled import _LONG, _WORD, Compiled, _call_address, _cycles, _step_environments, difference
from configuration import ConfigError, own_optimizer
from kernels import driver, host
from vector import aligned_zeros


class Gpu:
    """Streams, pinned memory and graphs of one device.

    device: a torch.device of type cuda. workers: how many streams besides the main one.
    """

    def __init__(self, device, workers):
        self.torch_device = device
        # One stream a worker: its buffers share its activations, so they must not overlap with one another.
        self.streams = [torch.cuda.Stream(device) for _ in range(workers)]
        self.main_stream = torch.cuda.Stream(device)
        self._pinned, self._graphs = [], {}
        weakref.finalize(self, _unlock, device, self._pinned).atexit = False  # dropped without release()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def pin(self, array):
        """Lock a numpy array's pages in memory until `release`; they must be its own. Raises RuntimeError where the
        system's limit of locked memory (ulimit -l) is too low."""
        if array.nbytes:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0))
            self._pinned.append(array)

    @contextlib.contextmanager
    def main(self):
        """Within it, work goes to the main stream, after what the caller's stream was given and before what follows."""
        before = torch.cuda.current_stream(self.torch_device)
        self.main_stream.wait_stream(before)
        try:
            with torch.cuda.stream(self.main_stream):
                yield
        finally:  # after an interrupt, too, what is queued comes before what the caller does next
            before.wait_stream(self.main_stream)

    @contextlib.contextmanager
    def worker(self, number):
        """Within it, this thread's work goes to that worker's stream."""
        with (torch.cuda.device(self.torch_device), torch.cuda.stream(self.streams[number]),
              torch.cuda.nvtx.range(f"worker {number}")):  # fmt: skip
            yield

    @staticmethod
    def wait():
        """Until all that the current stream was given is done; other Python threads run meanwhile."""
        torch.cuda.current_stream().synchronize()

    def play(self, key, function, *arguments):
        """Replay what was captured under `key`; call the function where nothing was."""
        graph = self._graphs.get(key)
        with torch.cuda.nvtx.range(str(key)):
            graph.replay() if graph else function(*arguments)

    def handles(self, worker, calls):
        """What replays captured graphs without the interpreter: the addresses of `int launch(graph, stream)` and
        `int synchronize(stream)`, which return 0 or an error's number, the worker's stream, and the graphs, int64
        (calls,). None where one of them was not captured, or where torch is too old to hand it out."""
        graphs = [self._graphs.get(key) for key, *_ in calls]
        if not all(hasattr(graph, "raw_cuda_graph_exec") for graph in graphs):
            return None
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        launch, synchronize = (ctypes.cast(function, ctypes.c_void_p).value
                               for function in (driver.cuGraphLaunch, driver.cuStreamSynchronize))
        handles = np.array([graph.raw_cuda_graph_exec() for graph in graphs], np.int64)
        return launch, synchronize, self.streams[worker].cuda_stream, handles

    def capture(self, worker, calls):
        """Record [(key, function, arguments), ...] on a worker's stream, or on the main one for None, without running
        them. They must have run before, so that every kernel is compiled. Raises RuntimeError for what a graph cannot
        hold, as a wait for the GPU."""
        from numba import cuda  # gives no memory back meanwhile, which would wait for the GPU

        torch.cuda.synchronize(self.torch_device)
        stream, pool = self.main_stream if worker is None else self.streams[worker], torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream), cuda.defer_cleanup():
            for key, function, arguments in calls:
                graph = torch.cuda.CUDAGraph()
                # The graphs of one stream never run side by side, and hand on nothing but in the arena: one pool does.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    function(*arguments)
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # says again that the capture has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
                self._graphs[key] = graph
        torch.cuda.synchronize(self.torch_device)

    def forget(self):
        """Drop all graphs, once they are done: everything runs as it is written again."""
        torch.cuda.synchronize(self.torch_device)
        self._graphs.clear()

    def usage(self):
        """{"GPU": "87%", "GPU memory": "1,234 of 143,771 MiB"} for a dashboard, the first where nvidia-ml-py knows."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        shown = {"GPU memory": f"{(total - free) / 2**20:,.0f} of {total / 2**20:,.0f} MiB"}
        with contextlib.suppress(Exception):  # no package, no library, or a GPU that does not tell (MIG)
            shown = {"GPU": f"{torch.cuda.utilization(self.torch_device)}%", **shown}
        return shown

    def release(self):
        """Unlock the pinned arrays."""
        _unlock(self.torch_device, self._pinned)
        self.forget()


def _unlock(device, arrays):
    """Unlock pinned arrays when all work is done, which must come before their memory is given back."""
    if arrays:
        torch.cuda.synchronize(device)
    while arrays:
        torch.cuda.cudart().cudaHostUnregister(arrays.pop().ctypes.data)


def find_gpu(workers):
    """This process's current GPU. Raises ConfigError if torch or numba cannot use one."""
    if not torch.cuda.is_available():
        raise ConfigError("train.device = cuda: torch finds no GPU here (nvidia-smi shows what the system has; torch "
                          f"{torch.__version__} is made for CUDA {torch.version.cuda}). Take cpu.")
    from numba import cuda

    if cuda.implementation != "NVIDIA":
        raise ConfigError("train.device = cuda needs numba-cuda, but numba.cuda is numba's own here: pip install -r "
                          "requirements-cuda.txt (on PYTHONPATH instead of in site-packages it does not take its "
                          "place, until a sitecustomize.py there imports _numba_cuda_redirector).")
    return Gpu(torch.device("cuda", ranks.connect().choose_gpu()), workers)


# ---------------------------------------------------------------------------------------------------------------------
# Any network


class Graphs(engines.Autograd):
    """engines.Autograd on a GPU. The environments write pinned arrays, of which the policy has copies there."""

    name, rollout_name = "autograd", "graphs"

    def __init__(self, policy, vecenv, config, segments, first_agent=0):
        super().__init__(policy, vecenv, config, segments, first_agent)
        self.device = find_gpu(vecenv.num_workers)
        self.torch_device = self.device.torch_device
        policy.to(self.torch_device)
        self._start_pool()
        self.worker_of = {}  # buffer -> the worker that serves it
        self.parts = {}  # of an epoch's learning, by name: (name, function, arguments)
        self.learned, self.learning_now, self.captured = 0, False, False

    # -- memory ----------------------------------------------------------------------------------------------------

    def register(self, arena):
        super().register(arena)
        for name, tensor in self.host.items():
            if tensor is not None:
                arena.register(f"storage/{name}", tensor.shape, tensor.dtype)
        arena.register("cut", (self.num_agents,), torch.uint8)
        arena.register("cut_step", (self.vecenv.num_buffers,), torch.int64)

    def bind(self):
        super().bind()
        cut = aligned_zeros((self.num_agents,), np.uint8)
        cut_step = aligned_zeros((self.vecenv.num_buffers,), np.int64)
        arrays = [tensor.numpy() for tensor in self.host.values() if tensor is not None]
        for array in (*arrays, cut, cut_step):
            self.device.pin(array)
        self.host_cut, self.host_cut_step = torch.from_numpy(cut), torch.from_numpy(cut_step)

    def _storage(self):
        storage = {name: None if tensor is None else self.arena[f"storage/{name}"]
                   for name, tensor in self.host.items()}  # fmt: skip
        storage["valid"].copy_(self.host["valid"])  # all alive, if agents never die: then it stays
        return storage

    def _row(self, agents, t):
        row = super()._row(agents, t)
        row["copied"] = [(row[name], self.host[name][t, agents]) for name in engines.ROLLOUT
                         if row[name] is not None and (name != "valid" or self.vecenv.has_valid)]  # fmt: skip
        if t < self.horizon:
            row["host_actions"] = self.host["actions"][t, agents]
        return row

    # -- the rollout -----------------------------------------------------------------------------------------------

    def rollout(self, number):
        with self.device.main():
            if not self.captured and self.learned == self.config["cudagraphs"]:
                self._capture()
            seconds = super().rollout(number)
            for name in ("rewards", "terminals", "truncations"):
                self.storage[name].copy_(self.host[name], non_blocking=True)
        return seconds

    def _begin(self, number):
        super()._begin(number)
        self.device.wait()  # the workers have streams of their own

    def _run_workers(self):
        with engines.torch_threads(self.vecenv.threads_per_worker):
            return self.in_parallel(self._rollout, range(self.vecenv.num_workers))

    @torch.no_grad()
    def _rollout(self, worker):
        with self.device.worker(worker):
            return super()._rollout(worker)

    def step(self, worker, buffer, t):
        self.worker_of[buffer] = worker
        self.device.play(("step", buffer, t), self._step, worker, buffer, t)
        self.device.wait()  # for the actions

    def _step(self, worker, buffer, t):
        row = self.rows[buffer][t]
        for tensor, source in row["copied"]:
            tensor.copy_(source, non_blocking=True)
        super().step(worker, buffer, t)
        if t < self.horizon:
            row["host_actions"].copy_(row["actions"], non_blocking=True)

    def _bootstrap(self, worker, buffer, t):
        agents, row = self.vecenv.ranges[buffer], self.rows[buffer][t]
        cut = row["truncations"] & ~row["terminals"]  # terminal as well: nothing follows
        self.host_cut[agents], self.host_cut_step[buffer] = torch.from_numpy(cut), t
        self.device.play(("final", buffer), self._final_values, worker, buffer)

    def _final_values(self, worker, buffer):
        """On a GPU, where shapes are fixed: V of all of a buffer's final observations into the bootstraps of the step
        that the host sets, 0 if it sets no cut."""
        agents, one = self.vecenv.ranges[buffer], slice(buffer, buffer + 1)
        final, cut = self.storage["final_observations"][agents], self.arena["cut"][agents]
        step = self.arena["cut_step"][one]
        final.copy_(self.host["final_observations"][agents], non_blocking=True)
        cut.copy_(self.host_cut[agents], non_blocking=True)
        step.copy_(self.host_cut_step[one], non_blocking=True)
        state = self._copy_state(worker, {name: tensor[:, agents] for name, tensor in self.state.items()})
        outputs, _ = self._act(worker, final, state, *(flags[agents] for flags in self.flags))
        values = outputs[:, -1].masked_fill(cut == 0, 0.0)  # a NaN may be among them
        self.bootstraps[:, agents].index_copy_(0, step, values.unsqueeze(0))

    def _threads(self, rows):
        """Threads do nothing on a GPU, and torch.compile compiles anew for another number of them."""
        return 1

    # -- learning, and graphs --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def learning(self):
        self.learning_now = False
        with super().learning(), self.device.main():
            yield
        self.learned += self.learning_now

    def play(self, key, function, *arguments):
        self.parts.setdefault(key, (key, function, arguments))
        self.learning_now |= key == "minibatch"
        self.device.play(key, function, *arguments)

    def _learning_calls(self):
        """[(key, function, arguments)] of an epoch's learning, in the order in which they run: a minibatch in its
        parts, between which ranks add up. An optimizer of one's own may wait for the GPU, which a graph cannot."""
        left_out = ("minibatch", "update") if own_optimizer(self.config) else ("minibatch",)
        return [self.parts[key] for key in self.parts if key not in left_out]

    def _calls(self, worker, buffer):
        """[(key, function, arguments)] of a buffer's rollout: its steps, and its final values."""
        steps = [(("step", buffer, t), self._step, (worker, buffer, t)) for t in range(self.horizon + 1)]
        return [*steps, (("final", buffer), self._final_values, (worker, buffer))]

    def _capture(self):
        """Record what an epoch does as graphs, which from now on are replayed; nothing runs or changes. If that cannot
        be, the run goes on without, and says why."""
        self.captured = True
        try:
            with torch.no_grad():
                self._capture_rollout()
            self.device.capture(None, self._learning_calls())
            self._check_capture()
        except Exception as error:  # numba's CudaAPIError is no RuntimeError
            self._drop()
            if ranks.connect().rank == 0:
                print(f"train.cudagraphs: the network cannot be captured and runs without, which is slower: "
                      f"{(str(error) or type(error).__name__).splitlines()[0]}", file=sys.stderr)
        except BaseException:  # an interrupt: half of the graphs are none
            self._drop()
            raise

    def _capture_rollout(self):
        for buffer, worker in self.worker_of.items():
            self.device.capture(worker, self._calls(worker, buffer))

    def _check_capture(self):
        """RuntimeError unless the graphs of a custom network's update leave what its code leaves."""
        def gradients(way):
            before = self.arena.memory.clone()
            for key, function, arguments in self._learning_calls()[:3]:  # to the gradients
                way(key, function, *arguments)
            result = self.arena.flat("gradients").clone()
            self.arena.memory.copy_(before)
            return result

        eager = gradients(lambda key, function, *arguments: function(*arguments))
        error = (gradients(self.device.play) - eager).norm() / (eager.norm() + 1e-8)
        if not error < 1e-2:
            raise RuntimeError(f"its gradients from a graph differ by {float(error):.2g} from those without (has it "
                               "random numbers, or some outside of tensors?)")

    def _drop(self):
        self.device.forget()

    def forget(self):
        """Drop the graphs, because memory that they read is another; they are captured anew."""
        self._drop()
        self.learned, self.captured = 0, False

    def usage(self):
        return self.device.usage()

    def release(self):
        super().release()
        self.device.release()


# ---------------------------------------------------------------------------------------------------------------------
# The default network


@intrinsic
def _call_driver(typing, function, arguments):
    """int function(...) by its address, of the integers in a tuple."""

    def codegen(context, builder, signature, values):
        numbers = [builder.extract_value(values[1], i) for i in range(signature.args[1].count)]
        return builder.sext(_call_address(builder, _WORD, values[0], *numbers), _LONG)

    return types.int64(types.int64, types.UniTuple(types.int64, arguments.count)), codegen


@driver
def _rollout_cuda(begin, end, environments, launch, synchronize, stream, graphs, terminals, truncations, resets, cut,
                  cut_step):
    horizon, inside, begun = len(terminals), 0, _cycles()
    for t in range(horizon + 1):
        error, any_cut = 0, False
        if t > 0:
            for i in range(begin, end):
                cut[i] = truncations[t - 1, i] != 0 and terminals[t - 1, i] == 0  # terminal as well: nothing follows
                any_cut |= cut[i] != 0
        if any_cut:
            cut_step[0] = t - 1
            error = _call_driver(launch, (graphs[horizon + 1], stream))
        if error == 0:
            error = _call_driver(launch, (graphs[t], stream))
        if error == 0:
            error = _call_driver(synchronize, (stream,))
        if error != 0:
            return error, 0.0
        if t < horizon:
            inside += _step_environments(environments, t, begin, end, terminals, truncations, resets)
    return 0, inside / (_cycles() - begun)


def rollout_in_graphs(agents, environments, handles, storage, cut, cut_step):
    """A rollout of the agents in a slice where the policy is on a GPU: its graphs, T + 1 steps and the one of final
    values, by their `handles` (Gpu.handles), and in between the environments. storage: terminals, truncations (T, N),
    resets (T + 1, N); before the last graph is replayed, cut (N,) uint8 says whose final observation it is for,
    cut_step (1,) int64 of which step. Returns the share of the time that the environments took; RuntimeError for what
    the GPU reports."""
    error, share = _rollout_cuda(agents.start, agents.stop, environments, *handles, *map(host, storage), host(cut),
                                 host(cut_step))
    if error:
        torch.cuda.synchronize()  # says more
        raise RuntimeError(f"fused.rollout_in_graphs: the GPU's driver reports error {error}.")
    return share


class Fused(Graphs):
    """The default network on a GPU: the kernels' forward and backward, all segments of a minibatch at once."""

    name = "fused"
    difference = staticmethod(difference)
    learn_segments = Compiled._learn

    def __init__(self, policy, vecenv, config, segments, first_agent=0):
        super().__init__(policy, vecenv, config, segments, first_agent)
        self.handles = {}  # buffer -> what replays its rollout's graphs without the interpreter

    def register(self, arena):
        super().register(arena)
        self._register_layers(self.at_once // self.horizon)

    def bind(self):
        super().bind()
        self._bind_layers()

    _register_layers, _bind_layers, _act = Compiled._register_layers, Compiled._bind_layers, Compiled._act
    outdated = Compiled.outdated

    def _rollout(self, worker):
        with torch.no_grad(), self.device.worker(worker):
            self.actors[worker].refresh()
            buffers = range(worker, self.vecenv.num_buffers, self.vecenv.num_workers)
            if self.vecenv.can_step_in_kernels and self.config["rollout"] != "plain" and all(
                    map(self.handles.get, buffers)):
                return sum(map(self._rollout_in_graphs, buffers))
        return super()._rollout(worker)

    def _rollout_in_graphs(self, buffer):
        """All steps of one buffer without the interpreter."""
        begun, s = time.perf_counter(), self.host
        self.device.wait()  # this thread has spoken to the GPU
        share = rollout_in_graphs(
            self.vecenv.ranges[buffer], self.vecenv.addresses(buffer), self.handles[buffer],
            (s["terminals"], s["truncations"], s["resets"]), self.host_cut, self.host_cut_step[buffer : buffer + 1])
        self.vecenv.finish(buffer)
        return share * (time.perf_counter() - begun)

    def learn(self, index):
        self.learn_segments(0)

    def _learning_calls(self):
        if ranks.connect().count > 1 or own_optimizer(self.config):
            return super()._learning_calls()
        return [self.parts["renew"], self.parts["minibatch"]]  # nobody to add up with: a minibatch is one graph

    def _capture_rollout(self):
        for buffer, worker in self.worker_of.items():  # not every environment truncates
            with self.device.worker(worker):
                self._final_values(worker, buffer)
        super()._capture_rollout()
        for buffer, worker in self.worker_of.items():
            # torch's own replay also counts the random numbers that another network may draw
            self.handles[buffer] = self.device.handles(worker, self._calls(worker, buffer))

    def _check_capture(self):
        """The kernels do in a graph what they do without."""

    def _drop(self):
        super()._drop()
        self.handles.clear()

"""Allocate a trainer's tensors at once, and run kernels on them.

    arena = Arena()                     # register every tensor, allocate once
    run(driver, lanes, cost, *arrays)   # driver(first, last, *arrays) over threads, or on a GPU

kernels.py is written with these.
"""

import functools
import hashlib
import itertools
import math
import os
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import config, njit, types
from numba.core import event
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic, overload

import processes

# Without nnan and ninf: they let the compiler drop NaNs, which the trainer must see.
FASTMATH = {"contract", "nsz", "arcp"}
REDUCTION = FASTMATH | {"reassoc"}
FOLDER = Path(__file__).resolve().parent
# numba checks only a function's own file for edits. These files inline each other's functions, so
# an edit of one invalidates the cache of all.
FILES = [*(FOLDER / f"{name}.py" for name in ("arena", "kernels", "optim")),
         *sorted((FOLDER / "fast").glob("*.py"))]
SOURCES_HASH = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()
cell = njit(inline="always", error_model="numpy")


def cached_njit(**options):
    """Return an njit decorator without the GIL that caches in __pycache__.

    An edit of one of FILES invalidates the cache. A function contains those that it calls
    (`forceinline`): compiled apart, they round differently in the last bit, and the cache would
    decide which of the two runs.
    """
    def decorate(function):
        compile_cached = njit(nogil=True, cache=True, error_model="numpy", forceinline=True,
                              **options)
        try:
            compiled = compile_cached(function)
        except RuntimeError:  # numba has no folder for its cache
            if config.CACHE_DIR:
                raise
            config.CACHE_DIR = str(processes.spare_folder("compiled kernels are"))
            compiled = compile_cached(function)
        # None if nothing is cached
        index = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
        if index is not None:
            index._source_stamp = index._source_stamp, SOURCES_HASH
            compiled._cache.save_overload = _keeps_if_it_fits(compiled._cache.save_overload)
        return compiled

    return decorate


def _keeps_if_it_fits(save):
    """Wrap the method that keeps a compiled function: a full disk gives a warning."""
    def save_overload(*arguments):
        try:
            save(*arguments)
        except OSError as error:
            _warn_of_disk(f"compiled kernels are not kept: {error}")

    return save_overload


@functools.cache
def _warn_of_disk(text):
    processes.say(text, sys.stderr)


class _NoAlias(Compiler):
    """Compile on the promise that arrays do not overlap.

    Loops then need no check for it, which takes a quarter of a MinGRU scan's time.
    """

    def __init__(self, typingctx, targetctx, library, args, return_type, flags, locals):
        flags.noalias = True
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)


# Without reference counts (`_nrt=False`), which take a twelfth of a minibatch. A driver that
# allocates an array then fails with "NRT required but not enabled".
driver = cached_njit(fastmath=FASTMATH, _nrt=False)
distinct_driver = cached_njit(fastmath=FASTMATH, _nrt=False, pipeline_class=_NoAlias)
reduction_driver = cached_njit(fastmath=REDUCTION, _nrt=False)


class CompileTimer(event.TimingListener):
    """Measure the seconds in which this process compiled kernels, its `duration`.

    `announce` is called once, when compiling takes more than 1.5 seconds.
    """

    _duration = 0.0  # before numba's listener sets it

    def __init__(self):
        super().__init__()
        self.announce = lambda: None

    def on_start(self, event):
        super().on_start(event)
        # small kernels and loads take less
        if self.duration + time.perf_counter() - self._ts > 1.5:
            announce, self.announce = self.announce, lambda: None
            announce()


compile_timer = CompileTimer()
event.register("numba:compile", compile_timer)


@contextmanager
def compiling():
    """Count the time of a compiler that sends no events of numba, as those for a GPU."""
    with global_compiler_lock, event.trigger_event("numba:compile"):
        yield


def clock():
    """Return seconds, without those in which kernels are compiled."""
    return time.perf_counter() - compile_timer.duration


f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64
u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
ZERO, HALF, ONE = f32(0), f32(0.5), f32(1)
# A plain 0 as an argument makes numba compile the callee again, for that literal alone.
INT0 = np.int64(0)


# --------------------------------------------------------------------------------------------------
# The arena: one allocation for every long-lived tensor


class Arena:
    """One flat allocation for all long-lived tensors.

    Register every tensor first, then `allocate` once; `arena[name]` is a view, 256-byte aligned,
    zero at first. The tensors of one `group` are contiguous in the order of registration, and
    `arena.flat(group)` is the whole range (with alignment gaps, which stay zero), so that zeroing,
    norms, momentum, an all-reduce or a checkpoint of all gradients is one operation.

        arena = Arena()
        arena.register("advantages", (64, 4096))
        arena.adopt(policy)                      # groups "weights", "gradients"
        arena.allocate("cpu")
    """

    ALIGNMENT = 256

    def __init__(self):
        self._specs = {}  # name -> (shape, dtype, group)
        self._views = {}
        self._flats = {}
        self._parameters = {}  # of adopted modules
        self._packed = set()  # names in blocks without padding
        self.memory = None

    def register(self, name, shape, dtype=torch.float32, group="data"):
        """Reserve a tensor.

        Raises ValueError for a registered name, or after `allocate`.
        """
        if name in self._specs or self.memory is not None:
            raise ValueError(f"arena.register({name!r}): register each name once, and before "
                             "arena.allocate().")
        self._specs[name] = (tuple(shape), dtype, group)

    def adopt(self, module, prefix="policy"):
        """Move a module's parameters and gradients into the arena.

        They are the groups "weights" and "gradients", in the same order. `allocate` copies the
        values, and makes each parameter's `.data` and `.grad` a view. The weights of a recurrent
        torch module stay one unpadded block, which its fused kernels need. Parameters are float32.
        """
        for name, parameter in module.named_parameters():
            self.register(f"weights/{prefix}.{name}", parameter.shape, group="weights")
            self.register(f"gradients/{prefix}.{name}", parameter.shape, group="gradients")
            self._parameters[f"{prefix}.{name}"] = parameter
        self._packed |= {f"{prefix}.{name}.{weight}".replace("..", ".")
                         for name, child in module.named_modules()
                         if isinstance(child, torch.nn.RNNBase)
                         for weight in child._flat_weights_names}

    def allocate(self, device="cpu"):
        """Allocate the memory, zero it, make all views, and copy adopted modules in."""
        offset, offsets, ranges = 0, {}, {}
        for group in dict.fromkeys(spec[2] for spec in self._specs.values()):
            start = offset
            block = None  # start of a packed block, of which only the first tensor is aligned
            members = [(name, *spec) for name, spec in self._specs.items() if spec[2] == group]
            for name, shape, dtype, _ in members:
                is_packed = name.partition("/")[2] in self._packed
                if block is None or not is_packed:
                    offset = -(-offset // self.ALIGNMENT) * self.ALIGNMENT
                    block = offset if is_packed else None
                offsets[name] = offset, block
                offset += math.prod(shape) * dtype.itemsize
            offset = -(-offset // self.ALIGNMENT) * self.ALIGNMENT
            ranges[group] = start, offset, dtype
        if torch.device(device).type == "cpu":
            processes.check_memory(offset, "the trainer's arrays")
            # numpy asks Linux for huge pages; with torch's memory learning is 2% slower
            block = torch.from_numpy(np.zeros(offset + self.ALIGNMENT, np.uint8))
        else:
            block = torch.zeros(offset + self.ALIGNMENT, dtype=torch.uint8, device=device)
        padding = -block.data_ptr() % self.ALIGNMENT
        self.memory = block[padding : padding + offset]
        for name, (shape, dtype, _) in self._specs.items():
            size = math.prod(shape) * dtype.itemsize
            (offset, block), memory = offsets[name], self.memory
            # cuDNN reads a recurrent module's weights from the start of their storage
            if block is not None:
                offset, memory = offset - block, torch.from_dlpack(memory[block:])
            self._views[name] = memory[offset : offset + size].view(dtype).view(shape)
        for group, (start, end, dtype) in ranges.items():
            self._flats[group] = self.memory[start:end].view(dtype)
        for name, parameter in self._parameters.items():
            weight = self._views[f"weights/{name}"]
            weight.copy_(parameter.data)
            parameter.data = weight
            parameter.grad = self._views[f"gradients/{name}"]

    def flat(self, group):
        """Return all tensors of a group, which have one dtype, as one 1-D tensor."""
        return self._flats[group]

    def __getitem__(self, name):
        return self._views[name]


# --------------------------------------------------------------------------------------------------
# Threads: plain ones, each with a range of lanes; docs/findings.md says why not numba's prange

_local = threading.local()
_pools = {}  # number of threads -> pool


def set_threads(count):
    """Split the lanes of this thread's next kernels over `count` threads."""
    _local.count = count


@contextmanager
def threads(count):
    """Set the number of threads within the context."""
    previous = getattr(_local, "count", 1)
    _local.count = count
    try:
        yield
    finally:
        _local.count = previous


# to start and join a thread takes nearly as long
MIN_THREAD_NANOSECONDS = 100_000


def run(function, lanes, cost, *arguments):
    """Call function(first, last, *arguments) over all lanes.

    A lane takes about `cost` nanoseconds; there are as many threads as that is worth, at most those
    of `threads`. `function` releases the GIL. If the last argument is on a GPU, each GPU thread
    takes one lane.
    """
    if SIMULATOR or hasattr(arguments[-1], "__cuda_array_interface__"):
        _launch(function, lanes, arguments)
        return
    count = min(getattr(_local, "count", 1), lanes, lanes * cost // MIN_THREAD_NANOSECONDS)
    if count <= 1:
        function(0, lanes, *arguments)
        return
    if count not in _pools:
        _pools[count] = ThreadPoolExecutor(  # the mode as in engines.torch_threads
            count - 1, "kernels", torch.set_flush_denormal, (True,))
    bounds = [lanes * i // count for i in range(count + 1)]
    futures = [
        _pools[count].submit(function, first, last, *arguments)
        for first, last in itertools.pairwise(bounds[1:])
    ]
    function(0, bounds[1], *arguments)
    for future in futures:
        future.result()


# --------------------------------------------------------------------------------------------------
# CUDA: numba compiles and caches a driver at its first launch, which imports numba.cuda

# Whether the CUDA drivers run in numba's simulator, on CPU tensors, as in the tests.
SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
THREADS = 128  # per block

_kernels, _streams = {}, {}  # driver -> its kernel; torch's stream -> numba's
_launching = threading.RLock()  # numba-cuda fails if two threads load a kernel for the first time
cuda = None  # numba.cuda, once it is used


def cuda_kernel(function):
    """Return the kernel in which thread `lane` calls function(lane, lane + 1, ...)."""
    global cuda
    from numba import cuda

    def kernel(lanes, arguments):
        lane = cuda.grid(1)
        if lane < lanes:
            function(lane, lane + 1, *arguments)

    kernel.__name__ = kernel.__qualname__ = getattr(function, "__name__", "kernel")
    return kernel


def _cached_kernel(function):
    """Return the kernel of `cuda_kernel`, cached in __pycache__.

    The first launch compiles or loads it. An edit of the function's file or one of FILES
    invalidates the cache.
    """
    kernel = cuda_kernel(function)  # imports cuda
    if SIMULATOR:
        return cuda.jit(kernel)
    import numba_cuda

    code = getattr(function, "py_func", function).__code__
    from numba.cuda.core import config as cuda_config

    cuda_config.CACHE_DIR = config.CACHE_DIR  # of `cached_njit` or the user
    kernel.__qualname__ = f"{function.__module__}.{kernel.__name__}"  # the cache file's name
    # lto=False: run the code that tests/ptx.py checks, and not nvJitLink's optimisation of it
    compiled = cuda.jit(kernel, lto=False, cache=True)
    # numba's key contains the callee, whose pickle differs in each process
    cache, file_status = compiled._cache, os.stat(code.co_filename)
    code_key = (numba_cuda.__version__, code.co_filename, code.co_firstlineno, code.co_code,
                repr(code.co_consts))
    cache._index_key = lambda signature, codegen: (signature, codegen.magic_tuple(), code_key)
    cache._cache_file._source_stamp = file_status.st_mtime, file_status.st_size, SOURCES_HASH
    load = cache._load_overload

    def load_matching(signature, context):
        entry = load(signature, context)  # of another signature, if two processes wrote the index
        return entry if entry is not None and entry.signature.args == tuple(signature) else None

    cache._load_overload = load_matching
    return compiled


def _launch(function, lanes, arguments):
    """Launch a driver on a GPU, one lane per thread, on torch's current stream."""
    if lanes == 0:
        return
    if not SIMULATOR and any(isinstance(argument, np.ndarray) for argument in arguments):
        raise ValueError("kernels: the tensors are on a GPU and on the CPU, expected one device.")
    with _launching:
        is_new = function not in _kernels
        if is_new:
            # the grid follows from the batch; numba's text may start with a colour code
            warnings.filterwarnings("ignore", ".*Grid size")
            _kernels[function] = _cached_kernel(function)
        stream = 0
        if not SIMULATOR:
            handle = torch.cuda.current_stream().cuda_stream
            if handle not in _streams:
                _streams[handle] = cuda.external_stream(handle)
            stream = _streams[handle]
        with compiling() if is_new else nullcontext():
            _kernels[function][-(-lanes // THREADS), THREADS, stream](lanes, arguments)


@contextmanager
def stream_between(stream, outer_stream):
    """Send this thread's work to a CUDA stream, in order with `outer_stream`.

    It runs after the earlier work of `outer_stream`, and before its later work.
    """
    stream.wait_stream(outer_stream)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:  # also after an interrupt
        outer_stream.wait_stream(stream)


def default_stream(device):
    """Send work to the device's default stream, in order with the current one.

    Simulators with private streams order these by the default stream alone.
    """
    if device.type != "cuda":
        return nullcontext()
    return stream_between(torch.cuda.default_stream(device), torch.cuda.current_stream(device))


def on_gpu(tensor):
    """Return whether a tensor's kernels are the CUDA drivers."""
    return tensor.is_cuda or SIMULATOR


# --------------------------------------------------------------------------------------------------
# Prefetching


@intrinsic
def _prefetch_line(context, address):
    """Prefetch the cache line of an address."""
    def generate(context, builder, signature, arguments):
        pointer, number = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()), ir.IntType(32)
        to_read, closest, data = map(number, (0, 3, 1))
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], signature)
        builder.call(prefetch, [pointer, to_read, closest, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(row):
    """Prefetch a row of an array.

    Hardware prefetches contiguous memory, but not rows that lie far apart, as a segment's steps do.
    Without numba's compiler this does nothing.
    """


@overload(prefetch)
def _prefetch_overload(row):
    def ask(row):
        begin = np.int64(row.ctypes.data)
        for address in range(begin & ~63, begin + len(row) * row.itemsize, 64):
            _prefetch_line(address)

    return ask


def without_torch_function(function):
    """Return `function` with torch's function modes switched off.

    Within a mode such as products.Tiles each read of a tensor's shape takes fifteen times as long.
    """
    @functools.wraps(function)
    def call(*arguments):
        with torch._C.DisableTorchFunction():
            return function(*arguments)

    return call


# --------------------------------------------------------------------------------------------------
# Tensors as the arrays of kernels, and the check of their arguments

FLOATS = (np.float32, np.uint16)  # float32, or bfloat16 as its bits: numba has no such type
# id of a tensor -> [weak reference, address, array, (shape, dtype) if checked]
_arrays = {}
_constants = {}  # (*key, device) -> tensor: columns in order, an absent mask


def as_array(tensor):
    """Return the array of numpy or numba with a tensor's memory.

    It is cached while the tensor keeps its memory, which takes 0.3 µs, not 1.5.
    """
    key = id(tensor)
    entry = _arrays.get(key)
    if entry is not None and entry[0]() is tensor and entry[1] == tensor.data_ptr():
        return entry[2]
    bits = tensor.detach()
    bits = bits.view(torch.uint16) if bits.dtype == torch.bfloat16 else bits
    if tensor.is_cuda:
        from numba import cuda

        array = cuda.as_cuda_array(bits, sync=False)
    else:
        array = bits.numpy()
    reference = weakref.ref(tensor, lambda _: _arrays.pop(key, None))
    _arrays[key] = [reference, tensor.data_ptr(), array, None]
    return array


def check_arrays(kernel, **expected):
    """Return the tensors of a kernel's arguments as arrays.

    expected: name=(tensor, shape, dtype). A first size of -n takes n rows or more, the dtype FLOATS
    float32 or bfloat16, None any. Numbers instead of a tensor become an array on the first tensor's
    device; a CUDA graph does not follow them. Raises ValueError for a wrong shape or layout,
    TypeError for a wrong dtype.
    """
    arrays = []
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is None:
            arrays.append(None)
            continue
        entry = _arrays.get(id(tensor))
        if (entry is None or entry[3] != (shape, dtype) or entry[1] != tensor.data_ptr()
                or entry[0]() is not tensor):
            if not isinstance(tensor, torch.Tensor):
                array = np.array(tensor, dtype).reshape(shape)
                first = next(iter(expected.values()))[0]
                arrays.append(as_array(torch.from_numpy(array).to(first.device)) if first.is_cuda
                              else array)
                continue
            array, sizes = as_array(tensor), shape
            if shape and shape[0] < 0:
                sizes = (max(len(tensor), -shape[0]), *shape[1:])
            if array.shape != sizes or not tensor.is_contiguous():
                least = "at least " if sizes is not shape else ""
                raise ValueError(f"kernels.{kernel}: {name} has shape {array.shape} and strides "
                                 f"{tensor.stride()}, expected {least}{tuple(map(abs, shape))}, "
                                 "contiguous.")
            kinds = dtype if dtype is FLOATS else (dtype or array.dtype,)
            if array.dtype not in kinds:
                kind = "float32 or bfloat16" if dtype is FLOATS else np.dtype(dtype)
                raise TypeError(f"kernels.{kernel}: {name} is {array.dtype}, expected {kind}.")
            entry = _arrays[id(tensor)]
            entry[3] = shape, dtype
        arrays.append(entry[2])
    return arrays


def constant(key, like, make):
    """Return the tensor of make() on the device of `like`, cached by `key`."""
    key = (*key, like.device)
    if key not in _constants:
        _constants[key] = make().to(like.device)
    return _constants[key]


def all_columns(count, like):
    """Return the index of `count` columns in order."""
    return constant(("columns", count), like, lambda: torch.arange(count))


def optional_masks(masks, like, dimensions):
    """Return (whether there are masks, the masks).

    Absent masks are a tensor of one row, which drivers index but do not read.
    """
    if masks is not None:
        return True, masks
    return False, constant(("mask", dimensions), like,
                           lambda: torch.zeros((1,) * dimensions, dtype=torch.uint8))


def optional_squash(squash, like):
    """Return models.squash's (3, dims), or (3, 1) zeros without one.

    models.squash has no half width of 0, so a driver reads 0 as no squash.
    """
    return constant(("squash",), like, lambda: torch.zeros(3, 1)) if squash is None else squash


def expand_log_std(log_std, shape):
    """Return log_std (A,), or one per row, as an array of `shape`, without a copy."""
    if log_std.is_cuda:
        return as_array(log_std.expand(shape))
    return np.broadcast_to(as_array(log_std), shape)  # takes less time than a view of torch's

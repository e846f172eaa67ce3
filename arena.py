"""The one allocation of a trainer, and how a kernel reaches its tensors and its threads.

    arena = Arena()                     # register every tensor, allocate once
    run(driver, lanes, cost, *arrays)   # driver(first, last, *arrays) over threads, or as a kernel of a GPU

kernels.py is written with these.
"""

import functools
import hashlib
import itertools
import math
import os
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
from numba.extending import intrinsic, overload

import processes

# Without nnan and ninf: they let the compiler drop NaNs, which the trainer must see.
FASTMATH = {"contract", "nsz", "arcp"}
REDUCTION = FASTMATH | {"reassoc"}
FOLDER = Path(__file__).resolve().parent
# numba compiles a kept function again if its own file was edited. These files inline each other's
# functions, so an edit of one of them must count for all.
FILES = [FOLDER / f"{name}.py"
         for name in ("arena", "kernels", "vector", "fast/products", "fast/compiled", "fast/fused")]
SOURCES_HASH = hashlib.sha256(b"".join(path.read_bytes() for path in FILES if path.exists())).hexdigest()
cell = njit(inline="always", error_model="numpy")


def cached_njit(**options):
    """njit without the GIL, whose result is kept in __pycache__ until one of FILES is edited."""
    def decorate(function):
        compile_kept = njit(nogil=True, cache=True, error_model="numpy", **options)
        try:
            compiled = compile_kept(function)
        except RuntimeError:  # numba finds no folder to keep it in
            if config.CACHE_DIR:
                raise
            config.CACHE_DIR = str(processes.spare_folder("compiled kernels are"))
            compiled = compile_kept(function)
        # It is None if nothing is kept.
        index = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
        if index is not None:
            index._source_stamp = index._source_stamp, SOURCES_HASH
        return compiled

    return decorate


class _NoAlias(Compiler):
    """Compiles on the promise that arrays do not overlap. Loops then need no check for it; that
    check is a quarter of a MinGRU scan's time."""

    def __init__(self, typingctx, targetctx, library, args, return_type, flags, locals):
        flags.noalias = True
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)


# A driver makes no array (`_nrt=False`; if it does, numba says "NRT required but not enabled"), so numba need not count
# who uses which: that took a twelfth of a minibatch.
driver = cached_njit(fastmath=FASTMATH, _nrt=False)
distinct_driver = cached_njit(fastmath=FASTMATH, _nrt=False, pipeline_class=_NoAlias)
reduction_driver = cached_njit(fastmath=REDUCTION, _nrt=False)


class CompileTimer(event.Listener):
    """Seconds in which kernels were compiled in this process."""

    def __init__(self):
        self.seconds, self.announce = 0.0, lambda: None  # called once it takes a while
        self._depth, self._begun, self._one_at_a_time = 0, 0.0, threading.RLock()

    @contextmanager
    def timed(self):
        """Within it, a compiler is at work that sends no events of its own, as those for a GPU."""
        with self._one_at_a_time:
            self.on_start(None)
            try:
                yield
            finally:
                self.on_end(None)

    def on_start(self, _):
        now = time.perf_counter()
        if self._depth == 0:
            self._begun = now
        if self.seconds + now - self._begun > 1.5:  # what is never kept, or only read, takes less
            announce, self.announce = self.announce, lambda: None
            announce()
        self._depth += 1

    def on_end(self, _):
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._begun


compile_timer = CompileTimer()
event.register("numba:compile", compile_timer)


def clock():
    """Seconds, without those in which kernels were compiled."""
    return time.perf_counter() - compile_timer.seconds


f32, i32, u16, u32, u64 = np.float32, np.int32, np.uint16, np.uint32, np.uint64
ZERO, HALF, ONE = f32(0), f32(0.5), f32(1)
# For a plain 0 as an argument numba compiles the function that is called once more, for that number alone.
INT0 = np.int64(0)


# --------------------------------------------------------------------------------------------------
# The arena: one allocation for every long-lived tensor


class Arena:
    """One flat allocation for all long-lived tensors.

    Register every tensor first, then `allocate` once; `arena[name]` is a view, 256-byte
    aligned, zero at first. Tensors registered under one `group` lie side by side in the order
    of registration, and `arena.flat(group)` is that whole range (alignment gaps included; they
    stay zero), so that zeroing, norms, momentum, an all-reduce or a checkpoint of, say, all
    gradients is one operation.

        arena = Arena()
        arena.register("advantages", (64, 4096))
        arena.adopt(policy)                      # groups "weights", "gradients"
        arena.allocate("cpu")
    """

    ALIGNMENT = 256

    def __init__(self):
        self._specs = {}  # name -> (shape, dtype, group)
        self._views, self._flats, self._modules = {}, {}, []
        self.memory = None

    def register(self, name, shape, dtype=torch.float32, group="data"):
        """Ask for a tensor. Raises ValueError for a name that is taken or after `allocate`."""
        if self.memory is not None:
            raise ValueError(f"arena.register({name!r}) after arena.allocate(): register "
                             "everything first.")
        if name in self._specs:
            raise ValueError(f"arena.register({name!r}): that name is taken.")
        if any(int(n) < 0 for n in shape):
            raise ValueError(f"arena.register({name!r}): shape {tuple(shape)} has a negative size.")
        self._specs[name] = (tuple(int(n) for n in shape), dtype, group)

    def adopt(self, module, prefix="policy"):
        """Move a module's parameters and their gradients in: groups "weights" and
        "gradients", the same order.

        At `allocate` the values are copied, and each parameter's `.data` and `.grad` become views.
        A recurrent torch module's weights stay one unpadded block, as its fused kernels want them.
        """
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                raise TypeError(f"arena.adopt: {name} is {parameter.dtype}; master "
                                "weights are float32.")
            self.register(f"weights/{prefix}.{name}", parameter.shape, group="weights")
            self.register(f"gradients/{prefix}.{name}", parameter.shape, group="gradients")
        packed = {f"{prefix}.{name}.{weight}".replace("..", ".")
                  for name, child in module.named_modules()
                  if isinstance(child, torch.nn.RNNBase) for weight in child._flat_weights_names}
        self._modules.append((module, prefix, packed))

    def __contains__(self, name):
        return name in self._specs

    def allocate(self, device="cpu"):
        """Make the one allocation and all views; zero it; move adopted modules in."""
        packed = set().union(*(p for _, _, p in self._modules))
        offset, places, ranges = 0, {}, {}
        for group in dict.fromkeys(spec[2] for spec in self._specs.values()):
            offset = start = -(-offset // self.ALIGNMENT) * self.ALIGNMENT
            block = None  # where a packed block began, of which only the first tensor is aligned
            for name, (shape, dtype, owner) in self._specs.items():
                if owner != group:
                    continue
                inside = name.partition("/")[2] in packed
                if block is None or not inside:
                    offset = -(-offset // self.ALIGNMENT) * self.ALIGNMENT
                    block = offset if inside else None
                places[name] = offset, block
                offset += math.prod(shape) * dtype.itemsize
            offset = -(-offset // self.ALIGNMENT) * self.ALIGNMENT
            ranges[group] = (start, offset)
        if torch.device(device).type == "cpu":
            processes.check_memory(offset, "the trainer's arrays")
            # numpy asks Linux for huge pages; torch does not, and learns 2% slower.
            block = torch.from_numpy(np.zeros(offset + self.ALIGNMENT, np.uint8))
        else:
            block = torch.zeros(offset + self.ALIGNMENT, dtype=torch.uint8, device=device)
        skip = -block.data_ptr() % self.ALIGNMENT
        self.memory = block[skip : skip + offset]
        for name, (shape, dtype, _) in self._specs.items():
            size = math.prod(shape) * dtype.itemsize
            (offset, block), memory = places[name], self.memory
            # cuDNN looks for a recurrent module's weights where their storage begins
            if block is not None:
                offset, memory = offset - block, torch.from_dlpack(memory[block:])
            self._views[name] = memory[offset : offset + size].view(dtype).view(shape)
        for group, (start, end) in ranges.items():
            dtypes = {dtype for _, dtype, owner in self._specs.values() if owner == group}
            if len(dtypes) == 1:
                self._flats[group] = self.memory[start:end].view(dtypes.pop())
        for module, prefix, _ in self._modules:
            for name, parameter in module.named_parameters():
                weight = self._views[f"weights/{prefix}.{name}"]
                weight.copy_(parameter.data)
                parameter.data = weight
                parameter.grad = self._views[f"gradients/{prefix}.{name}"]

    def flat(self, group):
        """All tensors of a group as one 1-D tensor. Raises KeyError if their dtypes differ."""
        return self._flats[group]

    def without(self, group, names):
        """Slices of `flat(group)` that leave out the tensors `names`,
        given in the group's order."""
        flat, parts, first = self.flat(group), [], 0
        for name in names:
            tensor = self[f"{group}/{name}"]
            place = (tensor.data_ptr() - flat.data_ptr()) // flat.itemsize
            parts.append(slice(first, place))
            first = place + tensor.numel()
        return [*parts, slice(first, len(flat))]

    def __getitem__(self, name):
        return self._views[name]


# --------------------------------------------------------------------------------------------------
# Threads: plain ones, each with a range of lanes. Not numba's prange: see docs/LOG.md.

_local = threading.local()
_pools = {}  # number of threads -> pool


def set_threads(count):
    """From now on kernels called from this thread split their lanes over `count` threads."""
    _local.count = count


@contextmanager
def threads(count):
    """set_threads, undone at the end."""
    before = getattr(_local, "count", 1)
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


MIN_THREAD_NANOSECONDS = 100_000  # nanoseconds: until another thread has begun and ended takes nearly as long


def run(function, lanes, cost, *arguments):
    """function(first, last, *arguments) over all lanes, of which each takes about `cost`
    nanoseconds, on as many threads as that is worth; `function` releases the GIL. If the last
    argument lies on a GPU, each of the GPU's threads takes one lane."""
    if SIMULATOR or hasattr(arguments[-1], "__cuda_array_interface__"):
        _launch(function, lanes, arguments)
        return
    pieces = min(getattr(_local, "count", 1), lanes, lanes * cost // MIN_THREAD_NANOSECONDS)
    if pieces <= 1:
        function(0, lanes, *arguments)
        return
    if pieces not in _pools:
        _pools[pieces] = ThreadPoolExecutor(pieces - 1, thread_name_prefix="kernels")
    bounds = [lanes * i // pieces for i in range(pieces + 1)]
    futures = [
        _pools[pieces].submit(function, first, last, *arguments)
        for first, last in itertools.pairwise(bounds[1:])
    ]
    function(0, bounds[1], *arguments)
    for future in futures:
        future.result()


# --------------------------------------------------------------------------------------------------
# CUDA: numba compiles a driver at its first launch, and keeps the result as it does for a CPU;
# nothing of CUDA is imported before

# Whether the CUDA drivers run in numba's simulator, on CPU tensors, as in the tests.
SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
THREADS = 128  # a block

_kernels, _streams = {}, {}  # driver -> its kernel; torch's stream -> numba's
_launching = threading.RLock()  # numba-cuda fails if two threads load a kernel for the first time
cuda = None  # numba.cuda, once it is used


def cuda_kernel(function):
    """The kernel in which thread `lane` calls function(lane, lane + 1, *arguments)."""
    global cuda
    from numba import cuda

    def kernel(lanes, arguments):
        lane = cuda.grid(1)
        if lane < lanes:
            function(lane, lane + 1, *arguments)

    kernel.__name__ = kernel.__qualname__ = getattr(function, "__name__", "kernel")
    return kernel


def _cached_kernel(function):
    """The kernel of `cuda_kernel`, compiled by its first launch, or taken from __pycache__, where it
    is until the function's own file or one of FILES is edited."""
    kernel = cuda_kernel(function)  # imports cuda
    if SIMULATOR:
        return cuda.jit(kernel)
    import numba_cuda

    code = getattr(function, "py_func", function).__code__
    if not os.path.exists(code.co_filename):  # typed into a prompt
        return cuda.jit(kernel, lto=False)
    if config.CACHE_DIR:  # `kept` found no other folder, or the user names one
        from numba.cuda.core import config as cuda_config

        cuda_config.CACHE_DIR = config.CACHE_DIR
    kernel.__qualname__ = f"{function.__module__}.{kernel.__name__}"  # the file's name
    # The code that tests/ptx.py has run, and not what nvJitLink would make of it once more.
    compiled = cuda.jit(kernel, lto=False, cache=True)
    # numba's own key has the function that the kernel calls, whose pickle differs in each process.
    cache, edited = compiled._cache, os.stat(code.co_filename)
    place = numba_cuda.__version__, code.co_filename, code.co_firstlineno, code.co_code, repr(code.co_consts)
    cache._index_key = lambda signature, codegen: (signature, codegen.magic_tuple(), place)
    cache._cache_file._source_stamp = edited.st_mtime, edited.st_size, SOURCES_HASH
    load = cache._load_overload

    def load_own(signature, context):
        kept = load(signature, context)  # another one's, if two processes wrote the index at once
        return kept if kept is not None and kept.signature.args == tuple(signature) else None

    cache._load_overload = load_own
    return compiled


def _launch(function, lanes, arguments):
    if lanes == 0:
        return
    if not SIMULATOR and any(isinstance(argument, np.ndarray) for argument in arguments):
        raise ValueError("kernels: some of these tensors are on a GPU and some on the CPU; put all "
                         "on one device.")
    with _launching:
        is_new = function not in _kernels
        if is_new:
            warnings.filterwarnings("ignore", ".*Grid size")  # ours are what the batch is; it may begin with a colour
            _kernels[function] = _cached_kernel(function)
        stream = 0
        if not SIMULATOR:
            handle = torch.cuda.current_stream().cuda_stream
            if handle not in _streams:
                _streams[handle] = cuda.external_stream(handle)
            stream = _streams[handle]
        with compile_timer.timed() if is_new else nullcontext():
            _kernels[function][-(-lanes // THREADS), THREADS, stream](lanes, arguments)


@contextmanager
def stream_between(stream, other):
    """Within it, this thread's work goes to a CUDA stream, after what `other` was given and before what it is given
    next."""
    stream.wait_stream(other)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:  # after an interrupt, too
        other.wait_stream(stream)


def default_stream(device):
    """Within it, work goes to the device's default stream, in order with the present one. Simulators that have streams
    of their own order these by the default stream alone."""
    if device.type != "cuda":
        return nullcontext()
    return stream_between(torch.cuda.default_stream(device), torch.cuda.current_stream(device))


def on_gpu(tensor):
    """Whether the CUDA drivers are the ones for this tensor."""
    return tensor.is_cuda or SIMULATOR


def device_array(tensor):
    """numba's view of a CUDA tensor, made once while the tensor lives and stays in its place."""
    from numba import cuda

    return _view(tensor, lambda tensor: cuda.as_cuda_array(_bits(tensor), sync=False))


# --------------------------------------------------------------------------------------------------
# Checks: what each public function says when it is handed the wrong thing

FLOATS = (np.float32, np.uint16)  # what a float may be: float32, or bfloat16's bits


def numpy_dtype(tensor):
    return np.dtype(str(_bits(tensor).dtype).removeprefix("torch."))


def _bits(tensor):
    """The tensor as numpy and numba can see it."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


@intrinsic
def _prefetch_line(context, address):
    """Ask for the line of a cache in which an address lies, before it is needed."""
    def generate(context, builder, signature, arguments):
        pointer, number = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()), ir.IntType(32)
        to_read, closest, data = map(number, (0, 3, 1))
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], ir.FunctionType(
            ir.VoidType(), [pointer.type, number, number, number]))
        builder.call(prefetch, [pointer, to_read, closest, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(row):
    """Ask for a row of an array before it is needed. A processor foresees what lies side by side in memory, not what
    lies far apart, as a segment's steps. (Without numba's compiler there is nothing to ask.)"""


@overload(prefetch)
def _prefetch_overload(row):
    def ask(row):
        begin = np.int64(row.ctypes.data)
        for address in range(begin & ~63, begin + len(row) * row.itemsize, 64):
            _prefetch_line(address)

    return ask


# id of a tensor -> [weak reference to it, its address, its view, its (shape, dtype) if checked]
_views = {}


def host_array(tensor):
    """The numpy view of a CPU tensor, kept while the tensor stays in its
    place (0.3 µs, not 1.5)."""
    return _view(tensor, lambda tensor: _bits(tensor).numpy())


def _view(tensor, make):
    key = id(tensor)
    kept = _views.get(key)
    if kept is not None and kept[0]() is tensor and kept[1] == tensor.data_ptr():
        return kept[2]
    view = make(tensor)
    _views[key] = [weakref.ref(tensor, lambda _: _views.pop(key, None)),
                   tensor.data_ptr(), view, None]
    return view


def without_torch_function(function):
    """`function` with torch's modes for functions switched off: within one, such as products.Tiles, each look at a
    tensor's shape takes fifteen times as long."""
    @functools.wraps(function)
    def call(*arguments):
        with torch._C.DisableTorchFunction():
            return function(*arguments)

    return call


def check_dimensions(kernel, name, tensor, dimensions):
    """The tensor's shape. Raises ValueError if it has another number of dimensions."""
    if tensor.dim() != dimensions:
        raise ValueError(f"kernels.{kernel}: {name} has shape {tuple(tensor.shape)}, expected "
                         f"{dimensions} dimensions.")
    return tensor.shape


def check_array(kernel, name, tensor, shape, dtype=np.float32):
    """`tensor` as numpy's or numba's array. Raises ValueError or TypeError, which say what was
    expected."""
    kept = _views.get(id(tensor))
    if kept and kept[3] == (shape, dtype) and kept[0]() is tensor and kept[1] == tensor.data_ptr():
        return kept[2]
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"kernels.{kernel}: {name} is on {tensor.device}; expected a CPU or "
                         "a CUDA tensor.")
    array = device_array(tensor) if tensor.is_cuda else host_array(tensor)
    if array.shape != shape:
        raise ValueError(f"kernels.{kernel}: {name} has shape {array.shape}, expected {shape}.")
    if array.dtype != dtype and not (dtype is FLOATS and array.dtype in FLOATS):
        expected = "float32 or bfloat16" if dtype is FLOATS else np.dtype(dtype)
        raise TypeError(f"kernels.{kernel}: {name} is {array.dtype}, expected {expected}.")
    if not tensor.is_contiguous():
        raise ValueError(f"kernels.{kernel}: {name} is not contiguous; pass {name}.contiguous().")
    _views[id(tensor)][3] = shape, dtype
    return array


# (key, device) -> array that a kernel needs: columns in order, sizes of the heads, an absent mask
_constants = {}


def constant(key, like, make):
    """The array of the CPU tensor make() on the device of `like`, kept under `key`."""
    key = (*key, like.device)
    if key not in _constants:
        _constants[key] = make().to(like.device)
    return (device_array if like.is_cuda else host_array)(_constants[key])


def check_numbers(kernel, name, values, count, dtype, like):
    """Numbers, or a tensor of them, as an array (count,) on the device of `like`. A tensor may
    change between two replays of a CUDA graph; a plain number may not."""
    if isinstance(values, torch.Tensor):
        return check_array(kernel, name, values, (count,), dtype)
    array = np.array(values, dtype).reshape(count)
    return device_array(torch.from_numpy(array).to(like.device)) if like.is_cuda else array


def check_index(kernel, index, start, count, columns, like):
    """The columns of the segments as an array; all, in order, if `index` is None. Raises ValueError
    if start to start + count do not lie within it."""
    if index is None:
        index = constant(("columns", columns), like, lambda: torch.arange(columns))
    else:
        index = check_array(kernel, "index", index,
                        (check_dimensions(kernel, "index", index, 1)[0],), np.int64)
    if start < 0 or start + count > len(index):
        raise ValueError(f"kernels.{kernel}: segments {start} to {start + count} of an index "
                         f"of {len(index)}.")
    return index


def optional_masks(array, like, dimensions):
    """(is there a mask?, the mask): a driver reads row 0 of the absent one, but nothing in it."""
    if array is not None:
        return True, array
    return False, constant(("mask", dimensions), like,
                           lambda: torch.zeros((1,) * dimensions, dtype=torch.uint8))


def check_rows(kernel, name, tensor, least, shape, dtype=np.float32):
    """`tensor` as an array of `least` rows or more, each of `shape`."""
    if len(tensor) < least:
        raise ValueError(f"kernels.{kernel}: {name} has {len(tensor)} rows, expected "
                         f"{least} or more.")
    return check_array(kernel, name, tensor, (len(tensor), *shape), dtype)


def check_heads(kernel, heads, count, width, like):
    """The sizes of the action heads, a CPU tensor, on the device of `like`;
    they must fill the logits."""
    sizes = tuple(check_array(kernel, "heads", heads, (count,), np.int64).tolist())
    if sum(sizes) != width or min(sizes) < 1:
        raise ValueError(f"kernels.{kernel}: heads {list(sizes)} do not add up to {width} logits.")
    return constant(("heads", sizes), like, lambda: torch.tensor(sizes))


def check_log_std(kernel, log_std, shape):
    """log_std (A,), or one a row, as an array of `shape`, without a copy."""
    array = check_array(kernel, "log_std", log_std, shape if log_std.dim() > 1 else shape[-1:])
    return device_array(log_std.expand(shape)) if log_std.is_cuda else np.broadcast_to(array, shape)


def check_squash(kernel, squash, dims, like):
    """models.squash's (3, dims) as an array; (3, 1) zeros, whose half width of 0 tells a
    driver so, without one (models.squash has no 0 there)."""
    if squash is None:
        return constant(("squash",), like, lambda: torch.zeros(3, 1))
    return check_array(kernel, "squash", squash, (3, dims))

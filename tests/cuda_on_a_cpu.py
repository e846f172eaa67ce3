"""A stand-in for CuPy: kernels are compiled as C++ behind cuda_shim.h and take the addresses of numpy's arrays.

    cupy = cuda_on_a_cpu.install(monkeypatch)          # from now on kernels.CUDA and environments launch here
    cupy.launches                                      # the names of the kernels

Some mistakes that a GPU does not report are errors here: a wrong number, size or kind of arguments, another stream
than torch's, and threads that wait for each other for ever.
"""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import numpy as np
import torch

import kernels
import ocean
from fast import cuda_cpp, rollout

SHIM = Path(__file__).with_name("cuda_shim.h")
STREAM = 7  # torch's current one, here
PROCESSORS = 3  # multiprocessors
LIMIT = 227 << 10  # bytes of shared memory that a block may have, as on an H100
FLAGS = os.environ.get("CUDA_SHIM_FLAGS", "-O1").split()  # -fsanitize=address,undefined finds what is out of bounds
APART = "-ffp-contract=off"  # what --fmad=false is for a GPU: products and sums are not joined


def build(code, flags=()):
    """The library of a CUDA source, kept in ocean/.build. Raises RuntimeError with the compiler's message."""
    return _build(code, (*FLAGS, *flags))


@functools.cache
def _build(code, flags):
    names = re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(', code)
    # env.h renames words of C++
    words = ["#undef using", "#undef namespace", "using namespace policy;"] if "namespace policy {" in code else []
    text = "\n".join([f'#include "{SHIM}"', code, *words, *(f"KERNEL({name})" for name in names)])
    command = ["g++", "-std=c++20", "-w", "-fno-strict-aliasing", "-fno-math-errno", "-mfma", "-U_FORTIFY_SOURCE",
               "-shared", "-fPIC", *flags]
    key = hashlib.sha256("\0".join([text, SHIM.read_text(), *command]).encode()).hexdigest()[:16]
    library = ocean.FOLDER / ".build" / f"cuda-{key}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="cuda-", dir=library.parent) as folder:
            source, result = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            source.write_text(text)
            done = subprocess.run([*command, source, "-o", result], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            os.replace(result, library)
    return ctypes.CDLL(library)


class Kernel:
    max_dynamic_shared_size_bytes = 48 << 10  # what a launch may ask for, unless it is set

    def __init__(self, library, name, owner):
        self.name, self.owner, self.launch = name, owner, getattr(library, f"launch_{name}")
        text = ctypes.create_string_buffer(256)
        count = getattr(library, f"kinds_{name}")(text)
        self.kinds = [text.value[i : i + 2].decode() for i in range(0, count, 2)]

    @property
    def kernel(self):  # CuPy's Function of its RawKernel
        return self

    def __call__(self, grid, block, args, shared_mem=0, *, enable_cooperative_groups=False):
        assert type(grid) is tuple and type(block) is tuple and type(args) is tuple
        assert self.owner.streams.stack == [STREAM], f"{self.name} is launched on another stream than torch's"
        assert 0 < grid[0] < 2**31 and 0 < block[0] <= 1024, (grid, block)
        assert not enable_cooperative_groups or grid[0] <= PROCESSORS, f"{self.name}: {grid[0]} blocks at once"
        assert shared_mem <= self.max_dynamic_shared_size_bytes <= LIMIT, f"{self.name}: {shared_mem} bytes shared"
        assert all(isinstance(value, np.generic) for value in args), f"{self.name}: {args}"
        given = [("f" if value.dtype.kind == "f" else "i") + str(value.itemsize) for value in args]
        assert given == [kind.replace("p", "i") for kind in self.kinds], f"{self.name} takes {self.kinds}, not {given}"
        values = [np.array(value) for value in args]
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        self.owner.execute(self, grid[0], block[0], shared_mem, values, addresses, enable_cooperative_groups)

    def run(self, blocks, threads, shared, _, addresses, together):
        error = self.launch(*map(ctypes.c_uint, (blocks, threads, shared)), addresses, int(self.owner.backwards),
                            int(together))
        assert error != 1, f"{self.name}: threads wait for each other that never meet"
        assert error == 0, f"{self.name} writes behind the {shared} bytes of its shared memory"


class RawModule:
    def __init__(self, owner, code, options=()):
        assert type(options) is tuple and all(type(option) is str for option in options)
        self.owner, self.library = owner, build(code, (APART,) if "--fmad=false" in options else ())

    def get_function(self, name):
        return Kernel(self.library, name, self.owner)


class Streams(threading.local):
    """Those that a thread has entered."""

    def __init__(self):
        self.stack = []


class Stream:
    def __init__(self, owner, handle):
        self.owner, self.handle = owner, handle

    def __enter__(self):
        self.owner.streams.stack.append(self.handle)

    def __exit__(self, *error):
        self.owner.streams.stack.pop()


def cupy():
    """The module. `backwards` runs the last thread first; `execute` may be replaced by what notes the launches."""
    module = types.ModuleType("cupy")
    module.streams, module.backwards, module.launches = Streams(), False, []

    def execute(kernel, *call):
        module.launches.append(kernel.name)
        kernel.run(*call)

    module.execute = execute
    module.RawModule = functools.partial(RawModule, module)
    module.cuda = types.SimpleNamespace(ExternalStream=functools.partial(Stream, module))
    return module


@functools.cache
def here():
    """kernels.CUDA and rollout.module for this machine, and their cupy."""
    return cuda_cpp.Module("kernels.cu", vars(kernels)), functools.cache(rollout.module.__wrapped__), cupy()


def install(monkeypatch):
    """kernels.CUDA with `cupy`, which is returned, for one test."""
    module, modules, stand_in = here()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setattr(kernels, "CUDA", module)
    monkeypatch.setattr(rollout, "module", modules)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: types.SimpleNamespace(
                            major=9, multi_processor_count=PROCESSORS, shared_memory_per_block_optin=LIMIT,
                            shared_memory_per_multiprocessor=LIMIT + 1024))
    monkeypatch.setattr(stand_in, "backwards", False)
    monkeypatch.setattr(stand_in, "execute", stand_in.execute)
    stand_in.launches.clear()
    return stand_in

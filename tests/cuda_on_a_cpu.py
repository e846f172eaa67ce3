"""CuPy's part in launching a kernel, without a GPU: a module that stands for `cupy`, whose kernels are compiled as C++
for the CPU behind cuda_shim.h and take the addresses of numpy's arrays.

    cupy = cuda_on_a_cpu.install(monkeypatch)          # from now on kernels.CUDA launches here

It takes what CuPy takes: numpy's scalars by their size, a grid and a block as tuples, a stream in a `with`. Some
mistakes that a GPU does not report are errors here: a wrong number of arguments, a wrong size or kind
of one, another stream than torch's, and threads that wait for each other for ever. `launches`
are the names of the kernels, as they were launched.
"""

import ctypes
import functools
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch

import cuda_cpp
import kernels

SHIM = Path(__file__).with_name("cuda_shim.h")
STREAM = 7  # torch's current one, here
FLAGS = os.environ.get("CUDA_SHIM_FLAGS", "-O1").split()  # -fsanitize=address,undefined finds what is out of bounds


@functools.cache
def build(code, flags=()):
    """The library of a CUDA source, compiled once a process."""
    folder = tempfile.TemporaryDirectory(prefix="cuda-")
    names = re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(', code)
    source, library = Path(folder.name) / "kernels.cpp", Path(folder.name) / "kernels.so"
    source.write_text("\n".join([f'#include "{SHIM}"', code, *(f"KERNEL({name})" for name in names)]))
    command = ["g++", "-std=c++20", "-Wno-attributes", "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-mfma",
               "-U_FORTIFY_SOURCE", "-shared", "-fPIC", *FLAGS, *flags, source, "-o", library]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = ctypes.CDLL(library)
    loaded.folder = folder
    return loaded


class Kernel:
    def __init__(self, library, name, owner):
        self.name, self.owner, self.launch = name, owner, getattr(library, f"launch_{name}")
        text = ctypes.create_string_buffer(256)
        count = getattr(library, f"kinds_{name}")(text)
        self.kinds = [text.value[i : i + 2].decode() for i in range(0, count, 2)]

    def __call__(self, grid, block, args, *, shared_mem=0):
        assert type(grid) is tuple and type(block) is tuple and type(args) is tuple
        assert self.owner.streams == [STREAM], f"{self.name} is launched on another stream than torch's"
        assert 0 < grid[0] < 2**31 and 0 < block[0] <= 1024 and shared_mem == 0, (grid, block)
        assert all(isinstance(value, np.generic) for value in args), f"{self.name}: {args}"
        given = [("f" if value.dtype.kind == "f" else "i") + str(value.itemsize) for value in args]
        assert given == [kind.replace("p", "i") for kind in self.kinds], f"{self.name} takes {self.kinds}, not {given}"
        values = [np.array(value) for value in args]
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        self.owner.execute(self, grid[0], block[0], values, addresses)

    def run(self, blocks, threads, _, addresses):
        error = self.launch(ctypes.c_uint(blocks), ctypes.c_uint(threads), addresses, int(self.owner.backwards))
        assert error == 0, f"{self.name}: threads wait for each other that never meet"


class RawModule:
    def __init__(self, owner, code, options=()):
        assert type(options) is tuple and all(type(option) is str for option in options)
        self.owner, self.library = owner, build(code)

    def get_function(self, name):
        return Kernel(self.library, name, self.owner)


class Stream:
    def __init__(self, owner, handle):
        self.owner, self.handle = owner, handle

    def __enter__(self):
        self.owner.streams.append(self.handle)

    def __exit__(self, *error):
        self.owner.streams.pop()


def cupy():
    """The module. `backwards` runs the last thread first; `execute(kernel, blocks, threads, values, addresses)` may be
    replaced by what notes the launches."""
    module = types.ModuleType("cupy")
    module.streams, module.backwards, module.launches = [], False, []

    def execute(kernel, *call):
        module.launches.append(kernel.name)
        kernel.run(*call)

    module.execute = execute
    module.RawModule = functools.partial(RawModule, module)
    module.cuda = types.SimpleNamespace(ExternalStream=functools.partial(Stream, module))
    return module


@functools.cache
def here():
    """kernels.CUDA for this machine, and its cupy."""
    return cuda_cpp.Module("kernels.cu", vars(kernels)), cupy()


def install(monkeypatch):
    """kernels.CUDA with `cupy`, which is returned, for one test."""
    module, stand_in = here()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setattr(kernels, "CUDA", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: types.SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(stand_in, "backwards", False)
    monkeypatch.setattr(stand_in, "execute", stand_in.execute)
    stand_in.launches.clear()
    return stand_in

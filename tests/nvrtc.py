"""Compiles CUDA C++ with NVRTC, NVIDIA's compiler as a library, which needs no GPU and no driver.

    ptx = nvrtc.compile(source, "env.cu", "sm_90", ("-std=c++20",))     # the text; RuntimeError with NVRTC's own log
"""

import ctypes
import functools
import glob
import importlib.util
import os

FAILED = 6  # NVRTC_ERROR_COMPILATION


@functools.cache
def library():
    """libnvrtc of the package nvidia-cuda-nvrtc, or of the system; None if there is neither."""
    package = importlib.util.find_spec("nvidia")
    folders = [] if package is None else package.submodule_search_locations
    found = [path for folder in folders for path in glob.glob(os.path.join(folder, "*", "lib", "libnvrtc.so*"))]
    for path in [*found, "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            # Before 13.5 it asks for this one by name alone, which is found if it is there already.
            for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so*")):
                ctypes.CDLL(builtins)
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def compile(source, name="kernel.cu", arch="sm_90", options=()):
    """The PTX of `source`, text, for one generation of GPUs. Raises RuntimeError with the compiler's log."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("there is no libnvrtc here: pip install -r requirements/test.txt")
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        options = [f"--gpu-architecture={arch.replace('sm_', 'compute_')}", *options]
        values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = nvrtc.nvrtcCompileProgram(program, len(options), values)
        if result != 0:
            log = _text(nvrtc, program, "ProgramLog") if result == FAILED else ""
            raise RuntimeError(f"{name} does not compile for {arch}:\n{log or _name(nvrtc, result)}")
        return _text(nvrtc, program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc, program, what):
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text.value.decode()


def _check(nvrtc, result):
    if result != 0:
        raise RuntimeError(f"NVRTC: {_name(nvrtc, result)}")


def _name(nvrtc, result):
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc.nvrtcGetErrorString(result).decode()

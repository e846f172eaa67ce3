"""Compile CUDA C++ with NVRTC, NVIDIA's compiler as a library, which needs no GPU and no driver."""

import pytest

try:
    from cuda.bindings import nvrtc

    nvrtc.nvrtcVersion()
    is_missing = False
except (ImportError, RuntimeError):
    is_missing = True
needed = pytest.mark.skipif(is_missing, reason="there is no libnvrtc: pip install -r requirements/test.txt")


def call(name, *arguments):
    """Return the results of an NVRTC function, after its status."""
    status, *results = getattr(nvrtc, f"nvrtc{name}")(*arguments)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (name, status)
    return results[0] if results else None


def read(program, kind):
    size = call(f"Get{kind}Size", program)
    text = b" " * (size + 1)  # Python has one object for b" ", which this would overwrite
    call(f"Get{kind}", program, text)
    return text[: size - 1].decode()


def compile(source, name="kernel.cu", arch="sm_90", options=(), assembles=False):
    """Return (PTX, log) of `source` for one generation of GPUs; RuntimeError has the compiler's log.

    assembles: also run the assembler, ptxas.
    """
    target = arch if assembles else arch.replace("sm_", "compute_")
    options = [f"--gpu-architecture={target}".encode(),
               *(option.encode() for option in options)]
    program = call("CreateProgram", source.encode(), name.encode(), 0, [], [])
    try:
        status, = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = read(program, "ProgramLog")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{name} does not compile for {arch}:\n{log}")
        return read(program, "PTX"), log
    finally:
        call("DestroyProgram", program)

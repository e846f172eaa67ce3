"""Environments on a GPU, from the same header: one thread an environment.

    problem = device.why_not(library)               # None, or in one line why it steps on the host
    text = device.source(library)                   # CUDA C++, for NVRTC with device.OPTIONS
    kernels = device.Kernels(library)               # compiled by CuPy, for torch's GPU
    kernels.launch("step", num_envs, (envs, rows, resets))  # addresses there; on CuPy's stream

C++ is not C. env.h has what a GPU's compiler lacks, and `source` writes `(Type){...}` as
`Type{...}`; the rest of a header stays as it is. Structs and the arrays of HEAP are copied to the
GPU as c_init left them on the host; the pointers of HEAP then lead into the copy of the arrays.
"""

import functools
import importlib.util
import re
import sys

import numpy as np

from errors import EnvError
from ocean import FOLDER

# Products and sums stay apart, so results are the C compiler's but for the last bit of sinf, expf
# and their like.
OPTIONS = ("-std=c++20", "-default-device", "--fmad=false", "-w")
THREADS = 32  # per block: 4,096 environments are 128 blocks, for an H100's 132 multiprocessors
STANDARD = {f"{name}.h" for name in ("float", "limits", "math", "stdarg", "stdbool", "stddef",
                                     "stdint", "stdio", "stdlib", "string")}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"]+)"|<([^>]+)>|(ENV_HEADER)).*$',
                     re.MULTILINE)
# (Type){ where a value may be: after an operator, a bracket, a comma or return
TYPE = r"\(\s*(?:struct\s+)?([A-Za-z_]\w*)\s*\)\s*\{"
LITERAL = re.compile(rf"(?<=[-=(,{{?:&|+*/;<>!~^%])(\s*){TYPE}|\breturn(\s*){TYPE}")
# a definition, at the beginning of a line
FUNCTION = re.compile(r"^\w[\w \t*]*?\b(\w+)\s*\([^;{}()]*\)\s*\{", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def why_not(library):
    """Return why an environment cannot step on a GPU, as a sentence's end, or None."""
    text = _user_text(library)
    if holds_pointer(library):
        return "its struct holds a pointer, which a copy of it would keep"
    for _, name, _ in INCLUDE.findall(text):
        if name and name not in STANDARD:
            return f"it includes <{name}>, which a GPU does not have"
    if name := _recursion(text):
        return (f"its function {name} calls itself, for which a GPU's thread has no memory: "
                "write it as a loop")
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return "there is no CuPy: pip install -r requirements/cuda.txt"
    return None


def holds_pointer(library):
    """Tell whether `struct Env` has a pointer."""
    return "*" in _struct(_user_text(library))


@functools.cache  # an edited header has another library
def _user_text(library):
    """Return the text of a header and of what it includes, but for ocean/'s files."""
    included = []
    _flat(library.header, library.header, included)
    return "".join(path.read_text("utf-8") for path in included if path.parent != FOLDER)


def _struct(text):
    """Return the fields of `struct Env` without comments and arrays' sizes, or ""."""
    text = re.sub(r"\[[^]]*\]", "", COMMENT.sub(" ", text))
    match = re.search(r"\bstruct\s+Env\s*\{", text)
    return "" if match is None else _braces(text, match.end())


def _braces(text, begin):
    """Return the text up to the brace that closes the one before `begin`."""
    depth, end = 1, begin
    while depth and end < len(text):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[begin:end]


def _recursion(text):
    """Return the name of a function that calls itself, also by way of others, or None.

    A GPU's threads have 1,024 bytes each for calls whose depth the compiler does not know.
    """
    text = COMMENT.sub(" ", text)
    bodies = {match[1]: _braces(text, match.end()) for match in FUNCTION.finditer(text)}
    calls = {name: bodies.keys() & set(re.findall(r"\b(\w+)\s*\(", body))
             for name, body in bodies.items()}
    for _ in calls:  # each round follows one call more at least
        calls = {name: callees.union(*map(calls.get, callees)) for name, callees in calls.items()}
    return next((name for name, callees in calls.items() if name in callees), None)


def truncates(library):
    """Return whether an environment may write anything but 0 into the truncations."""
    zeros = r"truncations(?:\[[^]]*\])?\s*=\s*(?:0|false)\s*;|memset\(env->truncations, 0,"
    return "truncations" in re.sub(zeros, "", COMMENT.sub(" ", _user_text(library)))


def source(library, policy=""):
    """Return the text of the kernels device_step, device_reset and device_log.

    policy: C++ that comes before, in a namespace of this name. Its macros end there.
    """
    constants = {"OCEAN_DEVICE": 1, "STRUCT_SIZE": library.struct_size,
                 "PLAIN_START": library.plain_start, "LOG_OFFSET": library.log_offset}
    lines = [f"#define {name} {value}\n" for name, value in constants.items()]
    if policy:
        macros = re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", policy, re.MULTILINE)
        lines = [f"namespace policy {{\n{policy}}}\n", *(f"#undef {name}\n" for name in macros), *lines]
    text = _flat(FOLDER / "binding.c", library.header, [])
    return "".join(lines) + LITERAL.sub(
        lambda m: f"{m[1]}{m[2]}{{" if m[2] else f"return {m[4]}{{", text)


def _flat(path, header, included):
    """Return a file's text with what it includes in its place, each file once.

    included: the files so far, a list that grows. System headers of which env.h has a part are
    left out.
    """
    included.append(path)

    def replace(match):
        name, system, _ = match.groups()
        if system:
            return "" if system in STANDARD else match[0]
        other = header if name is None else _find(name, path)
        if other in included:
            return ""
        line = path.read_text("utf-8")[: match.start()].count("\n") + 2
        text = _flat(other, header, included)
        return f'#line 1 "{other.name}"\n{text}\n#line {line} "{path.name}"'

    return INCLUDE.sub(replace, path.read_text("utf-8").replace("#pragma once", ""))


def _find(name, path):
    """Return the file that `path` includes as "name"."""
    beside = path.parent / name
    return beside if beside.exists() else FOLDER / name


class Kernels:
    """An environment's kernels on the current GPU. Raises EnvError for invalid C++."""

    def __init__(self, library):
        import cupy

        try:
            module = cupy.RawModule(code=source(library), options=OPTIONS)
            self._functions = {name: module.get_function(f"device_{name}")
                               for name in ("step", "reset", "log")}
        except Exception as error:  # CuPy's CompileException is nothing but an Exception
            raise EnvError(f"{library.header} does not compile for a GPU:\n{error}") from error

    def launch(self, name, num_envs, addresses):
        """Run a kernel on CuPy's current stream, with a thread per environment.

        addresses on the GPU: of the environments, and of the rows or the logs; for a step of the
        resets, too.
        """
        arguments = tuple(np.int64(number) for number in (addresses[0], num_envs, *addresses[1:]))
        self._functions[name]((-(-num_envs // THREADS),), (THREADS,), arguments)

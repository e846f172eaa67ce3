"""Environments on a GPU, from the same header: one thread an environment.

    problem = device.why_not(library)               # None, or in one line why it steps on the host
    text = device.source(library)                   # CUDA C++, for NVRTC with device.OPTIONS
    kernels = device.Kernels(library)               # compiled by CuPy, for the GPU that torch has chosen
    kernels.launch("step", num_envs, (envs, rows, resets))  # addresses there; on the stream that CuPy has at present

C++ is not C. env.h has what a GPU's compiler lacks, and `source` writes `(Type){...}` as `Type{...}`; the rest of a
header stays as it is. A struct that holds nothing but plain data is copied to the GPU as c_init left it on the host.
"""

import importlib.util
import re
import sys

import numpy as np

from errors import EnvError
from ocean import FOLDER

# As the C compiler's results, but for the last bit of sinf, expf and their like: products and sums stay apart.
OPTIONS = ("-std=c++20", "-default-device", "--fmad=false", "-w")
THREADS = 32  # a block: 4,096 environments are then 128 blocks, for an H100's 132 multiprocessors
STANDARD = {f"{name}.h" for name in ("float", "limits", "math", "stdarg", "stdbool", "stddef", "stdint", "stdio",
                                     "stdlib", "string")}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"]+)"|<([^>]+)>|(ENV_HEADER)).*$', re.MULTILINE)
# (Type){ where a value may stand: after an operator, a bracket, a comma or return.
LITERAL = re.compile(r"(?<=[-=(,{?:&|+*/;<>!~^%])(\s*)\(\s*(?:struct\s+)?([A-Za-z_]\w*)\s*\)\s*\{|"
                     r"\breturn(\s*)\(\s*(?:struct\s+)?([A-Za-z_]\w*)\s*\)\s*\{")
FUNCTION = re.compile(r"^\w[\w \t*]*?\b(\w+)\s*\([^;{}()]*\)\s*\{", re.MULTILINE)  # a definition, at a line's begin
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def why_not(library):
    """Why an environment cannot step on a GPU here, as the end of a sentence; None if nothing is known against it."""
    if library.has_heap:
        return "its struct points to memory of its own (HEAP)"
    if any("*" in _struct(path.read_text()) for path in _files(library.header)):
        return "its struct holds a pointer, which a copy of it would keep"
    for path in _files(library.header):
        for _, name, _ in INCLUDE.findall(path.read_text()):
            if name and name not in STANDARD and path.parent != FOLDER:
                return f"it includes <{name}>, which a GPU does not have"
    if name := _recursion("".join(path.read_text() for path in _files(library.header) if path.parent != FOLDER)):
        return f"its function {name} calls itself, for which a GPU's thread has too little memory: write it as a loop"
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return "there is no CuPy: pip install -r requirements/cuda.txt"
    return None


def _struct(text):
    """What stands between the braces of `struct Env`, without comments and arrays' sizes; "" if it is not there."""
    text = re.sub(r"\[[^]]*\]", "", COMMENT.sub(" ", text))
    begun = re.search(r"\bstruct\s+Env\s*\{", text)
    return "" if begun is None else _braces(text, begun.end())


def _braces(text, begin):
    """What follows up to the brace that closes the one before `begin`."""
    depth, end = 1, begin
    while depth and end < len(text):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[begin:end]


def _recursion(text):
    """The name of a function that calls itself, also by way of others; None if there is none. How deep it goes no
    compiler knows, and a GPU's threads have 1,024 bytes each for calls whose depth is unknown."""
    text = COMMENT.sub(" ", text)
    bodies = {match[1]: _braces(text, match.end()) for match in FUNCTION.finditer(text)}
    calls = {name: bodies.keys() & set(re.findall(r"\b(\w+)\s*\(", body)) for name, body in bodies.items()}
    for _ in calls:  # each round reaches one call further at least
        calls = {name: reached.union(*map(calls.get, reached)) for name, reached in calls.items()}
    return next((name for name, reached in calls.items() if name in reached), None)


def truncates(library):
    """Whether an environment may cut episodes off: unless its header writes nothing but 0 into the truncations."""
    text = "".join(path.read_text() for path in _files(library.header) if path.parent != FOLDER)
    text = COMMENT.sub(" ", text)
    never = r"truncations(?:\[[^]]*\])?\s*=\s*(?:0|false)\s*;|memset\(env->truncations, 0,"
    return "truncations" in re.sub(never, "", text)


def source(library):
    """The text of an environment's kernels: device_step, device_reset and device_log of binding.c."""
    described = {"OCEAN_DEVICE": 1, "STRUCT_SIZE": library.struct_size, "PLAIN_START": library.plain_start,
                 "LOG_OFFSET": library.log_offset}
    lines = [f"#define {name} {value}\n" for name, value in described.items()]
    text = _flat(FOLDER / "binding.c", library.header, set())
    return "".join(lines) + LITERAL.sub(lambda m: f"{m[1]}{m[2]}{{" if m[2] else f"return {m[4]}{{", text)


def _flat(path, header, seen):
    """A file with what it includes in its place, each file once; of system headers those of which env.h has a part
    are left out."""
    seen.add(path)

    def included(match):
        own, system, _ = match.groups()
        if system:
            return "" if system in STANDARD else match[0]
        other = header if own is None else _find(own, path)
        if other in seen:
            return ""
        line = path.read_text()[: match.start()].count("\n") + 2
        return f'#line 1 "{other.name}"\n{_flat(other, header, seen)}\n#line {line} "{path.name}"'

    return INCLUDE.sub(included, path.read_text().replace("#pragma once", ""))


def _find(name, path):
    """The file that `path` includes as "name"."""
    beside = path.parent / name
    return beside if beside.exists() else FOLDER / name


def _files(path, seen=None):
    """A header and all that it includes by name."""
    seen = {path} if seen is None else seen | {path}
    for own, _, _ in INCLUDE.findall(path.read_text()):
        if own and _find(own, path) not in seen:
            seen = _files(_find(own, path), seen)
    return seen


class Kernels:
    """An environment's kernels on the current GPU. Raises EnvError if the header is not C++ enough."""

    def __init__(self, library):
        import cupy

        try:
            module = cupy.RawModule(code=source(library), options=OPTIONS)
            self._functions = {name: module.get_function(f"device_{name}") for name in ("step", "reset", "log")}
        except Exception as error:  # CuPy's CompileException is nothing but an Exception
            raise EnvError(f"{library.header} does not compile for a GPU:\n{error}") from error

    def launch(self, name, num_envs, addresses):
        """Run a kernel on CuPy's current stream, with a thread for each of num_envs environments. addresses there: of
        the environments, and of the rows or the logs; for a step of the resets, too."""
        arguments = tuple(np.int64(number) for number in (addresses[0], num_envs, *addresses[1:]))
        self._functions[name]((-(-num_envs // THREADS),), (THREADS,), arguments)

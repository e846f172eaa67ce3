"""Runs a GPU's code on a CPU: a driver that numba-cuda has compiled to PTX (a GPU's assembly language)
is translated to C, and its threads run one after another.

    launch = Launcher()                                 # instead of arena._launch
    launch(driver, lanes, arguments)                    # the effect that the launch has on a GPU
    launch.names                                        # drivers that were launched

numba's simulator runs the Python source; this finds what the compiler does to it (docs/findings.md), and what
compute-sanitizer looks for: AssertionError for an access outside of the arrays that were handed over, and for memory
that one thread writes and another one reads or writes otherwise.

It knows the instructions that these kernels are made of, after the PTX ISA (docs.nvidia.com/cuda/
parallel-thread-execution), and raises NotImplementedError for any other. Approximate instructions are exact here.
"""

import ctypes
import re
import subprocess
import tempfile
import threading
import types
from pathlib import Path

import numba
import numpy as np
from numpy.lib.array_utils import byte_bounds

import arena

PRELUDE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef struct { uint64_t begin, end; int32_t *writer, *reader; } Range;
static __thread Range *ranges;
static __thread int count, thread;
static __thread uint64_t bad;
static __thread uint32_t tid_x, ntid_x, ctaid_x, nctaid_x;

static Range *range_of(uint64_t address, int size) {
    for (int i = 0; i < count; i++)
        if (address >= ranges[i].begin && address + size <= ranges[i].end) return &ranges[i];
    if (!bad) bad = 1;
    return 0;
}
static void load(uint64_t address, int size, void *out) {
    Range *range = range_of(address, size);
    memset(out, 0, size);
    if (!range) return;
    memcpy(out, (void *)address, size);
    for (uint64_t i = address - range->begin; i < address - range->begin + size; i++) {
        if (range->writer[i] && range->writer[i] != thread && !bad) bad = 2;
        range->reader[i] = range->reader[i] && range->reader[i] != thread ? -1 : thread;  // -1: several
    }
}
static void store(uint64_t address, int size, const void *value) {
    Range *range = range_of(address, size);
    if (!range) return;
    int same = memcmp((void *)address, value, size) == 0;
    for (uint64_t i = address - range->begin; i < address - range->begin + size; i++) {
        if (range->reader[i] && range->reader[i] != thread && !bad) bad = 3;
        if (range->writer[i] && range->writer[i] != thread && !same && !bad) bad = 4;
        range->writer[i] = thread;
    }
    memcpy((void *)address, value, size);
}
static inline float as_f32(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
static inline double as_f64(uint64_t x) { double y; memcpy(&y, &x, 8); return y; }
"""

RUN = r"""
uint64_t run(const uint64_t *params, int64_t blocks, int64_t threads, Range *all, int number) {
    ranges = all, count = number, bad = 0, ntid_x = threads, nctaid_x = blocks;
    for (int64_t i = 0; i < blocks * threads && !bad; i++) {
        thread = i + 1, ctaid_x = i / threads, tid_x = i % threads;
        kernel(params);
    }
    return bad;
}
"""

PROBLEMS = {1: "an access outside of every array", 2: "a thread reads what another one wrote",
            3: "a thread writes what another one read",
            4: "two threads write different numbers to one place"}

C_TYPES = {"pred": "int", "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "f32": "float", "f64": "double"}
C_TYPES |= {f"{kind}{bits}": f"{'int' if kind == 's' else 'uint'}{bits}_t" for kind in "bus"
            for bits in (16, 32, 64)}

INFIX = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "div": "/", "rem": "%", "mul": "*"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "hi": ">"}
CALLS = {"max.f64": "fmax", "abs.f32": "fabsf", "sqrt.f32": "sqrtf", "sqrt.f64": "sqrt", "lg2.f32": "log2f",
         "fma.f32": "fmaf", "fma.f64": "fma"}


def operand(text):
    """A register, a number, a special register or a parameter, in C."""
    text = text.strip()
    if text.startswith("0f"):
        return f"as_f32(0x{text[2:]}u)"
    if text.startswith("0d"):
        return f"as_f64(0x{text[2:]}ull)"
    if text.startswith("%"):
        return text[1:].replace(".", "_")
    if re.fullmatch(r"-?\d+", text):
        return "INT64_MIN" if text == str(-(2**63)) else f"{text}ll" if int(text) < 2**63 else f"{text}ull"
    return text


def place(text):
    """[base+offset] -> (base, offset)."""
    base, _, offset = text.strip()[1:-1].partition("+")
    return operand(base), offset or "0"


def cast(kind, text):
    """An operand as a number of this type: registers hold bits; the instruction knows whether they are signed."""
    return f"({C_TYPES[kind]})({operand(text)})"


def instruction(text):
    """One PTX instruction, without its predicate, as a C statement."""
    name, _, rest = text.partition(" ")
    op, *modifiers = name.split(".")
    args = [arg.strip() for arg in re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)", rest)]
    args = [arg for arg in args if arg]
    kind = modifiers[-1] if modifiers else None
    to = operand(args[0]) if args and not args[0].startswith(("[", "{")) else None
    floating = kind in ("f32", "f64")
    if op == "bra":
        return f"goto {args[0].replace('$', '_')};"
    if op == "ret":
        return "return;"
    if op in ("ld", "st"):
        (base, offset), value = place(args[op == "ld"]), operand(args[op == "st"])
        if "param" in modifiers:
            memory = f"*({C_TYPES[kind]} *)((char *)&{base} + {offset})"
            return f"{value} = {memory};" if op == "ld" else f"{memory} = {value};"
        size = f"(uint64_t)({base} + ({offset})), sizeof({C_TYPES[kind]}), &memory"
        return (f"{{ {C_TYPES[kind]} memory; load({size}); {value} = memory; }}" if op == "ld"
                else f"{{ {C_TYPES[kind]} memory = {value}; store({size}); }}")
    if op == "mov":
        source = operand(args[1])
        if args[1].startswith("%") and "." not in args[1]:  # between registers the bits stay
            return f"memcpy(&{to}, &{source}, sizeof {to});"
        return f"{to} = {f'{source} != 0' if kind == 'pred' else source};"
    if op == "cvta":
        return f"{to} = {operand(args[1])};"
    if op == "cvt":
        target, source = modifiers[-2:]
        rounds_to_integer = source[0] == "f" and target[0] != "f"
        if {"sat", "ftz", "rni"} & set(modifiers) or ("rzi" in modifiers) != rounds_to_integer:
            raise NotImplementedError(text)
        return f"{to} = ({C_TYPES[target]})({cast(source, args[1])});"
    if op == "selp":
        return f"{to} = {operand(args[3])} ? {operand(args[1])} : {operand(args[2])};"
    if op == "setp":
        comparison, a, b = modifiers[0], cast(kind, args[1]), cast(kind, args[2])
        if comparison == "nan":
            return f"{to} = isnan({a}) || isnan({b});"
        ordered = f" && !isnan({a}) && !isnan({b})" if comparison == "ne" and floating else ""
        return f"{to} = {a} {COMPARE[comparison]} {b}{ordered};"
    values = [cast(kind, arg) for arg in args[1:]]
    if op == "mul" and "wide" in modifiers:
        wide = C_TYPES[kind[0] + str(2 * int(kind[1:]))]
        return f"{to} = ({wide}){values[0]} * ({wide}){values[1]};"
    if op in ("shl", "shr"):  # a shift by more than the width leaves nothing but the sign
        bits = int(kind[1:])
        amount, sign = f"(uint32_t)({operand(args[2])})", "shr" in op and kind[0] == "s"
        sign = f"(({values[0]}) < 0 ? -1 : 0)" if sign else "0"
        return f"{to} = {amount} >= {bits} ? {sign} : {values[0]} {'<<' if op == 'shl' else '>>'} {amount};"
    if f"{op}.{kind}" in CALLS and "NaN" not in modifiers:
        return f"{to} = {CALLS[f'{op}.{kind}']}({', '.join(values)});"
    if op in ("min", "max") and not floating:
        return f"{to} = {values[0]} {'<' if op == 'min' else '>'} {values[1]} ? {values[0]} : {values[1]};"
    if op == "rcp" and floating:
        return f"{to} = 1 / {values[0]};"
    if op == "neg":
        return f"{to} = -{values[0]};"
    if op == "not":
        return f"{to} = {'!' if kind == 'pred' else '~'}{values[0]};"
    if op in INFIX and len(values) == 2 and "hi" not in modifiers:
        return f"{to} = {values[0]} {INFIX[op]} {values[1]};"
    raise NotImplementedError(f"tests/ptx.py does not know {text!r}")


def translate(ptx):
    """A module of PTX with one entry as C: `kernel`, which takes its parameters' 8 bytes each."""
    ptx = re.sub(r"//.*", "", ptx)
    if ".func" in ptx:
        raise NotImplementedError("a function that is not inlined")
    header, body = re.search(r"\.entry([^{;]*)\n\{\n(.*)\n\}", ptx, flags=re.DOTALL).groups()
    lines = [PRELUDE, "static void kernel(const uint64_t *params) {"]
    for i, name in enumerate(re.findall(r"\.param \.\w+ (\w+)", header)):
        lines.append(f"uint64_t {name} = params[{i}];")
    for kind, prefix, number in re.findall(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;", body):
        lines.append(f"{C_TYPES[kind]} {', '.join(f'{prefix}{i}' for i in range(int(number)))};")
    for line in re.split(r";|(?<=:)\s*\n", body):
        text = " ".join(line.split())
        if not text or text.startswith((".reg", ".pragma")):
            continue
        if text.endswith(":"):
            lines.append(text.replace("$", "_") + ";")
        else:
            predicate, rest = re.match(r"(?:@(!?%\w+)\s+)?(.*)", text).groups()
            condition = f"if ({predicate.replace('%', '')}) " if predicate else ""
            lines.append(f"{condition}{{ {instruction(rest)} }}")
    return "\n".join([*lines, "}", RUN])


def parameters(arguments):
    """The arguments as numba-cuda hands them to a kernel: 8 bytes each, arrays taken apart."""
    flat = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            flat += [0, 0, argument.size, argument.itemsize, argument.ctypes.data, *argument.shape, *argument.strides]
        else:
            number = np.asarray(argument)
            flat.append(int.from_bytes(number.tobytes().ljust(8, b"\0"), "little"))
    return np.array([number % 2**64 for number in flat], np.uint64)


class Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_uint64), ("end", ctypes.c_uint64), ("writer", ctypes.c_void_p),
                ("reader", ctypes.c_void_p)]


class Launcher:
    """arena._launch, by the PTX for one generation of GPUs."""

    def __init__(self, capability=(9, 0)):
        self.capability, self.names, self._compiled = capability, set(), {}
        self._folder, self._lock = tempfile.TemporaryDirectory(prefix="ptx-"), threading.Lock()

    def compile(self, driver, arguments):
        from numba import cuda
        from numba.cuda import dispatcher

        # a function that is not inlined asks the GPU what to compile for
        before = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=self.capability)
        try:
            return cuda.compile(arena.cuda_kernel(driver), (numba.int64, numba.typeof(arguments)),
                                cc=self.capability, output="ptx", device=False, abi="numba")[0]
        finally:
            dispatcher.get_current_device = before

    def _load(self, driver, arguments):
        source = Path(self._folder.name) / f"{driver.__name__}_{len(self._compiled)}.c"
        source.write_text(translate(self.compile(driver, arguments)))
        library = source.with_suffix(".so")
        subprocess.run(["cc", "-O1", "-w", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC",
                        source, "-o", library, "-lm"], check=True)
        return ctypes.CDLL(library).run

    def __call__(self, driver, lanes, arguments):
        if lanes == 0:
            return
        key = driver, numba.typeof(arguments)
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = self._load(driver, arguments)
        blocks = -(-lanes // arena.THREADS)
        bounds = {byte_bounds(argument) for argument in arguments if isinstance(argument, np.ndarray)}
        marks = [np.zeros((2, end - begin), np.int32) for begin, end in bounds]
        ranges = (Range * len(bounds))(*(Range(*bound, *(each.ctypes.data for each in mark))
                                         for bound, mark in zip(bounds, marks, strict=True)))
        values = parameters([lanes, *arguments])
        problem = self._compiled[key](
            ctypes.c_void_p(values.ctypes.data), ctypes.c_int64(blocks), ctypes.c_int64(arena.THREADS),
            ranges, ctypes.c_int(len(bounds)))
        assert problem == 0, f"{driver.__name__} with {lanes} lanes: {PROBLEMS[problem]}"
        self.names.add(driver.__name__)

"""CUDA C++: cells in Python become C, a .cu file is compiled with them, and its kernels are launched.

    module = Module("kernels.cu", globals())           # the file, and where the cells that it names stand
    module.launch("write_back", 512, 128, T, M, ...)   # blocks, threads a block, the kernel's arguments

A formula stands once, in Python (kernels.py). The .cu file names a cell or a constant of it, and finds it before its
own first line: `translate` writes as C what a cell is made of, scalars in assignments, conditions and loops. What it
does not know is an error. CuPy compiles the text by NVRTC, and is imported when the first kernel is launched.
"""

import ast
import functools
import inspect
import re
import string
import textwrap

import numpy as np
import torch

from arena import FOLDER, compile_timer

# -default-device: NVRTC before 13.5 takes a lambda for a function of the host without it.
OPTIONS = ("-std=c++17", "-default-device", "-prec-div=false")  # a float's division within 2 units in the last place

# What a translated cell may call, for whatever type it is called with.
PRELUDE = """
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
#define CELLS __device__ __forceinline__
#define CELL static CELLS
template <class T, class S> CELL T bits_as(S x) {
    static_assert(sizeof(T) == sizeof(S), "a view of another size");
    T y;
    memcpy(&y, &x, sizeof y);
    return y;
}
template <class T> struct Row { T *data; i64 length; CELLS T &operator[](i64 i) const { return data[i]; } };
template <class T> CELL i64 length(const Row<T> &row) { return row.length; }
CELL float absolute(float x) { return fabsf(x); }
CELL double absolute(double x) { return fabs(x); }
#ifndef SHARED_MEMORY  // as many bytes as the launch says
#define SHARED_MEMORY(Type, name) extern __shared__ __align__(16) char shared_memory[]; \
    Type *name = (Type *)shared_memory
// Copy 4, 8 or 16 bytes to shared memory, where they are after end_copies, while the thread goes on.
template <int BYTES> CELL void begin_copy(void *to, const void *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES) : "memory");
#else
    struct alignas(BYTES) Bytes { char at[BYTES]; };
    *(Bytes *)to = *(const Bytes *)from;
#endif
}
CELL void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#endif
"""
CALLS = {"abs": "absolute", "len": "length", "math.log": "logf", "math.sqrt": "sqrtf"}
# What a cell returns if it returns a tuple: a struct with as many fields, and how C++ finds their types.
STRUCTS = ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")
for _number, _name in enumerate(STRUCTS, 1):
    _types = string.ascii_uppercase[:_number]
    _classes, _fields = ", ".join(f"class {t}" for t in _types), " ".join(f"{t} {t.lower()};" for t in _types)
    PRELUDE += (f"template <{_classes}> struct {_name} {{ {_fields} }};\n"
                f"template <{_classes}> {_name}({', '.join(_types)}) -> {_name}<{', '.join(_types)}>;\n")
TYPES = {np.float32: "float", np.float64: "double", np.int32: "int", np.int64: "i64", np.uint8: "u8",
         np.uint16: "u16", np.uint32: "u32", np.uint64: "u64", np.bool_: "bool"}
DTYPES = {name: np.dtype(kind) for kind, name in TYPES.items()} | {"void": None}  # None: any
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.LShift: "<<", ast.RShift: ">>",
             ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.And: "&&", ast.Or: "||", ast.Eq: "==",
             ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.USub: "-", ast.Not: "!",
             ast.Invert: "~"}


def literal(number):
    """A number of Python or numpy in C, exactly."""
    if isinstance(number, bool | np.bool_):
        return str(bool(number)).lower()
    if isinstance(number, np.float32 | np.float64):
        suffix = "f" if isinstance(number, np.float32) else ""
        if np.isinf(number):
            bits = ("float", 0x7F800000, "u32") if suffix else ("double", 0x7FF0000000000000, "u64")
            return f"({'-' if number < 0 else ''}bits_as<{bits[0]}>(({bits[2]}){bits[1]}))"
        return f"({float(number).hex()}{suffix})"
    if isinstance(number, np.integer):
        return f"({TYPES[type(number)]}){int(number)}"
    if isinstance(number, int) and -(2**31) <= number < 2**31:
        return str(number)
    raise TypeError(f"{number!r} has no float32 or integer type: write np.float32(...), or the loop becomes double")


class _Cell:
    """One cell as a C function, a template over its arguments' types."""

    def __init__(self, function):
        function = getattr(function, "py_func", function)
        self.names = dict(inspect.getclosurevars(function).globals)
        self.used = []  # the cells that it calls
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        self.name, arguments = tree.name, [argument.arg for argument in tree.args.args]
        self.scopes = [set(arguments)]
        types = ", ".join(f"class T{i}" for i in range(len(arguments)))
        values = ", ".join(f"T{i} {name}" for i, name in enumerate(arguments))
        self.text = f"template <{types}> CELL auto {tree.name}({values}) {{\n{self.block(tree.body)}}}\n"

    def unknown(self, node, why=""):
        return NotImplementedError(f"{self.name}: `{ast.unparse(node)}` cannot be written in C by cuda_cpp.py{why}; "
                                   "use assignments, conditions and loops of scalars, or teach it.")

    # -- statements ------------------------------------------------------------------------------------------------

    def block(self, statements, names=()):
        self.scopes.append(set(names))
        text = "".join(f"{self.statement(statement)}\n" for statement in statements)
        self.scopes.pop()
        return text

    def statement(self, node):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return ""  # the docstring
        if isinstance(node, ast.Return):
            return f"return {self.value(node.value)};"
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            return self.assign(node.targets[0], node.value)
        if isinstance(node, ast.AugAssign):
            return f"{self.value(node.target)} {self.operator(node.op, node)}= {self.value(node.value)};"
        if isinstance(node, ast.If):
            text = f"if ({self.value(node.test)}) {{\n{self.block(node.body)}}}"
            return text + (f" else {{\n{self.block(node.orelse)}}}" if node.orelse else "")
        if isinstance(node, ast.While) and not node.orelse:
            return f"while ({self.value(node.test)}) {{\n{self.block(node.body)}}}"
        if isinstance(node, ast.For) and not node.orelse and ast.unparse(node.iter).startswith("range("):
            first, last = ["0", *map(self.value, node.iter.args)][-2:]
            if len(node.iter.args) > 2:
                raise self.unknown(node)
            i = node.target.id
            return f"for (i64 {i} = {first}; {i} < {last}; {i}++) {{\n{self.block(node.body, [i])}}}"
        if isinstance(node, ast.Break | ast.Continue | ast.Pass):
            return {ast.Break: "break;", ast.Continue: "continue;", ast.Pass: ";"}[type(node)]
        raise self.unknown(node)

    def known(self, name):
        return any(name in scope for scope in self.scopes)

    def assign(self, target, value):
        if isinstance(target, ast.Name):
            declared = "" if self.known(target.id) else "auto "
            text = f"{declared}{target.id} = {self.value(value)};"
            self.scopes[-1] |= {target.id} if declared else set()
            return text
        if isinstance(target, ast.Subscript):
            return f"{self.value(target)} = {self.value(value)};"
        if isinstance(target, ast.Tuple) and all(isinstance(name, ast.Name) for name in target.elts):
            names = [name.id for name in target.elts]
            new = [f"new_{name}" if self.known(name) else name for name in names]
            if isinstance(value, ast.Tuple):  # side by side: each sees what was before
                parts = [self.value(part) for part in value.elts]
                text = " ".join(f"auto {name} = {part};" for name, part in zip(new, parts, strict=True))
            else:
                text = f"auto [{', '.join(new)}] = {self.value(value)};"
            text += "".join(f" {name} = {other};" for name, other in zip(names, new, strict=True) if name != other)
            if any(name != other for name, other in zip(names, new, strict=True)) and len(set(new) & set(names)):
                raise self.unknown(target, ": some of these names are new and some are not")
            if new != names:
                return f"{{ {text} }}"
            self.scopes[-1] |= set(names)
            return text
        raise self.unknown(target)

    # -- expressions -----------------------------------------------------------------------------------------------

    def operator(self, op, node):
        if type(op) not in OPERATORS:
            raise self.unknown(node)
        return OPERATORS[type(op)]

    def value(self, node):
        if isinstance(node, ast.Constant):
            return literal(node.value)
        if isinstance(node, ast.Name):
            return self.name_of(node)
        if isinstance(node, ast.Tuple):
            if len(node.elts) > len(STRUCTS):
                raise self.unknown(node, f": it returns more than {len(STRUCTS)} numbers; add a name to STRUCTS")
            return f"{STRUCTS[len(node.elts) - 1]}{{{', '.join(map(self.value, node.elts))}}}"
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.FloorDiv):  # the same in C, as cells divide no negative number
                return f"({self.value(node.left)} / {self.value(node.right)})"
            return f"({self.value(node.left)} {self.operator(node.op, node)} {self.value(node.right)})"
        if isinstance(node, ast.UnaryOp):
            return f"({self.operator(node.op, node)}{self.value(node.operand)})"
        if isinstance(node, ast.BoolOp):
            return f"({f' {OPERATORS[type(node.op)]} '.join(map(self.value, node.values))})"
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return f"({self.value(node.left)} {self.operator(node.ops[0], node)} {self.value(node.comparators[0])})"
        if isinstance(node, ast.IfExp):
            return f"({self.value(node.test)} ? {self.value(node.body)} : {self.value(node.orelse)})"
        if isinstance(node, ast.Subscript):
            return f"{self.value(node.value)}[{self.value(node.slice)}]"
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "np.inf":
            return literal(np.float64(np.inf))
        if isinstance(node, ast.Call) and not node.keywords:
            return self.call(node)
        raise self.unknown(node)

    def name_of(self, node):
        if self.known(node.id):
            return node.id
        if node.id in self.names and isinstance(self.names[node.id], int | np.generic):
            return literal(self.names[node.id])
        raise self.unknown(node, " (it is set in an inner block, or is no number)")

    def call(self, node):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "view":
            return f"bits_as<{TYPES[self.names[node.args[0].id]]}>({self.value(function.value)})"
        name = function.id if isinstance(function, ast.Name) else ast.unparse(function)
        if name in CALLS:
            return f"{CALLS[name]}({self.value(node.args[0])})"
        target = self.names.get(name)
        if isinstance(target, type) and target in TYPES:
            try:
                return literal(target(ast.literal_eval(node.args[0])))
            except ValueError:  # no literal
                return f"(({TYPES[target]})({self.value(node.args[0])}))"
        if not hasattr(target, "py_func") and not inspect.isfunction(target):
            raise self.unknown(node)
        self.used.append(target)
        return f"{name}({', '.join(map(self.value, node.args))})"


def translate(functions):
    """C for these cells and for all that they call, in an order in which each is known before it is used."""
    texts = {}

    def add(function):
        cell = _Cell(function)
        for other in cell.used:
            if getattr(other, "py_func", other).__name__ not in texts:
                add(other)
        texts[cell.name] = cell.text

    for function in functions:
        add(function)
    return "\n".join(texts.values())


class Module:
    """The kernels of one .cu file. names: the globals of the Python file whose cells and numbers it uses by name."""

    def __init__(self, path, names):
        self.path, self.names, self._kernels = FOLDER / path, names, {}

    @functools.cached_property
    def source(self):
        """The file, and before it the cells and the numbers that it names."""
        text = self.path.read_text()
        code = re.sub(r"//.*", "", text)
        own = set(re.findall(r"(\w+)\([^()]*\)\s*\{", code))
        calls = dict.fromkeys(re.findall(r"\b([A-Za-z]\w+)\(", code))
        cells = [self.names[name] for name in calls if inspect.isroutine(self.names.get(name)) and name not in own]
        words = dict.fromkeys(re.findall(r"\b[A-Z]\w+\b", code))
        numbers = {word: self.names[word] for word in words if isinstance(self.names.get(word), int | np.generic)}
        constants = "".join(f"#define {word} {literal(value)}\n" for word, value in numbers.items())
        return f'{PRELUDE}{translate(cells)}{constants}#line 1 "{self.path.name}"\n{text}'

    @functools.cached_property
    def signatures(self):
        """Of each kernel, by name: [(dtype, is it an array?, the parameter's name)]."""
        kernels = re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\((.*?)\)\s*\{',
                             self.source, flags=re.DOTALL)
        return {name: [self._parameter(text) for text in parameters.split(",")] for name, parameters in kernels}

    @staticmethod
    def _parameter(text):
        words = text.replace("*", " * ").replace("const", "").replace("__restrict__", "").split()
        return DTYPES[words[0]], "*" in words, words[-1]

    def arguments(self, name, values):
        """The values as CuPy hands them on, each of the type that the kernel declares: numbers cast, arrays by their
        address. Raises TypeError for another number of them, or an array of another type."""
        signature = self.signatures[name]
        if len(values) != len(signature):
            raise TypeError(f"{self.path.name}: {name} takes {len(signature)} arguments, not {len(values)}.")
        result = []
        for value, (dtype, is_array, parameter) in zip(values, signature, strict=True):
            result.append(_address(name, parameter, value, dtype) if is_array else dtype.type(value))
        return tuple(result)

    def launch(self, name, blocks, threads, *values, shared=0, cooperative=False):
        """Run a kernel on torch's current stream. It does not wait, and allocates nothing. `values` are numbers, and
        arrays of numpy or numba. shared: bytes of shared memory a block, beside the kernel's own variables.
        cooperative: all blocks run at once, so they may wait for each other; CuPy takes fewer if the GPU cannot hold
        so many, and the driver refuses what it cannot promise."""
        if blocks == 0:
            return
        if name not in self._kernels:
            with compile_timer.timed():
                self._kernels[name] = self._load(name)
        kernel = self._kernels[name]
        if shared > kernel.max_dynamic_shared_size_bytes:  # 48 KB, unless a kernel asks for more
            kernel.max_dynamic_shared_size_bytes = shared
        with on_stream(torch.cuda.current_stream().cuda_stream):
            kernel.kernel((blocks,), (threads,), self.arguments(name, values), shared,
                          enable_cooperative_groups=cooperative)

    @functools.cached_property
    def _module(self):
        import cupy

        return cupy.RawModule(code=self.source, options=OPTIONS)

    def _load(self, name):
        return self._module.get_function(name)


def _address(kernel, parameter, array, dtype):
    if dtype is not None and getattr(array, "dtype", None) != dtype:
        raise TypeError(f"{kernel}: {parameter} is {getattr(array, 'dtype', type(array))}, expected {dtype}.")
    if isinstance(array, np.ndarray):
        return np.uint64(array.ctypes.data)
    return np.uint64(array.__cuda_array_interface__["data"][0])


@functools.cache
def on_stream(handle):
    """Within it, CuPy launches on the stream of this handle."""
    import cupy

    return cupy.cuda.ExternalStream(handle)

"""Call C functions from compiled code: environment steps, CUDA graph launches."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from arena import driver

LONG, WORD = ir.IntType(64), ir.IntType(32)


def call_address(builder, result, function, *numbers):
    """Emit the call of a C function by its address; pointers are integers."""
    kind = ir.FunctionType(result, [LONG] * len(numbers))
    return builder.call(builder.inttoptr(function, kind.as_pointer()), numbers)


@intrinsic
def _call_step(typing, function, environments, first, last, rows):
    """Call ocean_step(environments, first, last, rows); pointers are integers."""

    def codegen(context, builder, signature, arguments):
        call_address(builder, ir.VoidType(), *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def cycles(typing):
    """Read the processor's cycle counter."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(LONG, [])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), codegen


@driver
def step_environments(environments, t, begin, end, terminals, truncations, resets):
    """Step environments at row t; return the cycles it took.

    begin, end: the environments' agents. It also writes row t + 1 of the resets.
    """
    function, address, first, last, rows = environments
    entered = cycles()
    _call_step(function, address, first, last, rows[t])
    for i in range(begin, end):
        resets[t + 1, i] = terminals[t, i] | truncations[t, i]
    return cycles() - entered

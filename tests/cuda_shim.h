// CUDA C++ on a CPU, for tests/cuda_on_a_cpu.py: what a kernel uses of CUDA, and `launch`, which runs a grid.
//
// A block's threads are fibers of one thread of the system. Each runs until it meets the others: at __syncthreads, or
// in a shuffle, its warp's, or, if it sleeps, another block's. `launch` returns HANGS if all that can run have ended or
// wait, and none of these waits can end, or if a block waits for another though the launch is not cooperative
// (`together`), and OVERRUN if a block wrote behind the shared memory that the launch gave it.
// Shared memory is filled with NaN before each block. Threads and blocks run in order or from the last to the first:
// what depends on it was a race.
#pragma once
#include <math.h>
#include <mutex>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))
#define __restrict__
#define SHARED_MEMORY(Type, name) Type *name = (Type *)shim::dynamic

struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

extern char __start_shared_memory[] __attribute__((weak)), __stop_shared_memory[] __attribute__((weak));

namespace shim {
static std::mutex one_at_a_time;  // shared memory is the kernels' own variables
enum State { RUNS, AT_BLOCK, AT_WARP, SPINS, ENDED };
struct Fiber {
    jmp_buf place;
    State state;
    unsigned parity;
    void *stack = nullptr;
};
struct Block {
    unsigned index;
    std::vector<Fiber> fibers;
    std::vector<char> memory;   // its shared memory while another block runs
    std::vector<char> dynamic;  // what the launch gave it besides, and a GUARD behind
};
enum { HANGS = 1, OVERRUN = 2 };
const size_t STACK = 1 << 18, GUARD = 64;
static char *dynamic;  // the active block's
static std::vector<Block> blocks;  // kept, with their stacks
static Block *active;
static jmp_buf scheduler;  // setjmp and longjmp ask the system for nothing, as swapcontext would each time
static unsigned current;
static void (*body)(void **);
static void **arguments;
static uint64_t slots[2][1024];

inline void wait(State state) {
    unsigned me = current;
    active->fibers[me].state = state;
    if (_setjmp(active->fibers[me].place) == 0) _longjmp(scheduler, 1);
    threadIdx.x = me;
}

inline void start() {
    for (;;) {  // a fiber is used again
        body(arguments);
        wait(ENDED);
    }
}

// Let a fiber run until it waits.
__attribute__((noinline)) inline void resume(Fiber &fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.stack) _longjmp(fiber.place, 1);
    ucontext_t context;
    getcontext(&context);
    fiber.stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    context.uc_stack.ss_sp = fiber.stack, context.uc_stack.ss_size = STACK, context.uc_link = nullptr;
    makecontext(&context, start, 0);
    setcontext(&context);
}

inline void begin(Block &block, unsigned threads, unsigned shared) {
    block.dynamic.assign(shared + GUARD, (char)0xff);
    block.fibers.resize(threads > block.fibers.size() ? threads : block.fibers.size());
    for (unsigned i = 0; i < threads; i++) block.fibers[i].state = RUNS, block.fibers[i].parity = 0;
    block.memory.assign(__stop_shared_memory - __start_shared_memory, (char)0xff);
}

// Release those who wait for each other in [first, last), if all there do or have ended.
inline bool release(unsigned first, unsigned last, State state) {
    bool any = false;
    for (unsigned i = first; i < last; i++) {
        if (active->fibers[i].state == state) any = true;
        else if (active->fibers[i].state != ENDED) return false;
    }
    for (unsigned i = first; any && i < last; i++)
        if (active->fibers[i].state == state) active->fibers[i].state = RUNS;
    return any;
}

// Run a block until all its threads have ended, or wait for another block. `moved`: any has come further.
inline bool run(Block &block, unsigned threads, bool backwards, bool &moved) {
    active = &block, blockIdx.x = block.index, dynamic = block.dynamic.data();
    if (!block.memory.empty()) memcpy(__start_shared_memory, block.memory.data(), block.memory.size());
    bool done = false;
    for (bool going = true; going && !done;) {
        going = false, done = true;
        for (unsigned n = 0; n < threads; n++) {
            unsigned i = backwards ? threads - 1 - n : n;
            Fiber &fiber = block.fibers[i];
            if (fiber.state == RUNS || fiber.state == SPINS) {
                bool spun = fiber.state == SPINS;
                current = threadIdx.x = i;
                resume(fiber);
                if (!spun || fiber.state != SPINS) going = true;
            }
            done &= fiber.state == ENDED;
        }
        for (unsigned first = 0; first < threads; first += 32)
            going |= release(first, first + 32 < threads ? first + 32 : threads, AT_WARP);
        going |= release(0, threads, AT_BLOCK);
        moved |= going;
    }
    if (!block.memory.empty()) memcpy(block.memory.data(), __start_shared_memory, block.memory.size());
    return done;
}

inline bool overrun(const Block &block) {
    for (size_t i = block.dynamic.size() - GUARD; i < block.dynamic.size(); i++)
        if (block.dynamic[i] != (char)0xff) return true;
    return false;
}

template <class T> inline T exchange(T value, unsigned from) {
    static_assert(sizeof(T) <= 8, "a shuffle of more than 8 bytes");
    unsigned me = current, side = active->fibers[me].parity++ % 2;
    memcpy(&slots[side][me], &value, sizeof value);
    wait(AT_WARP);
    memcpy(&value, &slots[side][from], sizeof value);
    return value;
}

template <class... P, size_t... I>
inline void call(void (*kernel)(P...), void **values, std::index_sequence<I...>) {
    kernel(*(P *)values[I]...);
}

inline int launch(void (*entry)(void **), unsigned grid, unsigned threads, unsigned shared, void **values,
                  int backwards, int together) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    body = entry, arguments = values, blockDim.x = threads, gridDim.x = grid;
    unsigned waiting = 0;  // blocks[0] to [waiting - 1] wait for others
    for (unsigned n = 0; n < grid; n++) {
        if (blocks.size() <= waiting) blocks.resize(waiting + 1);
        blocks[waiting].index = backwards ? grid - 1 - n : n;
        begin(blocks[waiting], threads, shared);
        bool moved = false;
        bool done = run(blocks[waiting], threads, backwards, moved);
        if (overrun(blocks[waiting])) return OVERRUN;
        if (!done && !together) return HANGS;
        if (!done) waiting++;
    }
    while (waiting > 0) {
        bool moved = false;
        unsigned left = 0;
        for (unsigned i = 0; i < waiting; i++)
            if (!run(blocks[i], threads, backwards, moved)) std::swap(blocks[left++], blocks[i]);
        waiting = left;
        if (!moved) return HANGS;
    }
    return 0;
}

// 'p' for a pointer, 'f' for a float, 'i' for an integer, and its size: what the kernel itself declares.
template <class... P> inline int kinds(void (*)(P...), char *out) {
    int n = 0;
    ((out[n++] = std::is_pointer<P>::value ? 'p' : std::is_floating_point<P>::value ? 'f' : 'i',
      out[n++] = (char)('0' + sizeof(P))), ...);
    return n;
}
}  // namespace shim

// What a thread copies arrives when it asks for the end, as late as may be.
struct Copy { char *to; const char *from; int bytes; };
static std::vector<Copy> copies[1024];
template <int BYTES> inline void begin_copy(void *to, const void *from) {
    if (((uintptr_t)to | (uintptr_t)from) % BYTES != 0) abort();  // a GPU refuses it
    memset(to, 0xff, BYTES);
    copies[threadIdx.x].push_back({(char *)to, (const char *)from, BYTES});
}
inline void end_copies() {
    for (Copy &copy : copies[threadIdx.x]) memcpy(copy.to, copy.from, copy.bytes);
    copies[threadIdx.x].clear();
}
inline void __syncthreads() { shim::wait(shim::AT_BLOCK); }
inline int __syncthreads_or(int any) {
    static int found;
    shim::wait(shim::AT_BLOCK), found = 0;
    shim::wait(shim::AT_BLOCK), found |= any != 0;
    shim::wait(shim::AT_BLOCK);
    int result = found;
    shim::wait(shim::AT_BLOCK);
    return result;
}
inline void __syncwarp(unsigned = ~0u) { shim::exchange(0, shim::current); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { shim::wait(shim::SPINS); }
template <class T> inline T __ldcg(const T *place) { return *place; }
template <class T> inline T __shfl_sync(unsigned, T value, int lane) {
    return shim::exchange(value, shim::current / 32 * 32 + lane % 32);
}
template <class T> inline T __shfl_down_sync(unsigned, T value, unsigned delta) {
    unsigned lane = shim::current % 32;
    return shim::exchange(value, lane + delta < 32 ? shim::current + delta : shim::current);
}
template <class T> inline T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return shim::exchange(value, shim::current ^ mask);
}
// Tensor cores, for the layout of PTX's mma.m16n8k8 with tf32: a thread's numbers of c are (row g or g + 8, column 2t
// or 2t + 1), of a (g or g + 8, t or t + 4), of b (t or t + 4, g), where g = lane / 4 and t = lane % 4.
inline void multiply_tile(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    static float operands[2][1024][6];
    unsigned me = shim::current, side = shim::active->fibers[me].parity++ % 2, warp = me / 32 * 32;
    auto put = [&](int i, unsigned bits) { bits &= ~0x1fffu, memcpy(&operands[side][me][i], &bits, sizeof bits); };
    for (int i = 0; i < 4; i++) put(i, a[i]);
    put(4, b[0]), put(5, b[1]);
    shim::wait(shim::AT_WARP);
    float(*lanes)[6] = operands[side] + warp;
    for (unsigned e = 0; e < 4; e++)
        for (unsigned k = 0; k < 8; k++) {
            unsigned row = me % 32 / 4, column = me % 4 * 2 + e % 2;
            c[e] = fmaf(lanes[row * 4 + k % 4][k / 4 * 2 + e / 2], lanes[column * 4 + k % 4][4 + k / 4], c[e]);
        }
}
inline int __ffs(int word) { return __builtin_ffs(word); }
inline int __ffsll(long long word) { return __builtin_ffsll(word); }
inline int __clz(int word) { return word ? __builtin_clz((unsigned)word) : 32; }
inline int __clzll(long long word) { return word ? __builtin_clzll((unsigned long long)word) : 64; }
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __popcll(unsigned long long word) { return __builtin_popcountll(word); }
inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
template <class T> inline T atomicAdd(T *place, T value) { T before = *place; *place += value; return before; }

#define KERNEL(NAME) \
    extern "C" int kinds_##NAME(char *out) { return shim::kinds(NAME, out); } \
    extern "C" int launch_##NAME(unsigned blocks, unsigned threads, unsigned shared, void **values, int backwards, \
                                 int together) { \
        return shim::launch([](void **v) { shim::call(NAME, v, indices(NAME)); }, blocks, threads, shared, values, \
                            backwards, together); \
    }
template <class... P> constexpr auto indices(void (*)(P...)) { return std::index_sequence_for<P...>(); }

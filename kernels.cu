// The load-bearing kernels of kernels.py for a GPU, in CUDA C++. cuda_cpp.py puts before this text, as C, the cells and
// the numbers of kernels.py that it names: a formula is changed there. Each kernel belongs to the public function of its
// name, which checks all shapes. Arrays are contiguous; their sizes are as in that function's docstring.

CELL float widen(float x) { return x; }
CELL float widen(u16 bits) { return float_of_bfloat(bits); }
template <class To> CELL To narrow(float x);
template <> CELLS float narrow<float>(float x) { return x; }
template <> CELLS u16 narrow<u16>(float x) { return bfloat_of_float(x); }

CELL i64 global_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// V neighbours in memory, read and written at once.
template <class Type, int V> struct alignas(sizeof(Type) * V) Pack { Type at[V]; };
template <int V, class Type> CELL Pack<Type, V> read(const Type *from) { return *(const Pack<Type, V> *)from; }
template <int V, class Type> CELL void write(Type *to, const float (&values)[V]) {
    Pack<Type, V> pack;
    for (int v = 0; v < V; v++) pack.at[v] = narrow<Type>(values[v]);
    *(Pack<Type, V> *)to = pack;
}

// --------------------------------------------------------------------------------------------------------------------
// MinGRU. A thread has V channels of one segment and goes along its steps. There are few threads for what a GPU's memory
// takes to answer, so each has asked for the numbers of DEPTH steps before it computes the first.

#define DEPTH 4

template <int V, class Gate, class Input> struct Ahead { Pack<Gate, V> h, g, p; Pack<Input, V> x; bool reset, live; };

template <int V, class Gate, class Input> CELL Ahead<V, Gate, Input> read_step(
    const Gate *hgp, const Input *x, const u8 *resets, const u8 *valid, i64 row, i64 j, i64 H, i64 flag) {
    const Gate *gates = hgp + row * 3 * H + j;
    return {read<V>(gates), read<V>(gates + H), read<V>(gates + 2 * H), read<V>(x + row * H + j), resets[flag] != 0,
            valid[flag] != 0};
}

template <int V, class Gate, class Input, class Output> CELL void mingru_scan_lane(
    i64 T, i64 M, i64 N, i64 H, const Gate *hgp, const Input *x, float *states, const u8 *resets, const u8 *valid,
    const i64 *index, i64 start, Output *out) {
    i64 lane = global_thread(), lanes = H / V, m = lane / lanes, j = lane % lanes * V;
    if (m >= M) return;
    i64 column = index[start + m];
    Ahead<V, Gate, Input> ahead[DEPTH];
    for (int d = 0; d < DEPTH; d++)
        if (d < T) ahead[d] = read_step<V>(hgp, x, resets, valid, d * M + m, j, H, d * N + column);
    Pack<float, V> state = read<V>(states + m * H + j);
    for (i64 begin = 0; begin < T; begin += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            i64 t = begin + d, row = t * M + m;
            if (t >= T) break;
            Ahead<V, Gate, Input> now = ahead[d];
            if (t + DEPTH < T)
                ahead[d] = read_step<V>(hgp, x, resets, valid, row + DEPTH * M, j, H, (t + DEPTH) * N + column);
            float y[V];
#pragma unroll
            for (int v = 0; v < V; v++) {
                auto [candidate, z, q] = mingru_gates_cell(widen(now.h.at[v]), widen(now.g.at[v]), widen(now.p.at[v]));
                float before = state.at[v] * (now.reset ? 0.0f : 1.0f);
                auto [after, result] = mingru_cell(widen(now.x.at[v]), candidate, z, q, before, now.live);
                state.at[v] = after, y[v] = result;
            }
            write<V>(out + row * H + j, y);
            write<V>(states + (row + M) * H + j, state.at);
        }
    }
}

template <int V, class Real> CELL void mingru_scan_grad_lane(
    i64 T, i64 M, i64 N, i64 H, Real *hgp, const Real *x, const float *states, const u8 *resets, const u8 *valid,
    const i64 *index, i64 start, Real *grad_out, float *sums) {
    i64 lane = global_thread(), lanes = H / V, m = lane / lanes, j = lane % lanes * V;
    if (m >= M) return;
    i64 column = index[start + m];
    Ahead<V, Real, Real> ahead[DEPTH];
    Pack<float, V> states_ahead[DEPTH];
    Pack<Real, V> grads_ahead[DEPTH];
    auto ask = [&](int d, i64 t) {
        i64 row = t * M + m;
        ahead[d] = read_step<V>(hgp, x, resets, valid, row, j, H, t * N + column);
        states_ahead[d] = read<V>(states + row * H + j), grads_ahead[d] = read<V>(grad_out + row * H + j);
    };
    for (int d = 0; d < DEPTH; d++)
        if (d < T) ask(d, T - 1 - d);
    float carry[V] = {}, sum_h[V] = {}, sum_g[V] = {}, sum_p[V] = {};
    for (i64 begin = 0; begin < T; begin += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            i64 t = T - 1 - begin - d, row = t * M + m;
            if (t < 0) break;
            Ahead<V, Real, Real> now = ahead[d];
            Pack<float, V> state = states_ahead[d];
            Pack<Real, V> grad = grads_ahead[d];
            if (t >= DEPTH) ask(d, t - DEPTH);
            float keep = now.reset ? 0.0f : 1.0f, to_h[V], to_g[V], to_p[V], to_x[V];
#pragma unroll
            for (int v = 0; v < V; v++) {
                auto [candidate, z, q] = mingru_gates_cell(widen(now.h.at[v]), widen(now.g.at[v]), widen(now.p.at[v]));
                auto [dh, dg, dp, dx, ds] = mingru_cell_grad(
                    widen(now.x.at[v]), candidate, z, q, state.at[v] * keep, now.live, widen(grad.at[v]), carry[v]);
                to_h[v] = dh, to_g[v] = dg, to_p[v] = dp, to_x[v] = dx;
                sum_h[v] += dh, sum_g[v] += dg, sum_p[v] += dp, carry[v] = ds * keep;
            }
            Real *gates = hgp + row * 3 * H + j;
            write<V>(gates, to_h), write<V>(gates + H, to_g), write<V>(gates + 2 * H, to_p);
            write<V>(grad_out + row * H + j, to_x);
        }
    }
    float *sum = sums + m * 3 * H + j;
    write<V>(sum, sum_h), write<V>(sum + H, sum_g), write<V>(sum + 2 * H, sum_p);
}

// Gates, inputs and outputs are float32, bfloat16, or bfloat16 with a float32 output, as the last layer's is.

extern "C" __global__ void mingru_scan(i64 T, i64 M, i64 N, i64 H, const float *hgp, const float *x, float *states,
                                       const u8 *resets, const u8 *valid, const i64 *index, i64 start, float *out) {
    if (H % 2) mingru_scan_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, out);
    else mingru_scan_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, out);
}

extern "C" __global__ void mingru_scan_half(i64 T, i64 M, i64 N, i64 H, const u16 *hgp, const u16 *x, float *states,
                                            const u8 *resets, const u8 *valid, const i64 *index, i64 start, u16 *out) {
    if (H % 2) mingru_scan_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, out);
    else mingru_scan_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, out);
}

extern "C" __global__ void mingru_scan_half_last(i64 T, i64 M, i64 N, i64 H, const u16 *hgp, const u16 *x,
                                                 float *states, const u8 *resets, const u8 *valid, const i64 *index,
                                                 i64 start, float *out) {
    if (H % 2) mingru_scan_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, out);
    else mingru_scan_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, out);
}

extern "C" __global__ void mingru_scan_grad(i64 T, i64 M, i64 N, i64 H, float *hgp, const float *x,
                                            const float *states, const u8 *resets, const u8 *valid, const i64 *index,
                                            i64 start, float *grad_out, float *sums) {
    if (H % 2) mingru_scan_grad_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
    else mingru_scan_grad_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
}

extern "C" __global__ void mingru_scan_grad_half(i64 T, i64 M, i64 N, i64 H, u16 *hgp, const u16 *x,
                                                 const float *states, const u8 *resets, const u8 *valid,
                                                 const i64 *index, i64 start, u16 *grad_out, float *sums) {
    if (H % 2) mingru_scan_grad_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
    else mingru_scan_grad_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
}

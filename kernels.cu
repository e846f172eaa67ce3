// The kernels that take most of a GPU's time, in CUDA C++. cuda_cpp.py puts before this text, as C, the cells and
// the numbers of kernels.py that it names: a formula is changed there. Each kernel belongs to the public function of its
// name, which checks all shapes. Arrays are contiguous; their sizes are as in that function's docstring.

CELL float widen(float x) { return x; }
CELL float widen(u16 bits) { return float_of_bfloat(bits); }
template <class To> CELL To rounded_to(float x);
template <> CELLS float rounded_to<float>(float x) { return x; }
template <> CELLS u16 rounded_to<u16>(float x) { return bfloat_of_float(x); }

CELL i64 global_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// V neighbours in memory, read and written at once.
template <class Type, int V> struct alignas(sizeof(Type) * V) Pack { Type at[V]; };
template <int V, class Type> CELL Pack<Type, V> read(const Type *from) { return *(const Pack<Type, V> *)from; }
template <int V, class Type> CELL void write(Type *to, const float (&values)[V]) {
    Pack<Type, V> pack;
    for (int v = 0; v < V; v++) pack.at[v] = rounded_to<Type>(values[v]);
    *(Pack<Type, V> *)to = pack;
}

// --------------------------------------------------------------------------------------------------------------------
// MinGRU. The initial states are those in states[0], or the drawn columns of `initial`. A thread has V channels of one
// segment and goes along its steps. There are few threads for a memory that answers so late, so each asks for the numbers
// of DEPTH steps before it computes the first. V is 1 if two channels a thread would leave too few threads, or H is odd.

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
    const i64 *index, i64 start, const float *initial, bool drawn, Output *out) {
    i64 lane = global_thread(), lanes = H / V, m = lane / lanes, j = lane % lanes * V;
    if (m >= M) return;
    i64 column = index[start + m];
    Ahead<V, Gate, Input> ahead[DEPTH];
    for (int d = 0; d < DEPTH; d++)
        if (d < T) ahead[d] = read_step<V>(hgp, x, resets, valid, d * M + m, j, H, d * N + column);
    Pack<float, V> state = read<V>(initial + (drawn ? column : m) * H + j);
    if (drawn) write<V>(states + m * H + j, state.at);
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

CELL bool one_channel(i64 M, i64 H) { return H % 2 || M * H < MANY; }  // a thread; kernels._launch_scan counts them

// Gates, inputs and outputs are float32, bfloat16, or bfloat16 with a float32 output, as the last layer's is.

extern "C" __global__ void mingru_scan(i64 T, i64 M, i64 N, i64 H, const float *hgp, const float *x, float *states,
                                       const u8 *resets, const u8 *valid, const i64 *index, i64 start,
                                       const float *initial, bool drawn, float *out) {
    if (one_channel(M, H)) mingru_scan_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
    else mingru_scan_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
}

extern "C" __global__ void mingru_scan_half(i64 T, i64 M, i64 N, i64 H, const u16 *hgp, const u16 *x, float *states,
                                            const u8 *resets, const u8 *valid, const i64 *index, i64 start,
                                            const float *initial, bool drawn, u16 *out) {
    if (one_channel(M, H)) mingru_scan_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
    else mingru_scan_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
}

extern "C" __global__ void mingru_scan_half_last(i64 T, i64 M, i64 N, i64 H, const u16 *hgp, const u16 *x,
                                                 float *states, const u8 *resets, const u8 *valid, const i64 *index,
                                                 i64 start, const float *initial, bool drawn, float *out) {
    if (one_channel(M, H)) mingru_scan_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
    else mingru_scan_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
}

extern "C" __global__ void mingru_scan_grad(i64 T, i64 M, i64 N, i64 H, float *hgp, const float *x,
                                            const float *states, const u8 *resets, const u8 *valid, const i64 *index,
                                            i64 start, float *grad_out, float *sums) {
    if (one_channel(M, H)) mingru_scan_grad_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
    else mingru_scan_grad_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
}

extern "C" __global__ void mingru_scan_grad_half(i64 T, i64 M, i64 N, i64 H, u16 *hgp, const u16 *x,
                                                 const float *states, const u8 *resets, const u8 *valid,
                                                 const i64 *index, i64 start, u16 *grad_out, float *sums) {
    if (one_channel(M, H)) mingru_scan_grad_lane<1>(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
    else mingru_scan_grad_lane<2>(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
}

// --------------------------------------------------------------------------------------------------------------------
// A rollout's step of the whole default network. A block copies all weights into its shared memory and then takes one
// tile of `rows` agents after the other. What flows between the layers stays there, a column's rows side by side.

#define EACH 8     // rows whose sums one thread has
#define IN_WAY 16  // numbers that a thread asks for before it puts the first in its place

CELL i64 fours(i64 n) { return (n + 3) / 4 * 4; }
// The length of a row of n weights: threads that read four numbers each of neighbouring rows then meet no bank twice.
CELL int weight_pitch(i64 n) { return (int)((n + 3) / 8 * 8 + 4); }

// write(row, column, read(row, column)) for all rows and columns, by all threads of a block.
template <class Value, class Read, class Write> CELL void carry(int rows, int columns, Read read, Write write) {
    int row = threadIdx.x / columns, column = threadIdx.x % columns;
    int down = blockDim.x / columns, right = blockDim.x % columns;
    auto next = [=](int &row, int &column) {
        row += down, column += right;
        if (column >= columns) column -= columns, row++;
    };
    while (row < rows) {
        Value values[IN_WAY];
        int r = row, c = column;
#pragma unroll
        for (int i = 0; i < IN_WAY; i++, next(r, c))
            if (r < rows) values[i] = read(r, c);
#pragma unroll
        for (int i = 0; i < IN_WAY; i++, next(row, column))
            if (row < rows) write(row, column, values[i]);
    }
}

// Weights (outputs, inputs) with zeros behind each row, to full fours.
template <class Real> CELL void carry_weights(const Real *from, Real *to, int outputs, int inputs) {
    int pitch = weight_pitch(inputs);
    if (inputs % 4 == 0)
        carry<Pack<Real, 4>>(
            outputs, inputs / 4, [=](int row, int k) { return read<4>(from + (i64)row * inputs + 4 * k); },
            [=](int row, int k, Pack<Real, 4> four) { *(Pack<Real, 4> *)(to + row * pitch + 4 * k) = four; });
    else
        carry<Real>(
            outputs, fours(inputs), [=](int row, int k) { return k < inputs ? from[(i64)row * inputs + k] : Real(0); },
            [=](int row, int k, Real weight) { to[row * pitch + k] = weight; });
}

template <class Real> CELL void carry_bias(const Real *from, float *to, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = widen(from[i]);
}

// An observation's number, of one of the types in fused.DTYPES.
CELL float number_at(const void *from, i64 kind, i64 i) {
    switch (kind) {
    case 0: return ((const float *)from)[i];
    case 1: return ((const u8 *)from)[i];
    case 2: return ((const signed char *)from)[i];
    case 3: return ((const short *)from)[i];
    case 4: return ((const u16 *)from)[i];
    case 5: return (float)((const int *)from)[i];
    case 6: return (float)((const u32 *)from)[i];
    case 7: return (float)((const i64 *)from)[i];
    default: return (float)((const double *)from)[i];
    }
}

// sum[g][r] += the weights' row g, `apart` from the one before it, times row r of x.
template <int G, int R, class Real> CELL void add_products(int inputs, const Real *weights, int apart, const float *x,
                                                           int pitch, float (&sum)[G][R]) {
    constexpr int V = R < 4 ? R : 4;
#pragma unroll 1
    for (int k = 0; k < inputs; k += 4) {
        Pack<Real, 4> four[G];
#pragma unroll
        for (int g = 0; g < G; g++) four[g] = read<4>(weights + g * apart + k);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int r = 0; r < R; r += V) {
                Pack<float, V> part = read<V>(x + (k + i) * pitch + r);
#pragma unroll
                for (int v = 0; v < V; v++)
#pragma unroll
                    for (int g = 0; g < G; g++) sum[g][r + v] += widen(four[g].at[i]) * part.at[v];
            }
        }
    }
}

// Column j's rows from r on, and behind the last column zeros, to full fours.
CELL void put(float *x, int columns, int pitch, int j, int r, const float (&values)[EACH]) {
#pragma unroll
    for (int v = 0; v < EACH; v++) x[j * pitch + r + v] = values[v];
    for (int k = columns; j + 1 == columns && k < fours(columns); k++)
        for (int v = 0; v < EACH; v++) x[k * pitch + r + v] = 0.0f;
}

template <class Real> CELL float rounded(float x) { return widen(rounded_to<Real>(x)); }

// weights: addresses of the encoder's weight and bias, each layer's, and the decoder's; all but the decoder's are
// bfloat16 if `half`, as is then what flows, but for the last layer's output. state: its first layer, the others
// state_stride further on each; it changes only if `commit`. log_std is read, and a Gaussian drawn from, if there are
// no heads; squash_row as in ppo_loss_continuous. Without `drawn` nothing after `outputs` is written. If `restricted`,
// a block that has no agent with a flag in `only` does nothing.
extern "C" __global__ void __launch_bounds__(256, 1)
policy_step(i64 n, i64 inputs, i64 hidden, i64 layers, i64 width, i64 rows, bool half, const i64 *weights, i64 kind,
            const void *observations, bool normalised, const float *shift, const float *scale, i64 state_stride,
            bool commit, float *state, const u8 *resets, const u8 *valid, bool restricted, const u8 *only,
            float *outputs, bool drawn, u64 seed, i64 first_agent, const i64 *counter, i64 head_count,
            const i64 *heads, bool masked, const u8 *masks, const float *log_std, i64 squash_row, const float *squash,
            void *actions, float *samples, float *logprobs, float *values) {
    SHARED_MEMORY(float, memory);
    bool any = !restricted;
    for (i64 i = blockIdx.x * rows + threadIdx.x; restricted && threadIdx.x < rows && i < n; i += gridDim.x * rows)
        any |= only[i] != 0;
    if (!__syncthreads_or(any)) return;
    int D = (int)inputs, H = (int)hidden, pitch = (int)rows + 4, wide = weight_pitch(D), narrow = weight_pitch(H);
    float *even = memory, *odd = even + fours(D > H ? D : H) * pitch;  // fused.PolicyStep.size counts these as well
    float *decoder = odd + fours(H) * pitch, *left = decoder + width * narrow, *biases = left + rows * width;
    void *rest = left + fours(rows * width + (3 * layers + 1) * H + width);
    float *decoder_bias = biases + (3 * layers + 1) * H;
    carry_weights((const float *)weights[2 * layers + 2], decoder, (int)width, H);
    carry_bias((const float *)weights[2 * layers + 3], decoder_bias, (int)width);

    auto take = [&](auto like) {
        typedef decltype(like) Real;
        Real *encoder = (Real *)rest, *gates = encoder + H * wide;
        carry_weights((const Real *)weights[0], encoder, H, D);
        carry_bias((const Real *)weights[1], biases, H);
        for (int l = 0; l < layers; l++) {
            carry_weights((const Real *)weights[2 * l + 2], gates + 3 * l * H * narrow, 3 * H, H);
            carry_bias((const Real *)weights[2 * l + 3], biases + (3 * l + 1) * H, 3 * H);
        }
        for (i64 begin = blockIdx.x * rows; begin < n; begin += gridDim.x * rows) {
            carry<float>(
                (int)rows, (int)fours(D),
                [&](int row, int k) {
                    if (begin + row >= n || k >= D) return 0.0f;
                    float x = number_at(observations, kind, (begin + row) * D + k);
                    return rounded<Real>(normalised ? normalise_cell(x, shift[k], scale[k]) : x);
                },
                [&](int row, int k, float x) { even[k * pitch + row] = x; });
            __syncthreads();
            for (int item = threadIdx.x; item < H * (rows / EACH); item += blockDim.x) {
                int j = item % H, r = item / H * EACH;
                float sum[1][EACH] = {};
                add_products((int)fours(D), encoder + j * wide, 0, even + r, pitch, sum);
#pragma unroll
                for (int v = 0; v < EACH; v++) sum[0][v] = rounded<Real>(sum[0][v] + biases[j]);
                put(odd, H, pitch, j, r, sum[0]);
            }
            __syncthreads();
            float *x = odd, *y = even;
            for (int l = 0; l < layers; l++) {
                const float *bias = biases + (3 * l + 1) * H;
                for (int item = threadIdx.x; item < H * (rows / EACH); item += blockDim.x) {
                    int j = item % H, r = item / H * EACH;
                    float *place = state + l * state_stride + (begin + r) * H + j, before[EACH], sum[3][EACH] = {};
#pragma unroll
                    for (int v = 0; v < EACH; v++)
                        before[v] = begin + r + v < n ? place[v * H] * (resets[begin + r + v] ? 0.0f : 1.0f) : 0.0f;
                    add_products((int)fours(H), gates + (3 * l * H + j) * narrow, H * narrow, x + r, pitch, sum);
#pragma unroll
                    for (int v = 0; v < EACH; v++) {
                        bool inside = begin + r + v < n;
                        auto [candidate, z, q] = mingru_gates_cell(rounded<Real>(sum[0][v] + bias[j]),
                                                                   rounded<Real>(sum[1][v] + bias[H + j]),
                                                                   rounded<Real>(sum[2][v] + bias[2 * H + j]));
                        auto [after, result] = mingru_cell(x[j * pitch + r + v], candidate, z, q, before[v],
                                                           inside && valid[begin + r + v] != 0);
                        if (commit && inside) place[v * H] = after;
                        before[v] = l + 1 < layers ? rounded<Real>(result) : result;
                    }
                    put(y, H, pitch, j, r, before);
                }
                __syncthreads();
                float *last = x;
                x = y, y = last;
            }
            for (int item = threadIdx.x; item < width * rows; item += blockDim.x) {
                int j = item % (int)width, r = item / (int)width;
                float sum[1][1] = {};
                add_products((int)fours(H), decoder + j * narrow, 0, x + r, pitch, sum);
                left[item] = sum[0][0] + decoder_bias[j];
                if (begin + r < n) outputs[begin * width + item] = left[item];
            }
            __syncthreads();
            i64 i = begin + threadIdx.x;
            if (!drawn || threadIdx.x >= rows || i >= n) continue;
            const float *row = left + threadIdx.x * width;
            float logprob = 0.0f;
            for (i64 h = 0, first = 0; h < head_count; first += heads[h++]) {
                auto words = action_words_cell(seed, (u64)counter[0], first_agent + i, h);
                auto [action, chosen] = choose_cell(row, masks + (masked ? i * (width - 1) : 0), masked, first,
                                                    first + heads[h], uniform_cell(words.a), false);
                ((int *)actions)[i * head_count + h] = (int)action, logprob += chosen;
            }
            for (i64 j = 0, place = i * (width - 1); head_count == 0 && j < width - 1; j++, place++) {
                auto words = action_words_cell(seed, (u64)counter[0], first_agent + i, j);
                auto [u, surprise] = gaussian_draw_cell(row[j], log_std[j], words.a, words.b, false);
                samples[place] = u, logprob -= surprise;
                if (squash[squash_row] > 0.0f) {
                    auto [inside, log_slope] = squash_cell(u);
                    ((float *)actions)[place] = squash[j] + squash[squash_row + j] * inside;
                    logprob -= squash[2 * squash_row + j] + log_slope;
                }
            }
            logprobs[i] = logprob, values[i] = row[width - 1];
        }
    };
    if (half) take(u16(0));
    else take(0.0f);
}

// --------------------------------------------------------------------------------------------------------------------
// Sums over all threads of a grid, the same in every run: a warp's by shuffles, a block's through shared memory into its
// row of `parts`; the block that is done last adds up the rows, in order. `ticket` counts the blocks that are done; it is
// 0 before and after.

CELL double warp_sum(double x) {
    for (int delta = 16; delta > 0; delta /= 2) x += __shfl_down_sync(~0u, x, delta);
    return x;
}

// Whether this block is the last. What each has written before, it may read by __ldcg.
CELL bool is_last_block(int *ticket, int *shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *shared = atomicAdd(ticket, 1) == (int)gridDim.x - 1;
        if (*shared) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return *shared;
}

template <int COUNT> struct Shared { double sums[32 * COUNT]; int last; };

// True in the last block, in which shared.sums[0] to [COUNT - 1] are then the sums of `mine`.
template <int COUNT> CELL bool grid_sums(double (&mine)[COUNT], double *parts, int *ticket, Shared<COUNT> &shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        double sum = warp_sum(mine[k]);
        if (lane == 0) shared.sums[warp * COUNT + k] = sum;
    }
    __syncthreads();
    if (threadIdx.x < COUNT) {
        double sum = 0.0;
        for (int w = 0; w < warps; w++) sum += shared.sums[w * COUNT + threadIdx.x];
        parts[blockIdx.x * COUNT + threadIdx.x] = sum;
    }
    if (!is_last_block(ticket, &shared.last)) return false;
    for (int k = warp; k < COUNT; k += warps) {
        double sum = 0.0;
        for (unsigned block = lane; block < gridDim.x; block += 32) sum += __ldcg(parts + block * COUNT + k);
        sum = warp_sum(sum);
        if (lane == 0) shared.sums[k] = sum;
    }
    __syncthreads();
    return true;
}

// --------------------------------------------------------------------------------------------------------------------
// Advantages and priorities: a warp for each segment in `index`; eight neighbours, a block, share what the memory brings.
// A warp's lanes read 32 steps at once. Then the last lane hands its result to the one before, and so on.

extern "C" __global__ void advantage(i64 T, i64 N, i64 count, const i64 *index, const float *values,
                                     const float *rewards, const u8 *terminals, const u8 *truncations,
                                     const float *bootstraps, const float *ratios, const u8 *valid, float gamma,
                                     float gae_lambda, float rho_clip, float c_clip, float reward_clip,
                                     float *advantages) {
    i64 m = global_thread() / 32;
    int lane = threadIdx.x % 32;
    if (m >= count || (m > 0 && index[m - 1] == index[m])) return;  // a segment drawn twice
    i64 n = index[m];
    float next_advantage = 0.0f, next_value = values[T * N + n];
    for (i64 end = T; end > 0; end -= 32) {
        int steps = end < 32 ? (int)end : 32;
        i64 place = (end - steps + lane) * N + n;
        float value = 0.0f, reward = 0.0f, bootstrap = 0.0f, ratio = 0.0f, own = 0.0f;
        bool done = false, live = false;
        if (lane < steps) {
            value = values[place], reward = rewards[place], bootstrap = bootstraps[place], ratio = ratios[place];
            done = terminals[place] != 0 || truncations[place] != 0, live = valid[place] != 0;
        }
        for (int turn = steps - 1; turn >= 0; turn--) {
            auto [result, following] =
                advantage_cell(value, reward, done, bootstrap, ratio, live, next_advantage, next_value, gamma,
                               gae_lambda, rho_clip, c_clip, reward_clip);
            next_advantage = __shfl_sync(~0u, result, turn), next_value = __shfl_sync(~0u, following, turn);
            if (lane == turn) own = result;
        }
        if (lane < steps) advantages[place] = live ? own : 0.0f;
    }
}

extern "C" __global__ void priorities(i64 T, i64 N, i64 count, const float *advantages, const u8 *valid, double alpha,
                                      const i64 *index, double *masses) {
    i64 m = global_thread() / 32;
    if (m >= count) return;
    i64 n = index[m];
    double total = 0.0, live = 0.0;
    for (i64 t = threadIdx.x % 32; t < T; t += 32)
        if (valid[t * N + n] != 0) total += fabs((double)advantages[t * N + n]), live = 1.0;
    total = warp_sum(total), live = warp_sum(live);
    if (threadIdx.x % 32 == 0) masses[n] = live > 0.0 ? pow(total, alpha) + 1e-6 : 0.0;
}

// --------------------------------------------------------------------------------------------------------------------
// Sums of a minibatch

extern "C" __global__ void advantage_moments(i64 T, i64 M, i64 N, const float *advantages, const u8 *valid,
                                             const i64 *index, double *parts, int *ticket, double *moments) {
    __shared__ Shared<3> shared;
    double mine[3] = {};
    for (i64 i = global_thread(); i < T * M; i += (i64)gridDim.x * blockDim.x) {
        i64 place = i / M * N + index[i % M];
        if (valid[place] == 0) continue;
        double a = advantages[place];
        mine[0] += 1.0, mine[1] += a, mine[2] += a * a;
    }
    if (grid_sums(mine, parts, ticket, shared) && threadIdx.x < 3) moments[threadIdx.x] = shared.sums[threadIdx.x];
}

CELL double squares(i64 n, const float *flat) {
    double sum = 0.0;
    for (i64 i = global_thread(); i < n; i += (i64)gridDim.x * blockDim.x) sum += (double)flat[i] * flat[i];
    return sum;
}

extern "C" __global__ void gradient_norm(i64 n, const float *flat, double *parts, int *ticket, double *norm) {
    __shared__ Shared<1> shared;
    double mine[1] = {squares(n, flat)};
    if (grid_sums(mine, parts, ticket, shared) && threadIdx.x == 0) norm[0] = sqrt(shared.sums[0]);
}

// The norm, and Muon's scalars from it: clip's scale (NaN if nothing may change), momentum, decay, learning rate.
extern "C" __global__ void clip(i64 n, const float *flat, double max_grad_norm, float momentum, float weight_decay,
                                const float *rate, double *parts, int *ticket, float *found_inf, double *norm,
                                float *scalars) {
    __shared__ Shared<1> shared;
    double mine[1] = {squares(n, flat)};
    if (!grid_sums(mine, parts, ticket, shared) || threadIdx.x != 0) return;
    norm[0] = sqrt(shared.sums[0]);
    if (!(norm[0] <= 1.7976931348623157e308)) found_inf[0] = 1.0f;
    float scale = (float)(max_grad_norm / (norm[0] + 1e-6));
    scalars[0] = found_inf[0] != 0.0f ? bits_as<float>(0x7fffffffu) : scale < 1.0f ? scale : 1.0f;
    scalars[1] = momentum, scalars[2] = 1.0f - rate[0] * weight_decay, scalars[3] = rate[0];
}

// gradient = the sum of the rows, or += if `add`. A block has some rows and up to blockDim.x columns: neighbouring threads read what
// lies side by side, also where there are few columns.
template <class Real> CELL void add_rows_block(i64 rows, i64 columns, i64 chunk, const Real *values, double *parts,
                                               int *ticket, bool add, float *gradient, double *shared, int *last) {
    i64 width = columns < blockDim.x ? columns : blockDim.x, side_by_side = blockDim.x / width;
    i64 tiles = (columns + width - 1) / width, piece = blockIdx.x / tiles;
    i64 column = blockIdx.x % tiles * width + threadIdx.x % width, row = piece * chunk + threadIdx.x / width;
    bool inside = threadIdx.x < side_by_side * width && column < columns;
    float sum = 0.0f;
    i64 end = (piece + 1) * chunk < rows ? (piece + 1) * chunk : rows;
    if (inside)
        for (; row < end; row += side_by_side) sum += widen(values[row * columns + column]);
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (inside && threadIdx.x < width) {
        double total = 0.0;
        for (i64 i = 0; i < side_by_side; i++) total += shared[i * width + threadIdx.x];
        parts[piece * columns + column] = total;
    }
    if (!is_last_block(ticket, last)) return;
    for (i64 c = threadIdx.x; c < columns; c += blockDim.x) {
        double total = 0.0;
        for (i64 i = 0; i < gridDim.x / tiles; i++) total += __ldcg(parts + i * columns + c);
        gradient[c] = (add ? gradient[c] : 0.0f) + (float)total;
    }
}

extern "C" __global__ void add_rows(i64 rows, i64 columns, i64 chunk, const float *values, double *parts, int *ticket,
                                    bool add, float *gradient) {
    __shared__ double shared[256];
    __shared__ int last;
    add_rows_block(rows, columns, chunk, values, parts, ticket, add, gradient, shared, &last);
}

extern "C" __global__ void add_rows_half(i64 rows, i64 columns, i64 chunk, const u16 *values, double *parts,
                                         int *ticket, bool add, float *gradient) {
    __shared__ double shared[256];
    __shared__ int last;
    add_rows_block(rows, columns, chunk, values, parts, ticket, add, gradient, shared, &last);
}

// --------------------------------------------------------------------------------------------------------------------
// PPO loss: a thread a step

struct Head { float top, total, log_total, entropy; };

// One head of a row of logits. The gradient needs this once more, which costs less than to keep it in memory.
CELL Head read_head(const float *row, const u8 *mask, bool masked, i64 first, i64 last) {
    Head head = {head_max_cell(row, mask, masked, first, last), 0.0f, 0.0f, 0.0f};
    for (i64 j = first; j < last; j++) head.total += masked && mask[j] == 0 ? 0.0f : exp_cell(row[j] - head.top);
    head.log_total = logf(head.total);
    for (i64 j = first; j < last; j++) {
        float p = masked && mask[j] == 0 ? 0.0f : exp_cell(row[j] - head.top) / head.total;
        head.entropy += entropy_cell(p, row[j] - head.top - head.log_total);
    }
    return head;
}

extern "C" __global__ void ppo_loss_discrete(
    i64 T, i64 M, i64 N, i64 B, i64 width, i64 start, i64 head_count, bool masked, const float *outputs,
    const i64 *index, const u8 *masks, const i64 *heads, const int *actions, const float *logprobs, const float *values,
    const float *advantages, const float *weights, const u8 *valid, const float *settings, float *grad,
    float *new_values, float *ratios, double *parts, int *ticket, double *sums) {
    __shared__ Shared<SUMS> shared;
    double mine[SUMS] = {};
    float clip_coef = settings[CLIP_COEF], ent_coef = settings[ENT_COEF] * settings[ROW_SCALE];
    for (i64 i = global_thread(); i < T * M; i += (i64)gridDim.x * blockDim.x) {
        i64 t = i / M, m = i % M, column = start + m, place = t * N + index[column];
        const float *row = outputs + i * width;
        const u8 *mask = masks + (masked ? place * (width - 1) : 0);
        float *drow = grad + i * width, value = row[width - 1], old_value = values[place];
        bool live = valid[place] != 0;
        new_values[t * B + column] = live ? value : old_value;
        if (!live) {
            for (i64 j = 0; j < width; j++) drow[j] = 0.0f;
            ratios[t * B + column] = 1.0f;
            continue;
        }
        const int *chosen = actions + place * head_count;
        float logprob = 0.0f, entropy = 0.0f, advantage = advantages[place];
        Head head;
        for (i64 h = 0, first = 0; h < head_count; first += heads[h++]) {
            head = read_head(row, mask, masked, first, first + heads[h]);
            logprob += row[first + chosen[h]] - head.top - head.log_total;
            entropy += head.entropy;
        }
        float target = advantage + old_value;
        auto [policy, value_loss, ratio, logratio, dlogprob, dvalue] = objective_cell(
            logprob, logprobs[place], value, old_value, advantage, weights[column], settings);
        for (i64 h = 0, first = 0; h < head_count; first += heads[h++]) {
            if (head_count > 1) head = read_head(row, mask, masked, first, first + heads[h]);
            for (i64 j = first; j < first + heads[h]; j++) {
                float p = masked && mask[j] == 0 ? 0.0f : exp_cell(row[j] - head.top) / head.total;
                float slope = entropy_grad_cell(p, row[j] - head.top - head.log_total, head.entropy);
                drow[j] = logit_grad_cell(slope, p, j == first + chosen[h], dlogprob, ent_coef);
            }
        }
        drow[width - 1] = dvalue;
        ratios[t * B + column] = ratio;
        statistics_cell(mine, policy, value_loss, entropy, ratio, logratio, clip_coef, target, target - value);
    }
    if (grid_sums(mine, parts, ticket, shared) && threadIdx.x < SUMS) sums[threadIdx.x] += shared.sums[threadIdx.x];
}

// spread_row: from one step's log_std to the next one's, 0 if all have the same. squash_row: the length of squash's rows.
extern "C" __global__ void ppo_loss_continuous(
    i64 T, i64 M, i64 N, i64 B, i64 width, i64 start, i64 spread_row, i64 squash_row, const float *outputs,
    const i64 *index, const float *log_std, const float *squash, const float *actions, const float *logprobs,
    const float *values, const float *advantages, const float *weights, const u8 *valid, const float *settings,
    float *grad, float *grad_log_std, float *new_values, float *ratios, double *parts, int *ticket, double *sums) {
    __shared__ Shared<SUMS> shared;
    double mine[SUMS] = {};
    float clip_coef = settings[CLIP_COEF], ent_coef = settings[ENT_COEF] * settings[ROW_SCALE];
    bool squashed = squash[squash_row] > 0.0f;
    for (i64 i = global_thread(); i < T * M; i += (i64)gridDim.x * blockDim.x) {
        i64 t = i / M, m = i % M, column = start + m, place = t * N + index[column], dims = width - 1;
        const float *row = outputs + i * width, *spread = log_std + i * spread_row, *chosen = actions + place * dims;
        float *drow = grad + i * width, *dspread = grad_log_std + i * dims;
        float value = row[dims], old_value = values[place], advantage = advantages[place];
        bool live = valid[place] != 0;
        new_values[t * B + column] = live ? value : old_value;
        if (!live) {
            for (i64 j = 0; j < dims; j++) drow[j] = dspread[j] = 0.0f;
            drow[dims] = 0.0f;
            ratios[t * B + column] = 1.0f;
            continue;
        }
        float logprob = 0.0f, entropy = 0.0f, target = advantage + old_value;
        for (i64 j = 0; j < dims; j++) {
            float log_slope = squashed ? squash[2 * squash_row + j] + squash_cell(chosen[j]).b : 0.0f;
            auto [surprise, uncertainty] = gaussian_cell(chosen[j], row[j], spread[j], log_slope);
            logprob -= surprise, entropy += uncertainty;
        }
        auto [policy, value_loss, ratio, logratio, dlogprob, dvalue] = objective_cell(
            logprob, logprobs[place], value, old_value, advantage, weights[column], settings);
        for (i64 j = 0; j < dims; j++) {
            float inside = squashed ? squash_cell(chosen[j]).a : 0.0f;
            auto [dmean, dlog_std] = gaussian_grad_cell(chosen[j], row[j], spread[j], inside, dlogprob, ent_coef);
            drow[j] = dmean, dspread[j] = dlog_std;
        }
        drow[dims] = dvalue;
        ratios[t * B + column] = ratio;
        statistics_cell(mine, policy, value_loss, entropy, ratio, logratio, clip_coef, target, target - value);
    }
    if (grid_sums(mine, parts, ticket, shared) && threadIdx.x < SUMS) sums[threadIdx.x] += shared.sums[threadIdx.x];
}

// --------------------------------------------------------------------------------------------------------------------
// Draw, by one block of 1,024 threads, each with a piece of the segments

struct Before { double warps, lanes; };  // what the warps before this thread's have, and the lanes before it

// Added up in the threads' order, so that a running sum never falls, and stays where nothing is added: warps + (lanes +
// what a thread adds) ends where the next thread's begins.
CELL Before sum_before(double mine, double *shared, double *totals) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shared[warp * 33 + lane] = mine;
    __syncthreads();
    if (threadIdx.x < 32) {
        double sum = 0.0;
        for (int i = threadIdx.x * 33; i < (int)threadIdx.x * 33 + 32; i++) {
            double next = shared[i];
            shared[i] = sum;
            sum += next;
        }
        totals[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (int w = 0; w < 32; w++) {
            double next = totals[w];
            totals[w] = sum;
            sum += next;
        }
    }
    __syncthreads();
    return {totals[warp], shared[warp * 33 + lane]};
}

extern "C" __global__ void __launch_bounds__(1024)
draw(i64 N, i64 M, i64 first, u64 seed, const i64 *counter, const float *beta, const double *masses, double *cumulative,
     i64 *index, float *weights) {
    __shared__ double shared[32 * 33], totals[32];
    i64 piece = (N + 1023) / 1024, begin = threadIdx.x * piece, end = begin + piece < N ? begin + piece : N;
    double sum = 0.0;
    for (i64 n = begin; n < end; n++) sum += masses[n];
    Before before = sum_before(sum, shared, totals);
    sum = 0.0;
    for (i64 n = begin; n < end; n++) {
        sum += masses[n];
        cumulative[n] = before.warps + (before.lanes + sum);
    }
    __syncthreads();

    double total = cumulative[N - 1];
    Row<double> row = {cumulative, N};
    i64 live = search_cell(row, total, false);  // the last segment with a mass; a NaN ends at some segment
    live = live < N - 1 ? live : N - 1;
    u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
    i64 begun = counter[1] * M;  // draws of the minibatches before
    for (i64 m = threadIdx.x; m < M; m += 1024) {
        auto words = philox_cell((u32)(first + m), (u32)counter[0], (u32)(begun / N), PURPOSE_DRAW, key0, key1);
        double u = ((double)words.a * 4294967296.0 + (double)words.b) * 5.421010862427522e-20;  // 2^-64
        u += (double)(begun % N) / N;
        i64 found = search_cell(row, (m + (u - floor(u))) / M * total, true);
        found = found < live ? found : live;
        double share = N * (masses[found] / total);  // NaN ** 0 is 1, which would hide it
        index[m] = found;
        weights[m] = share > 0.0 ? (float)pow(share, -(double)beta[0]) : bits_as<float>(0x7fffffffu);
    }
}

// --------------------------------------------------------------------------------------------------------------------
// Newton-Schulz: all steps of all matrices in one launch, whose blocks wait for each other between the products

// Until all blocks are here; `round` counts the times. There must be no more blocks than run at once. What the others
// have written is then read by __ldcg.
CELL void meet(int *arrived, int &round) {
    __syncthreads();
    if (threadIdx.x == 0) {
        int expected = ++round * gridDim.x;
        __threadfence();  // for all of the block, whose writes came before the barrier
        atomicAdd(arrived, 1);
        while (*(volatile int *)arrived < expected) __nanosleep(20);
        __threadfence();
    }
    __syncthreads();
}

struct Tiles { float left[32][33], right[32][33], scale; };

// The 32 x 32 numbers of a · b at (i, j), two by two for each of 256 threads; a (rows, inner), b (inner, columns), or
// (columns, inner) if it is to be transposed.
template <bool TRANSPOSED> CELL void tile_product(const float *a, const float *b, i64 rows, i64 columns, i64 inner, i64 i,
                                                  i64 j, Tiles &tiles, float (&sum)[2][2]) {
    int x = threadIdx.x % 16, y = threadIdx.x / 16, column = threadIdx.x % 32, row = threadIdx.x / 32;
    sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = 0.0f;
    for (i64 k = 0; k < inner; k += 32) {
        __syncthreads();
        for (int r = row; r < 32; r += 8) {
            tiles.left[r][column] = i + r < rows && k + column < inner ? __ldcg(a + (i + r) * inner + k + column) : 0.0f;
            if (TRANSPOSED)
                tiles.right[column][r] =
                    j + r < columns && k + column < inner ? __ldcg(b + (j + r) * inner + k + column) : 0.0f;
            else
                tiles.right[r][column] =
                    k + r < inner && j + column < columns ? __ldcg(b + (k + r) * columns + j + column) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int l = 0; l < 32; l++) {
            float left0 = tiles.left[y][l], left1 = tiles.left[y + 16][l];
            float right0 = tiles.right[l][x], right1 = tiles.right[l][x + 16];
            sum[0][0] += left0 * right0, sum[0][1] += left0 * right1;
            sum[1][0] += left1 * right0, sum[1][1] += left1 * right1;
        }
    }
}

// 1/(norm + 1e-7) from the diagonal of the product with the transpose, or 1 after the first step, for all threads.
CELL float first_scale(bool first, const float *gram, i64 rows, Tiles &tiles) {
    __syncthreads();
    if (threadIdx.x < 32) {
        double sum = 0.0;
        for (i64 r = threadIdx.x; first && r < rows; r += 32) sum += __ldcg(gram + r * rows + r);
        sum = warp_sum(sum);
        if (threadIdx.x == 0) tiles.scale = first ? (float)(1.0 / (sqrt(sum) + 1e-7)) : 1.0f;
    }
    __syncthreads();
    return tiles.scale;
}

// The matrices in x (count, rows, columns) by `steps` steps with the coefficients (steps, 3); after an odd number of
// them they are in y. gram, polynomial (count, rows, rows).
extern "C" __global__ void __launch_bounds__(256, 1)
newton_schulz(i64 count, i64 rows, i64 columns, i64 steps, const float *coefficients, float *x, float *y, float *gram,
              float *polynomial, int *arrived) {
    __shared__ Tiles tiles;
    i64 down = (rows + 31) / 32, across = (columns + 31) / 32, square = rows * rows, size = rows * columns;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16, round = 0;
    float sum[2][2];
    for (i64 step = 0; step < steps; step++) {
        float a = coefficients[3 * step], b = coefficients[3 * step + 1], c = coefficients[3 * step + 2];
        float *from = step % 2 ? y : x, *to = step % 2 ? x : y;
        for (i64 tile = blockIdx.x; tile < count * down * down; tile += gridDim.x) {  // X·X^T
            i64 matrix = tile / (down * down), i = tile / down % down * 32, j = tile % down * 32;
            tile_product<true>(from + matrix * size, from + matrix * size, rows, rows, columns, i, j, tiles, sum);
            for (int v = 0; v < 4; v++) {
                i64 row = i + ty + v / 2 * 16, column = j + tx + v % 2 * 16;
                if (row < rows && column < rows) gram[matrix * square + row * rows + column] = sum[v / 2][v % 2];
            }
        }
        meet(arrived, round);
        for (i64 tile = blockIdx.x; tile < count * down * down; tile += gridDim.x) {  // b·S + c·S·S
            i64 matrix = tile / (down * down), i = tile / down % down * 32, j = tile % down * 32;
            const float *own = gram + matrix * square;
            float scale = first_scale(step == 0, own, rows, tiles);
            scale *= scale;
            tile_product<false>(own, own, rows, rows, rows, i, j, tiles, sum);
            for (int v = 0; v < 4; v++) {
                i64 row = i + ty + v / 2 * 16, column = j + tx + v % 2 * 16;
                if (row < rows && column < rows)
                    polynomial[matrix * square + row * rows + column] =
                        b * (scale * __ldcg(own + row * rows + column)) + c * (scale * scale * sum[v / 2][v % 2]);
            }
        }
        meet(arrived, round);
        for (i64 tile = blockIdx.x; tile < count * down * across; tile += gridDim.x) {  // a·X + P·X
            i64 matrix = tile / (down * across), i = tile / across % down * 32, j = tile % across * 32;
            const float *own = from + matrix * size;
            float scale = first_scale(step == 0, gram + matrix * square, rows, tiles);
            tile_product<false>(polynomial + matrix * square, own, rows, columns, rows, i, j, tiles, sum);
            for (int v = 0; v < 4; v++) {
                i64 row = i + ty + v / 2 * 16, column = j + tx + v % 2 * 16;
                if (row < rows && column < columns)
                    to[matrix * size + row * columns + column] =
                        scale * (a * __ldcg(own + row * columns + column) + sum[v / 2][v % 2]);
            }
        }
        meet(arrived, round);
    }
    if (threadIdx.x == 0 && atomicAdd(arrived + 1, 1) == (int)gridDim.x - 1) arrived[0] = arrived[1] = 0;
}

// The kernels that take most of a GPU's time, in CUDA C++. fast/cuda_cpp.py puts the cells and
// numbers of kernels.py that this file names before it, as C: formulas are changed there. Each
// kernel belongs to the public function of its name, which checks all shapes. Arrays are
// contiguous; that function's docstring has their sizes.

// -------------------------------------------------------------------------------------------------
// MinGRU. The initial states are in states[0], or in the sampled columns of `initial`. A thread has
// V channels of one segment and loops over its steps. There are few threads, so none may wait: each
// reads the numbers of the next DEPTH steps before it computes the DEPTH that it has, and computes
// their gates at once, since only the states depend on each other. V is 1 if two channels a thread
// leave too few threads, or if H is odd.

#define DEPTH (8 / V)

template <int V, class Gate, class Input> struct Step {
    Pack<Gate, V> h, g, p;
    Pack<Input, V> x;
    bool is_reset, is_valid;
};

// Where a thread reads its next step. advance: to the step after (1) or before (-1).
template <int V, class Gate, class Input> struct Steps {
    const Gate *gates;
    const Input *x;
    const u8 *resets, *valid;
    i64 M, N, H;
    CELLS Steps(i64 t, i64 m, i64 j, i64 column, i64 M, i64 N, i64 H, const Gate *hgp,
                const Input *x, const u8 *resets, const u8 *valid)
        : gates(hgp + (t * M + m) * 3 * H + j),
          x(x + (t * M + m) * H + j),
          resets(resets + t * N + column),
          valid(valid + t * N + column),
          M(M),
          N(N),
          H(H) {}
    CELLS Step<V, Gate, Input> read_here() const {
        return {read<V>(gates), read<V>(gates + H), read<V>(gates + 2 * H),
                read<V>(x),     *resets != 0,       *valid != 0};
    }
    CELLS void advance(int direction) {
        gates += direction * M * 3 * H, x += direction * M * H, resets += direction * N,
            valid += direction * N;
    }
};

template <int V> struct Gates { float candidate[V], z[V], q[V]; };

template <int V, class Gate, class Input> CELL Gates<V> gates_of(const Step<V, Gate, Input> &step) {
    Gates<V> gates;
#pragma unroll
    for (int v = 0; v < V; v++) {
        auto [candidate, z, q] =
            mingru_gates_cell(widen(step.h.at[v]), widen(step.g.at[v]), widen(step.p.at[v]));
        gates.candidate[v] = candidate, gates.z[v] = z, gates.q[v] = q;
    }
    return gates;
}

template <int V, class Gate, class Input, class Output>
CELL void mingru_scan_lane(i64 T, i64 M, i64 N, i64 H, const Gate *hgp, const Input *x,
                           float *states, const u8 *resets, const u8 *valid, const i64 *index,
                           i64 start, const float *initial, bool drawn, Output *out) {
    int lane = (int)global_thread(), lanes = (int)H / V, last = (int)T - 1;
    i64 m = lane / lanes, j = lane % lanes * V;
    if (m >= M) return;
    i64 column = index[start + m];
    Step<V, Gate, Input> now[DEPTH], next[DEPTH] = {};
    Steps<V, Gate, Input> steps(0, m, j, column, M, N, H, hgp, x, resets, valid);
    auto prefetch = [&](int begin) {
        bool all = begin + DEPTH <= last + 1;
        auto read_step = [&](int d) { next[d] = steps.read_here(), steps.advance(1); };
#pragma unroll
        for (int d = 0; all && d < DEPTH; d++) read_step(d);
#pragma unroll
        for (int d = 0; !all && d < DEPTH; d++)
            if (begin + d <= last) read_step(d);
    };
    prefetch(0);
    Pack<float, V> state = read<V>(initial + (drawn ? column : m) * H + j);
    states += m * H + j, out += m * H + j;
    if (drawn) write<V>(states, state.at);
    for (int begin = 0; begin <= last; begin += DEPTH) {
        Gates<V> gates[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) now[d] = next[d];
        if (begin + DEPTH <= last) prefetch(begin + DEPTH);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) gates[d] = gates_of<V>(now[d]);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (begin + d > last) break;
            float y[V];
#pragma unroll
            for (int v = 0; v < V; v++) {
                float before = state.at[v] * (now[d].is_reset ? 0.0f : 1.0f);
                auto [after, result] =
                    mingru_cell(widen(now[d].x.at[v]), gates[d].candidate[v], gates[d].z[v],
                                gates[d].q[v], before, now[d].is_valid);
                state.at[v] = after, y[v] = result;
            }
            states += M * H;
            write<V>(out, y), write<V>(states, state.at);
            out += M * H;
        }
    }
}

template <int V, class Real>
CELL void mingru_scan_grad_lane(i64 T, i64 M, i64 N, i64 H, Real *hgp, const Real *x,
                                const float *states, const u8 *resets, const u8 *valid,
                                const i64 *index, i64 start, Real *grad_out, float *sums) {
    int lane = (int)global_thread(), lanes = (int)H / V, last = (int)T - 1;
    i64 m = lane / lanes, j = lane % lanes * V;
    if (m >= M) return;
    Step<V, Real, Real> now[DEPTH], next[DEPTH] = {};
    Pack<float, V> state[DEPTH], next_state[DEPTH] = {};
    Pack<Real, V> grad[DEPTH], next_grad[DEPTH] = {};
    Steps<V, Real, Real> steps(last, m, j, index[start + m], M, N, H, hgp, x, resets, valid);
    i64 place = (last * M + m) * H + j;
    states += place, hgp += (last * M + m) * 3 * H + j;
    const Real *grad_in = grad_out += place;
    auto prefetch = [&](int begin) {
        bool all = begin + 1 >= DEPTH;
        auto read_step = [&](int d) {
            next[d] = steps.read_here(), next_state[d] = read<V>(states),
            next_grad[d] = read<V>(grad_in);
            steps.advance(-1), states -= M * H, grad_in -= M * H;
        };
#pragma unroll
        for (int d = 0; all && d < DEPTH; d++) read_step(d);
#pragma unroll
        for (int d = 0; !all && d < DEPTH; d++)
            if (d <= begin) read_step(d);
    };
    prefetch(last);
    float carry[V] = {}, sum_h[V] = {}, sum_g[V] = {}, sum_p[V] = {};
    for (int begin = last; begin >= 0; begin -= DEPTH) {
        Gates<V> gates[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            now[d] = next[d], state[d] = next_state[d], grad[d] = next_grad[d];
        if (begin >= DEPTH) prefetch(begin - DEPTH);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) gates[d] = gates_of<V>(now[d]);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (begin < d) break;
            float keep = now[d].is_reset ? 0.0f : 1.0f, to_h[V], to_g[V], to_p[V], to_x[V];
#pragma unroll
            for (int v = 0; v < V; v++) {
                auto [dh, dg, dp, dx, ds] = mingru_cell_grad(
                    widen(now[d].x.at[v]), gates[d].candidate[v], gates[d].z[v], gates[d].q[v],
                    state[d].at[v] * keep, now[d].is_valid, widen(grad[d].at[v]), carry[v]);
                to_h[v] = dh, to_g[v] = dg, to_p[v] = dp, to_x[v] = dx;
                sum_h[v] += dh, sum_g[v] += dg, sum_p[v] += dp, carry[v] = ds * keep;
            }
            write<V>(hgp, to_h), write<V>(hgp + H, to_g), write<V>(hgp + 2 * H, to_p),
                write<V>(grad_out, to_x);
            hgp -= M * 3 * H, grad_out -= M * H;
        }
    }
    float *sum = sums + m * 3 * H + j;
    write<V>(sum, sum_h), write<V>(sum + H, sum_g), write<V>(sum + 2 * H, sum_p);
}

// Return whether a thread has one channel; kernels._launch_scan counts threads in the same way.
CELL bool one_channel(i64 M, i64 H) { return H % 2 || M * H < MIN_CHANNELS_FOR_PAIRS; }

// Run a scan's lane with one or two channels a thread.
template <class... Arrays>
CELL void mingru_scan_lanes(i64 T, i64 M, i64 N, i64 H, Arrays... arrays) {
    if (one_channel(M, H)) mingru_scan_lane<1>(T, M, N, H, arrays...);
    else mingru_scan_lane<2>(T, M, N, H, arrays...);
}
template <class... Arrays>
CELL void mingru_scan_grad_lanes(i64 T, i64 M, i64 N, i64 H, Arrays... arrays) {
    if (one_channel(M, H)) mingru_scan_grad_lane<1>(T, M, N, H, arrays...);
    else mingru_scan_grad_lane<2>(T, M, N, H, arrays...);
}

// Gates, inputs and outputs are float32, bfloat16, or bfloat16 with a float32 output (last layer).

extern "C" __global__ void mingru_scan(i64 T, i64 M, i64 N, i64 H, const float *hgp, const float *x,
                                       float *states, const u8 *resets, const u8 *valid,
                                       const i64 *index, i64 start, const float *initial,
                                       bool drawn, float *out) {
    mingru_scan_lanes(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
}

extern "C" __global__ void mingru_scan_half(i64 T, i64 M, i64 N, i64 H, const u16 *hgp,
                                            const u16 *x, float *states, const u8 *resets,
                                            const u8 *valid, const i64 *index, i64 start,
                                            const float *initial, bool drawn, u16 *out) {
    mingru_scan_lanes(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
}

extern "C" __global__ void mingru_scan_half_last(i64 T, i64 M, i64 N, i64 H, const u16 *hgp,
                                                 const u16 *x, float *states, const u8 *resets,
                                                 const u8 *valid, const i64 *index, i64 start,
                                                 const float *initial, bool drawn, float *out) {
    mingru_scan_lanes(T, M, N, H, hgp, x, states, resets, valid, index, start, initial, drawn, out);
}

extern "C" __global__ void mingru_scan_grad(i64 T, i64 M, i64 N, i64 H, float *hgp, const float *x,
                                            const float *states, const u8 *resets, const u8 *valid,
                                            const i64 *index, i64 start, float *grad_out,
                                            float *sums) {
    mingru_scan_grad_lanes(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
}

extern "C" __global__ void mingru_scan_grad_half(i64 T, i64 M, i64 N, i64 H, u16 *hgp, const u16 *x,
                                                 const float *states, const u8 *resets,
                                                 const u8 *valid, const i64 *index, i64 start,
                                                 u16 *grad_out, float *sums) {
    mingru_scan_grad_lanes(T, M, N, H, hgp, x, states, resets, valid, index, start, grad_out, sums);
}

// -------------------------------------------------------------------------------------------------
// Sums over all threads of a grid, equal in every run: a warp's by shuffles, a block's through
// shared memory into its row of `parts`; the last block to finish adds the rows in order. `ticket`
// counts the blocks that finished; it is 0 at the beginning and at the end.

CELL double warp_sum(double x) {
    for (int delta = 16; delta > 0; delta /= 2) x += __shfl_down_sync(~0u, x, delta);
    return x;
}

// Return whether this block is the last to finish. It reads the others' writes by __ldcg.
CELL bool is_last_block(int *ticket, int blocks, int *shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *shared = atomicAdd(ticket, 1) == blocks - 1;
        if (*shared) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return *shared;
}

template <int COUNT> struct Shared { double sums[32 * COUNT]; int last; };

// Return true in the last block, where shared.sums[0] to [COUNT - 1] are the sums of `local`.
template <int COUNT>
CELL bool grid_sums(double (&local)[COUNT], double *parts, int *ticket, Shared<COUNT> &shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        double sum = warp_sum(local[k]);
        if (lane == 0) shared.sums[warp * COUNT + k] = sum;
    }
    __syncthreads();
    if (threadIdx.x < COUNT) {
        double sum = 0.0;
        for (int w = 0; w < warps; w++) sum += shared.sums[w * COUNT + threadIdx.x];
        parts[blockIdx.x * COUNT + threadIdx.x] = sum;
    }
    if (!is_last_block(ticket, gridDim.x, &shared.last)) return false;
    for (int k = warp; k < COUNT; k += warps) {
        double sum = 0.0;
        for (unsigned block = lane; block < gridDim.x; block += 32)
            sum += __ldcg(parts + block * COUNT + k);
        sum = warp_sum(sum);
        if (lane == 0) shared.sums[k] = sum;
    }
    __syncthreads();
    return true;
}

// -------------------------------------------------------------------------------------------------
// Advantages and priorities: a warp for each segment in `index`; the eight warps of a block share
// cache lines. A warp's lanes read 32 steps at once; then the last lane passes its result to the
// one before it, and so on.

extern "C" __global__ void advantage(i64 T, i64 N, i64 count, const i64 *index, const float *values,
                                     const float *rewards, const u8 *terminals,
                                     const u8 *truncations, const float *bootstraps,
                                     const float *ratios, const u8 *valid, const float *offset,
                                     float gamma, float gae_lambda, float rho_clip, float c_clip,
                                     float reward_clip, float *advantages) {
    i64 m = global_thread() / 32;
    int lane = threadIdx.x % 32;
    if (m >= count || (m > 0 && index[m - 1] == index[m])) return;  // a segment drawn twice
    i64 n = index[m];
    float next_advantage = 0.0f, next_value = values[T * N + n], follows = 1.0f, shift = *offset;
    for (i64 end = T; end > 0; end -= 32) {
        int steps = end < 32 ? (int)end : 32;
        i64 place = (end - steps + lane) * N + n;
        float value = 0.0f, reward = 0.0f, bootstrap = 0.0f, ratio = 0.0f, result_of_lane = 0.0f;
        bool is_done = false, is_cut = false, is_valid = false;
        if (lane < steps) {
            value = values[place], reward = rewards[place], bootstrap = bootstraps[place],
            ratio = ratios[place];
            is_done = terminals[place] != 0 || truncations[place] != 0,
            is_valid = valid[place] != 0;
            is_cut = is_done && terminals[place] == 0;
        }
        for (int turn = steps - 1; turn >= 0; turn--) {
            auto [result, following, has_next] = advantage_cell(
                value, reward, is_done, is_cut, bootstrap, ratio, is_valid, next_advantage,
                next_value, follows, shift, gamma, gae_lambda, rho_clip, c_clip, reward_clip);
            next_advantage = __shfl_sync(~0u, result, turn),
            next_value = __shfl_sync(~0u, following, turn);
            follows = __shfl_sync(~0u, has_next, turn);
            if (lane == turn) result_of_lane = result;
        }
        if (lane < steps) advantages[place] = is_valid ? result_of_lane : 0.0f;
    }
}

extern "C" __global__ void priorities(i64 T, i64 N, i64 count, const float *advantages,
                                      const u8 *valid, double alpha, const i64 *index,
                                      double *priorities) {
    i64 m = global_thread() / 32;
    if (m >= count) return;
    i64 n = index[m];
    double total = 0.0, any_valid = 0.0;
    for (i64 t = threadIdx.x % 32; t < T; t += 32)
        if (valid[t * N + n] != 0) total += fabs((double)advantages[t * N + n]), any_valid = 1.0;
    total = warp_sum(total), any_valid = warp_sum(any_valid);
    if (threadIdx.x % 32 == 0) priorities[n] = any_valid > 0.0 ? pow(total, alpha) + 1e-6 : 0.0;
}

// -------------------------------------------------------------------------------------------------
// Sums of a minibatch

extern "C" __global__ void masked_moments(i64 T, i64 M, i64 N, const float *numbers,
                                          const u8 *valid, const i64 *index, double *parts,
                                          int *ticket, double *moments) {
    __shared__ Shared<3> shared;
    double local[3] = {};
    for (int i = (int)global_thread(); i < (int)(T * M); i += (int)(gridDim.x * blockDim.x)) {
        i64 place = i / (int)M * N + index[i % (int)M];
        if (valid[place] == 0) continue;
        double x = numbers[place];
        local[0] += 1.0, local[1] += x, local[2] += x * x;
    }
    if (grid_sums(local, parts, ticket, shared) && threadIdx.x < 3)
        moments[threadIdx.x] = shared.sums[threadIdx.x];
}

CELL double squares(i64 n, const float *flat) {
    double sum = 0.0;
    for (i64 i = global_thread(); i < n; i += (i64)gridDim.x * blockDim.x)
        sum += (double)flat[i] * flat[i];
    return sum;
}

extern "C" __global__ void gradient_norm(i64 n, const float *flat, double *parts, int *ticket,
                                         double *norm) {
    __shared__ Shared<1> shared;
    double local[1] = {squares(n, flat)};
    if (grid_sums(local, parts, ticket, shared) && threadIdx.x == 0) norm[0] = sqrt(shared.sums[0]);
}

// The norm, and Muon's scalars: the factor that clips (NaN if nothing may change), momentum, decay
// and learning rate.
extern "C" __global__ void clip(i64 n, const float *flat, double max_grad_norm, float momentum,
                                float weight_decay, const float *rate, double *parts, int *ticket,
                                float *found_inf, double *norm, float *scalars) {
    __shared__ Shared<1> shared;
    double local[1] = {squares(n, flat)};
    if (!grid_sums(local, parts, ticket, shared) || threadIdx.x != 0) return;
    norm[0] = sqrt(shared.sums[0]);
    if (!(norm[0] <= 1.7976931348623157e308)) found_inf[0] = 1.0f;
    float scale = (float)(max_grad_norm / (norm[0] + 1e-6));
    scalars[0] = found_inf[0] != 0.0f ? bits_as<float>(0x7fffffffu) : scale < 1.0f ? scale : 1.0f;
    scalars[1] = momentum, scalars[2] = 1.0f - rate[0] * weight_decay, scalars[3] = rate[0];
}

// Return the sum of get(row) for every `apart`-th row up to `end`, eight reads at a time.
template <class Sum, class Get> CELL Sum sum_every(int row, int end, int apart, Get get) {
    Sum sum = 0;
    for (; row < end; row += 8 * apart) {
        Sum values[8];
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = row + i * apart < end ? get(row + i * apart) : 0;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += values[i];
    }
    return sum;
}

// One of the sums of add_bias_gradients: the address of its rows, and whether they are bfloat16; numbers of
// rows and columns; a block's rows; its first block and its first part; the address of the result.
struct RowSum { i64 values, half, rows, columns, chunk, first_block, first_part, gradient; };

// A block has some rows and up to blockDim.x columns: neighbouring threads read neighbouring
// numbers, even of few columns. The last block to finish adds the parts of all.
template <class Real> CELL void add_rows_block(const RowSum &of, int block, int blocks,
                                               double *parts, int *ticket, bool add, double *shared,
                                               int *last) {
    const Real *values = (const Real *)of.values;
    float *gradient = (float *)of.gradient;
    int columns = (int)of.columns, threads = blockDim.x,
        width = columns < threads ? columns : threads;
    int side_by_side = threads / width, tiles = (columns + width - 1) / width,
        piece = block / tiles;
    int across = threadIdx.x % width, down = threadIdx.x / width,
        column = block % tiles * width + across;
    auto sum_tile = [&](int column, int begin, int end,
                        auto get) {  // all rows, for the threads at the top
        double sum = 0.0;
        if (down < side_by_side && column < columns)
            sum = sum_every<decltype(get(0))>(begin + down, end, side_by_side, [&](int row) {
                return get((i64)row * columns + column);
            });
        __syncthreads();
        shared[threadIdx.x] = sum;
        __syncthreads();
#pragma unroll 8
        for (int i = 1; i < side_by_side; i++) sum += down == 0 ? shared[i * width + across] : 0.0;
        return sum;
    };
    int begin = piece * (int)of.chunk, end = begin + (int)of.chunk;
    double sum = sum_tile(column, begin, end < of.rows ? end : (int)of.rows,
                          [&](i64 i) { return widen(values[i]); });
    if (down == 0 && column < columns) parts[(i64)piece * columns + column] = sum;
    if (!is_last_block(ticket, blocks, last)) return;
    for (column = across; column < tiles * width; column += width) {
        sum = sum_tile(column, 0, blocks / tiles, [&](i64 i) { return __ldcg(parts + i); });
        if (down == 0 && column < columns)
            gradient[column] = (add ? gradient[column] : 0.0f) + (float)sum;
    }
}

// For each RowSum: gradient = the sum of the rows, or += with `add`. Each has a ticket.
extern "C" __global__ void add_bias_gradients(int count, const i64 *sums, bool add, double *parts,
                                    int *tickets) {
    __shared__ double shared[256];
    __shared__ int last;
    const RowSum *row_sums = (const RowSum *)sums;
    int number = 0;
    while (number + 1 < count && blockIdx.x >= row_sums[number + 1].first_block) number++;
    RowSum of = row_sums[number];
    int first = (int)of.first_block, block = blockIdx.x - first;
    int blocks = (number + 1 < count ? (int)row_sums[number + 1].first_block : gridDim.x) - first;
    parts += of.first_part, tickets += number;
    if (of.half) add_rows_block<u16>(of, block, blocks, parts, tickets, add, shared, &last);
    else add_rows_block<float>(of, block, blocks, parts, tickets, add, shared, &last);
}

// -------------------------------------------------------------------------------------------------
// PPO loss: a thread a step

struct Head { float top, total, log_total, entropy; };

// Return one head of a row of logits. The gradient calls it again, which takes less time than to
// store it.
CELL Head read_head(const float *row, const u8 *mask, bool masked, i64 first, i64 last) {
    Head head = {head_max_cell(row, mask, masked, first, last), 0.0f, 0.0f, 0.0f};
    for (i64 j = first; j < last; j++)
        head.total += masked && mask[j] == 0 ? 0.0f : exp_cell(row[j] - head.top);
    head.log_total = logf(head.total);
    for (i64 j = first; j < last; j++) {
        float p = masked && mask[j] == 0 ? 0.0f : exp_cell(row[j] - head.top) / head.total;
        head.entropy += entropy_cell(p, row[j] - head.top - head.log_total);
    }
    return head;
}

extern "C" __global__ void ppo_loss_discrete(
    i64 T, i64 M, i64 N, i64 B, i64 width, i64 start, i64 head_count, bool masked,
    const float *outputs, const i64 *index, const u8 *masks, const i64 *heads, const int *actions,
    const float *logprobs, const float *values, const float *advantages, const float *weights,
    const u8 *valid, const float *__restrict__ settings, float *grad, float *new_values,
    float *ratios, double *parts, int *ticket, double *sums) {
    __shared__ Shared<SUMS> shared;
    double local[SUMS] = {};
    float clip_coef = settings[CLIP_COEF];
    for (int i = (int)global_thread(); i < (int)(T * M); i += (int)(gridDim.x * blockDim.x)) {
        i64 t = i / (int)M, m = i % (int)M, column = start + m, place = t * N + index[column];
        const float *row = outputs + (i64)i * width;
        const u8 *mask = masks + (masked ? place * (width - 1) : 0);
        float *drow = grad + i * width, value = row[width - 1], old_value = values[place];
        bool is_valid = valid[place] != 0;
        new_values[t * B + column] = is_valid ? value : old_value;
        if (!is_valid) {
            for (i64 j = 0; j < width; j++) drow[j] = 0.0f;
            ratios[t * B + column] = 1.0f;
            continue;
        }
        const int *action = actions + place * head_count;
        float logprob = 0.0f, entropy = 0.0f, advantage = advantages[place];
        Head head;
        for (i64 h = 0, first = 0; h < head_count; first += heads[h++]) {
            head = read_head(row, mask, masked, first, first + heads[h]);
            logprob += row[first + action[h]] - head.top - head.log_total;
            entropy += head.entropy;
        }
        float target = advantage + old_value;
        auto [policy, value_loss, ratio, logratio, dlogprob, dvalue] = objective_cell(
            logprob, logprobs[place], value, old_value, advantage, weights[column], settings);
        for (i64 h = 0, first = 0; h < head_count; first += heads[h++]) {
            if (head_count > 1) head = read_head(row, mask, masked, first, first + heads[h]);
            for (i64 j = first; j < first + heads[h]; j++) {
                float p = masked && mask[j] == 0 ? 0.0f : exp_cell(row[j] - head.top) / head.total;
                drow[j] =
                    logit_grad_cell(row[j], p, row[j] - head.top - head.log_total, head.entropy,
                                    j == first + action[h], dlogprob, settings);
            }
        }
        drow[width - 1] = dvalue;
        ratios[t * B + column] = ratio;
        statistics_cell(local, policy, value_loss, entropy, ratio, logratio, clip_coef, target,
                        target - value);
    }
    if (grid_sums(local, parts, ticket, shared) && threadIdx.x < SUMS)
        sums[threadIdx.x] += shared.sums[threadIdx.x];
}

// spread_row: the distance from one step's log_std to the next one's, 0 if all are equal.
// squash_row: the length of squash's rows.
extern "C" __global__ void ppo_loss_continuous(
    i64 T, i64 M, i64 N, i64 B, i64 width, i64 start, i64 spread_row, i64 squash_row,
    const float *outputs, const i64 *index, const float *log_std, const float *squash,
    const float *actions, const float *logprobs, const float *values, const float *advantages,
    const float *weights, const u8 *valid, const float *__restrict__ settings, float *grad,
    float *grad_log_std, float *new_values, float *ratios, double *parts, int *ticket, double *sums) {
    __shared__ Shared<SUMS> shared;
    double local[SUMS] = {};
    float clip_coef = settings[CLIP_COEF];
    bool squashed = squash[squash_row] != 0.0f;
    for (int i = (int)global_thread(); i < (int)(T * M); i += (int)(gridDim.x * blockDim.x)) {
        i64 t = i / (int)M, m = i % (int)M, column = start + m, place = t * N + index[column],
            dims = width - 1;
        const float *row = outputs + (i64)i * width, *spread = log_std + i * spread_row,
                    *action = actions + place * dims;
        float *drow = grad + i * width, *dspread = grad_log_std + i * dims;
        float value = row[dims], old_value = values[place], advantage = advantages[place];
        bool is_valid = valid[place] != 0;
        new_values[t * B + column] = is_valid ? value : old_value;
        if (!is_valid) {
            for (i64 j = 0; j < dims; j++) drow[j] = dspread[j] = 0.0f;
            drow[dims] = 0.0f;
            ratios[t * B + column] = 1.0f;
            continue;
        }
        float logprob = 0.0f, entropy = 0.0f, target = advantage + old_value;
        for (i64 j = 0; j < dims; j++) {
            float log_slope = squashed ? squash[2 * squash_row + j]
                                             + squash_cell(action[j], squash[squash_row + j]).b
                                       : 0.0f;
            auto [surprise, uncertainty] = gaussian_cell(action[j], row[j], spread[j], log_slope);
            logprob -= surprise, entropy += uncertainty;
        }
        auto [policy, value_loss, ratio, logratio, dlogprob, dvalue] = objective_cell(
            logprob, logprobs[place], value, old_value, advantage, weights[column], settings);
        for (i64 j = 0; j < dims; j++) {
            float inside = squashed ? squash_cell(action[j], squash[squash_row + j]).a : 0.0f;
            auto [dmean, dlog_std] =
                gaussian_grad_cell(action[j], row[j], spread[j], inside, dlogprob, settings);
            drow[j] = dmean, dspread[j] = dlog_std;
        }
        drow[dims] = dvalue;
        ratios[t * B + column] = ratio;
        statistics_cell(local, policy, value_loss, entropy, ratio, logratio, clip_coef, target,
                        target - value);
    }
    if (grid_sums(local, parts, ticket, shared) && threadIdx.x < SUMS)
        sums[threadIdx.x] += shared.sums[threadIdx.x];
}

// -------------------------------------------------------------------------------------------------
// Draw, by one block of 1,024 threads, each with a piece of the segments

// The sums of the warps before this thread's, and of the lanes before it in its warp.
struct Prefix {
    double warps, lanes;
};

// Sums are in the order of the threads, so that a running sum never falls, and is constant where
// nothing is added: warps + (lanes + what a thread adds) ends where the next thread's begins.
CELL Prefix prefix_sum(double local, double *shared, double *totals) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shared[warp * 33 + lane] = local;
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
    draw_segments(i64 N, i64 M, i64 first, u64 seed, const i64 *counter, const float *beta,
                  const double *priorities, double *cumulative, i64 *index, float *weights) {
    __shared__ double shared[32 * 33], totals[32];
    __shared__ int num_drawable;
    if (threadIdx.x == 0) num_drawable = 0;
    i64 piece = (N + 1023) / 1024, begin = threadIdx.x * piece,
        end = begin + piece < N ? begin + piece : N;
    double sum = 0.0;
    for (i64 n = begin; n < end; n++) sum += priorities[n];
    Prefix prefix = prefix_sum(sum, shared, totals);
    sum = 0.0;
    int positive = 0;
    for (i64 n = begin; n < end; n++) {
        sum += priorities[n];
        positive += priorities[n] > 0.0;
        cumulative[n] = prefix.warps + (prefix.lanes + sum);
    }
    atomicAdd(&num_drawable, positive);
    __syncthreads();

    double total = cumulative[N - 1];
    Row<double> row = {cumulative, N};
    i64 last_positive =
        search_cell(row, total, false);  // the last segment with a mass; a NaN ends at some segment
    last_positive = last_positive < N - 1 ? last_positive : N - 1;
    u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
    i64 first_draw = counter[1] * M;  // of this minibatch in the epoch
    for (i64 m = threadIdx.x; m < M; m += 1024) {
        auto words = philox_cell((u32)(first + m), (u32)counter[0], (u32)(first_draw / N),
                                 PURPOSE_SEGMENT, key0, key1);
        double u =
            ((double)words.a * 4294967296.0 + (double)words.b) * 5.421010862427522e-20;  // 2^-64
        u += (double)(first_draw % N) / N;
        i64 segment = search_cell(row, (m + (u - floor(u))) / M * total, true);
        segment = segment < last_positive ? segment : last_positive;
        // NaN ** 0 is 1, which would hide it
        double share = num_drawable * (priorities[segment] / total);
        index[m] = segment;
        weights[m] =
            share > 0.0 ? (float)pow(share, -(double)beta[0]) : bits_as<float>(0x7fffffffu);
    }
}

// -------------------------------------------------------------------------------------------------
// Newton-Schulz: all steps of all matrices in one launch, whose blocks wait for each other between
// the products

// Wait until all blocks arrive; `round` counts the calls. The launch must be cooperative. The other
// blocks' writes are then read by __ldcg.
CELL void grid_barrier(int *arrived, int &round) {
    __syncthreads();
    if (threadIdx.x == 0) {
        int expected = ++round * gridDim.x;
        __threadfence();  // for the whole block's writes
        atomicAdd(arrived, 1);
        while (*(volatile int *)arrived < expected) __nanosleep(20);
        __threadfence();
    }
    __syncthreads();
}

#define DEEP 64  // a tile's sums go over so many numbers at once

// A tile has STRIP x ACROSS numbers. Of each operand DEEP rows, the first one transposed, so that a
// sum goes down all of them.
struct alignas(16) Strips {
    float left[DEEP][STRIP + 4], right[DEEP][DEEP + 4], x_tile[DEEP][ACROSS + 4], parts[8 * CREW],
        scale;
};
static_assert(CREW == 4 * DEEP && STRIP % 4 == 0 && ACROSS % 4 == 0,
              "gram_tile reads four rows at once, a thread a column");

// A thread has 2 x 4 numbers of a tile; the threads that are left over share the sum over DEEP
// numbers.
template <int COLUMNS> struct Piece {
    static constexpr int PIECES = STRIP / 2 * (COLUMNS / 4), GROUPS = CREW / PIECES,
                         SHARE = DEEP / GROUPS;
    int row = (int)threadIdx.x % PIECES / (COLUMNS / 4) * 2,
        column = (int)threadIdx.x % (COLUMNS / 4) * 4;
    int group = (int)threadIdx.x / PIECES;
    float sum[2][4] = {};

    template <int PITCH>
    CELLS void add(const float (&left)[DEEP][STRIP + 4], const float (&right)[DEEP][PITCH]) {
#pragma unroll 8
        for (int k = group * SHARE; k < (group + 1) * SHARE; k++) {
            Pack<float, 2> down = read<2>(&left[k][row]);
            Pack<float, 4> across = read<4>(&right[k][column]);
#pragma unroll
            for (int v = 0; v < 8; v++) sum[v / 4][v % 4] += down.at[v / 4] * across.at[v % 4];
        }
    }

    // take(row, column, sum) for each number of the tile, by one thread each.
    template <class Take> CELLS void join(float *parts, Take take) const {
        for (int v = 0; v < 2; v++)
            write<4>(parts + (group * STRIP + row + v) * COLUMNS + column, sum[v]);
        __syncthreads();
        for (int i = threadIdx.x; i < STRIP * COLUMNS; i += CREW) {
            float total = 0.0f;
            for (int g = 0; g < GROUPS; g++) total += parts[g * STRIP * COLUMNS + i];
            take(i / COLUMNS, i % COLUMNS, total);
        }
    }
};

// Return 1/(norm + 1e-7) from the diagonal of the product with the transpose, or 1 after the first
// step, for all threads.
CELL float first_scale(bool first, const float *gram, int rows, Strips &strips) {
    if (!first) return 1.0f;
    __syncthreads();
    if (threadIdx.x < 32) {
        double sum = 0.0;
        for (int r = threadIdx.x; r < rows; r += 32) sum += __ldcg(gram + r * rows + r);
        sum = warp_sum(sum);
        if (threadIdx.x == 0) strips.scale = (float)(1.0 / (sqrt(sum) + 1e-7));
    }
    __syncthreads();
    return strips.scale;
}

// S = X·X^T, the STRIP x ACROSS numbers at (i, j); x (rows, columns).
CELL void gram_tile(const float *x, int rows, int columns, int i, int j, float *gram,
                    Strips &strips) {
    int k = threadIdx.x / 32 * 8 + threadIdx.x % 8,
        r = threadIdx.x % 32 / 8;  // no two threads of a warp in one bank
    float next[(STRIP + ACROSS) / 4];
    auto prefetch = [&](int begin) {
#pragma unroll
        for (int n = 0; n < (STRIP + ACROSS) / 4; n++) {
            int row = r + (n < STRIP / 4 ? i + 4 * n : j + 4 * n - STRIP);
            next[n] =
                row < rows && begin + k < columns ? __ldcg(x + row * columns + begin + k) : 0.0f;
        }
    };
    Piece<ACROSS> piece;
    prefetch(0);
    for (int begin = 0; begin < columns; begin += DEEP) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < (STRIP + ACROSS) / 4; n++)
            (n < STRIP / 4 ? strips.left[k][r + 4 * n] : strips.x_tile[k][r + 4 * n - STRIP]) =
                next[n];
        __syncthreads();
        if (begin + DEEP < columns) prefetch(begin + DEEP);
        piece.add(strips.left, strips.x_tile);
    }
    piece.join(strips.parts, [&](int row, int column, float sum) {
        if (i + row < rows && j + column < rows) gram[(i + row) * rows + j + column] = sum;
    });
}

// scale·(a + (b·s + c·s²·S)·S)·X, s = scale², the STRIP x ACROSS numbers at (i, j). A block
// computes the rows of the polynomial that it needs: to wait for others takes longer. S is
// symmetric.
CELL void step_tile(const float *x, const float *gram, int rows, int columns, int i, int j,
                    float scale, float a, float b, float c, float *to, Strips &strips) {
    int t = threadIdx.x;
    float square = scale * scale;
    Piece<ACROSS> piece;
    for (int middle = 0; middle < rows; middle += DEEP) {
        Piece<DEEP> polynomial;
        for (int begin = 0; begin < rows; begin += DEEP) {
            float left[DEEP * STRIP / CREW], right[DEEP * DEEP / CREW],
                x_tile[DEEP * ACROSS / CREW];
#pragma unroll
            for (int n = 0; n < DEEP * STRIP / CREW; n++) {
                int l = begin + t / STRIP + n * (CREW / STRIP), r = i + t % STRIP;
                left[n] =
                    l < rows && r < rows ? c * square * square * __ldcg(gram + l * rows + r) : 0.0f;
                left[n] += l == r ? b * square : 0.0f;
            }
#pragma unroll
            for (int n = 0; n < DEEP * DEEP / CREW; n++) {
                int l = begin + t / DEEP + n * (CREW / DEEP), k = middle + t % DEEP;
                right[n] = l < rows && k < rows ? __ldcg(gram + l * rows + k) : 0.0f;
            }
#pragma unroll
            for (int n = 0; n < DEEP * ACROSS / CREW; n++) {
                int k = middle + t / ACROSS + n * (CREW / ACROSS), column = j + t % ACROSS;
                x_tile[n] = k < rows && column < columns ? __ldcg(x + k * columns + column) : 0.0f;
            }
            __syncthreads();
#pragma unroll
            for (int n = 0; n < DEEP * STRIP / CREW; n++)
                strips.left[t / STRIP + n * (CREW / STRIP)][t % STRIP] = left[n];
#pragma unroll
            for (int n = 0; n < DEEP * DEEP / CREW; n++)
                strips.right[t / DEEP + n * (CREW / DEEP)][t % DEEP] = right[n];
#pragma unroll
            for (int n = 0; n < DEEP * ACROSS / CREW; n++)
                strips.x_tile[t / ACROSS + n * (CREW / ACROSS)][t % ACROSS] = x_tile[n];
            __syncthreads();
            polynomial.add(strips.left, strips.right);
        }
        polynomial.join(strips.parts, [&](int row, int k, float sum) {
            strips.left[k][row] = sum + (middle + k == i + row ? a : 0.0f);
        });
        __syncthreads();
        piece.add(strips.left, strips.x_tile);
    }
    piece.join(strips.parts, [&](int row, int column, float sum) {
        if (i + row < rows && j + column < columns)
            to[(i + row) * columns + j + column] = scale * sum;
    });
}

// Orthogonalise the matrices in x (count, rows, columns) by `steps` steps with coefficients (steps,
// 3); after an odd number of steps they are in y. gram (count, rows, rows).
extern "C" __global__ void __launch_bounds__(CREW, 1)
    newton_schulz(int count, int rows, int columns, int steps, const float *coefficients, float *x,
                  float *y, float *gram, int *arrived) {
    __shared__ Strips strips;
    int down = (rows + STRIP - 1) / STRIP,
        round = 0;  // to divide a longer number takes a GPU much longer
    int squares = down * ((rows + ACROSS - 1) / ACROSS),
        tiles = down * ((columns + ACROSS - 1) / ACROSS);
    i64 square = rows * rows, size = rows * columns;
    for (int step = 0; step < steps; step++) {
        float a = coefficients[3 * step], b = coefficients[3 * step + 1],
              c = coefficients[3 * step + 2];
        float *from = step % 2 ? y : x, *to = step % 2 ? x : y;
        for (int tile = blockIdx.x; tile < count * squares; tile += gridDim.x) {
            int matrix = tile / squares, i = tile % down * STRIP,
                j = tile % squares / down * ACROSS;
            gram_tile(from + matrix * size, rows, columns, i, j, gram + matrix * square, strips);
        }
        grid_barrier(arrived, round);
        for (int tile = blockIdx.x; tile < count * tiles; tile += gridDim.x) {
            int matrix = tile / tiles, i = tile % down * STRIP, j = tile % tiles / down * ACROSS;
            float scale = first_scale(step == 0, gram + matrix * square, rows, strips);
            step_tile(from + matrix * size, gram + matrix * square, rows, columns, i, j, scale, a,
                      b, c, to + matrix * size, strips);
        }
        grid_barrier(arrived, round);
    }
    if (threadIdx.x == 0 && atomicAdd(arrived + 1, 1) == (int)gridDim.x - 1)
        arrived[0] = arrived[1] = 0;
}

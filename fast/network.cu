// The default network in a block's shared memory, for policy_step.cu and rollout.cu. A block copies
// all weights there while it reads its first observations, and then computes one tile of agents
// after the other. Activations stay in shared memory, a column's rows beside each other.
//
// It is compiled without contraction of products and sums, as environments are (ocean/device.py);
// the sums of products are explicit. fast/cuda_cpp.py puts the cells of kernels.py that these files
// name before them.

#define ROWS_PER_THREAD 8  // rows whose sums one thread has
enum { THREADS = CREW };   // of a block

CELL i64 fours(i64 n) { return (n + 3) / 4 * 4; }
// The length of a row of n weights: threads that read four numbers of neighbouring rows then have
// no bank conflicts.
CELL int weight_pitch(i64 n) { return (int)((n + 3) / 8 * 8 + 4); }

// Call write(row, column, read(i)) for the `count` numbers of a matrix, by all threads of a block.
template <class Value, class Read, class Write>
CELL void carry(int count, int columns, Read read, Write write) {
    constexpr int IN_FLIGHT = sizeof(Value) > 4 ? 4 : 16;  // reads before the first write
    int row = threadIdx.x / columns, column = threadIdx.x % columns, down = CREW / columns,
        right = CREW % columns;
    for (int begin = threadIdx.x; begin < count; begin += IN_FLIGHT * CREW) {
        Value values[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (begin + i * CREW < count) values[i] = read(begin + i * CREW);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            if (begin + i * CREW < count) write(row, column, values[i]);
            row += down, column += right;
            if (column >= columns) column -= columns, row++;
        }
    }
}

// Begin to copy weights (outputs, inputs); each row is padded with zeros to a multiple of four.
template <class Real> CELL void begin_weights(const Real *from, Real *to, int outputs, int inputs) {
    int pitch = weight_pitch(inputs), behind = (int)fours(inputs) - inputs;
    auto by = [=](auto pack) {  // as many at once as the rows' beginnings allow
        constexpr int V = sizeof pack / sizeof(Real);
        carry<int>(
            outputs * (inputs / V), inputs / V, [](int i) { return i; },
            [=](int row, int k, int i) {
                begin_copy<sizeof pack>(to + row * pitch + V * k, from + V * i);
            });
    };
    if (inputs % 4 == 0) by(Pack<Real, 4>());
    else if (inputs % 2 == 0) by(Pack<Real, 2>());
    else
        carry<Real>(outputs * inputs, inputs, [=](int i) { return from[i]; },
                    [=](int row, int k, Real weight) { to[row * pitch + k] = weight; });
    for (int i = threadIdx.x; i < outputs * behind; i += blockDim.x)
        to[i / behind * pitch + inputs + i % behind] = Real(0);
}

template <class Real> CELL void carry_bias(const Real *from, float *to, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = widen(from[i]);
}

// Call read with a pointer to numbers of one of the types in rollout.DTYPES.
template <class Read> CELL void with_kind(const void *from, i64 kind, Read read) {
    switch (kind) {
    case 0: return read((const float *)from);
    case 1: return read((const u8 *)from);
    case 2: return read((const signed char *)from);
    case 3: return read((const short *)from);
    case 4: return read((const u16 *)from);
    case 5: return read((const int *)from);
    case 6: return read((const u32 *)from);
    case 7: return read((const i64 *)from);
    default: return read((const double *)from);
    }
}

// Add row g of the weights, g * apart on, times row r of x to sum[g][r].
template <int G, int R, class Real> CELL void add_products(int inputs, const Real *weights,
                                                           int apart, const float *x, int pitch,
                                                           float (&sum)[G][R]) {
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
                    for (int g = 0; g < G; g++)
                        sum[g][r + v] = fmaf(widen(four[g].at[i]), part.at[v], sum[g][r + v]);
            }
        }
    }
}

// Write column j's rows from r on, and zeros behind the last column, to a multiple of four.
CELL void put(float *x, int columns, int pitch, int j, int r,
              const float (&values)[ROWS_PER_THREAD]) {
#pragma unroll
    for (int v = 0; v < ROWS_PER_THREAD; v++) x[j * pitch + r + v] = values[v];
    for (int k = columns; j + 1 == columns && k < fours(columns); k++)
        for (int v = 0; v < ROWS_PER_THREAD; v++) x[k * pitch + r + v] = 0.0f;
}

template <class Real> CELL float rounded(float x) { return widen(rounded_to<Real>(x)); }

// After a terminal nothing follows.
CELL bool is_cut(const u8 *truncations, const u8 *terminals, i64 i) {
    return truncations[i] != 0 && terminals[i] == 0;
}

// What a step reads: observations (n, inputs) of a kind in with_kind; state (layers, n, hidden), a
// layer state_stride after the one before; resets, valid (n,), or null for no reset, and for all.
struct Inputs {
    i64 n, kind;
    const void *observations;
    bool is_normalised;
    const float *shift, *scale;
    float *state;
    i64 state_stride;
    const u8 *resets, *valid;
};

// How actions are sampled, and where they go. Without heads a Gaussian is sampled, with log_std;
// squash_row as in ppo_loss_continuous.
struct Sampling {
    u64 seed;
    i64 first_agent;
    const i64 *counter;
    i64 head_count;
    const i64 *heads;
    bool is_masked;
    const u8 *masks;
    const float *log_std;
    i64 squash_row;
    const float *squash;
    void *actions;
    float *samples, *logprobs, *values;
};

// The network in a block's shared memory. Real: of all weights but the decoder's, and of the
// activations except the last layer's output.
template <class Real> struct Network {
    int D, H, L, width, rows, pitch, encoder_pitch, hidden_pitch;
    float *even, *odd, *decoder, *left, *biases, *decoder_bias;
    Real *encoder, *gates;

    // rollout.PolicyStep.size counts these as well.
    CELLS Network(i64 inputs, i64 hidden, i64 layers, i64 width, i64 rows, float *memory)
        : D((int)inputs),
          H((int)hidden),
          L((int)layers),
          width((int)width),
          rows((int)rows),
          pitch((int)rows + 4),
          encoder_pitch(weight_pitch(inputs)),
          hidden_pitch(weight_pitch(hidden)) {
        even = memory, odd = even + fours(D > H ? D : H) * pitch;
        decoder = odd + fours(H) * pitch, left = decoder + width * hidden_pitch;
        biases = left + rows * width, decoder_bias = biases + (3 * L + 1) * H;
        encoder = (Real *)(left + fours(rows * width + (3 * L + 1) * H + width));
        gates = encoder + H * encoder_pitch;
    }

    // weights: addresses of the encoder's weight and bias, each layer's, and the decoder's.
    CELLS void begin_to_load(const i64 *weights) {
        begin_weights((const float *)weights[2 * L + 2], decoder, width, H);
        carry_bias((const float *)weights[2 * L + 3], decoder_bias, width);
        begin_weights((const Real *)weights[0], encoder, H, D);
        for (int l = 0; l < L; l++)
            begin_weights((const Real *)weights[2 * l + 2], gates + 3 * l * H * hidden_pitch, 3 * H, H);
        carry_bias((const Real *)weights[1], biases, H);
        for (int l = 0; l < L; l++)
            carry_bias((const Real *)weights[2 * l + 3], biases + (3 * l + 1) * H, 3 * H);
    }

    // Write the outputs of the tile of agents that begins at `begin` to `left` (rows, width). The
    // state is written only if `commit`.
    CELLS void step(const Inputs &in, i64 begin, bool commit) {
        with_kind(in.observations, in.kind, [&](auto from) {
            from += begin * D;
            carry<decltype(*from + 0)>(
                D * (int)(in.n - begin < rows ? in.n - begin : rows), D,
                [=](int i) { return from[i]; },
                [&](int row, int k, auto number) {
                    float x = (float)number;
                    even[k * pitch + row] = rounded<Real>(
                        in.is_normalised ? normalise_cell(x, in.shift[k], in.scale[k]) : x);
                });
        });
        for (int i = threadIdx.x; i < ((int)fours(D) - D) * rows; i += CREW)
            even[(D + i / rows) * pitch + i % rows] = 0.0f;
        end_copies();
        __syncthreads();
        for (int item = threadIdx.x; item < H * (rows / ROWS_PER_THREAD); item += blockDim.x) {
            int j = item % H, r = item / H * ROWS_PER_THREAD;
            float sum[1][ROWS_PER_THREAD] = {};
            add_products((int)fours(D), encoder + j * encoder_pitch, 0, even + r, pitch, sum);
#pragma unroll
            for (int v = 0; v < ROWS_PER_THREAD; v++)
                sum[0][v] = rounded<Real>(sum[0][v] + biases[j]);
            put(odd, H, pitch, j, r, sum[0]);
        }
        __syncthreads();
        float *x = odd, *y = even;
        for (int l = 0; l < L; l++) {
            layer(in, begin, commit, l, x, y);
            __syncthreads();
            float *last = x;
            x = y, y = last;
        }
        for (int item = threadIdx.x; item < width * rows; item += blockDim.x) {
            int j = item % width, r = item / width;
            float sum[1][1] = {};
            add_products((int)fours(H), decoder + j * hidden_pitch, 0, x + r, pitch, sum);
            left[item] = sum[0][0] + decoder_bias[j];
        }
        __syncthreads();
    }

    CELLS void layer(const Inputs &in, i64 begin, bool commit, int l, const float *x, float *y) {
        const float *bias = biases + (3 * l + 1) * H;
        for (int item = threadIdx.x; item < H * (rows / ROWS_PER_THREAD); item += blockDim.x) {
            int j = item % H, r = item / H * ROWS_PER_THREAD;
            float *place = in.state + l * in.state_stride + (begin + r) * H + j,
                  before[ROWS_PER_THREAD], sum[3][ROWS_PER_THREAD] = {};
#pragma unroll
            for (int v = 0; v < ROWS_PER_THREAD; v++) {
                i64 i = begin + r + v;
                before[v] = i < in.n
                                ? place[v * H] * (in.resets && in.resets[i] ? 0.0f : 1.0f)
                                : 0.0f;
            }
            add_products((int)fours(H), gates + (3 * l * H + j) * hidden_pitch, H * hidden_pitch, x + r, pitch,
                         sum);
#pragma unroll
            for (int v = 0; v < ROWS_PER_THREAD; v++) {
                i64 i = begin + r + v;
                auto [candidate, z, q] = mingru_gates_cell(
                    rounded<Real>(sum[0][v] + bias[j]), rounded<Real>(sum[1][v] + bias[H + j]),
                    rounded<Real>(sum[2][v] + bias[2 * H + j]));
                auto [after, result] =
                    mingru_cell(x[j * pitch + r + v], candidate, z, q, before[v],
                                i < in.n && (!in.valid || in.valid[i] != 0));
                if (commit && i < in.n) place[v * H] = after;
                before[v] = l + 1 < L ? rounded<Real>(result) : result;
            }
            put(y, H, pitch, j, r, before);
        }
    }

    // Sample agent i's action from `row`, its part of `left`.
    CELLS void sample(const Sampling &to, i64 i, const float *row) {
        float logprob = 0.0f;
        for (i64 h = 0, first = 0; h < to.head_count; first += to.heads[h++]) {
            auto words = action_words_cell(to.seed, (u64)to.counter[0], to.first_agent + i, h);
            auto [action, chosen] =
                choose_cell(row, to.masks + (to.is_masked ? i * (width - 1) : 0), to.is_masked,
                            first, first + to.heads[h], uniform_cell(words.a), false);
            ((int *)to.actions)[i * to.head_count + h] = (int)action, logprob += chosen;
        }
        for (i64 j = 0, place = i * (width - 1); to.head_count == 0 && j < width - 1;
             j++, place++) {
            auto words = action_words_cell(to.seed, (u64)to.counter[0], to.first_agent + i, j);
            auto [u, surprise] =
                gaussian_draw_cell(row[j], to.log_std[j], words.a, words.b, false);
            to.samples[place] = u, logprob -= surprise;
            const float *squash = to.squash;
            if (squash[to.squash_row] != 0.0f) {
                float half = squash[to.squash_row + j];
                auto [inside, log_slope] = squash_cell(u, half);
                ((float *)to.actions)[place] =
                    squash[j] + (half > 0.0f ? half * inside : -half * u);
                logprob -= squash[2 * to.squash_row + j] + log_slope;
            }
        }
        to.logprobs[i] = logprob, to.values[i] = row[width - 1];
    }
};

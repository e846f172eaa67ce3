// The default network in a block's shared memory, for policy_step.cu and rollout.cu. A block copies
// all weights there while it reads its first observations, and then computes one tile of agents
// after the other. Activations stay in shared memory, a column's rows beside each other.
//
// Products are made by tensor cores, which GPUs have from sm_80 on. Other products and sums are not
// contracted, as in environments (ocean/device.py). fast/cuda_cpp.py puts the cells of kernels.py
// that these files name before them.

enum { THREADS = CREW };  // of a block

CELL i64 fours(i64 n) { return (n + 3) / 4 * 4; }
CELL int eights(i64 n) { return (int)((n + 7) / 8 * 8); }
// The length of a row of n weights: the threads of a warp then read from different banks.
CELL int weight_pitch(i64 n) { return eights(n) + 4; }

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

// Begin to copy weights (outputs, inputs); each row is padded with zeros to a multiple of eight.
template <class Real> CELL void begin_weights(const Real *from, Real *to, int outputs, int inputs) {
    int pitch = weight_pitch(inputs), behind = eights(inputs) - inputs;
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

// x = high + low, both as tensor cores read them: without the last 13 bits of the mantissa. What is
// lost is below 2^-21 of x. A NaN stays one in `low`.
CELL void split(float x, u32 &high, u32 &low) {
    u32 bits = bits_as<u32>(x);
    high = (bits + 0x1000u) & 0xffffe000u;
    low = bits_as<u32>(x - bits_as<float>(high));
}

// Products of x (inputs, 16 · M) with G matrices of weights (columns, inputs), one after the other.
// A warp has eight columns of all rows, a thread 4 · M numbers of them. load(row, column) is called
// before the products, and take(row, column, loaded, sums of the G) after them; `column` may be
// beyond the last one, to a multiple of eight. In bfloat16 weights and x are exact in one product,
// otherwise three give the precision of float32 (Ootomo and Yokota 2022).
template <int G, int M, class Weight, class Load, class Take>
CELL void multiply(int inputs, int columns, const Weight *weights, const float *x, Load load,
                   Take take) {
    constexpr bool IS_EXACT = sizeof(Weight) == 2;
    constexpr int X_PITCH = 16 * M + 8;
    int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4, pitch = weight_pitch(inputs),
        apart = columns * pitch;
    const float *from = x + member * X_PITCH + group;
    for (int first = threadIdx.x / 32 * 8; first < columns; first += THREADS / 32 * 8) {
        float sums[G][M][4] = {}, loaded[M][4];
        auto each = [&](auto call) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    call(m, e, 16 * m + e / 2 * 8 + group, first + 2 * member + e % 2);
        };
        each([&](int m, int e, int row, int column) { loaded[m][e] = load(row, column); });
        const Weight *at =
            weights + (first + group < columns ? first + group : columns - 1) * pitch + member;
#pragma unroll 1
        for (int k = 0; k < inputs; k += 8) {
            u32 high[M][4], low[M][4], weight_high[2], weight_low[2];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    split(from[(k + e / 2 * 4) * X_PITCH + 16 * m + e % 2 * 8], high[m][e],
                          low[m][e]);
#pragma unroll
            for (int g = 0; g < G; g++) {
#pragma unroll
                for (int e = 0; e < 2; e++)
                    split(widen(at[g * apart + k + 4 * e]), weight_high[e], weight_low[e]);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    if (!IS_EXACT) {
                        multiply_tile(sums[g][m], low[m], weight_high);
                        multiply_tile(sums[g][m], high[m], weight_low);
                    }
                    multiply_tile(sums[g][m], high[m], weight_high);
                }
            }
        }
        each([&](int m, int e, int row, int column) {
            float sum[G];
#pragma unroll
            for (int g = 0; g < G; g++) sum[g] = sums[g][m][e];
            take(row, column, loaded[m][e], sum);
        });
    }
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
// activations except the last layer's output. A tile has `rows` agents, 16 · M at most.
template <class Real, int M> struct Network {
    static constexpr int PITCH = 16 * M + 8;  // of a column of activations
    int D, H, L, width, rows, encoder_pitch, hidden_pitch;
    float *even, *odd, *decoder, *left, *biases, *decoder_bias;
    Real *encoder, *gates;

    // rollout.PolicyStep.size counts these as well.
    CELLS Network(i64 inputs, i64 hidden, i64 layers, i64 width, i64 rows, float *memory)
        : D((int)inputs),
          H((int)hidden),
          L((int)layers),
          width((int)width),
          rows((int)rows),
          encoder_pitch(weight_pitch(inputs)),
          hidden_pitch(weight_pitch(hidden)) {
        even = memory, odd = even + eights(D > H ? D : H) * PITCH;
        decoder = odd + eights(H) * PITCH, left = decoder + width * hidden_pitch;
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
        int agents = (int)(in.n - begin < rows ? in.n - begin : rows);
        with_kind(in.observations, in.kind, [&](auto from) {
            from += begin * D;
            carry<decltype(*from + 0)>(
                D * agents, D, [=](int i) { return from[i]; },
                [&](int row, int k, auto number) {
                    float x = (float)number;
                    even[k * PITCH + row] = rounded<Real>(
                        in.is_normalised ? normalise_cell(x, in.shift[k], in.scale[k]) : x);
                });
        });
        for (int i = threadIdx.x; i < (eights(D) - D) * rows; i += CREW)
            even[(D + i / rows) * PITCH + i % rows] = 0.0f;
        end_copies();
        __syncthreads();
        auto nothing = [](int, int) { return 0.0f; };
        multiply<1, M>(D, H, encoder, even, nothing, [&](int row, int j, float, auto &sum) {
            odd[j * PITCH + row] = j < H ? rounded<Real>(sum[0] + biases[j]) : 0.0f;
        });
        __syncthreads();
        float *x = odd, *y = even;
        for (int l = 0; l < L; l++) {
            layer(in, begin, agents, commit, l, x, y);
            __syncthreads();
            float *last = x;
            x = y, y = last;
        }
        multiply<1, M>(H, width, decoder, x, nothing, [&](int row, int j, float, auto &sum) {
            if (row < rows && j < width) left[row * width + j] = sum[0] + decoder_bias[j];
        });
        __syncthreads();
    }

    CELLS void layer(const Inputs &in, i64 begin, int agents, bool commit, int l, const float *x,
                     float *y) {
        const float *bias = biases + (3 * l + 1) * H;
        float *state = in.state + l * in.state_stride + begin * H;
        const u8 *resets = in.resets ? in.resets + begin : nullptr,
                 *valid = in.valid ? in.valid + begin : nullptr;
        multiply<3, M>(
            H, H, gates + 3 * l * H * hidden_pitch, x,
            [&](int row, int j) {
                bool is_kept = row < agents && j < H && !(resets && resets[row]);
                return is_kept ? state[row * H + j] : 0.0f;
            },
            [&](int row, int j, float before, auto &sum) {
                float result = 0.0f;
                if (row < agents && j < H) {
                    auto [candidate, z, q] = mingru_gates_cell(
                        rounded<Real>(sum[0] + bias[j]), rounded<Real>(sum[1] + bias[H + j]),
                        rounded<Real>(sum[2] + bias[2 * H + j]));
                    auto [after, output] = mingru_cell(x[j * PITCH + row], candidate, z, q, before,
                                                       !valid || valid[row] != 0);
                    if (commit) state[row * H + j] = after;
                    result = l + 1 < L ? rounded<Real>(output) : output;
                }
                y[j * PITCH + row] = result;
            });
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

// A whole rollout of environments in C on this GPU. An environment's text comes after this one, and
// then the kernel that rollout.Rollout launches (rollout.KERNEL).

// What a rollout reads and writes: fields of eight bytes, in the order of rollout.Rollout. A row is
// a step of all n agents. Observations, resets, valid, masks and values have T + 1 rows, the others
// T. An environment has agents_each agents, all of them in one tile. rows: T times what
// device_step takes.
struct Rollout {
    i64 n, inputs, hidden, layers, width, tile;
    const i64 *weights;
    i64 kind, item_bytes;
    const char *observations, *final_observations;
    i64 is_normalised;
    const float *shift, *scale;
    float *state;
    i64 state_stride;
    u8 *resets;
    const u8 *valid;
    i64 T, agents_each, truncates;
    const u8 *truncations, *terminals;
    float *bootstraps;
    void *environments;
    const void *rows;
    u64 seed;
    i64 first_agent;
    const i64 *steps;
    i64 head_count;
    const i64 *heads;
    i64 is_masked;
    const u8 *masks;
    const float *log_std;
    i64 squash_row;
    const float *squash;
    i64 action_count;
    int *actions;
    float *samples, *logprobs, *values;
};

// All T steps of one tile after the other's. No block waits for another. step(i, t) steps
// environment i with the actions of row t, by one thread.
template <class Step> CELL void rollout(const Rollout &all, Step step) {
    SHARED_MEMORY(float, memory);
    Network<REAL, SIXTEENS> network(all.inputs, all.hidden, all.layers, all.width, all.tile, memory);
    network.begin_to_load(all.weights);
    i64 n = all.n, choices = all.width - 1, row_bytes = n * all.inputs * all.item_bytes;
    for (i64 begin = blockIdx.x * all.tile; begin < n; begin += gridDim.x * all.tile) {
        // Every warp steps a few environments: the lanes of one would wait for each other's branches.
        i64 i = begin + threadIdx.x, place = threadIdx.x % 32 * (THREADS / 32) + threadIdx.x / 32,
            environment = begin / all.agents_each + place;
        bool has_agent = threadIdx.x < all.tile && i < n;
        bool has_environment = place < all.tile / all.agents_each
                               && environment < n / all.agents_each;
        const float *row = network.left + threadIdx.x * all.width;
        for (i64 t = 0; t <= all.T; t++) {
            i64 before = (t - 1) * n;
            bool cut = t > 0 && all.truncates && has_agent
                       && is_cut(all.truncations + before, all.terminals + before, i);
            // One call of network.step, because two would not fit the cache of instructions.
#pragma unroll 1
            for (int is_final = __syncthreads_or(cut) != 0; is_final >= 0; is_final--) {
                Inputs in = {n, all.kind, all.final_observations, all.is_normalised != 0, all.shift,
                             all.scale, all.state, all.state_stride, nullptr, nullptr};
                if (!is_final)
                    in.observations = all.observations + t * row_bytes,
                    in.resets = all.resets + t * n, in.valid = all.valid + t * n;
                network.step(in, begin, !is_final && t < all.T);
                if (is_final && cut) all.bootstraps[before + i] = row[choices];
            }
            if (t == all.T) {
                if (has_agent) all.values[t * n + i] = row[choices];
                break;
            }
            Sampling to = {all.seed, all.first_agent, all.steps + t, all.head_count, all.heads,
                           all.is_masked != 0, all.masks + t * n * choices, all.log_std,
                           all.squash_row, all.squash, all.actions + t * n * all.action_count,
                           all.samples + t * n * choices, all.logprobs + t * n, all.values + t * n};
            if (has_agent) network.sample(to, i, row);
            __syncthreads();
            if (has_environment) step(environment, t);
            __syncthreads();
        }
    }
}

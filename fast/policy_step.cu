// One step of a rollout; rollout.PolicyStep launches it. The state is written only if `commit`;
// actions, samples, logprobs and values only if `drawn`. If `final`, values are V of the agents
// that are cut off, 0 of the others, and a block without such an agent does nothing else.

extern "C" __global__ void __launch_bounds__(CREW, 1)
    policy_step(i64 n, i64 inputs, i64 hidden, i64 layers, i64 width, i64 rows,
                const i64 *weights, i64 kind, const void *observations, bool normalised,
                const float *shift, const float *scale, i64 state_stride, bool commit, float *state,
                const u8 *resets, const u8 *valid, bool final, const u8 *truncations,
                const u8 *terminals, float *outputs, bool drawn, u64 seed, i64 first_agent,
                const i64 *counter, i64 head_count, const i64 *heads, bool masked, const u8 *masks,
                const float *log_std, i64 squash_row, const float *squash, void *actions,
                float *samples, float *logprobs, float *values) {
    SHARED_MEMORY(float, memory);
    bool any = !final;
    for (i64 i = blockIdx.x * rows + threadIdx.x; final && threadIdx.x < rows && i < n;
         i += gridDim.x * rows)
        if (is_cut(truncations, terminals, i)) any = true;
        else values[i] = 0.0f;
    if (!__syncthreads_or(any)) return;
    Inputs in = {n, kind, observations, normalised, shift, scale, state, state_stride, resets, valid};
    Sampling to = {seed, first_agent, counter, head_count, heads, masked, masks, log_std,
                   squash_row, squash, actions, samples, logprobs, values};
    Network<REAL, SIXTEENS> network(inputs, hidden, layers, width, rows, memory);
    network.begin_to_load(weights);
    for (i64 begin = blockIdx.x * rows; begin < n; begin += gridDim.x * rows) {
        network.step(in, begin, commit);
        i64 size = width * (n - begin < rows ? n - begin : rows);
        for (int k = threadIdx.x; k < size; k += blockDim.x)
            outputs[begin * width + k] = network.left[k];
        i64 i = begin + threadIdx.x;
        if (threadIdx.x >= rows || i >= n) continue;
        const float *row = network.left + threadIdx.x * width;
        if (final && is_cut(truncations, terminals, i)) values[i] = row[width - 1];
        if (drawn) network.sample(to, i, row);
    }
}

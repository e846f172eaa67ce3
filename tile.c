/* The matrix product of compiled.py: a few rows times a few vectors of columns, whose sums stay in registers while the
   inner dimension passes by (Goto and van de Geijn 2008; the matrices here are so small that the caches need no more
   than the order of the loops). compiled.py compiles this file for the processor at hand and calls it from numba.

       out[r][c] = init[r][c] + sum over s of a[r][s] * w[s][c]     for `rows` rows, `columns` columns and `steps` steps

   Strides are in words of 4 bytes: of a from row to row and from step to step, of w from step to step, of init and out
   from row to row (0: one row for all, a bias). In `tile_floats` a and w are float32; in `tile_pairs` they are pairs of
   bfloat16, two steps each. init and out are float32, and may be the same memory. */
#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, VECTORS = 4 };
#define HEIGHT(vectors) ((vectors) == 1 ? 16 : (vectors) == 2 ? 8 : 4) /* 12 to 16 sums: more than an FMA's latency */
#elif defined(__AVX2__)
#include <immintrin.h>
enum { LANES = 8, VECTORS = 2 };
#define HEIGHT(vectors) ((vectors) == 1 ? 12 : 6)
#else
enum { LANES = 4, VECTORS = 4 };
#define HEIGHT(vectors) ((vectors) == 1 ? 16 : (vectors) == 2 ? 8 : 6)
#endif

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t word __attribute__((may_alias));
typedef word words __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

/* The first `count` floats at p, the other lanes 0; all of them if `part` is 0. */
INLINE vector load(const float *p, int part, int count) {
    if (!part) return *(const floats *)p;
#if defined(__AVX512F__)
    return (vector)_mm512_maskz_loadu_ps((1 << count) - 1, p);
#elif defined(__AVX2__)
    return (vector)_mm256_maskload_ps(p, first_lanes(count));
#else
    vector v = {0};
    for (int i = 0; i < count; i++) v[i] = p[i];
    return v;
#endif
}

INLINE void store(float *p, vector v, int part, int count) {
    if (!part) {
        *(floats *)p = v;
        return;
    }
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (1 << count) - 1, (__m512)v);
#elif defined(__AVX2__)
    _mm256_maskstore_ps(p, first_lanes(count), (__m256)v);
#else
    for (int i = 0; i < count; i++) p[i] = v[i];
#endif
}

/* v in a register: gcc would rather load it anew for each product, which takes as long as the product does. */
INLINE vector held(vector v) {
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#endif
    return v;
}

/* One number of a, or a pair, in all lanes. */
INLINE vector broadcast(const float *p) { return (vector)(*(const word *)p - (words){0}); }

/* sum + x * y; of pairs both products. */
INLINE vector add_product(vector sum, vector x, vector y, int pairs) {
    if (!pairs) return sum + x * y;
#if defined(__AVX512BF16__)
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else /* a bfloat16 is the upper half of a float */
    words a = (words)x, b = (words)y, upper = (words){0} - 65536;
    return sum + (vector)(a << 16) * (vector)(b << 16) + (vector)(a & upper) * (vector)(b & upper);
#endif
}

typedef struct {
    const float *a, *w, *init;
    float *out;
    int64_t a_row, a_step, w_step, steps, init_row, out_row;
} Product;

/* The first `rows` rows and `vectors` vectors of a product; if `part`, the last vector has only `last` columns. */
INLINE void tile(Product p, int pairs, int rows, int vectors, int part, int last) {
    vector sum[16][VECTORS], column[VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            sum[r][v] = load(p.init + r * p.init_row + v * LANES, part && v == vectors - 1, last);
    for (int64_t s = 0; s < p.steps; s++, p.a += p.a_step, p.w += p.w_step) {
        UNROLL for (int v = 0; v < vectors; v++)
            column[v] = held(load(p.w + v * LANES, part && v == vectors - 1, last));
        UNROLL for (int r = 0; r < rows; r++) {
            vector x = held(broadcast(p.a + r * p.a_row));
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = add_product(sum[r][v], x, column[v], pairs);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            store(p.out + r * p.out_row + v * LANES, sum[r][v], part && v == vectors - 1, last);
}

INLINE void some_rows(Product *p, int64_t *rows, int pairs, int height, int vectors, int part, int last) {
    for (; *rows >= height; *rows -= height) {
        tile(*p, pairs, height, vectors, part, last);
        p->a += height * p->a_row;
        p->init += height * p->init_row;
        p->out += height * p->out_row;
    }
}

INLINE void all_rows(Product p, int64_t rows, int pairs, int vectors, int part, int last) {
    some_rows(&p, &rows, pairs, HEIGHT(vectors), vectors, part, last);
    some_rows(&p, &rows, pairs, 4, vectors, part, last);
    some_rows(&p, &rows, pairs, 1, vectors, part, last);
}

INLINE void multiply(Product p, int64_t rows, int64_t columns, int pairs) {
    for (; columns > 0; columns -= VECTORS * LANES, p.w += VECTORS * LANES, p.init += VECTORS * LANES,
                        p.out += VECTORS * LANES) {
        int vectors = columns >= VECTORS * LANES ? VECTORS : (columns + LANES - 1) / LANES;
        int last = columns - (vectors - 1) * LANES;
        UNROLL for (int n = 1; n <= VECTORS; n++) { /* a loop of its own for each number of vectors */
            if (n == vectors && last >= LANES) all_rows(p, rows, pairs, n, 0, 0);
            if (n == vectors && last < LANES) all_rows(p, rows, pairs, n, 1, last);
        }
    }
}

/* Ask for `rows` pieces of `bytes` bytes, `stride` bytes apart, before they are needed. */
void tile_ahead(const char *p, int64_t rows, int64_t stride, int64_t bytes) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + r * stride + i, 0, 2);
}

void tile_floats(const float *a, int64_t a_row, int64_t a_step, int64_t rows, const float *w, int64_t w_step,
                 int64_t steps, const float *init, int64_t init_row, float *out, int64_t out_row, int64_t columns) {
    multiply((Product){a, w, init, out, a_row, a_step, w_step, steps, init_row, out_row}, rows, columns, 0);
}

void tile_pairs(const float *a, int64_t a_row, int64_t a_step, int64_t rows, const float *w, int64_t w_step,
                int64_t steps, const float *init, int64_t init_row, float *out, int64_t out_row, int64_t columns) {
    multiply((Product){a, w, init, out, a_row, a_step, w_step, steps, init_row, out_row}, rows, columns, 1);
}

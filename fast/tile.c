/* The matrix products of fast/products.py, which compiles this file for the processor at hand.

   numba calls `tile_multiply`, rows times a small matrix, and `tile_accumulate`, the gradient of
   that matrix. Both cut their matrices into products

       out[r][c] = init[r][c] + sum over s of a[r][s] * w[s][c]

   of `rows` rows, `columns` columns and `steps` steps, and these into tiles: a few rows times a few
   vectors of columns, whose sums are in registers during the loop over s (Goto and van de Geijn
   2008; the matrices are so small that the caches need only the order of the loops). Strides are in
   words of 4 bytes: of a between rows and between steps, of w between steps, of init and out
   between rows (0: one row for all, a bias). a and w are float32, or pairs of bfloat16, two steps
   each. init and out are float32, and may be the same memory. */
#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, VECTORS = 4 };
#define HEIGHT(vectors)                                                                            \
    ((vectors) == 1 ? 16 : (vectors) == 2 ? 8 : 4) /* 12 to 16 sums: more than an FMA's latency */
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
typedef uint32_t word __attribute__((may_alias));
typedef word words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
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

/* Keep v in a register: gcc loads it again for each product, which takes as long as the product. */
INLINE vector in_register(vector v) {
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#endif
    return v;
}

/* Return one number of a, or a pair, in all lanes. */
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

/* v as bfloat16, the upper half of a float, in the lower half of each lane: rounded to the nearest,
 * halves to even. */
INLINE words bfloats(vector v) {
#if defined(__AVX512BF16__)
    return (words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    words bits = (words)v, nan = (words)(v != v), even = bits >> 16 & 1;
    words up = (nan & (bits | 0x400000)) | (~nan & (bits + 0x7fff + even));
    return up >> 16;
#endif
}

/* pairs[r][s] = from[r][2s] beside from[r][2s + 1], and 0 where a row of `columns` ends between
   them. Written are whole vectors, beyond the end of a row; the next row overwrites that. */
INLINE void round_rows(const float *from, int64_t rows, int64_t columns, int64_t stride,
                       uint32_t *pairs, int64_t pairs_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += LANES) {
            vector v = load(from + r * stride + c, columns - c < LANES, (int)(columns - c));
            *(halves *)((uint16_t *)(pairs + r * pairs_stride) + c) =
                __builtin_convertvector(bfloats(v), halves);
        }
}

/* pairs[s][c] = from[2s][c] beside from[2s + 1][c], and 0 for a missing row. */
INLINE void pair_rows(const float *from, int64_t rows, int64_t columns, int64_t stride,
                      uint32_t *pairs, int64_t pairs_stride) {
    for (int64_t r = 0; r < rows; r += 2, from += 2 * stride, pairs += pairs_stride)
        for (int64_t c = 0; c < columns; c += LANES) {
            int part = columns - c < LANES, count = (int)(columns - c);
            words low = bfloats(load(from + c, part, count));
            words high = r + 1 < rows ? bfloats(load(from + stride + c, part, count)) : (words){0};
            *(words *)(pairs + c) = low | high << 16;
        }
}

typedef struct {
    const float *a, *w, *init;
    float *out;
    int64_t a_row, a_step, w_step, steps, init_row, out_row;
} Product;

/* The first `rows` rows and `vectors` vectors of a product; if `part`, the last vector has only
 * `last` columns. */
INLINE void tile(Product p, int pairs, int rows, int vectors, int part, int last) {
    vector sum[16][VECTORS], column[VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            sum[r][v] = load(p.init + r * p.init_row + v * LANES, part && v == vectors - 1, last);
    for (int64_t s = 0; s < p.steps; s++, p.a += p.a_step, p.w += p.w_step) {
        UNROLL for (int v = 0; v < vectors; v++)
            column[v] = in_register(load(p.w + v * LANES, part && v == vectors - 1, last));
        UNROLL for (int r = 0; r < rows; r++) {
            vector x = in_register(broadcast(p.a + r * p.a_row));
            UNROLL for (int v = 0; v < vectors; v++)
                sum[r][v] = add_product(sum[r][v], x, column[v], pairs);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            store(p.out + r * p.out_row + v * LANES, sum[r][v], part && v == vectors - 1, last);
}

INLINE void some_rows(Product *p, int64_t *rows, int pairs, int height, int vectors, int part,
                      int last) {
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
    for (; columns > 0; columns -= VECTORS * LANES, p.w += VECTORS * LANES,
                        p.init += VECTORS * LANES, p.out += VECTORS * LANES) {
        int vectors = columns >= VECTORS * LANES ? VECTORS : (columns + LANES - 1) / LANES;
        int last = columns - (vectors - 1) * LANES;
        /* one loop for each number of vectors */
        UNROLL for (int n = 1; n <= VECTORS; n++) {
            if (n == vectors && last >= LANES) all_rows(p, rows, pairs, n, 0, 0);
            if (n == vectors && last < LANES) all_rows(p, rows, pairs, n, 1, last);
        }
    }
}

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* AMX (Intel 64 and IA-32 Software Developer's Manual, volume 1, "Programming with Intel AMX"):
   eight tiles of 16 rows of 16 words, and one instruction that adds the product of two of them,
   pairs of bfloat16, to a third. Four tiles hold sums, one has a part of a, two of w. A program
   requests them from Linux (its Documentation/arch/x86/xstate.rst); if it refuses, the processor's
   vectors are used. */
enum { SIDE = 16, REQUEST = 0x1023, TILES = 18 };
static int has_tiles;
__attribute__((constructor)) static void request_tiles(void) {
    has_tiles = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

typedef vector Square[SIDE]; /* one tile in memory */
static const struct {
    uint8_t palette, start, zero[14];
    uint16_t bytes_of_a_row[16];
    uint8_t rows[16];
} EIGHT_TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* square[r][c] = p[r * stride + c] for the first `rows` rows and `columns` columns, and 0 beside
 * them. */
INLINE void copy(Square square, const float *p, int64_t stride, int rows, int columns) {
    for (int r = 0; r < SIDE; r++)
        square[r] = r < rows ? load(p + r * stride, columns < SIDE, columns) : (vector){0};
    __asm__ volatile("" ::: "memory"); /* gcc does not know that a tile is loaded from memory */
}

/* square[r][c] = p[c * stride + r] in the same way: neighbours exchange every second lane, then
   pairs of rows every second pair of lanes, then fours, then eights. */
INLINE void turn(Square square, const float *p, int64_t stride, int rows, int columns) {
    vector line[SIDE];
    words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    UNROLL for (int c = 0; c < SIDE; c++)
        line[c] = c < columns ? load(p + c * stride, rows < SIDE, rows) : (vector){0};
    UNROLL for (int d = 1; d < SIDE; d *= 2) {
        words second = (words)((lane & d) != 0) & (SIDE - d), even = lane + second, odd = even + d;
        UNROLL for (int c = 0; c < SIDE; c++)
            if (!(c & d)) {
                __m512 upper = (__m512)line[c], lower = (__m512)line[c + d];
                line[c] = (vector)_mm512_permutex2var_ps(upper, (__m512i)even, lower);
                line[c + d] = (vector)_mm512_permutex2var_ps(upper, (__m512i)odd, lower);
            }
    }
    UNROLL for (int r = 0; r < SIDE; r++) square[r] = line[r];
    __asm__ volatile("" ::: "memory");
}

/* The intrinsics want the number of a tile as a literal. */
#define LOAD(tile, p, stride, rows, columns)                                                       \
    if ((rows) >= SIDE && (columns) >= SIDE) _tile_loadd(tile, p, 4 * (stride));                   \
    else {                                                                                         \
        copy(square, p, stride, rows, columns);                                                    \
        _tile_loadd(tile, square, sizeof(vector));                                                 \
    }
#define BEGIN(sum, _)                                                                              \
    if (columns > SIDE * sum) {                                                                    \
        LOAD(sum, p.init + SIDE * sum, p.init_row, rows, columns - SIDE * sum)                     \
    }
#define ADD(sum, column)                                                                           \
    if (columns > SIDE * sum) {                                                                    \
        LOAD(column, p.w + SIDE * sum, p.w_step, left, columns - SIDE * sum)                       \
        _tile_dpbf16ps(sum, 4, column);                                                            \
    }
#define END(sum, _)                                                                                \
    if (rows >= SIDE && columns >= SIDE * (sum + 1))                                               \
        _tile_stored(sum, p.out + SIDE * sum, 4 * p.out_row);                                      \
    else if (columns > SIDE * sum) {                                                               \
        _tile_stored(sum, square, sizeof(vector));                                                 \
        for (int r = 0; r < rows && r < SIDE; r++)                                                 \
            store(p.out + r * p.out_row + SIDE * sum, square[r], columns < SIDE * (sum + 1),       \
                  columns - SIDE * sum);                                                           \
    }
#define FOUR(part) part(0, 5) part(1, 6) part(2, 5) part(3, 6)

/* The first 16 rows, or as many as there are, and the first 64 columns of a product of pairs. */
INLINE void tiles(Product p, int64_t rows, int64_t columns, int turned) {
    Square square;
    FOUR(BEGIN)
    for (int64_t left = p.steps; left > 0;
         left -= SIDE, p.a += SIDE * p.a_step, p.w += SIDE * p.w_step) {
        if (turned) {
            turn(square, p.a, p.a_step, rows, left);
            _tile_loadd(4, square, sizeof(vector));
        } else
            LOAD(4, p.a, p.a_row, rows, left)
        FOUR(ADD)
    }
    FOUR(END)
}

static void multiply_tiles(Product p, int64_t rows, int64_t columns) {
    _tile_loadconfig(&EIGHT_TILES); /* each time, 50 ns: another library may use the tiles */
    for (; columns > 0;
         columns -= 4 * SIDE, p.w += 4 * SIDE, p.init += 4 * SIDE, p.out += 4 * SIDE) {
        Product q = p;
        for (int64_t left = rows; left > 0; left -= SIDE) {
            tiles(q, left, columns, p.a_step != 1);
            q.a += SIDE * p.a_row, q.init += SIDE * p.init_row, q.out += SIDE * p.out_row;
        }
    }
    _tile_release();
}
#endif

INLINE void product(Product p, int64_t rows, int64_t columns, int pairs) {
#if defined(__AMX_BF16__) && defined(__linux__)
    if (pairs && has_tiles) { /* gcc does not know that tiles come from memory and go there */
        __asm__ volatile("" : : "r"(p.a), "r"(p.w), "r"(p.init) : "memory");
        multiply_tiles(p, rows, columns);
        __asm__ volatile("" : : "r"(p.out) : "memory");
        return;
    }
#endif
    multiply(p, rows, columns, pairs);
}

/* PANEL: columns of a panel of weights, see fast/products.py. BLOCK: rows computed while a panel
   stays in the first-level cache. DEEP: pairs of a row that are rounded at a time; WIDE: columns.
   HIGH: columns of grad at a time if nothing is rounded and there are more than
   BLOCK rows. GAP: one cache line more, as rows whose distance is a power of two would fall into
   the same few places of the cache. */
enum { PANEL = 64, BLOCK = 64, DEEP = 128, WIDE = 256, HIGH = 16, GAP = 16 };
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Prefetch `rows` pieces of `count` floats, `stride` floats apart. */
INLINE void prefetch_rows(const float *p, int64_t rows, int64_t count, int64_t stride) {
    for (; rows > 0; rows--, p += stride) {
        __builtin_prefetch(p);
        for (int64_t i = count; i > 0; i -= 16)
            __builtin_prefetch(p + i - 1); /* a piece may begin within a line */
    }
}

/* Prefetch the rows from rows * first / all to rows * last / all. Memory takes few requests at
   once, so the caller prefetches a share of the next rows with each piece of its work. */
INLINE void prefetch_share(const float *p, int64_t rows, int64_t columns, int64_t first,
                          int64_t last, int64_t all) {
    int64_t from = rows * first / all;
    prefetch_rows(p + from * columns, rows * last / all - from, columns, columns);
}

INLINE void multiply_rows(const float *a, int64_t rows, int64_t inner, const float *packed,
                          const float *init, int64_t init_row, float *out, int64_t columns,
                          int pairs) {
    uint32_t rounded[BLOCK * DEEP + LANES];
    int64_t steps = pairs ? (inner + 1) / 2 : inner, deep = pairs || !steps ? DEEP : steps;
    for (int64_t block = 0; block < rows; block += BLOCK)
        for (int64_t s = 0; s == 0 || s < steps;
             s += deep) { /* once without steps: out = init */
            int64_t count = least(BLOCK, rows - block), now = least(deep, steps - s);
            const float *left = a + block * inner;
            if (pairs) {
                round_rows(left + 2 * s, count, least(2 * now, inner - 2 * s), inner, rounded, now);
                left = (const float *)rounded;
            }
            for (int64_t first = 0; first < columns; first += PANEL) {
                int64_t width = least(PANEL, columns - first);
                float *target = out + block * columns + first;
                if (s == 0)
                    prefetch_share(a + (block + count) * inner, least(BLOCK, rows - block - count),
                                  inner, first, first + width, columns);
                const float *begin = s > 0 ? target : init + block * init_row + first;
                product((Product){left, packed + first * steps + s * width, begin, target,
                                  pairs ? now : inner, 1, width, now, s > 0 ? columns : init_row,
                                  columns},
                        count, width, pairs);
            }
        }
}

INLINE void accumulate_rows(const float *grad, const float *x, int64_t rows, int64_t outputs,
                            int64_t inputs, float *gradient, int pairs) {
    uint32_t lefts[BLOCK][WIDE + GAP], rights[BLOCK][PANEL + GAP];
    int64_t size = pairs ? 2 * BLOCK : BLOCK, wide = pairs ? WIDE : rows > size ? HIGH : outputs;
    for (int64_t first = 0; first < rows; first += size, grad += size * outputs, x += size * inputs)
        for (int64_t output = 0; output < outputs; output += wide) {
            int64_t steps = least(size, rows - first), height = least(wide, outputs - output);
            int64_t following = least(size, rows - first - steps),
                    last = output + height == outputs;
            if (pairs) pair_rows(grad + output, steps, height, outputs, lefts[0], WIDE + GAP);
            else if (rows > size) { /* a column's numbers lie far apart: the processor does not
                                       foresee them */
                prefetch_rows(last ? grad + steps * outputs : grad + output + height,
                          last ? following : steps, HIGH, outputs);
                prefetch_share(x + steps * inputs, following, inputs, output, output + height,
                              outputs);
            }
            for (int64_t input = 0; input < inputs; input += PANEL) {
                int64_t width = least(PANEL, inputs - input);
                float *target = gradient + output * inputs + input;
                Product p = {grad + output, x + input, target, target, 1,
                             outputs,       inputs,    steps,  inputs, inputs};
                if (pairs) {
                    pair_rows(x + input, steps, width, inputs, rights[0], PANEL + GAP);
                    p.a = (const float *)lefts, p.a_step = WIDE + GAP;
                    p.w = (const float *)rights, p.w_step = PANEL + GAP, p.steps = (steps + 1) / 2;
                }
                product(p, height, width, pairs);
            }
        }
}

/* out[:rows] = init + a[:rows] times the packed matrix (inner, columns), whose rows of pairs are
   bfloat16 if `pairs`; a, float32, is then rounded. init_row: numbers from a row of init to the
   next one. */
void tile_multiply(const float *a, int64_t rows, int64_t inner, const float *packed, int64_t pairs,
                   const float *init, int64_t init_row, float *out, int64_t columns) {
    if (pairs) multiply_rows(a, rows, inner, packed, init, init_row, out, columns, 1);
    else multiply_rows(a, rows, inner, packed, init, init_row, out, columns, 0);
}

/* gradient (outputs, inputs) += grad (rows, outputs) turned, times x (rows, inputs); if `pairs`,
 * both are rounded. */
void tile_accumulate(const float *grad, const float *x, int64_t rows, int64_t outputs,
                     int64_t inputs, int64_t pairs, float *gradient) {
    if (pairs) accumulate_rows(grad, x, rows, outputs, inputs, gradient, 1);
    else accumulate_rows(grad, x, rows, outputs, inputs, gradient, 0);
}

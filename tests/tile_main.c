/* fast/tile.c held to plain loops in double precision, on whatever processor it is compiled for; see test_products.py. It
   prints the largest error in units of what rounding may do, and exits 1 if that is over 1 or anything else was written. */
#include "../fast/tile.c"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t seed = 1;
static float number(void) { /* in -1 .. 1 */
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((int64_t)seed >> 40) / (1 << 23);
}
typedef union {
    float number;
    uint32_t bits;
} Word;
static float kept(float x, uint32_t mask) { return (Word){.bits = (Word){x}.bits & mask}.number; }
static float pair(float first, float second) {
    return (Word){.bits = (Word){first}.bits >> 16 | ((Word){second}.bits & 0xffff0000u)}.number;
}
static float *room(int64_t count) {
    float *p = malloc(4 * (size_t)count);
    for (int64_t i = 0; i < count; i++) p[i] = 12345.0f;
    return p;
}

/* The largest error of one product of these sizes. gap: words between the rows of w and out that nobody may touch;
   turned: a lies step by step. */
static double check(int64_t rows, int64_t steps, int64_t columns, int pairs, int bias, int gap, int turned) {
    int64_t width = columns + gap, deep = pairs ? 2 : 1, a_row = turned ? 1 : steps, a_step = turned ? rows : 1;
    uint32_t mask = pairs ? 0xffff0000u : 0xffffffffu; /* bfloat16 is the upper half of a float */
    float *a = room(rows * steps), *w = room(steps * width), *init = room(rows * width), *out = room(rows * width);
    float *exact_a = room(rows * steps * deep), *exact_w = room(steps * deep * columns);
    for (int64_t i = 0; i < rows * steps * deep; i++) exact_a[i] = kept(number(), mask);
    for (int64_t i = 0; i < steps * deep * columns; i++) exact_w[i] = kept(number(), mask);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t s = 0; s < steps; s++) {
            const float *x = exact_a + (r * steps + s) * deep;
            a[r * a_row + s * a_step] = pairs ? pair(x[0], x[1]) : x[0];
        }
    for (int64_t s = 0; s < steps; s++)
        for (int64_t c = 0; c < columns; c++) {
            const float *x = exact_w + s * deep * columns + c;
            w[s * width + c] = pairs ? pair(x[0], x[columns]) : x[0];
        }
    for (int64_t i = 0; i < rows * width; i++) init[i] = number();
    int64_t init_row = bias ? 0 : width;
    product((Product){a, w, init, out, a_row, a_step, width, steps, init_row, width}, rows, columns, pairs);
    double worst = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) {
            double sum = init[r * init_row + c], size = fabs(sum);
            if (c >= columns) {
                if (out[r * width + c] != 12345.0f) return INFINITY;
                continue;
            }
            for (int64_t s = 0; s < steps * deep; s++) {
                double one = (double)exact_a[r * steps * deep + s] * exact_w[s * columns + c];
                sum += one;
                size += fabs(one);
            }
            double error = fabs(out[r * width + c] - sum) / (size * 6e-8 * (double)(steps * deep + 2));
            worst = error > worst || isnan(error) ? error : worst;
        }
    free(a), free(w), free(init), free(out), free(exact_a), free(exact_w);
    return worst;
}

/* A float as a product of pairs takes it: rounded to bfloat16, halves to even. */
static double taken(float x, int pairs) {
    uint32_t bits = (Word){x}.bits;
    return pairs ? kept((Word){.bits = bits + 0x7fff + (bits >> 16 & 1)}.number, 0xffff0000u) : x;
}

/* The largest error of tile_multiply and of tile_accumulate, whose arrays end where they must. */
static double check_whole(int64_t rows, int64_t inner, int64_t columns, int pairs) {
    int64_t steps = pairs ? (inner + 1) / 2 : inner, deep = pairs ? 2 : 1;
    float *a = room(rows * inner), *packed = room(steps * columns), *bias = room(columns), *out = room(rows * columns);
    float *w = room(inner * columns), *gradient = room(inner * columns);
    for (int64_t i = 0; i < rows * inner; i++) a[i] = number();
    for (int64_t i = 0; i < inner * columns; i++) w[i] = kept(number(), 0xffff0000u), gradient[i] = number();
    for (int64_t i = 0; i < columns; i++) bias[i] = number();
    for (int64_t first = 0; first < columns; first += PANEL) /* as products.pack does */
        for (int64_t s = 0, width = least(PANEL, columns - first); s < steps; s++)
            for (int64_t c = 0; c < width; c++) {
                float low = w[deep * s * columns + first + c];
                float high = pairs && 2 * s + 1 < inner ? w[(2 * s + 1) * columns + first + c] : 0;
                packed[first * steps + s * width + c] = pairs ? pair(low, high) : low;
            }
    tile_multiply(a, rows, inner, packed, pairs, bias, 0, out, columns);
    double worst = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            double sum = bias[c], size = fabs(sum);
            for (int64_t s = 0; s < inner; s++) {
                double one = taken(a[r * inner + s], pairs) * w[s * columns + c];
                sum += one;
                size += fabs(one);
            }
            double error = fabs(out[r * columns + c] - sum) / (size * 6e-8 * (double)(inner + 2));
            worst = error > worst || isnan(error) ? error : worst;
        }
    size_t bytes = sizeof(double) * (size_t)(inner * columns);
    double *exact = malloc(bytes), *sizes = malloc(bytes);
    for (int64_t i = 0; i < inner; i++)
        for (int64_t c = 0; c < columns; c++) {
            double sum = gradient[i * columns + c], size = fabs(sum);
            for (int64_t r = 0; r < rows; r++) {
                double one = taken(a[r * inner + i], pairs) * taken(out[r * columns + c], pairs);
                sum += one;
                size += fabs(one);
            }
            exact[i * columns + c] = sum, sizes[i * columns + c] = size;
        }
    tile_accumulate(a, out, rows, inner, columns, pairs, gradient);
    for (int64_t i = 0; i < inner * columns; i++) {
        double error = fabs(gradient[i] - exact[i]) / (sizes[i] * 6e-8 * (double)(rows + 2));
        worst = error > worst || isnan(error) ? error : worst;
    }
    free(a), free(packed), free(bias), free(out), free(w), free(gradient), free(exact), free(sizes);
    return worst;
}

int main(void) {
    static const int64_t rows[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 33, 64}, steps[] = {1, 2, 7, 59, 64};
    static const int64_t columns[] = {1, 3, 4, 5, 8, 12, 15, 16, 17, 31, 32, 33, 47, 48, 64, 65, 100, 192};
    double worst = 0;
    for (int pairs = 0; pairs < 2; pairs++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            for (size_t j = 0; j < sizeof steps / sizeof *steps; j++)
                for (size_t k = 0; k < sizeof columns / sizeof *columns; k++) {
                    for (int turned = 0; turned < 2; turned++) {
                        int bias = (i + j + k) % 2, gap = (j + k) % 3;
                        double error = check(rows[i], steps[j], columns[k], pairs, bias, gap, turned);
                        worst = error > worst || isnan(error) ? error : worst;
                    }
                }
    static const int64_t heights[] = {1, 2, 65, 129, 200}, depths[] = {1, 7, 118, 255, 256, 257, 513};
    static const int64_t widths[] = {1, 4, 17, 64, 65, 130};
    for (int pairs = 0; pairs < 2; pairs++)
        for (size_t i = 0; i < sizeof heights / sizeof *heights; i++)
            for (size_t j = 0; j < sizeof depths / sizeof *depths; j++)
                for (size_t k = 0; k < sizeof widths / sizeof *widths; k++) {
                    double error = check_whole(heights[i], depths[j], widths[k], pairs);
                    worst = error > worst || isnan(error) ? error : worst;
                }
    printf("%d lanes, largest error %.3f\n", LANES, worst);
    return !(worst <= 1);
}

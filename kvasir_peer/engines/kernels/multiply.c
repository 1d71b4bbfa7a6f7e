/* Activations times one panel of weights. */
#include "chunks.h"

#include <math.h>

/* What table codes stand for, with SIGNED_BIAS added. */
#define BIASED(v) (uint8_t)((v) + SIGNED_BIAS)
static const uint8_t TABLES[3][16] = {{0}, {IQ4_VALUES(BIASED)}, {MXFP4_VALUES(BIASED)}};

size_t rounded_bytes(size_t n, size_t columns) {
    return n * (columns + columns / COLUMNS * sizeof(float) + columns / 16 * sizeof(int32_t));
}

struct activations rounded_at(void *memory, size_t n, size_t columns) {
    float *scales = memory;
    int32_t *sums = (int32_t *)(scales + n * (columns / COLUMNS));
    int8_t *codes = (int8_t *)(sums + n * (columns / 16));
    return (struct activations){.codes = codes, .scales = scales, .sums = sums, .columns = columns};
}

void round_row(const float *x, const struct activations *to, size_t row) {
    int8_t *codes = (int8_t *)to->codes + row * to->columns;
    float *scales = (float *)to->scales + row * (to->columns / COLUMNS);
    int32_t *sums = (int32_t *)to->sums + row * (to->columns / 16);
    for (size_t block = 0; block < to->columns / COLUMNS; block++, x += COLUMNS, codes += COLUMNS, sums += 2) {
        /* As integers, absolute floats order as they do as floats, and a NaN is above all. */
        int32_t bits[COLUMNS], largest = 0;
        memcpy(bits, x, sizeof bits);
        for (int i = 0; i < COLUMNS; i++) {
            int32_t magnitude = bits[i] & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= 0x7f800000) {
            /* Infinite or no number: nothing that the row becomes is one, whatever the weights. */
            memset(codes, 0, COLUMNS);
            memset(sums, 0, 2 * sizeof *sums);
            scales[block] = NAN;
            continue;
        }
        float most;
        memcpy(&most, &largest, 4);
        /* Steps are not below the smallest normal float, the inverse of which is a float too. */
        float step = most / 127.0f, inverse = 127.0f / most;
        step = step < 0x1p-126f ? 0x1p-126f : step;
        inverse = inverse > 0x1p126f ? 0x1p126f : inverse;
        scales[block] = largest ? step : 0.0f;
        /* Added to 1.5 * 2 ** 23 a float is rounded to a whole number, which is then in its low bits. */
        int32_t whole[COLUMNS];
        for (int i = 0; i < COLUMNS; i++) {
            float moved = x[i] * inverse + 12582912.0f;
            memcpy(&whole[i], &moved, 4);
            whole[i] -= 0x4b400000;
        }
        for (int half = 0; half < 2; half++) {
            int32_t sum = 0;
            for (int i = 16 * half; i < 16 * half + 16; i++)
                sum += whole[i];
            sums[half] = sum;
        }
        for (int i = 0; i < COLUMNS; i++)
            codes[i] = (int8_t)whole[i];
    }
}

/* Codes of a chunk as the dot instruction takes them. */
INLINE V dot_codes(const uint8_t *block, int bits, int table, V values, int c, int h) {
    V codes = chunk(block, bits, c, h);
    if (table)
        return v_look_up(values, codes);
#if SIGNED_BIAS == 0
    if (bits == 8)
        return v_xor_sign(codes);
#endif
    return codes;
}

/* N rows of activations times a panel; all but the pointers is known when this is compiled. */
INLINE void product(const uint8_t *panel, const struct activations *x, const int32_t *rows, float *out, const int N,
                    const int bits, const int zero, const int table, const enum scales kind) {
    const int is_signed = bits == 8 || table;
    /* Added to each sum of products: what codes are too large by, times the sum of activations. */
    const int bias = bits == 8 ? SIGNED_BIAS : table ? SIGNED_BIAS : zero;
    const int two_groups = kind == U4 || kind == I8;
    const int has_super = super_bytes(kind) != 0, has_minimum = kind == U6 || kind == U4;
    const size_t blocks = x->columns / COLUMNS;
    const int8_t *codes[MOST_ROWS];
    const float *scales[MOST_ROWS];
    const int32_t *sums[MOST_ROWS];
    F total[MOST_ROWS][NV], part[MOST_ROWS][NV], least[MOST_ROWS][NV];
    V values = v_table(TABLES[table]);
    for (int i = 0; i < N; i++) {
        codes[i] = x->codes + (size_t)rows[i] * x->columns;
        scales[i] = x->scales + (size_t)rows[i] * blocks;
        sums[i] = x->sums + (size_t)rows[i] * blocks * 2;
        for (int h = 0; h < NV; h++)
            total[i][h] = f_zero();
    }
    for (size_t b = 0; b < blocks;) {
        const uint8_t *super = panel;
        panel += super_bytes(kind);
        const size_t end = has_super ? b + 8 : blocks;
        if (has_super)
            for (int i = 0; i < N; i++)
                for (int h = 0; h < NV; h++)
                    part[i][h] = least[i][h] = f_zero();
        for (; b < end; b++, panel += record_bytes(bits, kind)) {
            const uint8_t *scale = panel + 64 * bits;
            for (int h = 0; h < NV; h++) {
                V dots[MOST_ROWS];
                for (int group = 0; group < 1 + two_groups; group++) {
                    for (int i = 0; i < N; i++) {
                        int32_t sum = two_groups ? sums[i][2 * b + group] : sums[i][2 * b] + sums[i][2 * b + 1];
                        dots[i] = v_word(-bias * sum);
                    }
                    for (int c = two_groups ? 4 * group : 0; c < (two_groups ? 4 * group + 4 : 8); c++) {
                        V weights = dot_codes(panel, bits, table, values, c, h);
                        for (int i = 0; i < N; i++) {
                            int32_t four;
                            memcpy(&four, codes[i] + COLUMNS * b + 4 * c, 4);
                            dots[i] = is_signed ? v_dot_signed(dots[i], weights, v_word(four))
                                                : v_dot(dots[i], weights, v_word(four));
                        }
                    }
                    const F s = scale_of(kind, scale, group, h);
                    const F m = minimum_of(kind, scale, group, h);
                    for (int i = 0; i < N; i++) {
                        F step = f_mul(s, f_all(scales[i][b]));
                        F *to = has_super ? &part[i][h] : &total[i][h];
                        *to = f_fma(f_from(dots[i]), step, *to);
                        if (has_minimum || kind == F16_OFFSET) {
                            int32_t sum = two_groups ? sums[i][2 * b + group] : sums[i][2 * b] + sums[i][2 * b + 1];
                            F *under = has_minimum ? &least[i][h] : &total[i][h];
                            *under = f_fma(m, f_all(scales[i][b] * (float)sum), *under);
                        }
                    }
                }
            }
        }
        if (has_super)
            for (int h = 0; h < NV; h++) {
                F d = f_half(super + 2 * h * LANES);
                for (int i = 0; i < N; i++)
                    total[i][h] = f_fma(d, part[i][h], total[i][h]);
                if (has_minimum) {
                    F least_d = f_mul(f_half(super + 32 + 2 * h * LANES), f_all(-1.0f));
                    for (int i = 0; i < N; i++)
                        total[i][h] = f_fma(least_d, least[i][h], total[i][h]);
                }
            }
    }
    for (int i = 0; i < N; i++)
        for (int h = 0; h < NV; h++)
            f_store(out + PANEL_ROWS * i + h * LANES, total[i][h]);
}

/* Versions for 1, 2, 3, 4 and 8 rows, where there are registers for so many; types with super-blocks need three sums of
 * floats for each row, so at most 4 rows fit. */
#define VERSION_COUNT 5
static const size_t VERSION_ROWS[VERSION_COUNT] = {1, 2, 3, 4, 8};

typedef void (*Product)(const uint8_t *, const struct activations *, const int32_t *, float *);

#define FITS(N, SCALES) ((N) <= MOST_ROWS && ((N) <= 4 || super_bytes(SCALES) == 0))
#define VERSION(NAME, N, BITS, ZERO, TABLE, SCALES)                                                               \
    static __attribute__((noinline)) void NAME##_##N(const uint8_t *panel, const struct activations *x,           \
                                                     const int32_t *rows, float *out) {                           \
        if (FITS(N, SCALES))                                                                                      \
            product(panel, x, rows, out, FITS(N, SCALES) ? N : 1, BITS, ZERO, TABLE, SCALES);                     \
    }
#define DEFINE(NAME, TYPE, BLOCK, BYTES, BITS, ZERO, TABLE, SCALES) \
    VERSION(NAME, 1, BITS, ZERO, TABLE, SCALES)                     \
    VERSION(NAME, 2, BITS, ZERO, TABLE, SCALES)                     \
    VERSION(NAME, 3, BITS, ZERO, TABLE, SCALES)                     \
    VERSION(NAME, 4, BITS, ZERO, TABLE, SCALES)                     \
    VERSION(NAME, 8, BITS, ZERO, TABLE, SCALES)
KINDS(DEFINE)

static const struct {
    struct kind kind;
    Product products[VERSION_COUNT];
} ALL[] = {
#define ENTRY(NAME, TYPE, BLOCK, BYTES, BITS, ZERO, TABLE, SCALES) \
    {{TYPE, BLOCK, BYTES, BITS, ZERO, TABLE, SCALES}, {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_8}},
    KINDS(ENTRY)};

const struct kind *find_kind(int type) {
    for (size_t i = 0; i < sizeof ALL / sizeof *ALL; i++)
        if (ALL[i].kind.type == type)
            return &ALL[i].kind;
    return NULL;
}

void multiply(const struct kind *kind, const uint8_t *panel, const struct activations *x, const int32_t *rows,
              size_t n, float *out) {
    if (x->floats) {
        multiply_exactly(kind, panel, x, rows, n, out);
        return;
    }
    const Product *products = (const Product *)((const char *)kind + offsetof(__typeof__(ALL[0]), products));
    while (n) {
        int version = VERSION_COUNT - 1;
        while (VERSION_ROWS[version] > n || !FITS(VERSION_ROWS[version], kind->scales))
            version--;
        const size_t now = VERSION_ROWS[version];
        products[version](panel, x, rows, out);
        rows += now;
        out += PANEL_ROWS * now;
        n -= now;
    }
}

/* Activations times one panel of weights, both as floats. */
#include "chunks.h"

/* What table codes stand for: IQ4 (kvalues_iq4nl of ggml), and twice the e2m1 floats. */
static const int8_t TABLES[3][16] = {
    {0},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

/* Codes become floats times this, and sums are divided by it at the end. */
#define RAISED 0x1p24f

size_t summed_bytes(size_t n, size_t columns) { return n * (columns / 16) * sizeof(float); }

struct activations summed_at(void *memory, const float *x, size_t columns) {
    return (struct activations){.columns = columns, .floats = x, .float_sums = memory};
}

void sum_row(const float *x, const struct activations *to, size_t row) {
    float *sums = (float *)to->float_sums + row * (to->columns / 16);
    for (size_t group = 0; group < to->columns / 16; group++, x += 16) {
        float four[4];
        for (int i = 0; i < 4; i++)
            four[i] = (x[i] + x[i + 4]) + (x[i + 8] + x[i + 12]);
        sums[group] = RAISED * ((four[0] + four[1]) + (four[2] + four[3]));
    }
}

/* Signed codes of a chunk, what stands for zero taken off. */
INLINE V signed_codes(const uint8_t *block, int bits, int zero, int table, V values, int c, int h) {
    V codes = chunk(block, bits, c, h);
    return table ? v_look_up(values, codes) : zero ? v_sub(codes, v_bytes(zero)) : codes;
}

/* gcc has to be told where sums stay in registers; clang is slowed down by it. */
#ifdef __clang__
#define UNROLL(TIMES)
#else
#define PRAGMA(TEXT) _Pragma(#TEXT)
#define UNROLL(TIMES) PRAGMA(GCC unroll TIMES)
#endif

/* N rows of activations times a panel; all but the pointers is known when this is compiled. */
INLINE void product(const uint8_t *panel, const struct activations *x, const int32_t *rows, float *out, const int N,
                    const int bits, const int zero, const int table, const enum scales kind) {
    const int has_super = super_bytes(kind) != 0, has_minimum = kind == U6 || kind == U4;
    const size_t blocks = x->columns / COLUMNS;
    const float *floats[MOST_EXACT], *sums[MOST_EXACT];
    F total[MOST_EXACT][NV], part[MOST_EXACT][NV], least[MOST_EXACT][NV];
    const V values = v_table((const uint8_t *)TABLES[table]);
    for (int i = 0; i < N; i++) {
        floats[i] = x->floats + (size_t)rows[i] * x->columns;
        sums[i] = x->float_sums + (size_t)rows[i] * blocks * 2;
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
            const uint8_t *scales = panel + 64 * bits;
            for (int h = 0; h < NV; h++) {
                /* Both halves of a block in turn: neither waits for its own last sum. */
                F half[2][MOST_EXACT];
                for (int i = 0; i < N; i++)
                    half[0][i] = half[1][i] = f_zero();
                UNROLL(1)
                for (int c = 0; c < 4; c++)
                    UNROLL(2)
                    for (int group = 0; group < 2; group++) {
                        const V codes = signed_codes(panel, bits, zero, table, values, c + 4 * group, h);
                        UNROLL(4)
                        for (int j = 0; j < 4; j++) {
                            const F weights = f_byte(codes, j);
                            UNROLL(8)
                            for (int i = 0; i < N; i++) {
                                const F with = f_all(floats[i][COLUMNS * b + (size_t)(16 * group + 4 * c + j)]);
                                half[group][i] = f_fma(weights, with, half[group][i]);
                            }
                        }
                    }
                for (int group = 0; group < 2; group++) {
                    const F s = scale_of(kind, scales, group, h), m = minimum_of(kind, scales, group, h);
                    for (int i = 0; i < N; i++) {
                        F *to = has_super ? &part[i][h] : &total[i][h];
                        *to = f_fma(half[group][i], s, *to);
                        if (has_minimum || kind == F16_OFFSET) {
                            F *under = has_minimum ? &least[i][h] : &total[i][h];
                            *under = f_fma(m, f_all(sums[i][2 * b + (size_t)group]), *under);
                        }
                    }
                }
            }
        }
        if (has_super)
            for (int h = 0; h < NV; h++) {
                const F d = f_half(super + 2 * h * LANES);
                for (int i = 0; i < N; i++)
                    total[i][h] = f_fma(d, part[i][h], total[i][h]);
                if (has_minimum) {
                    const F least_d = f_mul(f_half(super + 32 + 2 * h * LANES), f_all(-1.0f));
                    for (int i = 0; i < N; i++)
                        total[i][h] = f_fma(least_d, least[i][h], total[i][h]);
                }
            }
    }
    for (int i = 0; i < N; i++)
        for (int h = 0; h < NV; h++)
            f_store(out + PANEL_ROWS * i + h * LANES, f_mul(total[i][h], f_all(1.0f / RAISED)));
}

typedef void (*Product)(const uint8_t *, const struct activations *, const int32_t *, float *);

/* Versions for 1, 2, 3, 4 and 8 rows, where there are registers for so many. */
#define VERSION_COUNT 5
static const size_t VERSION_ROWS[VERSION_COUNT] = {1, 2, 3, 4, 8};

#define VERSION(NAME, N, BITS, ZERO, TABLE, SCALES)                                                           \
    static __attribute__((noinline)) void NAME##_##N(const uint8_t *panel, const struct activations *x,       \
                                                     const int32_t *rows, float *out) {                       \
        if (N <= MOST_EXACT)                                                                                  \
            product(panel, x, rows, out, N <= MOST_EXACT ? N : 1, BITS, ZERO, TABLE, SCALES);                 \
    }
#define DEFINE(NAME, TYPE, BLOCK, BYTES, BITS, ZERO, TABLE, SCALES) \
    VERSION(NAME, 1, BITS, ZERO, TABLE, SCALES)                     \
    VERSION(NAME, 2, BITS, ZERO, TABLE, SCALES)                     \
    VERSION(NAME, 3, BITS, ZERO, TABLE, SCALES)                     \
    VERSION(NAME, 4, BITS, ZERO, TABLE, SCALES)                     \
    VERSION(NAME, 8, BITS, ZERO, TABLE, SCALES)                     \
    static const Product NAME##_ALL[VERSION_COUNT] = {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_8};
KINDS(DEFINE)

static const Product *products_of(int type) {
    switch (type) {
#define CASE(NAME, TYPE, BLOCK, BYTES, BITS, ZERO, TABLE, SCALES) \
    case TYPE: return NAME##_ALL;
        KINDS(CASE)
    }
    return NULL; /* find_kind knows no others */
}

void multiply_exactly(const struct kind *kind, const uint8_t *panel, const struct activations *x,
                      const int32_t *rows, size_t n, float *out) {
    const Product *products = products_of(kind->type);
    while (n) {
        int version = VERSION_COUNT - 1;
        while (VERSION_ROWS[version] > n || VERSION_ROWS[version] > MOST_EXACT)
            version--;
        const size_t now = VERSION_ROWS[version];
        products[version](panel, x, rows, out);
        rows += now;
        out += PANEL_ROWS * now;
        n -= now;
    }
}

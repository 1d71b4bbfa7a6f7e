/* How block-quantised weights lie in memory: panels of 16 rows, in the bits that the file spends on them.
 *
 * GGUF keeps each row of a matrix by itself, so a row's scale meets 32 codes of one row. Here 16 rows go side by side:
 * a vector holds codes of 16 rows, their scales are one vector too, and no sum across a vector is ever needed. For
 * each block of 32 columns a panel has
 *
 *     codes     64 * bits bytes, in planes of 4, 2, 1 or 8 bits (below)
 *     scales    one value for each row and group of 16 or 32 columns, as the type has them
 *
 * and before each 8 blocks, for the types with super-blocks of 256, their float16 scales. Chunk c of a block is four
 * columns, 4c to 4c + 3, of 16 rows: 64 bytes, byte 4r + i of row r and column 4c + i. Planes hold the 8 chunks:
 *
 *     8 bits    vector c is chunk c
 *     4 bits    vector j of 4: low halves are chunk j, high ones chunk j + 4
 *     2 bits    vector j of 2: bits 2t and 2t + 1 are chunk 2t + j
 *     1 bit     one vector: bit c is chunk c
 *
 * 3, 5 and 6 bits are two planes, the low bits first. The last panel of a matrix is filled up with rows of zeros.
 */
#ifndef KVASIR_PANELS_H
#define KVASIR_PANELS_H

#include "lanes.h"

enum scales {
    F16,        /* float16 per block */
    F16_OFFSET, /* float16 scale and float16 offset per block */
    U6,         /* 6-bit scale and minimum per block, float16 d and dmin per super-block */
    U4,         /* 4-bit scale and minimum per group of 16, float16 d and dmin per super-block */
    I8,         /* int8 scale per group of 16, float16 d per super-block */
    I8_WIDE,    /* int8 scale per block of 32, float16 d per super-block */
    E8,         /* exponent per block: 2 ** (e - 128) */
};

struct kind {
    int type;        /* ggml's number */
    int block;       /* weights of a block in the file */
    int block_bytes; /* its bytes */
    int bits;        /* of a code */
    int zero;        /* code that stands for zero, the offset apart */
    int table;       /* codes stand for values of a table: 1 IQ4, 2 MXFP4 */
    enum scales scales;
};

#define KINDS(X)                          \
    X(Q4_0, 2, 32, 18, 4, 8, 0, F16)      \
    X(Q4_1, 3, 32, 20, 4, 0, 0, F16_OFFSET) \
    X(Q5_0, 6, 32, 22, 5, 16, 0, F16)     \
    X(Q5_1, 7, 32, 24, 5, 0, 0, F16_OFFSET) \
    X(Q8_0, 8, 32, 34, 8, 128, 0, F16)    \
    X(Q2_K, 10, 256, 84, 2, 0, 0, U4)     \
    X(Q3_K, 11, 256, 110, 3, 4, 0, I8)    \
    X(Q4_K, 12, 256, 144, 4, 0, 0, U6)    \
    X(Q5_K, 13, 256, 176, 5, 0, 0, U6)    \
    X(Q6_K, 14, 256, 210, 6, 32, 0, I8)   \
    X(IQ4_NL, 20, 32, 18, 4, 0, 1, F16)   \
    X(IQ4_XS, 23, 256, 136, 4, 0, 1, I8_WIDE) \
    X(MXFP4, 39, 32, 17, 4, 0, 2, E8)

#define COLUMNS 32 /* of a block in a panel */

/* What codes stand for where a type has a table: IQ4 (kvalues_iq4nl of ggml), and twice the e2m1 floats. */
#define IQ4_VALUES(X)                                                                                             \
    X(-127), X(-104), X(-83), X(-65), X(-49), X(-35), X(-22), X(-10), X(1), X(13), X(25), X(38), X(53), X(69), X(89), \
        X(113)
#define MXFP4_VALUES(X)                                                                                           \
    X(0), X(1), X(2), X(3), X(4), X(6), X(8), X(12), X(0), X(-1), X(-2), X(-3), X(-4), X(-6), X(-8), X(-12)

INLINE int scale_bytes(enum scales s) {
    return s == F16 || s == U6 || s == U4 || s == I8 ? 32 : s == F16_OFFSET ? 64 : 16;
}
INLINE int super_bytes(enum scales s) { return s == U6 || s == U4 ? 64 : s == I8 || s == I8_WIDE ? 32 : 0; }
INLINE int record_bytes(int bits, enum scales s) { return 64 * bits + scale_bytes(s); }

/* Bytes of one panel. */
INLINE size_t panel_bytes(int bits, enum scales s, size_t columns) {
    return columns / COLUMNS * (size_t)record_bytes(bits, s) + columns / 256 * (size_t)super_bytes(s);
}

const struct kind *find_kind(int type);

/* Activations of some rows: rounded to int8 block by block, or where `floats` is set as they are. */
struct activations {
    const int8_t *codes;  /* [rows, columns] */
    const float *scales;  /* [rows, columns / 32] */
    const int32_t *sums;  /* [rows, columns / 16], of codes */
    size_t columns;
    const float *floats;     /* [rows, columns] */
    const float *float_sums; /* [rows, columns / 16], as multiply_exact.c wants them */
};

/* Bytes that are filled for n rows by round_row or sum_row, and where the parts are. */
size_t rounded_bytes(size_t n, size_t columns);
struct activations rounded_at(void *memory, size_t n, size_t columns);
void round_row(const float *x, const struct activations *to, size_t row);
size_t summed_bytes(size_t n, size_t columns);
struct activations summed_at(void *memory, const float *x, size_t columns);
void sum_row(const float *x, const struct activations *to, size_t row);

/* out[columns] = row `row` of a panel, as ggml would dequantise it. */
void unpack_row(const struct kind *kind, const uint8_t *panel, int row, size_t columns, float *out);

/* out[i * 16 + r] = row `rows[i]` of the activations times row r of the panel, for i < n. */
void multiply(const struct kind *kind, const uint8_t *panel, const struct activations *x, const int32_t *rows,
              size_t n, float *out);
void multiply_exactly(const struct kind *kind, const uint8_t *panel, const struct activations *x,
                      const int32_t *rows, size_t n, float *out);

#endif

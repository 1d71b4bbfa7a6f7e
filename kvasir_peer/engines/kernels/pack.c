/* From rows of GGUF blocks to panels, and what panels hold as floats. The layouts of blocks are ggml's. */
#include "panels.h"

/* One block of a row, taken apart. */
struct parts {
    uint8_t codes[256];
    uint8_t scales[16]; /* as they go into a panel: 6-bit, two 4-bit values, int8 or an exponent */
    uint8_t minima[8];
    uint8_t d[2], dmin[2]; /* float16 */
};

static void nibbles(const uint8_t *q, uint8_t *codes) {
    for (int i = 0; i < 16; i++) {
        codes[i] = q[i] & 15;
        codes[16 + i] = q[i] >> 4;
    }
}

/* Runs of 32 bytes whose low halves are 32 codes and high halves the next 32. */
static void nibbles256(const uint8_t *q, uint8_t *codes) {
    for (int run = 0; run < 4; run++)
        for (int i = 0; i < 32; i++) {
            codes[64 * run + i] = q[32 * run + i] & 15;
            codes[64 * run + 32 + i] = q[32 * run + i] >> 4;
        }
}

static void fifth_bits(const uint8_t *q, uint8_t *codes) {
    for (int i = 0; i < 32; i++)
        codes[i] |= (uint8_t)((q[i / 8] >> (i % 8) & 1) << 4);
}

/* The 6-bit scales and minima in the 12 bytes of Q4_K and Q5_K. */
static void k_scales(const uint8_t *q, struct parts *to) {
    for (int i = 0; i < 4; i++) {
        to->scales[i] = q[i] & 63;
        to->minima[i] = q[4 + i] & 63;
        to->scales[4 + i] = (uint8_t)((q[8 + i] & 15) | (q[i] >> 2 & 48));
        to->minima[4 + i] = (uint8_t)(q[8 + i] >> 4 | (q[4 + i] >> 2 & 48));
    }
}

static void take_apart(int type, const uint8_t *b, struct parts *to) {
    switch (type) {
    case 2: /* Q4_0 */
    case 20: /* IQ4_NL */
        memcpy(to->d, b, 2);
        nibbles(b + 2, to->codes);
        break;
    case 3: /* Q4_1 */
        memcpy(to->d, b, 2);
        memcpy(to->dmin, b + 2, 2);
        nibbles(b + 4, to->codes);
        break;
    case 6: /* Q5_0 */
        memcpy(to->d, b, 2);
        nibbles(b + 6, to->codes);
        fifth_bits(b + 2, to->codes);
        break;
    case 7: /* Q5_1 */
        memcpy(to->d, b, 2);
        memcpy(to->dmin, b + 2, 2);
        nibbles(b + 8, to->codes);
        fifth_bits(b + 4, to->codes);
        break;
    case 8: /* Q8_0 */
        memcpy(to->d, b, 2);
        for (int i = 0; i < 32; i++)
            to->codes[i] = b[2 + i] ^ 0x80;
        break;
    case 10: /* Q2_K */
        memcpy(to->scales, b, 16);
        memcpy(to->d, b + 80, 2);
        memcpy(to->dmin, b + 82, 2);
        for (int i = 0; i < 256; i++)
            to->codes[i] = b[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        break;
    case 11: /* Q3_K */
        memcpy(to->d, b + 108, 2);
        for (int i = 0; i < 256; i++)
            to->codes[i] = (uint8_t)((b[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) |
                                     (b[i % 32] >> i / 32 & 1) << 2);
        for (int i = 0; i < 16; i++) {
            int low = i < 8 ? b[96 + i] & 15 : b[96 + i - 8] >> 4;
            to->scales[i] = (uint8_t)((low | (b[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
        }
        break;
    case 12: /* Q4_K */
        memcpy(to->d, b, 2);
        memcpy(to->dmin, b + 2, 2);
        k_scales(b + 4, to);
        nibbles256(b + 16, to->codes);
        break;
    case 13: /* Q5_K */
        memcpy(to->d, b, 2);
        memcpy(to->dmin, b + 2, 2);
        k_scales(b + 4, to);
        nibbles256(b + 48, to->codes);
        for (int i = 0; i < 256; i++)
            to->codes[i] |= (uint8_t)((b[16 + i % 32] >> i / 32 & 1) << 4);
        break;
    case 14: /* Q6_K */
        memcpy(to->d, b + 208, 2);
        memcpy(to->scales, b + 192, 16);
        for (int i = 0; i < 256; i++) {
            int half = i / 128, within = i % 128;
            int low = b[64 * half + within % 64] >> within / 64 * 4 & 15;
            to->codes[i] = (uint8_t)(low | (b[128 + 32 * half + within % 32] >> within / 32 * 2 & 3) << 4);
        }
        break;
    case 23: /* IQ4_XS */
        memcpy(to->d, b, 2);
        for (int i = 0; i < 8; i++) {
            int low = b[4 + i / 2] >> i % 2 * 4 & 15, high = (b[2 + i / 4] >> i % 4 * 2) & 3;
            to->scales[i] = (uint8_t)((low | high << 4) - 32);
            nibbles(b + 8 + 16 * i, to->codes + 32 * i);
        }
        break;
    case 39: /* MXFP4 */
        to->scales[0] = b[0];
        nibbles(b + 1, to->codes);
        break;
    }
}

/* Put 32 codes of a row into a block of its panel, which was all zeros. */
static void place_codes(uint8_t *block, int bits, int row, const uint8_t *codes) {
    for (int c = 0; c < 8; c++)
        for (int i = 0; i < 4; i++) {
            unsigned code = codes[4 * c + i];
            uint8_t *at = block + 4 * row + i;
            switch (bits) {
            case 8: at[64 * c] = (uint8_t)code; break;
            case 2: at[64 * (c & 1)] |= (uint8_t)(code << 2 * (c / 2)); break;
            case 3:
                at[64 * (c & 1)] |= (uint8_t)((code & 3) << 2 * (c / 2));
                at[128] |= (uint8_t)(code >> 2 << c);
                break;
            default:
                at[64 * (c & 3)] |= (uint8_t)((code & 15) << (c < 4 ? 0 : 4));
                if (bits == 5)
                    at[256] |= (uint8_t)(code >> 4 << c);
                else if (bits == 6)
                    at[256 + 64 * (c & 1)] |= (uint8_t)(code >> 4 << 2 * (c / 2));
            }
        }
}

static void place_scales(uint8_t *scale, const struct kind *kind, int row, const struct parts *p, int block) {
    switch (kind->scales) {
    case F16: memcpy(scale + 2 * row, p->d, 2); break;
    case F16_OFFSET:
        memcpy(scale + 2 * row, p->d, 2);
        memcpy(scale + 32 + 2 * row, p->dmin, 2);
        break;
    case U6:
        scale[row] = p->scales[block];
        scale[16 + row] = p->minima[block];
        break;
    case U4:
    case I8:
        scale[row] = p->scales[2 * block];
        scale[16 + row] = p->scales[2 * block + 1];
        break;
    case I8_WIDE:
    case E8: scale[row] = p->scales[block]; break;
    }
}

/* ------------------------------------------------------------------------------------------------ back to floats */

#define PLAIN(v) (v)
static const int8_t TABLES[3][16] = {{0}, {IQ4_VALUES(PLAIN)}, {MXFP4_VALUES(PLAIN)}};

static unsigned read_code(const uint8_t *block, int bits, int row, int column) {
    const int c = column / 4;
    const uint8_t *at = block + 4 * row + column % 4;
    switch (bits) {
    case 8: return at[64 * c];
    case 2: return at[64 * (c & 1)] >> 2 * (c / 2) & 3u;
    case 3: return (at[64 * (c & 1)] >> 2 * (c / 2) & 3u) | (at[128] >> c & 1u) << 2;
    }
    const unsigned low = at[64 * (c & 3)] >> (c < 4 ? 0 : 4) & 15u;
    if (bits == 5)
        return low | (at[256] >> c & 1u) << 4;
    if (bits == 6)
        return low | (at[256 + 64 * (c & 1)] >> 2 * (c / 2) & 3u) << 4;
    return low;
}

static float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return half_to_float(half);
}

/* 2 ** (e - 128); the two smallest are subnormal. */
static float power_at(uint8_t e) {
    const uint32_t bits = e < 2 ? (uint32_t)0x00200000 << e : (uint32_t)(e - 1) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

/* Scale and offset of group 0 or 1 of 16 columns, as the file's blocks have them. */
static void scale_at(enum scales kind, const uint8_t *super, const uint8_t *scales, int row, int group, float *scale,
                     float *offset) {
    *scale = *offset = 0.0f;
    switch (kind) {
    case F16: *scale = half_at(scales + 2 * row); break;
    case F16_OFFSET:
        *scale = half_at(scales + 2 * row);
        *offset = half_at(scales + 32 + 2 * row);
        break;
    case U6:
        *scale = half_at(super + 2 * row) * (float)scales[row];
        *offset = -(half_at(super + 32 + 2 * row) * (float)scales[16 + row]);
        break;
    case U4:
        *scale = half_at(super + 2 * row) * (float)(scales[16 * group + row] & 15);
        *offset = -(half_at(super + 32 + 2 * row) * (float)(scales[16 * group + row] >> 4));
        break;
    case I8: *scale = half_at(super + 2 * row) * (float)(int8_t)scales[16 * group + row]; break;
    case I8_WIDE: *scale = half_at(super + 2 * row) * (float)(int8_t)scales[row]; break;
    case E8: *scale = power_at(scales[row]); break;
    }
}

void unpack_row(const struct kind *kind, const uint8_t *panel, int row, size_t columns, float *out) {
    const int record = record_bytes(kind->bits, kind->scales), super = super_bytes(kind->scales);
    const uint8_t *at = panel, *of_super = panel;
    for (size_t b = 0; b < columns / COLUMNS; b++, at += record, out += COLUMNS) {
        if (super && b % 8 == 0) {
            of_super = at;
            at += super;
        }
        for (int group = 0; group < 2; group++) {
            float scale, offset;
            scale_at(kind->scales, of_super, at + 64 * kind->bits, row, group, &scale, &offset);
            for (int i = 16 * group; i < 16 * group + 16; i++) {
                const int code = (int)read_code(at, kind->bits, row, i);
                const int value = kind->table ? TABLES[kind->table][code] : code - kind->zero;
                out[i] = scale * (float)value;
                if (kind->scales == F16_OFFSET || kind->scales == U6 || kind->scales == U4)
                    out[i] += offset;
            }
        }
    }
}

#define EXPORT __attribute__((visibility("default")))

/* Bytes of a matrix in panels; 0 for a type or a width that has none. */
EXPORT size_t kvasir_panel_bytes(int type, size_t rows, size_t columns) {
    const struct kind *kind = find_kind(type);
    if (!kind || columns % (size_t)kind->block)
        return 0;
    return (rows + PANEL_ROWS - 1) / PANEL_ROWS * panel_bytes(kind->bits, kind->scales, columns);
}

/* Lay rows of blocks, `row_bytes` apart, as panels [first, end). */
EXPORT void kvasir_pack(int type, const uint8_t *raw, size_t rows, size_t columns, size_t first, size_t end,
                        uint8_t *out) {
    const struct kind *kind = find_kind(type);
    const size_t bytes = panel_bytes(kind->bits, kind->scales, columns), blocks = columns / (size_t)kind->block;
    const int record = record_bytes(kind->bits, kind->scales), each = kind->block / COLUMNS;
    const int super = super_bytes(kind->scales);
    memset(out + first * bytes, 0, (end - first) * bytes);
    for (size_t panel = first; panel < end; panel++)
        for (int row = 0; row < PANEL_ROWS && panel * PANEL_ROWS + (size_t)row < rows; row++) {
            const uint8_t *from = raw + (panel * PANEL_ROWS + (size_t)row) * blocks * (size_t)kind->block_bytes;
            uint8_t *to = out + panel * bytes;
            for (size_t b = 0; b < blocks; b++, from += kind->block_bytes) {
                struct parts p;
                take_apart(kind->type, from, &p);
                if (super) {
                    memcpy(to + 2 * row, p.d, 2);
                    if (super == 64)
                        memcpy(to + 32 + 2 * row, p.dmin, 2);
                    to += super;
                }
                for (int i = 0; i < each; i++, to += record) {
                    place_codes(to, kind->bits, row, p.codes + COLUMNS * i);
                    place_scales(to + 64 * kind->bits, kind, row, &p, i);
                }
            }
        }
}

EXPORT const char *kvasir_instructions(void) { return KVASIR_SET; }

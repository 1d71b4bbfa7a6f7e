/* Taking codes and scales out of a panel (see panels.h). */
#ifndef KVASIR_CHUNKS_H
#define KVASIR_CHUNKS_H

#include "panels.h"

/* Codes of chunk c of a block, rows from h * LANES on, as bytes. */
INLINE V chunk(const uint8_t *block, int bits, int c, int h) {
    const uint8_t *at = block + h * 4 * LANES;
    if (bits == 8)
        return v_load(at + 64 * c);
    if (bits == 2 || bits == 3) {
        V low = v_load(at + 64 * (c & 1));
        low = v_and(c < 2 ? low : v_right(low, 2 * (c / 2)), v_bytes(3));
        if (bits == 2)
            return low;
        V high = v_load(at + 128);
        high = c < 2 ? v_left(high, 2 - c) : v_right(high, c - 2);
        return v_or(low, v_and(high, v_bytes(4)));
    }
    V low = v_load(at + 64 * (c & 3));
    low = v_and(c < 4 ? low : v_right(low, 4), v_bytes(15));
    if (bits == 5) {
        V high = v_load(at + 256);
        high = c < 4 ? v_left(high, 4 - c) : v_right(high, c - 4);
        return v_or(low, v_and(high, v_bytes(16)));
    }
    if (bits == 6) {
        V high = v_load(at + 256 + 64 * (c & 1));
        int from = 2 * (c / 2);
        high = from < 4 ? v_left(high, 4 - from) : v_right(high, from - 4);
        return v_or(low, v_and(high, v_bytes(48)));
    }
    return low;
}

/* Scales of a block or a group of 16, apart from those of its super-block; rows from h * LANES on. */
INLINE F scale_of(enum scales kind, const uint8_t *scales, int group, int h) {
    const int lane = h * LANES;
    switch (kind) {
    case F16:
    case F16_OFFSET: return f_half(scales + 2 * lane);
    case U6: return f_u8(scales + lane);
    case U4: return f_low4(scales + 16 * group + lane);
    case I8: return f_i8(scales + 16 * group + lane);
    case I8_WIDE: return f_i8(scales + lane);
    case E8: return f_e8(scales + lane);
    }
    return f_zero();
}

/* Offsets or minima likewise, for the types that have them. */
INLINE F minimum_of(enum scales kind, const uint8_t *scales, int group, int h) {
    const int lane = h * LANES;
    switch (kind) {
    case F16_OFFSET: return f_half(scales + 32 + 2 * lane);
    case U6: return f_u8(scales + 16 + lane);
    case U4: return f_high4(scales + 16 * group + lane);
    default: return f_zero();
    }
}

#endif

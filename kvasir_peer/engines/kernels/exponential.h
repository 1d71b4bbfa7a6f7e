/* exp, the same bits wherever there are fused multiply-adds. */
#ifndef KVASIR_EXPONENTIAL_H
#define KVASIR_EXPONENTIAL_H

#include "lanes.h"

/* exp(x) to about 1e-7, by its series around a power of two; limited to what a float holds. */
INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x; /* a NaN stays one */
    float moved = __builtin_fmaf(x, 1.44269504f, 12582912.0f), whole = moved - 12582912.0f;
    float rest = __builtin_fmaf(whole, -0.693359375f, x);
    rest = __builtin_fmaf(whole, 2.12194440e-4f, rest);
    float sum = 1.9875691500e-4f;
    sum = __builtin_fmaf(sum, rest, 1.3981999507e-3f);
    sum = __builtin_fmaf(sum, rest, 8.3334519073e-3f);
    sum = __builtin_fmaf(sum, rest, 4.1665795894e-2f);
    sum = __builtin_fmaf(sum, rest, 1.6666665459e-1f);
    sum = __builtin_fmaf(sum, rest, 5.0000001201e-1f);
    sum = __builtin_fmaf(sum * rest, rest, rest + 1.0f);
    int32_t bits;
    memcpy(&bits, &moved, 4);
    bits = (int32_t)((uint32_t)(bits - 0x4b400000 + 127) << 23);
    float power;
    memcpy(&power, &bits, 4);
    return sum * power;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

#endif

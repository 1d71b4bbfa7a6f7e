/* Sixteen rows of weights side by side in vector registers, on each kind of processor.
 *
 * A panel has 16 rows (see panels.h). NV vectors of LANES rows each hold one value of every row. Whatever the width
 * of the vectors, each row sees the same operations in the same order: integer products are exact, and sums of floats
 * go block by block through fused multiply-adds. So results are the same bits on all processors.
 */
#ifndef KVASIR_LANES_H
#define KVASIR_LANES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PANEL_ROWS 16
#define INLINE static inline __attribute__((always_inline))

/* A float16 as a float. */
INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    float value;
    uint32_t bits = rest;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; /* exponents are 112 apart, subnormal ones too */
    memcpy(&bits, &value, 4);
    if ((h & 0x7c00) == 0x7c00)
        bits = 0x7f800000 | (rest & 0x7fffff);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(KVASIR_NO_AVX512) && !defined(KVASIR_PORTABLE)

#include <immintrin.h>
#define KVASIR_SET "AVX-512 VNNI"
#define NV 1
#define LANES 16
/* Most rows of activations that share a pass over a panel: accumulators of all of them stay in 32 registers. */
#define MOST_ROWS 8
#define MOST_EXACT 8
/* The dot instruction takes unsigned weights: signed ones have 128 added, which sums of activations undo. */
#define SIGNED_BIAS 128
typedef __m512i V;
typedef __m512 F;

INLINE V v_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE V v_bytes(int byte) { return _mm512_set1_epi8((char)byte); }
INLINE V v_word(int32_t word) { return _mm512_set1_epi32(word); }
INLINE V v_and(V a, V b) { return _mm512_and_si512(a, b); }
INLINE V v_or(V a, V b) { return _mm512_or_si512(a, b); }
INLINE V v_sub(V a, V b) { return _mm512_sub_epi8(a, b); }
INLINE V v_right(V a, int by) { return _mm512_srli_epi16(a, by); }
INLINE V v_left(V a, int by) { return _mm512_slli_epi16(a, by); }
INLINE V v_table(const uint8_t *table) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)); }
INLINE V v_look_up(V table, V index) { return _mm512_shuffle_epi8(table, index); }
INLINE V v_dot(V sum, V weights, V x) { return _mm512_dpbusd_epi32(sum, weights, x); }
INLINE V v_dot_signed(V sum, V weights, V x) { return _mm512_dpbusd_epi32(sum, weights, x); }
INLINE F f_zero(void) { return _mm512_setzero_ps(); }
INLINE F f_all(float value) { return _mm512_set1_ps(value); }
INLINE F f_from(V a) { return _mm512_cvtepi32_ps(a); }
/* Signed byte i of each lane, times 2 ** 24. */
INLINE F f_byte(V a, int i) {
    const int32_t from = (i << 24) | 0x808080;
    const __m128i four = _mm_setr_epi32(from, from + (4 << 24), from + (8 << 24), from + (12 << 24));
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(four)));
}
INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F f_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE F f_u8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE F f_i8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE F f_low4(const uint8_t *p) {
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtepi32_ps(_mm512_and_si512(b, _mm512_set1_epi32(15)));
}
INLINE F f_high4(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), 4));
}
/* 2 ** (e - 128), with 0 for the two smallest, which are below all normal floats. */
INLINE F f_e8(const uint8_t *p) {
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    e = _mm512_max_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), _mm512_setzero_si512());
    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
INLINE F f_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void f_store(float *p, F a) { _mm512_storeu_ps(p, a); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(KVASIR_PORTABLE)

#include <immintrin.h>
#define NV 2
#define LANES 8
#define MOST_ROWS 3
#define MOST_EXACT 4
typedef __m256i V;
typedef __m256 F;

INLINE V v_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE V v_bytes(int byte) { return _mm256_set1_epi8((char)byte); }
INLINE V v_word(int32_t word) { return _mm256_set1_epi32(word); }
INLINE V v_and(V a, V b) { return _mm256_and_si256(a, b); }
INLINE V v_or(V a, V b) { return _mm256_or_si256(a, b); }
INLINE V v_sub(V a, V b) { return _mm256_sub_epi8(a, b); }
INLINE V v_xor_sign(V a) { return _mm256_xor_si256(a, v_bytes(0x80)); }
INLINE V v_right(V a, int by) { return _mm256_srli_epi16(a, by); }
INLINE V v_left(V a, int by) { return _mm256_slli_epi16(a, by); }
INLINE V v_table(const uint8_t *table) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)); }
INLINE V v_look_up(V table, V index) { return _mm256_shuffle_epi8(table, index); }
#if defined(__AVXVNNI__) && !defined(KVASIR_NO_VNNI)
#define KVASIR_SET "AVX-VNNI"
#define SIGNED_BIAS 128
INLINE V v_dot(V sum, V weights, V x) { return _mm256_dpbusd_avx_epi32(sum, weights, x); }
INLINE V v_dot_signed(V sum, V weights, V x) { return _mm256_dpbusd_avx_epi32(sum, weights, x); }
#else
#define KVASIR_SET "AVX2"
#define SIGNED_BIAS 0
/* Pairs are added in 16 bits: codes of at most 63 times 127, twice, fit. */
INLINE V v_dot(V sum, V weights, V x) {
    V pairs = _mm256_maddubs_epi16(weights, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
/* With the sign moved to the activations, which are within 127, twice 128 times 127 fits too. */
INLINE V v_dot_signed(V sum, V weights, V x) {
    V pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
INLINE F f_zero(void) { return _mm256_setzero_ps(); }
INLINE F f_all(float value) { return _mm256_set1_ps(value); }
INLINE F f_from(V a) { return _mm256_cvtepi32_ps(a); }
/* Signed byte i of each lane, times 2 ** 24. */
INLINE F f_byte(V a, int i) {
    const int32_t from = (i << 24) | 0x808080;
    const __m128i four = _mm_setr_epi32(from, from + (4 << 24), from + (8 << 24), from + (12 << 24));
    return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(four)));
}
INLINE F f_mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V v_wide_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE F f_half(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE F f_u8(const uint8_t *p) { return _mm256_cvtepi32_ps(v_wide_u8(p)); }
INLINE F f_i8(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE F f_low4(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_and_si256(v_wide_u8(p), _mm256_set1_epi32(15))); }
INLINE F f_high4(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(v_wide_u8(p), 4)); }
INLINE F f_e8(const uint8_t *p) {
    V e = _mm256_max_epi32(_mm256_sub_epi32(v_wide_u8(p), _mm256_set1_epi32(1)), _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
INLINE F f_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void f_store(float *p, F a) { _mm256_storeu_ps(p, a); }

#elif defined(__aarch64__) && defined(__ARM_NEON) && !defined(KVASIR_PORTABLE)

#include <arm_neon.h>
#define NV 4
#define LANES 4
#define MOST_ROWS 3
#define MOST_EXACT 8
#define SIGNED_BIAS 0
typedef uint8x16_t V;
typedef float32x4_t F;

INLINE V v_load(const void *p) { return vld1q_u8((const uint8_t *)p); }
INLINE V v_bytes(int byte) { return vdupq_n_u8((uint8_t)byte); }
INLINE V v_word(int32_t word) { return vreinterpretq_u8_s32(vdupq_n_s32(word)); }
INLINE V v_and(V a, V b) { return vandq_u8(a, b); }
INLINE V v_or(V a, V b) { return vorrq_u8(a, b); }
INLINE V v_sub(V a, V b) { return vsubq_u8(a, b); }
INLINE V v_xor_sign(V a) { return veorq_u8(a, v_bytes(0x80)); }
INLINE V v_right(V a, int by) { return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16((int16_t)-by))); }
INLINE V v_left(V a, int by) { return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16((int16_t)by))); }
INLINE V v_table(const uint8_t *table) { return vld1q_u8(table); }
INLINE V v_look_up(V table, V index) { return vqtbl1q_u8(table, index); }
#ifdef __ARM_FEATURE_DOTPROD
#define KVASIR_SET "NEON dot product"
INLINE V v_dot(V sum, V weights, V x) {
    return vreinterpretq_u8_s32(
        vdotq_s32(vreinterpretq_s32_u8(sum), vreinterpretq_s8_u8(weights), vreinterpretq_s8_u8(x)));
}
#else
#define KVASIR_SET "NEON"
/* Products fit 16 bits, their sums do not. */
INLINE V v_dot(V sum, V weights, V x) {
    int8x16_t w = vreinterpretq_s8_u8(weights), a = vreinterpretq_s8_u8(x);
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a)));
    int32x4_t high = vpaddlq_s16(vmull_high_s8(w, a));
    return vreinterpretq_u8_s32(vaddq_s32(vreinterpretq_s32_u8(sum), vpaddq_s32(low, high)));
}
#endif
INLINE V v_dot_signed(V sum, V weights, V x) { return v_dot(sum, weights, x); }
INLINE F f_zero(void) { return vdupq_n_f32(0.0f); }
INLINE F f_all(float value) { return vdupq_n_f32(value); }
INLINE F f_from(V a) { return vcvtq_f32_s32(vreinterpretq_s32_u8(a)); }
/* Signed byte i of each lane, times 2 ** 24. */
INLINE F f_byte(V a, int i) {
    uint32x4_t top = vreinterpretq_u32_u8(a);
    top = i == 3 ? vandq_u32(top, vdupq_n_u32(0xff000000)) : vshlq_n_u32(vshlq_u32(top, vdupq_n_s32(-8 * i)), 24);
    return vcvtq_f32_s32(vreinterpretq_s32_u32(top));
}
INLINE F f_mul(F a, F b) { return vmulq_f32(a, b); }
INLINE F f_fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
INLINE uint32x4_t v_wide_u8(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}
INLINE F f_half(const uint8_t *p) {
    uint16x4_t bits;
    memcpy(&bits, p, 8);
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}
INLINE F f_u8(const uint8_t *p) { return vcvtq_f32_u32(v_wide_u8(p)); }
INLINE F f_i8(const uint8_t *p) {
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u32(v_wide_u8(p)), 24), 24));
}
INLINE F f_low4(const uint8_t *p) { return vcvtq_f32_u32(vandq_u32(v_wide_u8(p), vdupq_n_u32(15))); }
INLINE F f_high4(const uint8_t *p) { return vcvtq_f32_u32(vshrq_n_u32(v_wide_u8(p), 4)); }
INLINE F f_e8(const uint8_t *p) {
    int32x4_t e = vmaxq_s32(vsubq_s32(vreinterpretq_s32_u32(v_wide_u8(p)), vdupq_n_s32(1)), vdupq_n_s32(0));
    return vreinterpretq_f32_s32(vshlq_n_s32(e, 23));
}
INLINE F f_load(const float *p) { return vld1q_f32(p); }
INLINE void f_store(float *p, F a) { vst1q_f32(p, a); }

#else

/* For any processor, by loops: what the others are compared with, and far too slow for anything else. */
#define KVASIR_SET "portable"
#define NV 1
#define LANES 16
#define MOST_ROWS 2
#define MOST_EXACT 2
#define SIGNED_BIAS 0
typedef struct { uint8_t b[64]; } V;
typedef struct { float f[16]; } F;

#define EACH_BYTE for (int i = 0; i < 64; i++)
#define EACH_LANE for (int i = 0; i < 16; i++)
INLINE V v_load(const void *p) { V a; memcpy(&a, p, 64); return a; }
INLINE V v_bytes(int byte) { V a; EACH_BYTE a.b[i] = (uint8_t)byte; return a; }
INLINE V v_word(int32_t word) { V a; EACH_LANE memcpy(a.b + 4 * i, &word, 4); return a; }
INLINE V v_and(V a, V b) { EACH_BYTE a.b[i] &= b.b[i]; return a; }
INLINE V v_or(V a, V b) { EACH_BYTE a.b[i] |= b.b[i]; return a; }
INLINE V v_sub(V a, V b) { EACH_BYTE a.b[i] = (uint8_t)(a.b[i] - b.b[i]); return a; }
INLINE V v_xor_sign(V a) { EACH_BYTE a.b[i] ^= 0x80; return a; }
INLINE V v_right(V a, int by) { EACH_BYTE a.b[i] = (uint8_t)(a.b[i] >> by); return a; }
INLINE V v_left(V a, int by) { EACH_BYTE a.b[i] = (uint8_t)(a.b[i] << by); return a; }
INLINE V v_table(const uint8_t *table) { V a; EACH_BYTE a.b[i] = table[i & 15]; return a; }
INLINE V v_look_up(V table, V index) { EACH_BYTE index.b[i] = table.b[index.b[i] & 15]; return index; }
INLINE V v_dot(V sum, V weights, V x) {
    EACH_LANE {
        int32_t total;
        memcpy(&total, sum.b + 4 * i, 4);
        for (int j = 4 * i; j < 4 * i + 4; j++)
            total += (int8_t)weights.b[j] * (int8_t)x.b[j];
        memcpy(sum.b + 4 * i, &total, 4);
    }
    return sum;
}
INLINE V v_dot_signed(V sum, V weights, V x) { return v_dot(sum, weights, x); }
INLINE F f_all(float value) { F a; EACH_LANE a.f[i] = value; return a; }
INLINE F f_zero(void) { return f_all(0.0f); }
INLINE F f_from(V a) { F r; EACH_LANE { int32_t n; memcpy(&n, a.b + 4 * i, 4); r.f[i] = (float)n; } return r; }
/* Signed byte i of each lane, times 2 ** 24. */
INLINE F f_byte(V a, int i) {
    F r;
    for (int lane = 0; lane < 16; lane++)
        r.f[lane] = 0x1p24f * (float)(int8_t)a.b[4 * lane + i];
    return r;
}
INLINE F f_mul(F a, F b) { EACH_LANE a.f[i] *= b.f[i]; return a; }
INLINE F f_fma(F a, F b, F c) { EACH_LANE c.f[i] = __builtin_fmaf(a.f[i], b.f[i], c.f[i]); return c; }
INLINE F f_half(const uint8_t *p) { F r; EACH_LANE { uint16_t h; memcpy(&h, p + 2 * i, 2); r.f[i] = half_to_float(h); } return r; }
INLINE F f_u8(const uint8_t *p) { F r; EACH_LANE r.f[i] = p[i]; return r; }
INLINE F f_i8(const uint8_t *p) { F r; EACH_LANE r.f[i] = (int8_t)p[i]; return r; }
INLINE F f_low4(const uint8_t *p) { F r; EACH_LANE r.f[i] = p[i] & 15; return r; }
INLINE F f_high4(const uint8_t *p) { F r; EACH_LANE r.f[i] = p[i] >> 4; return r; }
INLINE F f_e8(const uint8_t *p) {
    F r;
    EACH_LANE {
        uint32_t bits = (uint32_t)(p[i] > 1 ? p[i] - 1 : 0) << 23;
        memcpy(&r.f[i], &bits, 4);
    }
    return r;
}
INLINE F f_load(const float *p) { F a; memcpy(a.f, p, 64); return a; }
INLINE void f_store(float *p, F a) { memcpy(p, a.f, 64); }

#endif
#endif

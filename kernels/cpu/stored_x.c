/* Activations as whole numbers: see x_block in stored.h. */
#include "stored.h"

/* Not finite, or so large that a block's sum, or what NEON adds to it, would not be: 2^110. */
#define TOO_LARGE 0x76800000

INLINE uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
INLINE float power_of_two(int exponent)
{
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE float inverse(float power_of_two)
{
    uint32_t bits = (254u << 23) - float_bits(power_of_two);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Smallest such that three bytes hold every X. */
INLINE int block_exponent(uint32_t largest)
{
    float value;
    memcpy(&value, &largest, 4);
    int exponent = (int)(float_bits(value * (1 + 0x1p-7f)) >> 23) - 127 - 22;
    return exponent < -100 ? -100 : exponent;
}

#if defined(__aarch64__)
/* The largest of the absolute values, as bits: they are ordered as the values are. */
INLINE uint32_t largest_of(const float *x)
{
    uint32x4_t found = vdupq_n_u32(0);
    for (int k = 0; k < BLOCK; k += 4)
        found = vmaxq_u32(found, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + k))));
    return vmaxvq_u32(found);
}

/* 16 of X to 16 of each byte. With 128 added to each of its bytes X has these side by side. */
INLINE int32x4_t put_bytes(const float *x, float scale, int k, x_block *out)
{
    int32x4_t number[4];
    int16x8_t low[2], high[2];
    for (int i = 0; i < 4; i++)
        number[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k + 4 * i), scale));
    int32x4_t sum = number[0] + number[1] + number[2] + number[3];
    for (int i = 0; i < 4; i++) number[i] += vdupq_n_s32(0x808080);
    for (int i = 0; i < 2; i++) {
        int16x8_t one = vreinterpretq_s16_s32(number[2 * i]);
        int16x8_t two = vreinterpretq_s16_s32(number[2 * i + 1]);
        low[i] = vuzp1q_s16(one, two);
        high[i] = vuzp2q_s16(one, two);
    }
    const int8x16_t signs = vdupq_n_s8(-128);
#define PLANE(uzp, from) (uzp(vreinterpretq_s8_s16(from[0]), vreinterpretq_s8_s16(from[1])) ^ signs)
    vst1q_s8(out->bytes[0] + k, PLANE(vuzp1q_s8, high));
    vst1q_s8(out->bytes[1] + k, PLANE(vuzp2q_s8, low));
    vst1q_s8(out->bytes[2] + k, PLANE(vuzp1q_s8, low));
    return sum;
}

INLINE void put_numbers(const float *x, float scale, int wants, x_block *out)
{
    (void)wants;
    int32x4_t sum = put_bytes(x, scale, 0, out) + put_bytes(x, scale, 16, out);
    out->sum = (float)vaddvq_s32(sum) * out->scale;
}
#else
INLINE uint32_t largest_of(const float *x)
{
    uint32_t largest = 0;
    for (int k = 0; k < BLOCK; k++) {
        uint32_t size = float_bits(x[k]) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* X in its parts, and their sums as a path wants them. */
INLINE void put_numbers(const float *x, float scale, int wants, x_block *out)
{
    int32_t number[BLOCK], high[BLOCK], low[BLOCK], high_sums[2] = {0, 0}, low_sums[2] = {0, 0};
    for (int k = 0; k < BLOCK; k++) number[k] = (int32_t)rintf(x[k] * scale);
    for (int k = 0; k < BLOCK; k++) high[k] = (number[k] + 128) >> 8;
    for (int k = 0; k < BLOCK; k++) low[k] = number[k] - high[k] * 256;
    for (int half = 0; half < 2; half++)
        for (int k = half * 16; k < half * 16 + 16; k++) {
            high_sums[half] += high[k];
            low_sums[half] += low[k];
        }
    int32_t total = (high_sums[0] + high_sums[1]) * 256 + low_sums[0] + low_sums[1];
    out->sum = (float)total * out->scale;
#if defined(__x86_64__)
    memcpy(out->high_sums, high_sums, sizeof high_sums);
    memcpy(out->low_sums, low_sums, sizeof low_sums);
    if (wants == HALVES) {
        for (int k = 0; k < BLOCK; k++) out->halves[0][k] = (int16_t)high[k];
        for (int k = 0; k < BLOCK; k++) out->halves[1][k] = (int16_t)low[k];
        return;
    }
#endif
    for (int k = 0; k < BLOCK; k++) {
        int32_t first = (high[k] + 128) >> 8;
        out->bytes[0][k] = (int8_t)first;
        out->bytes[1][k] = (int8_t)(high[k] - first * 256);
        out->bytes[2][k] = (int8_t)low[k];
    }
}
#endif

/* See stored_neon.h. */
INLINE void put_starts(int bits, x_block *out)
{
#if defined(__x86_64__)
    (void)bits, (void)out;
#else
    const float first = 0x1.8p39f, second = 0x1.8p31f, third = 0x1.8p23f;
    const float scale = bits == 4 ? out->scale * 0x1p-4f : out->scale;
    const float minus = bits == 8 ? -first - second : -first - second - third;
    for (int i = 0; i < 4; i++) out->starts[0][i] = first * scale;
    for (int i = 0; i < 4; i++) out->starts[1][i] = second * scale;
    for (int i = 0; i < 4; i++) out->starts[2][i] = third * scale;
    for (int i = 0; i < 4; i++) out->minus_starts[i] = minus * scale;
#endif
}

/* Scales of all blocks come first: each waits long for the largest value, and side by side they wait
 * together. */
void stored_x(const float *x, long blocks, int bits, int wants, x_block *out, long stride)
{
    for (long b = 0; b < blocks; b++) {
        uint32_t largest = largest_of(x + b * BLOCK);
        out[b * stride].scale = largest < TOO_LARGE ? power_of_two(block_exponent(largest)) : NAN;
    }
    for (long b = 0; b < blocks; b++, x += BLOCK, out += stride) {
        if (out->scale == out->scale) {
            put_numbers(x, inverse(out->scale), wants, out);
        } else {
            memset(out, 0, sizeof *out);
            out->scale = out->sum = NAN;
        }
        put_starts(bits, out);
    }
}

/* Quantizes activations to integers: see x_block in quant.h. */
#include "quant.h"

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

INLINE void put_numbers(const float *x, float scale, int bits, int format, x_block *out)
{
    (void)bits, (void)format;
    int32x4_t sum = put_bytes(x, scale, 0, out) + put_bytes(x, scale, 16, out);
    out->sum = (float)vaddvq_s32(sum) * out->scale;
}
#else
#if defined(__x86_64__)
/* Initial sums of high and of low where bytes of weights are unsigned and so have a bias: of each half
 * of a block, and of the whole. */
INLINE void put_sums(const int32_t high[2], const int32_t low[2], int bits, x_block *out)
{
    const int32_t bias = 1 << (bits - 1);
    for (int half = 0; half < 2; half++) {
        out->minus_high[half] = -bias * high[half];
        out->minus_low[half] = -bias * low[half];
    }
    out->minus_high[2] = out->minus_high[0] + out->minus_high[1];
    out->minus_low[2] = out->minus_low[0] + out->minus_low[1];
}
#endif

#if defined(__AVX512BW__)
INLINE uint32_t largest_of(const float *x)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    __m512i first = _mm512_and_si512(_mm512_loadu_si512(x), no_sign);
    __m512i second = _mm512_and_si512(_mm512_loadu_si512(x + 16), no_sign);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(first, second));
}

/* The sums over the lanes of four vectors. */
INLINE __m128i lane_sums(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* The largest of the lanes of four vectors. */
INLINE __m128i lane_tops(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i ab = _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_max_epu32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i all = _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* The three bytes of 32 numbers: see quant_wide512.c. */
INLINE void put_wide(__m512i first, __m512i second, int bits, x_block *out)
{
    const __m512i added = _mm512_set1_epi32((1 << 23) + (bits == 4 ? 0 : 128));
    const __m512i by_byte = _mm512_set4_epi32(0x0f0b0703, 0x0c080400, 0x0d090501, 0x0e0a0602);
    const __m512i upper_two = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i lower = _mm512_add_epi32(upper_two, _mm512_set1_epi32(2));
    first = _mm512_shuffle_epi8(_mm512_add_epi32(first, added), by_byte);
    second = _mm512_shuffle_epi8(_mm512_add_epi32(second, added), by_byte);
    _mm512_storeu_si512(out->bytes, _mm512_permutex2var_epi32(first, upper_two, second));
    __m512i last = _mm512_permutex2var_epi32(first, lower, second);
    _mm256_storeu_si256((__m256i *)out->bytes[2], _mm512_castsi512_si256(last));
}

INLINE void put_numbers(const float *x, float scale, int bits, int format, x_block *out)
{
    __m512i number[2], high[2], low[2];
    int32_t sums[4];
    for (int half = 0; half < 2; half++) {
        __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + half * 16), _mm512_set1_ps(scale));
        number[half] = _mm512_cvtps_epi32(scaled);
        high[half] = _mm512_srai_epi32(_mm512_add_epi32(number[half], _mm512_set1_epi32(128)), 8);
        low[half] = _mm512_sub_epi32(number[half], _mm512_slli_epi32(high[half], 8));
    }
    _mm_storeu_si128((__m128i *)sums, lane_sums(high[0], high[1], low[0], low[1]));
    out->sum = (float)((sums[0] + sums[1]) * 256 + sums[2] + sums[3]) * out->scale;
    if (format == WIDE_BYTES) {
        put_wide(number[0], number[1], bits, out);
        return;
    }
    put_sums(sums, sums + 2, bits, out);
    for (int half = 0; half < 2; half++) {
        if (format == HALVES) {
            _mm256_storeu_si256((__m256i *)out->halves[0] + half, _mm512_cvtepi32_epi16(high[half]));
            _mm256_storeu_si256((__m256i *)out->halves[1] + half, _mm512_cvtepi32_epi16(low[half]));
            continue;
        }
        __m512i first = _mm512_srai_epi32(_mm512_add_epi32(high[half], _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128((__m128i *)out->bytes[0] + half, _mm512_cvtepi32_epi8(first));
        _mm_storeu_si128((__m128i *)out->bytes[1] + half, _mm512_cvtepi32_epi8(high[half]));
        _mm_storeu_si128((__m128i *)out->bytes[2] + half, _mm512_cvtepi32_epi8(low[half]));
    }
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

/* X in its parts, and their sums in the path's format. */
INLINE void put_numbers(const float *x, float scale, int bits, int format, x_block *out)
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
    put_sums(high_sums, low_sums, bits, out);
    if (format == WIDE_BYTES) { /* see quant_wide512.c */
        const int32_t added = (1 << 23) + (bits == 4 ? 0 : 128);
        for (int k = 0; k < BLOCK; k++)
            for (int i = 0; i < 3; i++)
                out->bytes[i][k] = (int8_t)((number[k] + added) >> (16 - 8 * i));
        return;
    }
    if (format == HALVES) {
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
#endif

/* See quant_neon.h. */
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

#if defined(__AVX512BW__)
/* WIDE_BYTES of four blocks at a time, which share the sums over lanes; how many blocks were done. It
 * stops where something is too large. */
static long wide_x(const float *x, long blocks, int bits, x_block *out, long stride)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    long b = 0;
    for (; b + 4 <= blocks; b += 4, x += 4 * BLOCK, out += 4 * stride) {
        __m512i top[4], number[8];
        float scale[4], inverses[4], sums[4];
        for (int i = 0; i < 4; i++)
            top[i] = _mm512_max_epu32(
                _mm512_and_si512(_mm512_loadu_si512(x + i * BLOCK), no_sign),
                _mm512_and_si512(_mm512_loadu_si512(x + i * BLOCK + 16), no_sign));
        __m128i largest = lane_tops(top[0], top[1], top[2], top[3]);
        if (_mm_movemask_epi8(_mm_cmpgt_epi32(largest, _mm_set1_epi32(TOO_LARGE - 1)))) break;
        __m128 raised = _mm_mul_ps(_mm_castsi128_ps(largest), _mm_set1_ps(1 + 0x1p-7f));
        __m128i power = _mm_sub_epi32(_mm_srli_epi32(_mm_castps_si128(raised), 23), _mm_set1_epi32(22));
        power = _mm_slli_epi32(_mm_max_epi32(power, _mm_set1_epi32(127 - 100)), 23);
        _mm_storeu_ps(scale, _mm_castsi128_ps(power));
        _mm_storeu_si128((__m128i *)inverses, _mm_sub_epi32(_mm_set1_epi32(254 << 23), power));
        for (int i = 0; i < 8; i++)
            number[i] = _mm512_cvtps_epi32(
                _mm512_mul_ps(_mm512_loadu_ps(x + i * 16), _mm512_set1_ps(inverses[i / 2])));
        for (int i = 0; i < 4; i++) top[i] = _mm512_add_epi32(number[2 * i], number[2 * i + 1]);
        __m128i total = lane_sums(top[0], top[1], top[2], top[3]);
        _mm_storeu_ps(sums, _mm_mul_ps(_mm_cvtepi32_ps(total), _mm_loadu_ps(scale)));
        for (int i = 0; i < 4; i++) {
            put_wide(number[2 * i], number[2 * i + 1], bits, out + i * stride);
            out[i * stride].scale = scale[i];
            out[i * stride].sum = sums[i];
        }
    }
    return b;
}
#endif

/* Scales of all blocks first: each has a long latency for the largest value, which overlap here. */
void quantize_row(const float *x, long blocks, int bits, int format, x_block *out, long stride)
{
#if defined(__AVX512BW__)
    if (format == WIDE_BYTES) {
        long done = wide_x(x, blocks, bits, out, stride);
        x += done * BLOCK, out += done * stride, blocks -= done;
    }
#endif
    for (long b = 0; b < blocks; b++) {
        uint32_t largest = largest_of(x + b * BLOCK);
        out[b * stride].scale = largest < TOO_LARGE ? power_of_two(block_exponent(largest)) : NAN;
    }
    for (long b = 0; b < blocks; b++, x += BLOCK, out += stride) {
        if (out->scale == out->scale) {
            put_numbers(x, inverse(out->scale), bits, format, out);
        } else {
            memset(out, 0, sizeof *out);
            out->scale = out->sum = NAN;
        }
        put_starts(bits, out);
    }
}

/* Error bound of products by first bytes: the rest of the row, and the rounding of both products. Norms
 * bound both; the last factor covers their own rounding. */
float quant_error(const float *x, long blocks)
{
    const double rounding = (2 * blocks + 32) * 0x1p-23;
    double rest = 0, whole = 0;
    for (long b = 0; b < blocks; b++, x += BLOCK) {
        const uint32_t largest = largest_of(x);
        if (largest >= TOO_LARGE) return NAN;
        const float scale = power_of_two(block_exponent(largest)), inverted = inverse(scale);
        float own_rest[4] = {0}, own_whole[4] = {0};
        for (int k = 0; k < BLOCK; k += 4)
            for (int lane = 0; lane < 4; lane++) {
                const int32_t number = (int32_t)rintf(x[k + lane] * inverted);
                const float left = (float)(number - ((number + 0x8080) >> 16) * 65536);
                own_rest[lane] += left * left;
                own_whole[lane] += (float)number * (float)number;
            }
        const double square = (double)scale * scale;
        for (int lane = 0; lane < 4; lane++) rest += square * own_rest[lane];
        for (int lane = 0; lane < 4; lane++) whole += square * own_whole[lane];
    }
    return (float)(1.001 * (sqrt(rest) + rounding * sqrt(whole)));
}

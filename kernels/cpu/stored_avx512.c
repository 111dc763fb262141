/* Stored weights by AVX-512's dot products of bytes, which take weights without a sign: those of 8
 * bits get a bias of 128 that is taken off the sums again, like the bias of the others. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vnni,fma,f16c") /* of this file, which runs only there */
#include "stored.h"

#include <immintrin.h>

#if defined(__clang__) /* which does not know GCC's pragma */
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vnni,fma,f16c"))), apply_to = function)
#endif

INLINE int sum_bias(int type) { return stored_bits(type) == 8 ? 128 : stored_bias(type); }

/* Group g of all 16 outputs, 4 inputs each. */
INLINE __m512i group_of(int type, const uint8_t *low, int g)
{
    const uint8_t *high = low + low_bytes(type);
    const int bits = stored_bits(type);
    if (bits == 8) return _mm512_xor_si512(_mm512_loadu_si512(low + g * 64), _mm512_set1_epi8(-128));
    __m512i value = _mm512_loadu_si512(low + g % 4 * 64);
    if (bits == 4) value = _mm512_xor_si512(value, _mm512_set1_epi8((char)0x88));
    if (g >= 4) value = _mm512_srli_epi16(value, 4);
    value = _mm512_and_si512(value, _mm512_set1_epi8(15));
    if (bits == 5) {
        __mmask64 fifth = _mm512_test_epi8_mask(_mm512_loadu_si512(high),
                                                _mm512_set1_epi8((char)(1 << g)));
        value = _mm512_mask_add_epi8(value, fifth, value, _mm512_set1_epi8(16));
    }
    if (bits == 6) {
        __m512i two = _mm512_loadu_si512(high + g / 4 * 64);
        two = g % 4 < 2 ? _mm512_slli_epi16(two, 4 - 2 * (g % 4))
                        : _mm512_srli_epi16(two, 2 * (g % 4) - 4);
        value = _mm512_or_si512(value, _mm512_and_si512(two, _mm512_set1_epi8(48)));
    }
    return value;
}

INLINE __m512 halves_at(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE __m512 bytes_at(const uint8_t *p, int is_signed)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

INLINE void scales_of(int type, const uint8_t *panel, long b, __m512 scale[2], __m512 *min)
{
    const uint8_t *block = panel + block_offset(type, b), *super = panel + super_offset(type, b);
    if (type == Q4_K || type == Q6_K) {
        __m512 all = halves_at(super);
        scale[0] = _mm512_mul_ps(all, bytes_at(block, type == Q6_K));
        if (type == Q6_K) scale[1] = _mm512_mul_ps(all, bytes_at(block + PANEL, 1));
        if (type == Q4_K)
            *min = _mm512_sub_ps(
                _mm512_set1_ps(-0.0f),
                _mm512_mul_ps(halves_at(super + 2 * PANEL), bytes_at(block + PANEL, 0)));
    } else if (type != INT8) {
        scale[0] = halves_at(block);
        if (has_min(type)) *min = halves_at(block + 2 * PANEL);
    }
    if (has_min(type))
        *min = _mm512_fmadd_ps(scale[0], _mm512_set1_ps((float)stored_bias(type)), *min);
}

INLINE __m512 block_sum(int type, const __m512i w[GROUPS], const x_block *x, int begin, int end)
{
    __m512i sums[3];
    for (int i = 0; i < 3; i++) {
        sums[i] = _mm512_setzero_si512();
        for (int g = begin; g < end; g++) {
            int32_t four;
            memcpy(&four, x->bytes[i] + 4 * g, 4);
            sums[i] = _mm512_dpbusd_epi32(sums[i], w[g], _mm512_set1_epi32(four));
        }
    }
    __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]), low = sums[2];
    if (sum_bias(type)) {
        int32_t high_sum = 0, low_sum = 0;
        for (int half = begin / 4; half < end / 4; half++) {
            high_sum += x->high_sums[half];
            low_sum += x->low_sums[half];
        }
        high = _mm512_sub_epi32(high, _mm512_set1_epi32(sum_bias(type) * high_sum));
        low = _mm512_sub_epi32(low, _mm512_set1_epi32(sum_bias(type) * low_sum));
    }
    if (stored_bits(type) == 4)
        return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low));
}

INLINE void tile(int type, const uint8_t *panel, const x_block *x, long blocks, int rows,
                 float *sums)
{
    for (long b = 0; b < blocks; b++, x += rows) {
        const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
        __m512i w[GROUPS];
        __m512 scale[2], min;
        for (int g = 0; g < GROUPS; g++) w[g] = group_of(type, low, g);
        scales_of(type, panel, b, scale, &min);
        for (int r = 0; r < rows; r++) {
            const x_block *own = x + r;
            __m512 x_scale = _mm512_set1_ps(own->scale), sum = _mm512_loadu_ps(sums + r * PANEL);
            __m512 first = block_sum(type, w, own, 0, type == Q6_K ? 4 : 8);
            first = _mm512_mul_ps(first, x_scale);
            sum = type == INT8 ? _mm512_add_ps(sum, first) : _mm512_fmadd_ps(scale[0], first, sum);
            if (type == Q6_K) {
                __m512 second = _mm512_mul_ps(block_sum(type, w, own, 4, 8), x_scale);
                sum = _mm512_fmadd_ps(scale[1], second, sum);
            }
            if (has_min(type)) sum = _mm512_fmadd_ps(min, _mm512_set1_ps(own->sum), sum);
            _mm512_storeu_ps(sums + r * PANEL, sum);
        }
    }
}

EVERY_TYPE(DEFINE_TILE)
static stored_tile *const TILES[] = {EVERY_TYPE(NAME_TILE)};

static int runs_here(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("fma");
}

const stored_path stored_avx512 = {"avx512", runs_here, TILES, BYTES_AND_SUMS};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

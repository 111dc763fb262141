/* Quantized weights unpacked into 512-bit registers; for files compiled for AVX-512. */
#ifndef OUTRIDER_QUANT_AVX512_H
#define OUTRIDER_QUANT_AVX512_H

#include "quant.h"

#if HAS_AVX512
#include <immintrin.h>

/* Group g of all 16 outputs, 4 inputs each. */
INLINE __m512i group_of(int type, const uint8_t *low, int g)
{
    const uint8_t *high = low + low_bytes(type);
    const int bits = quant_bits(type);
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
        *min = _mm512_fmadd_ps(scale[0], _mm512_set1_ps((float)quant_bias(type)), *min);
}

#endif
#endif

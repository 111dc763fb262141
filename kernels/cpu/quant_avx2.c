/* Quantized weights by 16-bit products: two bytes of x at a time, so two sums instead of three. */
#include "quant.h"

#if HAS_AVX2
#include <immintrin.h>

#define QUADS 2 /* at a time: their 8 outputs fill a register of sums */

/* Group g of a quad, each weight in 16 bits: outputs of 4 inputs each. */
INLINE __m256i group_of(int type, const uint8_t *low, int quad, int g)
{
    const uint8_t *high = low + low_bytes(type) + quad * 16, *own = low + quad * 16;
    const int bits = quant_bits(type);
    if (bits == 8) return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(own + g * 64)));
    __m128i value = _mm_loadu_si128((const __m128i *)(own + g % 4 * 64));
    if (bits == 4) value = _mm_xor_si128(value, _mm_set1_epi8((char)0x88));
    if (g >= 4) value = _mm_srli_epi16(value, 4);
    value = _mm_and_si128(value, _mm_set1_epi8(15));
    if (bits == 5) {
        __m128i bit = _mm_loadu_si128((const __m128i *)high);
        bit = g < 4 ? _mm_slli_epi16(bit, 4 - g) : _mm_srli_epi16(bit, g - 4);
        value = _mm_or_si128(value, _mm_and_si128(bit, _mm_set1_epi8(16)));
    }
    if (bits == 6) {
        __m128i two = _mm_loadu_si128((const __m128i *)(high + g / 4 * 64));
        two = g % 4 < 2 ? _mm_slli_epi16(two, 4 - 2 * (g % 4)) : _mm_srli_epi16(two, 2 * (g % 4) - 4);
        value = _mm_or_si128(value, _mm_and_si128(two, _mm_set1_epi8(48)));
    }
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(value), _mm256_set1_epi16(quant_bias(type)));
}

INLINE __m256 halves_at(const uint8_t *p, int quad)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + quad * 8)));
}
INLINE __m256 bytes_at(const uint8_t *p, int quad, int is_signed)
{
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(p + quad * 4));
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

INLINE void scales_of(int type, const uint8_t *panel, long b, int quad, __m256 scale[2], __m256 *min)
{
    const uint8_t *block = panel + block_offset(type, b), *super = panel + super_offset(type, b);
    if (type == Q4_K || type == Q6_K) {
        __m256 all = halves_at(super, quad);
        scale[0] = _mm256_mul_ps(all, bytes_at(block, quad, type == Q6_K));
        if (type == Q6_K) scale[1] = _mm256_mul_ps(all, bytes_at(block + PANEL, quad, 1));
        if (type == Q4_K)
            *min = _mm256_sub_ps(_mm256_set1_ps(-0.0f),
                                 _mm256_mul_ps(halves_at(super + 2 * PANEL, quad),
                                               bytes_at(block + PANEL, quad, 0)));
    } else if (type != INT8) {
        scale[0] = halves_at(block, quad);
        if (has_min(type)) *min = halves_at(block + 2 * PANEL, quad);
    }
    if (has_min(type))
        *min = _mm256_fmadd_ps(scale[0], _mm256_set1_ps((float)quant_bias(type)), *min);
}

/* Neighbours added: 8 sums of pairs of inputs for each of two quads to one for each output. */
INLINE __m256i pairs_added(__m256i first, __m256i second)
{
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(first, second), 0xd8);
}

INLINE __m256 block_sum(int type, __m256i w[QUADS][GROUPS], const x_block *x, int begin, int end)
{
    __m256i high[QUADS], low[QUADS];
    for (int q = 0; q < QUADS; q++) high[q] = low[q] = _mm256_setzero_si256();
    for (int g = begin; g < end; g++) {
        int64_t four[2];
        memcpy(&four[0], x->halves[0] + 4 * g, 8);
        memcpy(&four[1], x->halves[1] + 4 * g, 8);
        __m256i x_high = _mm256_set1_epi64x(four[0]), x_low = _mm256_set1_epi64x(four[1]);
        for (int q = 0; q < QUADS; q++) {
            high[q] = _mm256_add_epi32(high[q], _mm256_madd_epi16(w[q][g], x_high));
            low[q] = _mm256_add_epi32(low[q], _mm256_madd_epi16(w[q][g], x_low));
        }
    }
    if (quant_bits(type) == 4) {
        for (int q = 0; q < QUADS; q++)
            high[q] = _mm256_add_epi32(_mm256_slli_epi32(high[q], 8), low[q]);
        return _mm256_cvtepi32_ps(pairs_added(high[0], high[1]));
    }
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(pairs_added(high[0], high[1])), _mm256_set1_ps(256),
                           _mm256_cvtepi32_ps(pairs_added(low[0], low[1])));
}

INLINE void tile(int type, const uint8_t *panel, const x_block *x, long blocks, int rows,
                 float *sums)
{
    for (long b = 0; b < blocks; b++, x += rows) {
        const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
        ask_ahead(type, low);
        for (int quad = 0; quad < 4; quad += QUADS) {
            __m256i w[QUADS][GROUPS];
            __m256 scale[2], min;
            for (int q = 0; q < QUADS; q++)
                for (int g = 0; g < GROUPS; g++) w[q][g] = group_of(type, low, quad + q, g);
            scales_of(type, panel, b, quad, scale, &min);
            for (int r = 0; r < rows; r++) {
                const x_block *own = x + r;
                float *place = sums + r * PANEL + quad * 4;
                __m256 x_scale = _mm256_set1_ps(own->scale), sum = _mm256_loadu_ps(place);
                __m256 first = block_sum(type, w, own, 0, type == Q6_K ? 4 : 8);
                first = _mm256_mul_ps(first, x_scale);
                sum = type == INT8 ? _mm256_add_ps(sum, first) : _mm256_fmadd_ps(scale[0], first, sum);
                if (type == Q6_K) {
                    __m256 second = _mm256_mul_ps(block_sum(type, w, own, 4, 8), x_scale);
                    sum = _mm256_fmadd_ps(scale[1], second, sum);
                }
                if (has_min(type)) sum = _mm256_fmadd_ps(min, _mm256_set1_ps(own->sum), sum);
                _mm256_storeu_ps(place, sum);
            }
        }
    }
}

EVERY_TYPE(DEFINE_TILE)
static quant_tile *const TILES[] = {EVERY_TYPE(NAME_TILE)};

/* Every CPU with AVX2 has F16C, which not every compiler can query. */
static int runs_here(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const quant_path quant_avx2 = {"avx2", runs_here, TILES, 0, HALVES, 0};

#endif

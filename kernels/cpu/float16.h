/* 16-bit weights (bfloat16, float16); see float16.c. */
#ifndef OUTRIDER_FLOAT16_H
#define OUTRIDER_FLOAT16_H

#include "quant.h"

INLINE int is_half(int64_t type) { return type == BF16 || type == F16; }

/* Bytes of a panel: [input][16 outputs]. */
INLINE int64_t half_panel_bytes(int64_t in_features) { return in_features * PANEL * 2; }

INLINE float value_of(int is_brain, uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return is_brain ? value : half_to_float(bits);
}

/* What is in a panel: as it is stored, or widened for many rows. */
enum { FROM_F16, FROM_BF16, FROM_F32 };

/* A vector of weights: of the 16 at `panel` the ones from `first` on. */
INLINE vec widened(int form, const void *panel, int first)
{
    const uint16_t *halves = panel;
    if (form == FROM_F32) return vec_load((const float *)panel + first);
#if defined(__aarch64__)
    if (form == FROM_F16) return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + first)));
    uint16x8_t eight = vld1q_u16(halves + first / 8 * 8), zero = vdupq_n_u16(0);
    return vreinterpretq_f32_u16(first % 8 ? vzip2q_u16(zero, eight) : vzip1q_u16(zero, eight));
#elif defined(__AVX512F__)
    __m256i own = _mm256_loadu_si256((const __m256i *)(halves + first));
    if (form == FROM_F16) return _mm512_cvtph_ps(own);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(own), 16));
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i own = _mm_loadu_si128((const __m128i *)(halves + first));
    if (form == FROM_F16) return _mm256_cvtph_ps(own);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(own), 16));
#else
    vec out;
    for (int i = 0; i < VEC_LANES; i++) out[i] = value_of(form == FROM_BF16, halves[first + i]);
    return out;
#endif
}

int float16_linear(const quant_layer *l, const float *x, int64_t rows, float *out);
void float16_pack(const uint8_t *file, int64_t out_features, int64_t in_features, uint8_t *packed);
void float16_row(const quant_layer *l, int64_t row, float *out);

#endif

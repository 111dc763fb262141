/* Many rows by AVX-512: the weights of three panels are unpacked once and then multiplied by tiles of
 * eight rows, whose 8 x 3 sums stay in registers.
 *
 * Here weights have signs and activations do not: of X + 2^23 all three bytes are used, the upper one
 * first. Its sums are moved up by a byte, the next byte's products are added to them, and so on: one
 * register for each sum where the tile of few rows has three. What 2^23 adds is a multiple of 2^23
 * times the sum of the weights, which is taken off before the upper byte's products are added. Where
 * the lower byte has a sum of its own, X + 128 + 2^23 has the same bytes but for its sign, and 128
 * times the sum of the weights is taken off there as well. */
#include "quant_avx512.h"

#if HAS_AVX512
#define UNROLLED _Pragma("GCC unroll 8")

/* For every row, and for every row and panel: sums have names, since compilers keep arrays that are
 * used in a loop in memory. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define PANELS_OF(DO, r) DO(r, 0) DO(r, 1) DO(r, 2)
#define EACH(DO)                                                                            \
    PANELS_OF(DO, 0) PANELS_OF(DO, 1) PANELS_OF(DO, 2) PANELS_OF(DO, 3) PANELS_OF(DO, 4)    \
    PANELS_OF(DO, 5) PANELS_OF(DO, 6) PANELS_OF(DO, 7)

typedef int32_t four_bytes __attribute__((may_alias));

INLINE void unpack_block(int type, const uint8_t *panel, long b, int p, wide_block *out)
{
    const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
    const __m512i bias = _mm512_set1_epi8((char)(1 << (quant_bits(type) - 1)));
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    __m512 scale[2] = {_mm512_set1_ps(1), _mm512_set1_ps(1)}, min;
    ask_ahead(type, low);
    UNROLLED for (int g = 0; g < GROUPS; g++) {
        const __m512i w = _mm512_sub_epi8(group_of(type, low, g), bias);
        __m512i *sum = &sums[type == Q6_K ? g / 4 : 0];
        *sum = _mm512_dpbusd_epi32(*sum, _mm512_set1_epi8(-128), w); /* 128 without a sign */
        _mm512_store_si512(out->groups[g][p], w);
    }
    scales_of(type, panel, b, scale, &min);
    for (int half = 0; half < (type == Q6_K ? 2 : 1); half++) {
        _mm512_store_ps(out->scale[half][p], scale[half]);
        _mm512_store_si512(out->minus[half][p], _mm512_sub_epi32(_mm512_setzero_si512(), sums[half]));
    }
    if (has_min(type)) _mm512_store_ps(out->min[p], min);
}

/* Instructions themselves, because compilers copy sums from one register or place to another between
 * intrinsics, and know that those of all rows begin alike. */
#define START(r, p) __asm__("vmovdqa64 %1, %0" : "=v"(sum##r##p) : "m"(w->minus[half][p]));
#define MOVE_UP(r, p) __asm__("vpslld $8, %0, %0" : "+v"(sum##r##p));
#define PRODUCT(r, p) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum##r##p) : "v"(four), "v"(w##p));
#define PRODUCTS(r)                                                             \
    {                                                                           \
        const __m512i four = _mm512_set1_epi32(*(const four_bytes *)(at + r * sizeof *x)); \
        PANELS_OF(PRODUCT, r)                                                   \
    }
/* The products of one byte of every row with groups of a block. */
#define ADD_PRODUCTS(byte)                                                                        \
    {                                                                                             \
        const char *at = (const char *)x->bytes[byte] + 4 * begin;                                \
        _Pragma("GCC unroll 1") for (int g = begin; g < end; g++, at += 4) {                      \
            const __m512i w0 = _mm512_load_si512(w->groups[g][0]);                                \
            const __m512i w1 = _mm512_load_si512(w->groups[g][1]);                                \
            const __m512i w2 = _mm512_load_si512(w->groups[g][2]);                                \
            EACH_ROW(PRODUCTS)                                                                    \
        }                                                                                         \
    }
#define KEEP_HIGH(r, p) _mm512_store_ps(highs[r][p], _mm512_cvtepi32_ps(sum##r##p));
#define FINISH(r, p) finish(type, sum##r##p, highs[r][p], w, x + r, half, p, out + (r * WIDE_PANELS + p) * PANEL);

INLINE void finish(int type, __m512i sum, const float *high, const wide_block *w, const x_block *x,
                   int half, int p, float *place)
{
    __m512 total = _mm512_cvtepi32_ps(sum), before = _mm512_load_ps(place);
    if (quant_bits(type) != 4)
        total = _mm512_fmadd_ps(_mm512_load_ps(high), _mm512_set1_ps(256), total);
    total = _mm512_mul_ps(total, _mm512_set1_ps(x->scale));
    before = _mm512_fmadd_ps(total, _mm512_load_ps(w->scale[half][p]), before);
    if (has_min(type))
        before = _mm512_fmadd_ps(_mm512_set1_ps(x->sum), _mm512_load_ps(w->min[p]), before);
    _mm512_store_ps(place, before);
}

/* Groups of one block, which have one scale. */
INLINE void add_groups(int type, const wide_block *w, const x_block *x, int half, int begin, int end,
                       float *out)
{
#define DECLARE(r, p) __m512i sum##r##p;
    EACH(DECLARE)
    float highs[WIDE_ROWS][WIDE_PANELS][PANEL] __attribute__((aligned(64)));
    EACH(START)
    ADD_PRODUCTS(0)
    EACH(MOVE_UP)
    ADD_PRODUCTS(1)
    if (quant_bits(type) == 4) {
        EACH(MOVE_UP)
    } else {
        EACH(KEEP_HIGH)
        EACH(START)
    }
    ADD_PRODUCTS(2)
    EACH(FINISH)
}

/* What types have in common with this one suffices to be multiplied like it: how many bits, scales and
 * minima. */
INLINE void tile(int type, const wide_block *w, const x_block *x, long blocks, float *sums)
{
    for (long b = 0; b < blocks; b++, w++, x += WIDE_ROWS) {
        add_groups(type, w, x, 0, 0, type == Q6_K ? 4 : 8, sums);
        if (type == Q6_K) add_groups(type, w, x, 1, 4, 8, sums);
    }
}

#define DEFINE(type)                                                                          \
    static void unpack_##type(const uint8_t *panel, long blocks, int p, wide_block *out)        \
    {                                                                                         \
        for (long b = 0; b < blocks; b++) unpack_block(type, panel, b, p, out + b);             \
    }                                                                                         \
    static void wide_##type(const wide_block *w, const x_block *x, long blocks, float *sums)  \
    {                                                                                         \
        tile(type, w, x, blocks, sums);                                                       \
    }
#define NAME(type) {unpack_##type, wide_##type},

EVERY_TYPE(DEFINE)
const quant_wide quant_wide512[] = {EVERY_TYPE(NAME)};

#endif

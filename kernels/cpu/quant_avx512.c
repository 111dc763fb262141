/* Quantized weights by AVX-512's byte dot products, which take unsigned weights: those of 8 bits get a
 * bias of 128 that is subtracted from the sums, like the bias of the others. */
#include "quant_avx512.h"

#if HAS_AVX512
#define UNROLLED _Pragma("GCC unroll 8")
#define EACH_ROW(r) UNROLLED for (int r = 0; r < rows; r++)

typedef int32_t four_bytes __attribute__((may_alias));

/* The instruction itself, with an embedded broadcast: compilers emit a separate one, and then the core
 * is bound by instruction issue. */
INLINE __m512i add_products(__m512i sums, __m512i w, const int8_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(w), "m"(*(const four_bytes *)x));
    return sums;
}

/* Sums of a row's three bytes, from which the weights' bias is taken before anything is added. */
INLINE void start(__m512i sums[3], const x_block *x, int begin, int end)
{
    const int whole = end - begin == GROUPS;
    sums[0] = _mm512_setzero_si512();
    sums[1] = _mm512_set1_epi32(x->minus_high[whole ? 2 : begin / 4]);
    sums[2] = _mm512_set1_epi32(x->minus_low[whole ? 2 : begin / 4]);
}

INLINE __m512 total(int type, const __m512i sums[3])
{
    __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]), low = sums[2];
    if (quant_bits(type) == 4)
        return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low));
}

/* Groups of one block, which have one scale, by all rows: a group's weights are unpacked once, and
 * every row's sums stay in registers. */
INLINE void add_groups(int type, const uint8_t *low, const x_block *x, int begin, int end, int rows,
                       __m512 scale, float *out)
{
    __m512i sums[MAX_QUANT_ROWS][3];
    EACH_ROW(r) start(sums[r], x + r, begin, end);
    UNROLLED for (int g = begin; g < end; g++) {
        const __m512i w = group_of(type, low, g);
        EACH_ROW(r)
            UNROLLED for (int i = 0; i < 3; i++)
                sums[r][i] = add_products(sums[r][i], w, x[r].bytes[i] + 4 * g);
    }
    EACH_ROW(r) {
        __m512 sum = _mm512_loadu_ps(out + r * PANEL);
        __m512 own = _mm512_mul_ps(total(type, sums[r]), _mm512_set1_ps(x[r].scale));
        sum = type == INT8 ? _mm512_add_ps(sum, own) : _mm512_fmadd_ps(scale, own, sum);
        _mm512_storeu_ps(out + r * PANEL, sum);
    }
}

INLINE void tile_of(int type, int rows, const uint8_t *panel, const x_block *x, long blocks,
                    float *out)
{
    for (long b = 0; b < blocks; b++, x += rows) {
        const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
        __m512 scale[2], min;
        ask_ahead(type, low);
        scales_of(type, panel, b, scale, &min);
        add_groups(type, low, x, 0, type == Q6_K ? 4 : 8, rows, scale[0], out);
        if (type == Q6_K) add_groups(type, low, x, 4, 8, rows, scale[1], out);
        if (has_min(type)) EACH_ROW(r) {
            __m512 sum = _mm512_loadu_ps(out + r * PANEL);
            sum = _mm512_fmadd_ps(min, _mm512_set1_ps(x[r].sum), sum);
            _mm512_storeu_ps(out + r * PANEL, sum);
        }
    }
}

INLINE void tile(int type, const uint8_t *panel, const x_block *x, long blocks, int rows,
                 float *sums)
{
    switch (rows) {
#define CASE(n) case n: tile_of(type, n, panel, x, blocks, sums); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

EVERY_TYPE(DEFINE_TILE)
static quant_tile *const TILES[] = {EVERY_TYPE(NAME_TILE)};

static int runs_here(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("fma");
}

const quant_path quant_avx512 = {"avx512", runs_here, TILES, 0, BYTES_AND_SUMS, quant_wide512};

#endif

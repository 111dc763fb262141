/* Quantized weights by the byte dot products of ARMv8.2. */
#if defined(__aarch64__) && defined(__linux__)
#pragma GCC target("arch=armv8.2-a+dotprod") /* of this file alone, which runs only where there are any */
#include "quant_neon.h"

#include <sys/auxv.h>

#if defined(__clang__) /* which does not know GCC's pragma */
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#endif

/* Blocks at a time: weights and the activations of 8 rows stay in the first-level cache while the quads
 * take turns. */
#define RUN 24
#define AHEAD 12288 /* bytes; less is too late with one row */

/* The 8 groups of a quad's weights; those of 4 bits times 16, which takes the fewest instructions. */
INLINE void unpack(int type, const uint8_t *low, int quad, int8x16_t w[GROUPS])
{
    const uint8_t *high = low + low_bytes(type) + quad * 16;
    low += quad * 16;
    if (quant_bits(type) == 8) {
        for (int g = 0; g < GROUPS; g++) w[g] = vld1q_s8((const int8_t *)low + g * 64);
        return;
    }
    uint8x16_t value[GROUPS];
    if (quant_bits(type) == 4) {
        for (int g = 0; g < 4; g++) {
            uint8x16_t both = vld1q_u8(low + g * 64);
            w[g] = vreinterpretq_s8_u8(vshlq_n_u8(both, 4));
            w[g + 4] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(0xf0)));
        }
        return;
    }
    for (int g = 0; g < 4; g++) {
        uint8x16_t both = vld1q_u8(low + g * 64);
        value[g] = vandq_u8(both, vdupq_n_u8(15));
        value[g + 4] = vshrq_n_u8(both, 4);
    }
    if (quant_bits(type) == 5) {
        uint8x16_t bits = vld1q_u8(high), sixteen = vdupq_n_u8(16);
#define FIFTH(g, move) value[g] = vorrq_u8(value[g], vandq_u8(move, sixteen));
        FIFTH(0, vshlq_n_u8(bits, 4))
        FIFTH(1, vshlq_n_u8(bits, 3))
        FIFTH(2, vshlq_n_u8(bits, 2))
        FIFTH(3, vshlq_n_u8(bits, 1))
        FIFTH(4, bits)
        FIFTH(5, vshrq_n_u8(bits, 1))
        FIFTH(6, vshrq_n_u8(bits, 2))
        FIFTH(7, vshrq_n_u8(bits, 3))
    }
    if (quant_bits(type) == 6)
        for (int half = 0; half < 2; half++) {
            uint8x16_t bits = vld1q_u8(high + half * 64), mask = vdupq_n_u8(48);
            uint8x16_t *own = value + 4 * half;
            own[0] = vorrq_u8(own[0], vandq_u8(vshlq_n_u8(bits, 4), mask));
            own[1] = vorrq_u8(own[1], vandq_u8(vshlq_n_u8(bits, 2), mask));
            own[2] = vorrq_u8(own[2], vandq_u8(bits, mask));
            own[3] = vorrq_u8(own[3], vandq_u8(vshrq_n_u8(bits, 2), mask));
        }
    for (int g = 0; g < GROUPS; g++) {
        int8x16_t biased = vreinterpretq_s8_u8(value[g]);
        w[g] = vsubq_s8(biased, vdupq_n_s8((int8_t)quant_bias(type)));
    }
}

INLINE float32x4_t halves_at(const uint8_t *p, int quad)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + quad * 8)));
}
INLINE float32x4_t bytes_at(const uint8_t *p, int quad, int is_signed)
{
    uint32_t four;
    memcpy(&four, p + quad * 4, 4);
    uint8x8_t bytes = vcreate_u8(four);
    if (!is_signed) return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(bytes));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

/* What a type has none of is something that is not used. */
INLINE float32x4_t quad_scale(int type, const uint8_t *panel, long b, int quad, int half)
{
    const uint8_t *block = panel + block_offset(type, b), *super = panel + super_offset(type, b);
    if (type == INT8) return vdupq_n_f32(1);
    if (type == Q4_K || type == Q6_K)
        return vmulq_f32(halves_at(super, quad), bytes_at(block + half * PANEL, quad, type == Q6_K));
    return vld1q_f32((const float *)block + quad * 4);
}
INLINE float32x4_t quad_min(int type, const uint8_t *panel, long b, int quad, float32x4_t scale)
{
    const uint8_t *block = panel + block_offset(type, b), *super = panel + super_offset(type, b);
    float32x4_t min = scale;
    if (type == Q4_K)
        min = vnegq_f32(
            vmulq_f32(halves_at(super + 2 * PANEL, quad), bytes_at(block + PANEL, quad, 0)));
    else if (has_min(type)) min = vld1q_f32((const float *)block + PANEL + quad * 4);
    return vfmaq_f32(min, scale, vdupq_n_f32((float)quant_bias(type)));
}

/* The lane has to be a constant. */
INLINE int32x4_t dotted(int32x4_t sum, int8x16_t w, int8x16_t x, int lane)
{
    if (lane == 0) __asm__("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(sum) : "w"(w), "w"(x));
    else if (lane == 1) __asm__("sdot %0.4s, %1.16b, %2.4b[1]" : "+w"(sum) : "w"(w), "w"(x));
    else if (lane == 2) __asm__("sdot %0.4s, %1.16b, %2.4b[2]" : "+w"(sum) : "w"(w), "w"(x));
    else __asm__("sdot %0.4s, %1.16b, %2.4b[3]" : "+w"(sum) : "w"(w), "w"(x));
    return sum;
}

/* Finished sums of some quads to their totals. All of them at once: a fused multiplication just before
 * or after products costs double. */
INLINE void add_sums(int type, const uint8_t *panel, long b, int half, int quad, int quads, int rows,
                     const x_block *x, const float32x4_t *sums, float32x4_t totals[][MAX_QUANT_ROWS])
{
    float32x4_t scale[4], min[4];
    UNROLL for (int q = 0; q < quads; q++) {
        scale[q] = quad_scale(type, panel, b, quad + q, half);
        min[q] = quad_min(type, panel, b, quad + q, scale[q]);
        UNROLL for (int r = 0; r < rows; r++) {
            const float32x4_t sum = sums[q * rows + r];
            totals[q][r] = type == INT8 ? vaddq_f32(totals[q][r], sum)
                                        : vfmaq_f32(totals[q][r], scale[q], sum);
        }
    }
    if (!has_min(type)) return;
    UNROLL for (int q = 0; q < quads; q++)
        UNROLL for (int r = 0; r < rows; r++)
            totals[q][r] = vfmaq_n_f32(totals[q][r], min[q], x[r].sum);
}

/* Of how many quads sums are added to totals at once: of as many as there are registers for. */
INLINE int quads_at_once(int type, int rows) { return type == Q6_K || rows > 3 ? 1 : rows > 1 ? 2 : 4; }

/* A block of quads [first, first + quads), which are added at once, by all of X. */
INLINE void add_block(int type, const uint8_t *panel, long b, const x_block *x, int rows, int first,
                      int quads, float32x4_t totals[][MAX_QUANT_ROWS])
{
    const int halves = type == Q6_K ? 2 : 1;
    const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
    digit_sums last;
    float32x4_t found[MAX_QUANT_ROWS];
    int8x16_t w[GROUPS];
    UNROLL for (int half = 0; half < halves; half++) {
        UNROLL for (int i = 0; i < quads * rows; i++) {
            const x_block *now = x + i % rows, *before = x + (i + rows - 1) % rows;
            const int8_t *bytes = now->bytes[0] + half * 16;
            if (i % rows == 0 && half == 0) unpack(type, low, first + i / rows, w);
            last = i ? next_sums(type, w + half * 4, now, bytes, last, before, &found[i - 1])
                     : begin_sums(type, w + half * 4, now, bytes);
        }
        found[quads * rows - 1] = finish(type, last, x + rows - 1);
        add_sums(type, panel, b, half, first, quads, rows, x, found, totals);
    }
}

/* The sum of a block, or of a half, by the first byte of a row of X. */
INLINE float32x4_t first_sum(const int8x16_t *w, int groups, const int8_t *bytes, const float *start)
{
    int32x4_t sum = vreinterpretq_s32_f32(vld1q_f32(start));
    UNROLL for (int g = 0; g < groups; g++)
        sum = dotted(sum, w[g], vld1q_s8(bytes + g / 4 * 16), g % 4);
    return vreinterpretq_f32_s32(sum);
}

/* A block of one quad by the first byte of X. Of few rows compilers keep the bytes of X for all quads,
 * of more they copy registers instead. */
INLINE void add_first_block(int type, const uint8_t *panel, long b, const x_block *x, int rows,
                            int quad, float32x4_t *totals)
{
    const int groups = type == Q6_K ? 4 : GROUPS, in_pairs = rows > 2 && groups == GROUPS ? rows / 2 * 2 : 0;
    int8x16_t w[GROUPS];
    unpack(type, panel + block_offset(type, b) + scale_bytes(type), quad, w);
    UNROLL for (int half = 0; half < GROUPS / groups; half++) {
        const float32x4_t scale = quad_scale(type, panel, b, quad, half);
        float32x4_t sums[MAX_QUANT_ROWS];
        UNROLL for (int r = 0; r < rows - in_pairs; r++)
            sums[r] = first_sum(w + half * 4, groups, x[r].bytes[0] + half * 16, x[r].starts[0]);
        UNROLL for (int r = rows - in_pairs; r < rows; r += 2) two_first_sums(w, x + r, sums + r);
        UNROLL for (int r = 0; r < rows; r++) sums[r] -= vld1q_f32(x[r].starts[0]);
        UNROLL for (int r = 0; r < rows; r++) totals[r] = vfmaq_f32(totals[r], scale, sums[r]);
    }
}

/* Blocks [begin, end) of `quads` quads, whose sums stay in registers, by some bytes of X. */
INLINE void quad_run(int type, int bytes_of_x, const uint8_t *panel, const x_block *x, long blocks,
                     long begin, long end, int rows, int first, int quads, float *sums)
{
    const int passes = 4 / quads, at_once = bytes_of_x == 1 ? 1 : quads_at_once(type, rows);
    const int lines = (block_bytes(type) + 64 * passes - 1) / (64 * passes);
    const long ahead = quads == 4 ? AHEAD : panel_bytes(type, blocks * BLOCK); /* the next panel */
    float32x4_t totals[4][MAX_QUANT_ROWS];
    UNROLL for (int q = 0; q < quads; q++)
        UNROLL for (int r = 0; r < rows; r++)
            totals[q][r] = vld1q_f32(sums + r * PANEL + (first + q) * 4);
    for (long b = begin; b < end; b++) {
        const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
        for (int i = 0; i < lines; i++)
            __builtin_prefetch(low + ahead + (first / quads * lines + i) * 64);
        UNROLL for (int q = 0; q < quads; q += at_once)
            if (bytes_of_x == 1) add_first_block(type, panel, b, x + b * rows, rows, first + q, totals[q]);
            else add_block(type, panel, b, x + b * rows, rows, first + q, at_once, totals + q);
    }
    UNROLL for (int q = 0; q < quads; q++)
        UNROLL for (int r = 0; r < rows; r++)
            vst1q_f32(sums + r * PANEL + (first + q) * 4, totals[q][r]);
}

/* With few rows all quads have room in the registers at once, and weights are read straight through. */
INLINE void tile_of(int type, int bytes_of_x, const uint8_t *panel, const x_block *x, long blocks,
                    int rows, float *sums)
{
    const int quads = rows <= 2 ? 4 : rows <= 4 ? 2 : 1;
    const long run = quads == 4 ? blocks : RUN;
    for (long begin = 0; begin < blocks; begin += run) {
        long end = begin + run < blocks ? begin + run : blocks;
        for (int first = 0; first < 4; first += quads)
            quad_run(type, bytes_of_x, panel, x, blocks, begin, end, rows, first, quads, sums);
    }
}

#define CASE(rows)                                                \
    case rows:                                                    \
        tile_of(type, bytes_of_x, panel, x, blocks, rows, sums); \
        break;
INLINE void any_tile(int type, int bytes_of_x, const uint8_t *panel, const x_block *x, long blocks,
                     int rows, float *sums)
{
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
}

INLINE void tile(int type, const uint8_t *panel, const x_block *x, long blocks, int rows,
                 float *sums)
{
    any_tile(type, 3, panel, x, blocks, rows, sums);
}

EVERY_TYPE(DEFINE_TILE)
static quant_tile *const TILES[] = {EVERY_TYPE(NAME_TILE)};

#define DEFINE_FIRST_TILE(type)                                                                  \
    static void first_tile_##type(const uint8_t *panel, const x_block *x, long blocks, int rows, \
                                  float *sums)                                                   \
    {                                                                                            \
        any_tile(type, 1, panel, x, blocks, rows, sums);                                         \
    }
#define NAME_FIRST_TILE(type) [type] = first_tile_##type,
EVERY_TYPE_WITHOUT_MIN(DEFINE_FIRST_TILE)
static quant_tile *const FIRST_TILES[F16 + 1] = {EVERY_TYPE_WITHOUT_MIN(NAME_FIRST_TILE)};

static int has_dot_products(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

const quant_path quant_neon = {"neon", has_dot_products, TILES, FIRST_TILES, BYTES_AND_STARTS, 0};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

/* Stored weights by the dot products of bytes that ARM has had since 8.2. */
#if defined(__aarch64__) && defined(__linux__)
#pragma GCC target("arch=armv8.2-a+dotprod") /* of this file alone, which runs only where there are any */
#include "stored_neon.h"

#include <sys/auxv.h>

#if defined(__clang__) /* which does not know GCC's pragma */
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#endif

/* So many blocks at a time: weights and the activations of 8 rows stay in the first-level cache while
 * the quads take turns. */
#define RUN 24
#define AHEAD 12288 /* bytes; less is asked for too late when one row passes */

/* The 8 groups of a quad's weights; those of 4 bits times 16, which takes the fewest instructions. */
INLINE void unpack(int type, const uint8_t *low, int quad, int8x16_t w[GROUPS])
{
    const uint8_t *high = low + low_bytes(type) + quad * 16;
    low += quad * 16;
    if (stored_bits(type) == 8) {
        for (int g = 0; g < GROUPS; g++) w[g] = vld1q_s8((const int8_t *)low + g * 64);
        return;
    }
    uint8x16_t value[GROUPS];
    if (stored_bits(type) == 4) {
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
    if (stored_bits(type) == 5) {
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
    if (stored_bits(type) == 6)
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
        w[g] = vsubq_s8(biased, vdupq_n_s8((int8_t)stored_bias(type)));
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
INLINE void quad_scales(int type, const uint8_t *panel, long b, int quad, float32x4_t scale[2],
                        float32x4_t *min)
{
    const uint8_t *block = panel + block_offset(type, b), *super = panel + super_offset(type, b);
    if (type == Q4_K || type == Q6_K) {
        float32x4_t all = halves_at(super, quad);
        scale[0] = vmulq_f32(all, bytes_at(block, quad, type == Q6_K));
        if (type == Q6_K) scale[1] = vmulq_f32(all, bytes_at(block + PANEL, quad, 1));
        if (type == Q4_K)
            *min = vnegq_f32(
                vmulq_f32(halves_at(super + 2 * PANEL, quad), bytes_at(block + PANEL, quad, 0)));
    } else if (type != INT8) {
        scale[0] = vld1q_f32((const float *)block + quad * 4);
        if (has_min(type)) *min = vld1q_f32((const float *)block + PANEL + quad * 4);
    }
    if (type == INT8) scale[0] = vdupq_n_f32(1);
    if (!has_min(type)) *min = scale[0];
    else *min = vfmaq_f32(*min, scale[0], vdupq_n_f32((float)stored_bias(type)));
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

/* A row's part of a block of one quad, or of its half with Q6_K, by the first byte of X alone. */
INLINE void add_first(int type, const int8x16_t *w, const x_block *x, const int8_t *bytes,
                      float32x4_t scale, float32x4_t *total)
{
    const int groups = type == Q6_K ? 4 : GROUPS;
    const float32x4_t start = vld1q_f32(x->starts[0]);
    int32x4_t sum = vreinterpretq_s32_f32(start);
    UNROLL for (int g = 0; g < groups; g++)
        sum = dotted(sum, w[g], vld1q_s8(bytes + g / 4 * 16), g % 4);
    *total = vfmaq_f32(*total, scale, vsubq_f32(vreinterpretq_f32_s32(sum), start));
}

/* Blocks [begin, end) of `quads` quads, whose sums stay in registers, by so many of the bytes of X. */
INLINE void quad_run(int type, int bytes_of_x, const uint8_t *panel, const x_block *x, long blocks,
                     long begin, long end, int rows, int first, int quads, float *sums)
{
    const int halves = type == Q6_K ? 2 : 1, passes = 4 / quads;
    const int lines = (block_bytes(type) + 64 * passes - 1) / (64 * passes);
    const long ahead = quads == 4 ? AHEAD : panel_bytes(type, blocks * BLOCK); /* the next panel */
    float32x4_t totals[4][MAX_STORED_ROWS];
    UNROLL for (int q = 0; q < quads; q++)
        UNROLL for (int r = 0; r < rows; r++)
            totals[q][r] = vld1q_f32(sums + r * PANEL + (first + q) * 4);
    for (long b = begin; b < end; b++) {
        const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
        const x_block *own = x + b * rows;
        unfinished last;
        for (int i = 0; i < lines; i++)
            __builtin_prefetch(low + ahead + (first / quads * lines + i) * 64);
        UNROLL for (int q = 0; q < quads; q++) {
            int8x16_t w[GROUPS];
            float32x4_t scale[2], min;
            unpack(type, low, first + q, w);
            quad_scales(type, panel, b, first + q, scale, &min);
            UNROLL for (int i = 0; i < halves * rows; i++) {
                const x_block *now = own + i % rows;
                const int8_t *bytes = now->bytes[0] + i / rows * 16;
                if (bytes_of_x == 1) {
                    add_first(type, w + i / rows * 4, now, bytes, scale[i / rows], &totals[q][i % rows]);
                    continue;
                }
                digit_sums sums = q + i ? next_sums(type, w + i / rows * 4, now, bytes, &last)
                                        : begin_sums(type, w, now, bytes);
                last = (unfinished){sums, scale[i / rows], min, now, &totals[q][i % rows]};
            }
        }
        if (bytes_of_x == 3) finish(type, &last);
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
static stored_tile *const TILES[] = {EVERY_TYPE(NAME_TILE)};

#define DEFINE_FIRST_TILE(type)                                                                  \
    static void first_tile_##type(const uint8_t *panel, const x_block *x, long blocks, int rows, \
                                  float *sums)                                                   \
    {                                                                                            \
        any_tile(type, 1, panel, x, blocks, rows, sums);                                         \
    }
#define NAME_FIRST_TILE(type) [type] = first_tile_##type,
EVERY_TYPE_WITHOUT_MIN(DEFINE_FIRST_TILE)
static stored_tile *const FIRST_TILES[F16 + 1] = {EVERY_TYPE_WITHOUT_MIN(NAME_FIRST_TILE)};

static int has_dot_products(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

const stored_path stored_neon = {"neon", has_dot_products, TILES, FIRST_TILES, BYTES_AND_STARTS, 0};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

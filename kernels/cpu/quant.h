/* Quantized weights as stored in checkpoints, and activations quantized to integers.
 *
 * A panel is 16 outputs, a block 32 inputs of them, a group 4 inputs of a block, a quad 4 outputs. A
 * block holds scales, the low bits of its weights, and what is left of them:
 *
 *   low bits   of 8: [group][quad][output][input], a byte each; of fewer than 8: the first four groups
 *              in the lower halves of such bytes, the last four in the upper ones; of 4: as signed
 *              numbers
 *   fifth bit  [quad][output][input]: bit g is that of group g
 *   6 bits     [group / 4][quad][output][input]: two bits each of four groups
 *
 * Activations of a block are X * 2^s with |X| < 2^23, so that products with weights are sums of
 * integers, exact in any order. A block's sum becomes one float32: rounded once, or, of weights of 8
 * bits, X = high * 256 + low, once for `high` and once for the whole. An output is a chain of fused
 * multiply-adds over its blocks. So a row's result is the same bits alone or among many, and the
 * same on every CPU. What X rounds off is less than the chain of float32 products would. */
#ifndef OUTRIDER_QUANT_H
#define OUTRIDER_QUANT_H

#include "ops.h"
#include "vec.h"

#include <math.h>
#include <string.h>

/* Paths to compile: only those of this CPU, to save compile time. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__FMA__) && defined(__F16C__)
#define HAS_AVX512 1
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_AVX2 1
#endif

#define PANEL 16
#define BLOCK 32
#define GROUPS 8
#define BLOCKS_PER_SUPER 8
#define MAX_X 8355711.0f /* 127 * (65536 + 256 + 1): three signed bytes hold it */

/* Bytes of a block's scale: as stored, or float32 where converting half floats is slower than reading
 * more. */
#if defined(__aarch64__)
#define SCALE 4
#else
#define SCALE 2
#endif

/* KINDS in stored.py has the same numbers. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K, INT8, BF16, F16 };

/* The activation format that a path needs: see x_block. */
enum { BYTES, BYTES_AND_STARTS, BYTES_AND_SUMS, HALVES, WIDE_BYTES };

/* Activations of one row and block. X = high * 256 + low, where low is a byte and high is two. As
 * small as possible: those of 8 rows should stay in the first-level cache. */
typedef struct {
    union {
        int8_t bytes[3][BLOCK]; /* the first of high, the second of high, low */
#if defined(__x86_64__)
        int16_t halves[2][BLOCK]; /* high, low */
#endif
    };
#if defined(__x86_64__)
    int32_t minus_high[3], minus_low[3]; /* BYTES_AND_SUMS: see put_sums */
#else
    float starts[3][4], minus_starts[4]; /* BYTES_AND_STARTS: see quant_neon.c */
#endif
    float scale, sum; /* 2^s, and the sum of what X stands for */
} __attribute__((aligned(16))) x_block;

/* The following are called with constant types and fold away. */
INLINE int quant_bits(int type)
{
    return type == Q8_0 || type == INT8 ? 8 : type == Q6_K ? 6 : type == Q5_0 || type == Q5_1 ? 5 : 4;
}
/* Subtracted from the bits of a weight. For any type, those of 4 and 5 bits are centred: sums
 * of 4 bits then fit 32 bits, and of 5 bits `high` is exact as a float. */
INLINE int quant_bias(int type)
{
    return quant_bits(type) == 8 ? 0 : 1 << (quant_bits(type) - 1);
}
INLINE int has_min(int type) { return type == Q4_1 || type == Q5_1 || type == Q4_K; }
INLINE long scale_bytes(int type)
{
    if (type == Q4_K || type == Q6_K) return 2 * PANEL;
    return type == INT8 ? 0 : (has_min(type) ? 2 : 1) * SCALE * PANEL;
}
INLINE long low_bytes(int type) { return PANEL * BLOCK / (quant_bits(type) == 8 ? 1 : 2); }
INLINE long block_bytes(int type)
{
    int high_bits = quant_bits(type) == 8 ? 0 : quant_bits(type) - 4;
    return scale_bytes(type) + low_bytes(type) + PANEL * BLOCK / 8 * high_bits;
}
INLINE long super_bytes(int type) { return type == Q4_K ? 4 * PANEL : type == Q6_K ? 2 * PANEL : 0; }
INLINE long panel_bytes(int type, long in_features)
{
    long blocks = in_features / BLOCK;
    return (type == INT8 ? 4 * PANEL : 0) + blocks / BLOCKS_PER_SUPER * super_bytes(type) +
           blocks * block_bytes(type);
}
/* Scales of a whole panel, of a super-block, of a block; each begins with the 16 of the outputs. */
INLINE long super_offset(int type, long b)
{
    return b / BLOCKS_PER_SUPER * (super_bytes(type) + BLOCKS_PER_SUPER * block_bytes(type));
}
INLINE long block_offset(int type, long b)
{
    if (type == INT8) return 4 * PANEL + b * block_bytes(type);
    if (!super_bytes(type)) return b * block_bytes(type);
    return super_offset(type, b) + super_bytes(type) + b % BLOCKS_PER_SUPER * block_bytes(type);
}

INLINE float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    float value;
    if (rest >= 0x7c00) { /* not finite */
        uint32_t bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
        memcpy(&value, &bits, 4);
        return value;
    }
    if (rest < 0x400) { /* subnormal */
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    uint32_t bits = sign | ((rest << 13) + (112u << 23));
    memcpy(&value, &bits, 4);
    return value;
}
INLINE float load_half(const uint8_t *p, long i)
{
    uint16_t half;
    memcpy(&half, p + 2 * i, 2);
    return half_to_float(half);
}

INLINE float load_scale(const uint8_t *p, long i)
{
    float value;
    if (SCALE == 2) return load_half(p, i);
    memcpy(&value, p + 4 * i, 4);
    return value;
}

/* Scale, and what is added, of output j of a panel in block b, half `half` of it; before any bias. */
INLINE float scale_of(int type, const uint8_t *panel, long b, int j, int half)
{
    const uint8_t *block = panel + block_offset(type, b), *super = panel + super_offset(type, b);
    if (type == INT8) return ((const float *)panel)[j];
    if (type == Q4_K) return load_half(super, j) * block[j];
    if (type == Q6_K) return load_half(super, j) * (int8_t)block[half * PANEL + j];
    return load_scale(block, j);
}
INLINE float min_of(int type, const uint8_t *panel, long b, int j)
{
    const uint8_t *block = panel + block_offset(type, b), *super = panel + super_offset(type, b);
    if (type == Q4_K) return -(load_half(super, PANEL + j) * block[PANEL + j]);
    return has_min(type) ? load_scale(block, PANEL + j) : 0;
}

/* The bits of a weight less its bias. `low` follows the scales. */
INLINE int weight_of(int type, const uint8_t *low, int j, int k)
{
    int g = k / 4, quad = j / 4, lane = quad * 16 + j % 4 * 4 + k % 4, bits = quant_bits(type);
    if (bits == 8) return (int8_t)low[g * 64 + lane];
    int value = low[g % 4 * 64 + lane] >> (g < 4 ? 0 : 4) & 15;
    if (bits == 4) return (value ^ 8) - 8;
    const uint8_t *high = low + low_bytes(type);
    if (bits == 5) value |= (high[lane] >> g & 1) << 4;
    if (bits == 6) value |= (high[g / 4 * 64 + lane] >> 2 * (g % 4) & 3) << 4;
    return value - quant_bias(type);
}

#if defined(__x86_64__)
/* Prefetches this far past a block: the hardware prefetcher stops at each page, and then products and
 * reads would wait for each other in turns. */
#define BYTES_AHEAD 2048
INLINE void ask_ahead(int type, const uint8_t *block)
{
    for (long at = 0; at < block_bytes(type); at += 64) __builtin_prefetch(block + BYTES_AHEAD + at);
}
#endif

/* Every type as a constant. */
#define EVERY_TYPE(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q6_K) DO(INT8)
#define EVERY_TYPE_WITHOUT_MIN(DO) DO(Q4_0) DO(Q5_0) DO(Q8_0) DO(Q6_K) DO(INT8)

/* Adds up to MAX_QUANT_ROWS rows, x[block * rows + row], by a panel to 16 sums each. */
#define MAX_QUANT_ROWS 8
typedef void quant_tile(const uint8_t *panel, const x_block *x, long blocks, int rows, float *sums);

/* A path has a `tile` with a type argument; these instantiate it for constant types. */
#define DEFINE_TILE(type)                                                                  \
    static void tile_##type(const uint8_t *panel, const x_block *x, long blocks, int rows, \
                            float *sums)                                                   \
    {                                                                                      \
        tile(type, panel, x, blocks, rows, sums);                                          \
    }
#define NAME_TILE(type) tile_##type,

/* Three panels of dequantized weights, for tiles of eight rows; see quant_wide512.c. */
#define WIDE_ROWS 8
#define WIDE_PANELS 3
typedef struct {
    uint8_t groups[GROUPS][WIDE_PANELS][4 * PANEL];
    float scale[2][WIDE_PANELS][PANEL], min[WIDE_PANELS][PANEL]; /* scales of halves that have their own */
    int32_t minus[2][WIDE_PANELS][PANEL];                        /* 128 times the sum of the weights */
} __attribute__((aligned(64))) wide_block;

typedef struct {
    void (*unpack)(const uint8_t *panel, long blocks, int p, wide_block *out);
    void (*tile)(const wide_block *w, const x_block *x, long blocks, float *sums);
} quant_wide;

typedef struct {
    const char *name;
    int (*runs_here)(void);
    quant_tile *const *tiles; /* by type */
    quant_tile *const *first_tiles; /* by the first byte of X alone, for types without a minimum; or null */
    int format;                /* of x_block */
    const quant_wide *wide;   /* by type, or null */
} quant_path;

/* Quantizes a row's blocks in the path's format, `stride` apart, for weights of `bits` bits. */
void quantize_row(const float *x, long blocks, int bits, int format, x_block *out, long stride);

/* Whether products by the first byte of X are available, and those products: they differ from
 * outrider_quant_linear by at most quant_error of the row times the norm of the weights. */
int outrider_quant_has_first(const quant_layer *l);
int quant_first(const quant_layer *l, const float *x, int64_t rows, float *out);
float quant_error(const float *x, long blocks);

extern const quant_wide quant_wide512[];
extern const quant_path quant_plain, quant_neon, quant_avx2, quant_avx512;

#endif

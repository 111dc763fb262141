/* Packs weights from the format of a file into that of the kernels, and dequantizes rows. */
#include "float16.h"
#include "pool.h"

/* Bytes of a file's block, and how many weights it holds. */
INLINE long file_bytes(int type)
{
    static const long BYTES[] = {18, 20, 22, 24, 34, 144, 210, 1};
    return BYTES[type];
}
INLINE long file_weights(int type) { return type == INT8 ? 1 : type < Q4_K ? 32 : 256; }

/* The bits of weight k of a file's block. */
INLINE int file_weight(int type, const uint8_t *block, int k)
{
    if (type == INT8) return (int8_t)block[0];
    if (type == Q8_0) return (int8_t)block[2 + k];
    if (type == Q4_K) return block[16 + k / 64 * 32 + k % 32] >> (k % 64 < 32 ? 0 : 4) & 15;
    if (type == Q6_K) {
        int low = block[k / 128 * 64 + k % 64] >> (k % 128 < 64 ? 0 : 4) & 15;
        return low | (block[128 + k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3) << 4;
    }
    const uint8_t *rest = block + (type == Q4_1 || type == Q5_1 ? 4 : 2);
    int high = 0;
    if (type == Q5_0 || type == Q5_1) {
        high = (rest[k / 8] >> k % 8 & 1) << 4;
        rest += 4;
    }
    return (rest[k % 16] >> (k < 16 ? 0 : 4) & 15) | high;
}

/* Scale and minimum, 6 bits each, of a part of a Q4_K block. */
INLINE void k_scales(const uint8_t *packed, int part, uint8_t *scale, uint8_t *min)
{
    if (part < 4) {
        *scale = packed[part] & 63;
        *min = packed[part + 4] & 63;
        return;
    }
    *scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
    *min = packed[part + 4] >> 4 | (packed[part] >> 6) << 4;
}

INLINE void put_scale(const uint8_t *file, uint8_t *scales, long i)
{
    float value = load_half(file, 0);
    memcpy(scales + SCALE * i, SCALE == 2 ? (const void *)file : &value, SCALE);
}

INLINE void put_scales(int type, const uint8_t *file, uint8_t *panel, long b, int j)
{
    uint8_t *block = panel + block_offset(type, b), *super = panel + super_offset(type, b);
    int part = b % BLOCKS_PER_SUPER;
    if (type == INT8) return;
    if (type == Q4_K) {
        memcpy(super + 2 * j, file, 2);
        memcpy(super + 2 * (PANEL + j), file + 2, 2);
        k_scales(file + 4, part, block + j, block + PANEL + j);
    } else if (type == Q6_K) {
        memcpy(super + 2 * j, file + 208, 2);
        block[j] = file[192 + 2 * part];
        block[PANEL + j] = file[192 + 2 * part + 1];
    } else {
        put_scale(file, block, j);
        if (has_min(type)) put_scale(file + 2, block, PANEL + j);
    }
}

/* Into a block that is zero. */
INLINE void put_weight(int type, uint8_t *low, int j, int k, int value)
{
    int g = k / 4, lane = j / 4 * 16 + j % 4 * 4 + k % 4, bits = quant_bits(type);
    if (bits == 8) {
        low[g * 64 + lane] = (uint8_t)value;
        return;
    }
    if (bits == 4) value ^= 8; /* less 8, as a signed number */
    low[g % 4 * 64 + lane] |= (uint8_t)((value & 15) << (g < 4 ? 0 : 4));
    uint8_t *high = low + low_bytes(type);
    if (bits == 5) high[lane] |= (uint8_t)(value >> 4 << g);
    if (bits == 6) high[g / 4 * 64 + lane] |= (uint8_t)(value >> 4 << 2 * (g % 4));
}

typedef struct {
    const uint8_t *file; /* [out][row_bytes] */
    const float *scales; /* [out] of INT8 */
    uint8_t *packed;
    int64_t type, out_features, in_features, row_bytes;
} packing;

INLINE void pack_panel(int type, const packing *a, int64_t p)
{
    long size = panel_bytes(type, a->in_features), per_file_block = file_weights(type);
    uint8_t *panel = a->packed + p * size;
    memset(panel, 0, size);
    for (long j = 0; j < PANEL && p * PANEL + j < a->out_features; j++) {
        const uint8_t *row = a->file + (p * PANEL + j) * a->row_bytes;
        if (type == INT8) memcpy(panel + 4 * j, a->scales + p * PANEL + j, 4);
        for (long b = 0; b < a->in_features / BLOCK; b++) {
            uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
            const uint8_t *file = row + b * BLOCK / per_file_block * file_bytes(type);
            put_scales(type, file, panel, b, j);
            for (int k = 0; k < BLOCK; k++) {
                const uint8_t *own = type == INT8 ? file + k : file;
                put_weight(type, low, j, k, file_weight(type, own, (b * BLOCK + k) % per_file_block));
            }
        }
    }
}

static void pack_any(void *context, int64_t p)
{
    const packing *a = context;
    switch (a->type) {
#define CASE(type)             \
    case type:                 \
        pack_panel(type, a, p); \
        break;
        EVERY_TYPE(CASE)
#undef CASE
    }
}

EXPORT int64_t outrider_quant_bytes(int64_t type, int64_t out_features, int64_t in_features)
{
    int64_t panels = (out_features + PANEL - 1) / PANEL;
    return panels * (is_half(type) ? half_panel_bytes(in_features) : panel_bytes(type, in_features));
}

EXPORT void outrider_quant_pack(int64_t type, const uint8_t *file, const float *scales,
                                 int64_t out_features, int64_t in_features, uint8_t *packed)
{
    if (is_half(type)) {
        float16_pack(file, out_features, in_features, packed);
        return;
    }
    int64_t row_bytes = in_features / file_weights(type) * file_bytes(type);
    packing a = {file, scales, packed, type, out_features, in_features, row_bytes};
    pool_run(pack_any, &a, (out_features + PANEL - 1) / PANEL);
}

INLINE void unpack_row(int type, const quant_layer *l, long row, float *out)
{
    const uint8_t *panel = l->packed + row / PANEL * panel_bytes(type, l->in_features);
    int j = row % PANEL;
    for (long b = 0; b < l->in_features / BLOCK; b++) {
        const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
        float min = min_of(type, panel, b, j);
        int bias = has_min(type) ? quant_bias(type) : 0;
        for (int k = 0; k < BLOCK; k++) {
            float scale = scale_of(type, panel, b, j, k / 16);
            float value = scale * (float)(weight_of(type, low, j, k) + bias);
            out[b * BLOCK + k] = has_min(type) ? value + min : value;
        }
    }
}

/* Rows by their numbers, as float32: bit for bit what dequantizing the file's format gives. */
EXPORT int outrider_quant_rows(const quant_layer *l, const int64_t *rows, int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= l->out_features) return BAD_ROW;
        float *row = out + i * l->in_features;
        switch (l->type) {
#define CASE(type)                        \
    case type:                            \
        unpack_row(type, l, rows[i], row); \
        break;
            EVERY_TYPE(CASE)
#undef CASE
        default:
            float16_row(l, rows[i], row);
        }
    }
    return OK;
}

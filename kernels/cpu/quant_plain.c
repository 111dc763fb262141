/* Quantized weights in plain C: the fallback, and the reference of the other paths. */
#include "quant.h"

INLINE float block_sum(int type, const uint8_t *low, const x_block *x, int j, int begin, int end)
{
    uint32_t first = 0, second = 0, third = 0; /* they wrap where only the total need not */
    for (int k = begin; k < end; k++) {
        int w = weight_of(type, low, j, k);
        first += (uint32_t)(w * x->bytes[0][k]);
        second += (uint32_t)(w * x->bytes[1][k]);
        third += (uint32_t)(w * x->bytes[2][k]);
    }
    uint32_t high = first * 256 + second;
    if (quant_bits(type) == 4) return (float)(int32_t)(high * 256 + third);
    return fmaf((float)(int32_t)high, 256.0f, (float)(int32_t)third);
}

INLINE void tile(int type, const uint8_t *panel, const x_block *x, long blocks, int rows,
                 float *sums)
{
    const int halves = type == Q6_K ? 2 : 1, width = BLOCK / halves;
    for (long b = 0; b < blocks; b++) {
        const uint8_t *low = panel + block_offset(type, b) + scale_bytes(type);
        for (int j = 0; j < PANEL; j++) {
            float min = min_of(type, panel, b, j);
            if (has_min(type))
                min = fmaf((float)quant_bias(type), scale_of(type, panel, b, j, 0), min);
            for (int r = 0; r < rows; r++) {
                const x_block *own = x + b * rows + r;
                float sum = sums[r * PANEL + j];
                for (int h = 0; h < halves; h++) {
                    float total = block_sum(type, low, own, j, h * width, h * width + width);
                    float scale = type == INT8 ? 1 : scale_of(type, panel, b, j, h);
                    sum = fmaf(scale, total * own->scale, sum);
                }
                if (has_min(type)) sum = fmaf(min, own->sum, sum);
                sums[r * PANEL + j] = sum;
            }
        }
    }
}

EVERY_TYPE(DEFINE_TILE)
static quant_tile *const TILES[] = {EVERY_TYPE(NAME_TILE)};

static int always(void) { return 1; }

const quant_path quant_plain = {"plain", always, TILES, 0, BYTES, 0};

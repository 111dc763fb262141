/* Linear layers whose weights are 16-bit floats, bfloat16 or float16, packed like those of linear.c.
 *
 * Their values in float32 are exact, and an output is the same chain of fused multiply-adds over
 * k = 0, 1, 2, ...: bit for bit what linear.c gives for the weights in float32. */
#include "gemm.h"
#include "pool.h"

#include <stdlib.h>

#define MAX_ROWS 6               /* with more rows, a panel is widened to float32 once */
#define CHUNK_WORK (64 * 1024)   /* weights read, or four rows multiplied by them */

#include "tile_rows.h"

#define WIDEN(r, c) const vec w##c = widened(form, panel, c * VEC_LANES);
#define FINISH(r, c) vec_store(out + r * PANEL + c * VEC_LANES, acc##r##c);

#define TILE(rows)                                                                               \
    INLINE void tile##rows(int form, const float *restrict x, const char *restrict panel,        \
                           long depth, const float *restrict bias, float *restrict out)          \
    {                                                                                            \
        const long step = PANEL * (form == FROM_F32 ? 4 : 2);                                    \
        ROWS##rows(START)                                                                        \
        _Pragma("GCC unroll 4") for (long k = 0; k < depth; k++, panel += step) {                \
            COLUMNS(WIDEN, 0)                                                                    \
            ROWS##rows(MULTIPLY)                                                                 \
        }                                                                                        \
        ROWS##rows(FINISH)                                                                       \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)

#define ANY_TILE(form)                                                                           \
    static void any_##form(long rows, const float *x, const void *panel, long depth,             \
                           const float *bias, float *out)                                        \
    {                                                                                            \
        switch (rows) {                                                                          \
        case 1: tile1(form, x, panel, depth, bias, out); break;                                  \
        case 2: tile2(form, x, panel, depth, bias, out); break;                                  \
        case 3: tile3(form, x, panel, depth, bias, out); break;                                  \
        case 4: tile4(form, x, panel, depth, bias, out); break;                                  \
        case 5: tile5(form, x, panel, depth, bias, out); break;                                  \
        case 6: tile6(form, x, panel, depth, bias, out); break;                                  \
        }                                                                                        \
    }
ANY_TILE(FROM_F16)
ANY_TILE(FROM_BF16)
ANY_TILE(FROM_F32)

typedef struct {
    const quant_layer *layer;
    const float *x;
    float *out;
    int64_t rows, panels_per_chunk;
    _Atomic int *failed;
} product;

static void put(const product *a, long p, long first_row, long rows, const float *sums)
{
    const quant_layer *l = a->layer;
    long columns = l->out_features - p * PANEL;
    if (columns > PANEL) columns = PANEL;
    for (long r = 0; r < rows; r++)
        memcpy(a->out + (first_row + r) * l->out_stride + p * PANEL, sums + r * PANEL,
               columns * sizeof(float));
}

static const uint16_t *panel_of(const quant_layer *l, long p)
{
    return (const uint16_t *)(l->packed + p * half_panel_bytes(l->in_features));
}
static const float *bias_of(const quant_layer *l, long p)
{
    return l->bias ? l->bias + p * PANEL : 0;
}

static void run_few(const product *a, long p)
{
    const quant_layer *l = a->layer;
    float sums[MAX_ROWS * PANEL];
    (l->type == BF16 ? any_FROM_BF16 : any_FROM_F16)(a->rows, a->x, panel_of(l, p), l->in_features,
                                                     bias_of(l, p), sums);
    put(a, p, 0, a->rows, sums);
}

static void widen_panel(const quant_layer *l, long p, float *wide)
{
    const uint16_t *panel = panel_of(l, p);
    for (long k = 0; k < l->in_features; k++, panel += PANEL, wide += PANEL)
        for (int c = 0; c < PANEL; c += VEC_LANES)
            vec_store(wide + c, l->type == BF16 ? widened(FROM_BF16, panel, c)
                                                : widened(FROM_F16, panel, c));
}

static void run_chunk(void *context, int64_t chunk)
{
    const product *a = context;
    const quant_layer *l = a->layer;
    long panels = (l->out_features + PANEL - 1) / PANEL;
    long begin = chunk * a->panels_per_chunk, end = begin + a->panels_per_chunk;
    if (end > panels) end = panels;
    if (a->rows <= MAX_ROWS) {
        for (long p = begin; p < end; p++) run_few(a, p);
        return;
    }
    float *wide = aligned_alloc(64, l->in_features * PANEL * sizeof(float));
    if (!wide) {
        *a->failed = 1;
        return;
    }
    for (long p = begin; p < end; p++) {
        widen_panel(l, p, wide);
        for (long r = 0; r < a->rows; r += MAX_ROWS) {
            float sums[MAX_ROWS * PANEL];
            long rows = a->rows - r < MAX_ROWS ? a->rows - r : MAX_ROWS;
            any_FROM_F32(rows, a->x + r * l->in_features, wide, l->in_features, bias_of(l, p), sums);
            put(a, p, r, rows, sums);
        }
    }
    free(wide);
}

int float16_linear(const quant_layer *l, const float *x, int64_t rows, float *out)
{
    _Atomic int failed = 0;
    if (suits_gemm(rows)) {
        gemm_args args = {l->packed, l->type == BF16 ? FROM_BF16 : FROM_F16, l->bias, l->out_features,
                             l->in_features, l->out_stride, x, out, rows};
        gemm_linear(&args);
        return OK;
    }
    int64_t panel_work = l->in_features * PANEL * (rows < 4 ? 1 : rows / 4);
    int64_t panels = (l->out_features + PANEL - 1) / PANEL;
    product a = {l, x, out, rows, CHUNK_WORK / panel_work > 1 ? CHUNK_WORK / panel_work : 1, &failed};
    if (rows > 0) pool_run(run_chunk, &a, (panels + a.panels_per_chunk - 1) / a.panels_per_chunk);
    return failed ? NO_MEMORY : OK;
}

typedef struct {
    const uint16_t *file;
    uint16_t *packed;
    int64_t out_features, in_features;
} packing;

static void pack_panel(void *context, int64_t p)
{
    const packing *a = context;
    uint16_t *panel = a->packed + p * a->in_features * PANEL;
    for (long k = 0; k < a->in_features; k++)
        for (long j = 0; j < PANEL; j++) {
            long row = p * PANEL + j;
            panel[k * PANEL + j] = row < a->out_features ? a->file[row * a->in_features + k] : 0;
        }
}

void float16_pack(const uint8_t *file, int64_t out_features, int64_t in_features, uint8_t *packed)
{
    packing a = {(const uint16_t *)file, (uint16_t *)packed, out_features, in_features};
    pool_run(pack_panel, &a, (out_features + PANEL - 1) / PANEL);
}

void float16_row(const quant_layer *l, int64_t row, float *out)
{
    const uint16_t *panel = panel_of(l, row / PANEL) + row % PANEL;
    for (long k = 0; k < l->in_features; k++) out[k] = value_of(l->type == BF16, panel[k * PANEL]);
}

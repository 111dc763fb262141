/* y = x W^T + b with W packed once into panels of 16 outputs: panel[k][16], bandwidth-friendly.
 *
 * An output is one chain of fused multiply-adds over k = 0, 1, 2, ..., for any number of rows and any
 * index of the row. So a row's result is the same bits alone or among many.
 */
#include "gemm.h"
#include "pool.h"

#include "tile_rows.h"
#define MAX_TILE 6 /* rows: 6 x 16 sums, 16 weights and an input fill 32 registers of 4 floats */

#define WEIGHT(r, c) const vec w##c = vec_load(panel + c * VEC_LANES);
#define FINISH(r, c) vec_store(out + r * out_stride + c * VEC_LANES, acc##r##c);

/* From four rows on the loop waits for arithmetic, and prefetching weights pays; below, the
 * hardware's own prefetching already fills the memory bus and more requests only disturb it. */
#define PREFETCH_NO
#define PREFETCH_YES                  \
    __builtin_prefetch(panel + 512);  \
    __builtin_prefetch(panel + 4096, 0, 2);

typedef void tile_fn(const float *x, const float *panel, long depth, const float *bias,
                     float *out, long out_stride);

#define TILE(rows, prefetch)                                                                 \
    static void tile##rows(const float *restrict x, const float *restrict panel, long depth, \
                           const float *restrict bias, float *restrict out, long out_stride) \
    {                                                                                        \
        (void)out_stride;                                                                    \
        ROWS##rows(START)                                                                    \
        _Pragma("GCC unroll 2") for (long k = 0; k < depth; k++, panel += PANEL) {           \
            COLUMNS(WEIGHT, 0)                                                               \
            ROWS##rows(MULTIPLY)                                                             \
            PREFETCH_##prefetch                                                              \
        }                                                                                    \
        ROWS##rows(FINISH)                                                                   \
    }
TILE(1, NO)
TILE(2, NO)
TILE(3, NO)
TILE(4, YES)
TILE(5, YES)
TILE(6, YES)

static tile_fn *const TILES[MAX_TILE + 1] = {0, tile1, tile2, tile3, tile4, tile5, tile6};

#define BLOCK_BYTES (384 * 1024) /* rows that stay in the second-level cache while panels pass */
#define CHUNK_WORK (32 * 1024)   /* weights read, or four rows multiplied by them: about 8 us */

/* At most MAX_TILE rows by one panel. */
static void run_tile(const layer *l, long p, long rows, const float *x, float *out)
{
    long depth = l->in_features, columns = l->out_features - p * PANEL;
    const float *panel = l->packed + p * depth * PANEL, *bias = l->bias ? l->bias + p * PANEL : 0;
    if (columns >= PANEL) {
        TILES[rows](x, panel, depth, bias, out, l->out_features);
        return;
    }
    float edge[MAX_TILE * PANEL];
    TILES[rows](x, panel, depth, bias, edge, PANEL);
    for (long r = 0; r < rows; r++)
        memcpy(out + r * l->out_features, edge + r * PANEL, columns * sizeof(float));
}

typedef struct {
    const layer *layer;
    const float *x;
    float *out;
    int64_t rows, panels_per_chunk;
} product;

/* Every row by a chunk of panels. A panel is read from memory once and then serves all the tiles of
 * a block of rows. */
static void run_chunk(void *context, int64_t chunk)
{
    const product *a = context;
    const layer *l = a->layer;
    long panels = (l->out_features + PANEL - 1) / PANEL;
    long begin = chunk * a->panels_per_chunk, end = begin + a->panels_per_chunk;
    long block = (BLOCK_BYTES / (l->in_features * MAX_TILE * (long)sizeof(float)) + 1) * MAX_TILE;
    for (long first = 0; first < a->rows; first += block)
        for (long p = begin; p < end && p < panels; p++)
            for (long r = first; r < first + block && r < a->rows; r += MAX_TILE)
                run_tile(l, p, a->rows - r < MAX_TILE ? a->rows - r : MAX_TILE,
                         a->x + r * l->in_features, a->out + r * l->out_features + p * PANEL);
}

/* Long enough to be worth taking, short enough that threads wait little for the last one. */
static int64_t panels_per_chunk(const layer *l, int64_t rows)
{
    int64_t panel_work = l->in_features * PANEL * (rows < 4 ? 1 : rows / 4);
    int64_t panels = CHUNK_WORK / panel_work;
    return panels > 1 ? panels : 1;
}

EXPORT void outrider_linear(const layer *l, const float *x, int64_t rows, float *out)
{
    if (suits_gemm(rows)) {
        gemm_args args = {l->packed, FROM_F32, l->bias, l->out_features, l->in_features,
                             l->out_features, x, out, rows};
        gemm_linear(&args);
        return;
    }
    product a = {l, x, out, rows, panels_per_chunk(l, rows)};
    int64_t panels = (l->out_features + PANEL - 1) / PANEL;
    pool_run(run_chunk, &a, (panels + a.panels_per_chunk - 1) / a.panels_per_chunk);
}

typedef struct {
    const float *weight;
    float *packed;
    int64_t out_features, in_features;
} packing;

static void pack_panel(void *context, int64_t p)
{
    const packing *a = context;
    float *panel = a->packed + p * a->in_features * PANEL;
    for (long k = 0; k < a->in_features; k++)
        for (long j = 0; j < PANEL; j++) {
            long row = p * PANEL + j;
            panel[k * PANEL + j] = row < a->out_features ? a->weight[row * a->in_features + k] : 0;
        }
}

EXPORT void outrider_linear_pack(const float *weight, int64_t out_features, int64_t in_features,
                                 float *packed)
{
    packing a = {weight, packed, out_features, in_features};
    pool_run(pack_panel, &a, (out_features + PANEL - 1) / PANEL);
}

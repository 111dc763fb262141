/* y = x W^T + b with W packed once into panels of 16 outputs: panel[k][16], bandwidth-friendly.
 *
 * An output is one chain of fused multiply-adds over k = 0, 1, 2, ..., whatever the number of rows
 * and wherever its row stands. So a row's result is the same bits alone or among many.
 */
#include "batch.h"
#include "vec.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 16
#define MAX_TILE 6 /* rows: 6 x 16 accumulators, 16 weights and the inputs fill 32 registers */

/* Every column vector of a panel, for row r. */
#if PANEL / VEC_LANES == 4
#define COLUMNS(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#elif PANEL / VEC_LANES == 2
#define COLUMNS(DO, r) DO(r, 0) DO(r, 1)
#else
#define COLUMNS(DO, r) DO(r, 0)
#endif

#define ROWS1(DO) COLUMNS(DO, 0)
#define ROWS2(DO) ROWS1(DO) COLUMNS(DO, 1)
#define ROWS3(DO) ROWS2(DO) COLUMNS(DO, 2)
#define ROWS4(DO) ROWS3(DO) COLUMNS(DO, 3)
#define ROWS5(DO) ROWS4(DO) COLUMNS(DO, 4)
#define ROWS6(DO) ROWS5(DO) COLUMNS(DO, 5)

#define START(r, c) vec acc##r##c = bias ? vec_load(bias + c * VEC_LANES) : (vec){0};
#define WEIGHT(r, c) const vec w##c = vec_load(panel + c * VEC_LANES);
#define MULTIPLY(r, c) acc##r##c += w##c * INPUT(r);
#define FINISH(r, c) vec_store(out + r * out_stride + c * VEC_LANES, acc##r##c);

/* Inputs of one k are loaded as vectors and used by lane: on NEON a broadcasting load would take
 * one of the two pipes that multiply. */
#if VEC_LANES == 4
typedef float half_vec __attribute__((vector_size(8), aligned(4), may_alias));
#define INPUTS1 const float x0 = x[0];
#define INPUTS2 const half_vec xl = *(const half_vec *)x; const float x0 = xl[0], x1 = xl[1];
#define INPUTS4 const vec xv = vec_load(x); \
    const float x0 = xv[0], x1 = xv[1], x2 = xv[2], x3 = xv[3];
#define INPUTS6 INPUTS4 const half_vec xh = *(const half_vec *)(x + 4); \
    const float x4 = xh[0], x5 = xh[1];
#else
#define INPUTS1 const float x0 = x[0];
#define INPUTS2 INPUTS1 const float x1 = x[1];
#define INPUTS4 INPUTS2 const float x2 = x[2], x3 = x[3];
#define INPUTS6 INPUTS4 const float x4 = x[4], x5 = x[5];
#endif
#define INPUT(r) x##r

/* From four rows on the loop waits for arithmetic, and asking for weights early pays; below, the
 * hardware's own prefetching already fills the memory bus and more requests only disturb it. */
#define PREFETCH_NO
#define PREFETCH_YES                  \
    __builtin_prefetch(panel + 512);  \
    __builtin_prefetch(panel + 4096, 0, 2);

typedef void tile_fn(const float *x, const float *panel, long depth, const float *bias,
                     float *out, long out_stride);

/* `stride` is the distance of one k to the next in the packed inputs. */
#define TILE(rows, stride, prefetch)                                                         \
    static void tile##rows(const float *restrict x, const float *restrict panel, long depth, \
                           const float *restrict bias, float *restrict out, long out_stride) \
    {                                                                                        \
        (void)out_stride;                                                                    \
        ROWS##rows(START)                                                                    \
        for (long k = 0; k < depth; k++, x += stride, panel += PANEL) {                      \
            INPUTS##stride                                                                   \
            COLUMNS(WEIGHT, 0)                                                               \
            ROWS##rows(MULTIPLY)                                                             \
            PREFETCH_##prefetch                                                              \
        }                                                                                    \
        ROWS##rows(FINISH)                                                                   \
    }
#pragma GCC diagnostic ignored "-Wunused-variable"
TILE(1, 1, NO)
TILE(2, 2, NO)
TILE(3, 4, NO)
TILE(4, 4, YES)
TILE(5, 6, YES)
TILE(6, 6, YES)

static tile_fn *const TILES[MAX_TILE + 1] = {0, tile1, tile2, tile3, tile4, tile5, tile6};
static const int STRIDES[MAX_TILE + 1] = {0, 1, 2, 4, 4, 6, 6};

#define BLOCK_ROWS (16 * MAX_TILE)   /* packed inputs of a block stay in the second-level cache */
#define GROUP_BYTES (256 * 1024)     /* panels that are reused by all tiles of a block, likewise */

EXPORT void outrider_linear_pack(const float *weight, long out_features, long in_features,
                                 float *packed)
{
    long panels = (out_features + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (long p = 0; p < panels; p++) {
        float *panel = packed + p * in_features * PANEL;
        for (long k = 0; k < in_features; k++)
            for (long j = 0; j < PANEL; j++) {
                long row = p * PANEL + j;
                panel[k * PANEL + j] = row < out_features ? weight[row * in_features + k] : 0.0f;
            }
    }
}

/* A block of rows is cut into tiles of nearly equal height: 8 rows are 4 + 4, not 6 + 2. */
typedef struct {
    long rows, tiles;
} block_shape;

INLINE long tile_start(block_shape b, long tile) { return tile * b.rows / b.tiles; }

static void pack_inputs(const float *x, long depth, int rows, float *packed)
{
    int stride = STRIDES[rows];
    for (long k = 0; k < depth; k++)
        for (int r = 0; r < stride; r++) packed[k * stride + r] = x[(r < rows ? r : 0) * depth + k];
}

typedef struct {
    const float *packed;
    const float *bias; /* padded to whole panels, or null */
    int64_t out_features, in_features;
} layer;

static void run_panel(const layer *l, long p, block_shape b, long tile, const float *inputs,
                      float *out)
{
    long first = tile_start(b, tile), rows = tile_start(b, tile + 1) - first;
    long depth = l->in_features, columns = l->out_features - p * PANEL;
    const float *panel = l->packed + p * depth * PANEL, *bias = l->bias ? l->bias + p * PANEL : 0;
    out += first * l->out_features + p * PANEL;
    if (columns >= PANEL) {
        TILES[rows](inputs, panel, depth, bias, out, l->out_features);
        return;
    }
    float edge[MAX_TILE * PANEL];
    TILES[rows](inputs, panel, depth, bias, edge, PANEL);
    for (long r = 0; r < rows; r++)
        memcpy(out + r * l->out_features, edge + r * PANEL, columns * sizeof(float));
}

static void run_panels(const layer *l, block_shape b, const float *inputs, long tile_size,
                       float *out)
{
    long panels = (l->out_features + PANEL - 1) / PANEL;
    long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    long begin = panels * thread / threads, end = panels * (thread + 1) / threads;
    long group = GROUP_BYTES / (l->in_features * PANEL * (long)sizeof(float)) + 1;
    for (long g = begin; g < end; g += group)
        for (long tile = 0; tile < b.tiles; tile++)
            for (long p = g; p < g + group && p < end; p++)
                run_panel(l, p, b, tile, inputs + tile * tile_size, out);
}

EXPORT int outrider_linear(const layer *l, const float *x, int64_t rows, float *out)
{
    if (rows == 1) {
#pragma omp parallel
        run_panels(l, (block_shape){1, 1}, x, 0, out);
        return OK;
    }
    long depth = l->in_features, tile_size = depth * MAX_TILE;
    long capacity = rows < BLOCK_ROWS ? (rows + MAX_TILE - 1) / MAX_TILE : BLOCK_ROWS / MAX_TILE;
    float *inputs = malloc(capacity * tile_size * sizeof(float));
    if (!inputs) return NO_MEMORY;
#pragma omp parallel
    for (long first = 0; first < rows; first += BLOCK_ROWS) {
        long count = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        block_shape b = {count, (count + MAX_TILE - 1) / MAX_TILE};
#pragma omp for
        for (long tile = 0; tile < b.tiles; tile++)
            pack_inputs(x + (first + tile_start(b, tile)) * depth, depth,
                        (int)(tile_start(b, tile + 1) - tile_start(b, tile)),
                        inputs + tile * tile_size);
        run_panels(l, b, inputs, tile_size, out + first * l->out_features);
#pragma omp barrier
    }
    free(inputs);
    return OK;
}

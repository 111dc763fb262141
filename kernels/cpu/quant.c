/* Products with quantized weights: choice of the path, division of panels among threads, row lookup. */
#include "float16.h"
#include "own_memory.h"
#include "pool.h"

#include <stdatomic.h>

#define CHUNK_WORK (64 * 1024) /* weights times rows: about 10 us */
#define SHARED_INPUTS 2048     /* from here on, quantizing activations is parallel, too */
#define CACHED_BYTES (24 * 1024)
#define WIDE_BYTES_OF_X (640 * 1024) /* rows that stay in the second-level cache while panels pass */

static const quant_path *const PATHS[] = {
#if HAS_AVX512
    &quant_avx512,
#endif
#if HAS_AVX2
    &quant_avx2,
#elif defined(__aarch64__) && defined(__linux__)
    &quant_neon,
#endif
    &quant_plain,
};
#define NUM_PATHS (long)(sizeof PATHS / sizeof *PATHS)

static _Atomic long chosen; /* 1 + index; 0: not chosen yet */

static const quant_path *path(void)
{
    long found = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!found) {
        for (found = 1; !PATHS[found - 1]->runs_here(); found++) {}
        atomic_store_explicit(&chosen, found, memory_order_relaxed);
    }
    return PATHS[found - 1];
}

/* Name of the path in use. An index selects that path from now on; null if it does not run here. */
EXPORT const char *outrider_quant_path(int64_t index)
{
    if (index >= NUM_PATHS || (index >= 0 && !PATHS[index]->runs_here())) return 0;
    if (index >= 0) atomic_store(&chosen, index + 1);
    return path()->name;
}

typedef struct {
    const quant_layer *layer;
    const quant_path *path;
    quant_tile *const *tiles;
    const float *x;
    x_block *blocks;
    float *out;
    int64_t rows, panel_size, panels_per_chunk, rows_per_chunk;
    _Atomic int *failed;
} product;

/* The rows of a tile that begins with this one. */
static int tile_rows(const product *a, long first_row)
{
    return a->rows - first_row < MAX_QUANT_ROWS ? a->rows - first_row : MAX_QUANT_ROWS;
}

/* Whether the tile is one of many that share dequantized weights. */
static int is_wide(const product *a, long first_row)
{
    return a->path->wide && a->rows > MAX_QUANT_ROWS && tile_rows(a, first_row) == WIDE_ROWS;
}

static void prepare_row(void *context, int64_t row)
{
    const product *a = context;
    const quant_layer *l = a->layer;
    long blocks = l->in_features / BLOCK, first = row / MAX_QUANT_ROWS * MAX_QUANT_ROWS;
    quantize_row(a->x + row * l->in_features, blocks, quant_bits(l->type),
             is_wide(a, first) ? WIDE_BYTES : a->path->format, a->blocks + first * blocks + row - first,
             tile_rows(a, first));
}

static const float zeros[PANEL];

static const uint8_t *panel_of(const product *a, long p) { return a->layer->packed + p * a->panel_size; }
static const float *bias_of(const quant_layer *l, long p)
{
    return l->bias ? l->bias + p * PANEL : zeros;
}

/* Initial sums of a panel, rows `stride` apart. */
static void start_sums(const quant_layer *l, long p, int rows, float *sums, long stride)
{
    const float *start = l->type == INT8 ? zeros : bias_of(l, p);
    for (int r = 0; r < rows; r++) memcpy(sums + r * stride, start, sizeof zeros);
}

static void put_sums(const product *a, long p, long first_row, int rows, float *sums, long stride)
{
    const quant_layer *l = a->layer;
    const float *scale = (const float *)panel_of(a, p), *bias = bias_of(l, p);
    float *out = a->out + first_row * l->out_stride + p * PANEL;
    long columns = l->out_features - p * PANEL;
    for (int r = 0; r < rows; r++, out += l->out_stride, sums += stride) {
        if (l->type == INT8)
            for (int j = 0; j < PANEL; j++) sums[j] = fmaf(scale[j], sums[j], bias[j]);
        if (columns >= PANEL) memcpy(out, sums, sizeof zeros);
        else memcpy(out, sums, columns * sizeof(float));
    }
}

/* At most MAX_QUANT_ROWS rows by one panel. Sums are kept contiguous: rows of the result may be
 * powers of two apart, of which caches hold few. */
static void run_tile(const product *a, long p, long first_row, int rows)
{
    const quant_layer *l = a->layer;
    long blocks = l->in_features / BLOCK;
    float sums[MAX_QUANT_ROWS * PANEL];
    start_sums(l, p, rows, sums, PANEL);
    a->tiles[l->type](panel_of(a, p), a->blocks + first_row * blocks, blocks, rows, sums);
    put_sums(a, p, first_row, rows, sums, PANEL);
}

/* The same for a tile of many rows and dequantized panels [begin, end). */
static void run_wide_tile(const product *a, const wide_block *unpacked, long begin, long end,
                          long first_row)
{
    const quant_layer *l = a->layer;
    const long blocks = l->in_features / BLOCK, stride = WIDE_PANELS * PANEL;
    float sums[WIDE_ROWS * WIDE_PANELS * PANEL] __attribute__((aligned(64)));
    for (long p = begin; p < end; p++)
        start_sums(l, p, WIDE_ROWS, sums + (p - begin) * PANEL, stride);
    a->path->wide[l->type].tile(unpacked, a->blocks + first_row * blocks, blocks, sums);
    for (long p = begin; p < end; p++)
        put_sums(a, p, first_row, WIDE_ROWS, sums + (p - begin) * PANEL, stride);
}

INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Some panels by the rows of all tiles from `first` to `last`. */
static void run_panels(const product *a, long begin, long end, long first, long last)
{
    static _Thread_local own_memory own;
    const quant_layer *l = a->layer;
    const long blocks = l->in_features / BLOCK;
    wide_block *unpacked = 0;
    if (is_wide(a, first)) {
        unpacked = at_least(&own, blocks * sizeof(wide_block));
        if (!unpacked) {
            *a->failed = 1;
            return;
        }
        for (long p = begin; p < end; p++)
            a->path->wide[l->type].unpack(panel_of(a, p), blocks, (int)(p - begin), unpacked);
    }
    const uint8_t *next = panel_of(a, end);
    long share = (end - begin) * a->panel_size / divide_up(last - first, MAX_QUANT_ROWS);
    for (long r = first; r < last; r += MAX_QUANT_ROWS)
        if (is_wide(a, r)) {
            for (const uint8_t *stop = next + share; next < stop; next += 64) __builtin_prefetch(next, 0, 2);
            run_wide_tile(a, unpacked, begin, end, r);
        } else {
            for (long p = begin; p < end; p++) run_tile(a, p, r, tile_rows(a, r));
        }
}

/* Consecutive chunks share rows, which stay in the cache. */
static void run_chunk(void *context, int64_t chunk)
{
    const product *a = context;
    long panels = divide_up(a->layer->out_features, PANEL);
    long chunks = divide_up(panels, a->panels_per_chunk);
    long begin = chunk % chunks * a->panels_per_chunk, end = begin + a->panels_per_chunk;
    long first = chunk / chunks * a->rows_per_chunk, last = first + a->rows_per_chunk;
    if (end > panels) end = panels;
    if (last > a->rows) last = a->rows;
    run_panels(a, begin, end, first, last);
}

/* At most `most`, and at least half of it: chosen to balance the threads. */
static int64_t fair_share(int64_t panels, int64_t most)
{
    int64_t threads = pool_threads(), best = 1, least = INT64_MAX;
    for (int64_t count = most; 2 * count > most; count--) {
        int64_t longest = divide_up(divide_up(panels, count), threads) * count;
        if (longest >= least) continue;
        best = count;
        least = longest;
    }
    return best;
}

/* Long enough to be worth taking. With many rows, as many panels as the first-level cache holds beside
 * the activations of a tile, so that these are read once for all of them; but a few per thread. */
static int64_t panels_per_chunk(const quant_layer *l, int64_t rows)
{
    int64_t panels = divide_up(l->out_features, PANEL);
    int64_t count = CHUNK_WORK / (l->in_features * PANEL * rows);
    if (rows > MAX_QUANT_ROWS) {
        int64_t cached = CACHED_BYTES / panel_bytes(l->type, l->in_features);
        int64_t fair = panels / (4 * pool_threads());
        count = cached < fair ? cached : fair;
    }
    return fair_share(panels, count > panels ? panels : count);
}

static int multiply(const quant_layer *l, quant_tile *const *tiles, const float *x, int64_t rows,
                    float *out)
{
    static _Thread_local own_memory own;
    _Atomic int failed = 0;
    product a = {l, path(), tiles, x, 0, out, rows, panel_bytes(l->type, l->in_features), 0, rows, &failed};
    if (rows <= 0) return OK;
    int64_t blocks = l->in_features / BLOCK, panels = divide_up(l->out_features, PANEL);
    a.blocks = at_least(&own, (size_t)(rows * blocks) * sizeof(x_block));
    if (!a.blocks) return NO_MEMORY;
    if (rows * l->in_features >= SHARED_INPUTS)
        pool_run(prepare_row, &a, rows);
    else
        for (int64_t r = 0; r < rows; r++) prepare_row(&a, r);
    a.panels_per_chunk = panels_per_chunk(l, rows);
    if (is_wide(&a, 0)) {
        a.panels_per_chunk = WIDE_PANELS;
        a.rows_per_chunk = (WIDE_BYTES_OF_X / (blocks * WIDE_ROWS * sizeof(x_block)) + 1) * WIDE_ROWS;
    }
    pool_run(run_chunk, &a, divide_up(panels, a.panels_per_chunk) * divide_up(rows, a.rows_per_chunk));
    return failed ? NO_MEMORY : OK;
}

EXPORT int outrider_quant_linear(const quant_layer *l, const float *x, int64_t rows, float *out)
{
    if (is_half(l->type)) return float16_linear(l, x, rows, out);
    return multiply(l, path()->tiles, x, rows, out);
}

EXPORT int outrider_quant_has_first(const quant_layer *l)
{
    return path()->first_tiles && path()->first_tiles[l->type];
}

int quant_first(const quant_layer *l, const float *x, int64_t rows, float *out)
{
    return multiply(l, path()->first_tiles, x, rows, out);
}

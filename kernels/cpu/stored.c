/* Products with stored weights: which path runs, who takes which panels, and rows by number. */
#include "halves.h"
#include "pool.h"

#include <stdatomic.h>
#include <stdlib.h>

#define CHUNK_WORK (64 * 1024) /* weights times rows: about 10 us */
#define SHARED_INPUTS 8192     /* from so many on, preparing activations is shared, too */
#define CACHED_BYTES (24 * 1024)

static const stored_path *const PATHS[] = {
#if defined(__x86_64__)
    &stored_avx512, &stored_avx2,
#elif defined(__aarch64__) && defined(__linux__)
    &stored_neon,
#endif
    &stored_plain,
};
#define NUM_PATHS (long)(sizeof PATHS / sizeof *PATHS)

static _Atomic long chosen; /* 1 + index; 0: not chosen yet */

static const stored_path *path(void)
{
    long found = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!found) {
        for (found = 1; !PATHS[found - 1]->runs_here(); found++) {}
        atomic_store_explicit(&chosen, found, memory_order_relaxed);
    }
    return PATHS[found - 1];
}

/* Names the path in use. With an index, that path is used from now on; null if it does not run
 * here. */
EXPORT const char *outrider_stored_path(int64_t index)
{
    if (index >= NUM_PATHS || (index >= 0 && !PATHS[index]->runs_here())) return 0;
    if (index >= 0) atomic_store(&chosen, index + 1);
    return path()->name;
}

typedef struct {
    const stored_layer *layer;
    const stored_path *path;
    const float *x;
    x_block *blocks;
    float *out;
    int64_t rows, panels_per_chunk;
} product;

/* The rows of a tile that begins with this one. */
static int tile_rows(const product *a, long first_row)
{
    return a->rows - first_row < MAX_STORED_ROWS ? a->rows - first_row : MAX_STORED_ROWS;
}

static void prepare_row(void *context, int64_t row)
{
    const product *a = context;
    const stored_layer *l = a->layer;
    long blocks = l->in_features / BLOCK, first = row / MAX_STORED_ROWS * MAX_STORED_ROWS;
    stored_x(a->x + row * l->in_features, blocks, stored_bits(l->type), a->path->wants,
             a->blocks + first * blocks + row - first, tile_rows(a, first));
}

/* At most MAX_STORED_ROWS rows by one panel. Sums are made side by side: rows of the result may be
 * powers of two apart, and of such places caches hold few. */
static void run_tile(const product *a, long p, long first_row, int rows)
{
    static const float zeros[PANEL];
    const stored_layer *l = a->layer;
    long blocks = l->in_features / BLOCK, columns = l->out_features - p * PANEL;
    const uint8_t *panel = l->packed + p * panel_bytes(l->type, l->in_features);
    const float *bias = l->bias ? l->bias + p * PANEL : zeros;
    float sums[MAX_STORED_ROWS * PANEL], *out = a->out + first_row * l->out_stride + p * PANEL;
    for (int r = 0; r < rows; r++)
        memcpy(sums + r * PANEL, l->type == INT8 ? zeros : bias, sizeof zeros);
    a->path->tiles[l->type](panel, a->blocks + first_row * blocks, blocks, rows, sums);
    for (int r = 0; r < rows; r++, out += l->out_stride) {
        float *row = sums + r * PANEL;
        if (l->type == INT8)
            for (int j = 0; j < PANEL; j++) row[j] = fmaf(((const float *)panel)[j], row[j], bias[j]);
        if (columns >= PANEL) memcpy(out, row, sizeof zeros);
        else memcpy(out, row, columns * sizeof(float));
    }
}

INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void run_chunk(void *context, int64_t chunk)
{
    const product *a = context;
    long panels = divide_up(a->layer->out_features, PANEL);
    long begin = chunk * a->panels_per_chunk, end = begin + a->panels_per_chunk;
    if (end > panels) end = panels;
    for (long r = 0; r < a->rows; r += MAX_STORED_ROWS)
        for (long p = begin; p < end; p++)
            run_tile(a, p, r, tile_rows(a, r));
}

/* At most so many, and at least half of them: such that nobody has much more to do than others. */
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

/* Long enough to be worth taking. Of many rows, as many panels as the first-level cache holds beside
 * the activations of a tile, so that these are read once for all of them; but a few for everybody. */
static int64_t panels_per_chunk(const stored_layer *l, int64_t rows)
{
    int64_t panels = divide_up(l->out_features, PANEL);
    int64_t count = CHUNK_WORK / (l->in_features * PANEL * rows);
    if (rows > MAX_STORED_ROWS) {
        int64_t cached = CACHED_BYTES / panel_bytes(l->type, l->in_features);
        int64_t fair = panels / (4 * pool_threads());
        count = cached < fair ? cached : fair;
    }
    return fair_share(panels, count > panels ? panels : count);
}

/* The caller's own, kept from call to call. */
static x_block *scratch(size_t count)
{
    static _Thread_local struct {
        x_block *blocks;
        size_t count;
    } own;
    if (count > own.count) {
        free(own.blocks);
        own.count = 0;
        own.blocks = aligned_alloc(64, (count * sizeof(x_block) + 63) / 64 * 64);
        if (own.blocks) own.count = count;
    }
    return own.blocks;
}

EXPORT int outrider_stored_linear(const stored_layer *l, const float *x, int64_t rows, float *out)
{
    if (is_half(l->type)) return halves_linear(l, x, rows, out);
    product a = {l, path(), x, 0, out, rows, 0};
    if (rows <= 0) return OK;
    a.blocks = scratch((size_t)rows * (size_t)(l->in_features / BLOCK));
    if (!a.blocks) return NO_MEMORY;
    if (rows * l->in_features >= SHARED_INPUTS)
        pool_run(prepare_row, &a, rows);
    else
        for (int64_t r = 0; r < rows; r++) prepare_row(&a, r);
    a.panels_per_chunk = panels_per_chunk(l, rows);
    pool_run(run_chunk, &a, divide_up(divide_up(l->out_features, PANEL), a.panels_per_chunk));
    return OK;
}

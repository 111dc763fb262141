/* Causal attention over the paged cache, for decode rows and prompt chunks alike.
 *
 * Keys are taken in chunks that begin at fixed positions (multiples of CHUNK). Each chunk has a partial
 * softmax with sums in a fixed order, and chunks are combined in order. So a row's result depends on its
 * own position and keys only, not on the rows that share its tile, thread, pass or blocks, nor on whether
 * its chunks were split over threads.
 */
#include "attention_tile.h"
#include "own_memory.h"
#include "pool.h"

#define SERIAL_WORK 16384 /* rows times keys times head_dim */
#define SHARES_PER_THREAD 8
#define FAIR_PARTS 4 /* for each thread; see divide */

static int64_t divide_up(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* How the rows of a sequence are divided. */
typedef struct {
    int64_t rows, rows_per_head; /* in all, and of a KV head */
    int64_t heads_per_tile, tiles_per_heads, tiles;
    int64_t first;  /* chunk that any of them sees */
    int64_t chunks; /* items per tile; 1: items are tiles */
    int64_t items, item_work, work;
} division;

typedef struct {
    const attention *attention;
    const ragged_batch *batch;
    int64_t work, shares, threads;
    void *partials; /* partial results of sequences split by chunks: [chunk][row] */
    int64_t split_rows;
} sharing;

/* The share that this work falls into: each thread has as many shares. */
static int64_t owner(const sharing *w, int64_t work) { return work * w->threads / w->work; }

/* A sequence is split by chunks if, after `before` work, it spans the parts of two threads and its tiles
 * are too long for one of them to take one more. Others are not split: one thread then needs no partial
 * results of another. */
static division divide(const sharing *w, int64_t sequence, int64_t before)
{
    const attention *a = w->attention;
    const ragged_batch *batch = w->batch;
    const int64_t queries = batch->cu_query_lens[sequence + 1] - batch->cu_query_lens[sequence];
    const int64_t context = batch->context_lens[sequence];
    const int64_t group = a->heads / a->kv_heads;
    division d = {.rows = queries * a->heads, .rows_per_head = queries * group, .chunks = 1};
    if (d.rows <= 0) return d;
    d.first = first_visible(a, context - queries) / CHUNK;
    const int64_t keys = context - d.first * CHUNK;
    d.work = d.rows * keys;
    d.heads_per_tile = d.rows_per_head < TILE_ROWS ? TILE_ROWS / d.rows_per_head : 1;
    d.tiles_per_heads = divide_up(d.rows_per_head, TILE_ROWS);
    d.tiles = divide_up(a->kv_heads, d.heads_per_tile) * d.tiles_per_heads;
    if (w->threads > 1 && d.tiles_per_heads == 1 && d.work * FAIR_PARTS * w->threads > w->work * d.tiles &&
        owner(w, before) != owner(w, before + d.work - 1))
        d.chunks = divide_up(keys, CHUNK);
    d.items = d.tiles * d.chunks;
    d.item_work = (d.chunks > 1 ? d.rows * CHUNK : d.work) / d.tiles;
    return d;
}

static void place(const sharing *w, const division *d, int64_t sequence, int64_t number, tile *t)
{
    const int64_t head = number / d->tiles_per_heads * d->heads_per_tile;
    const int64_t first = number % d->tiles_per_heads * TILE_ROWS;
    place_tile(w->attention, w->batch, t, sequence, head,
               (int)least(d->heads_per_tile, w->attention->kv_heads - head), first,
               (int)least(d->rows_per_head - first, TILE_ROWS));
}

/* All chunks of a tile, in order. */
static void run_tile(const sharing *w, tile *t)
{
    const attention *a = w->attention;
    float memory[2][TILE_ROWS * (MAX_DIM + sizeof(partial) / sizeof(float))];
    const int rows = t->heads * t->rows;
    for (int r = 0; r < rows; r++) forget(a, partial_at(a, memory[0], r));
    for (int64_t begin = first_chunk(a, t); begin < end_of(t); begin += CHUNK) {
        attend_chunk(a, w->batch, t, begin, memory[1]);
        add_chunk(a, memory[0], memory[1], rows);
    }
    for (int r = 0; r < rows; r++) write_out(a, partial_at(a, memory[0], r), t->out[r]);
}

/* One chunk of a tile; run_whole combines them. */
static void run_part(const sharing *w, const division *d, tile *t, int64_t chunk, int64_t split_before)
{
    const attention *a = w->attention;
    const int64_t row = chunk * d->rows + t->first_head * d->rows_per_head;
    const int64_t begin = (d->first + chunk) * CHUNK;
    if (begin < first_chunk(a, t)) return;
    attend_chunk(a, w->batch, t, begin, partial_at(a, w->partials, split_before + row));
}

/* The items of a sequence that belong to this part of its work. */
static int64_t items_within(const division *d, int64_t work)
{
    if (work >= d->work) return d->items;
    return work <= 0 ? 0 : least((2 * work + d->item_work) / (2 * d->item_work), d->items);
}

static void run_share(void *context, int64_t share)
{
    const sharing *w = context;
    const int64_t low = w->work * share / w->shares, high = w->work * (share + 1) / w->shares;
    int64_t done = 0, split = 0;
    tile t;
    for (int64_t s = 0; s < w->batch->sequences && done < high; s++) {
        const division d = divide(w, s, done);
        if (!d.work) continue;
        const int64_t end = items_within(&d, high - done);
        for (int64_t i = items_within(&d, low - done); i < end; i++) {
            place(w, &d, s, i % d.tiles, &t);
            if (d.chunks > 1) run_part(w, &d, &t, i / d.tiles, split);
            else run_tile(w, &t);
        }
        done += d.work;
        if (d.chunks > 1) split += d.rows * d.chunks;
    }
}

/* Combines the chunks of sequences that were split. */
static void run_whole(void *context, int64_t share)
{
    const sharing *w = context;
    const attention *a = w->attention;
    const int64_t low = w->split_rows * share / w->shares, high = w->split_rows * (share + 1) / w->shares;
    float memory[MAX_DIM + sizeof(partial) / sizeof(float)];
    partial *all = (partial *)memory;
    int64_t before = 0, done = 0, split = 0;
    tile t;
    for (int64_t s = 0; s < w->batch->sequences && done < high; s++) {
        const division d = divide(w, s, before);
        before += d.work;
        if (d.chunks == 1) continue;
        for (int64_t r = low < done ? 0 : low - done; r < least(high - done, d.rows); r++) {
            place_tile(a, w->batch, &t, s, r / d.rows_per_head, 1, r % d.rows_per_head, 1);
            forget(a, all);
            const int64_t end = divide_up(end_of(&t), CHUNK) - d.first;
            for (int64_t c = first_chunk(a, &t) / CHUNK - d.first; c < end; c += FOLD) {
                const partial *chunks[FOLD];
                const int count = (int)least(end - c, FOLD);
                for (int i = 0; i < count; i++)
                    chunks[i] = partial_at(a, w->partials, split + (c + i) * d.rows + r);
                add_row(a, all, chunks, count);
            }
            write_out(a, all, t.out[0]);
        }
        done += d.rows;
        split += d.rows * d.chunks;
    }
}

static int blocks_exist(const attention *a, const ragged_batch *batch)
{
    for (int64_t s = 0; s < batch->sequences; s++) {
        int64_t used = divide_up(batch->context_lens[s], a->block_size);
        if (used > batch->max_blocks) return 0;
        for (int64_t i = 0; i < used; i++) {
            int32_t block = batch->block_tables[s * batch->max_blocks + i];
            if (block < 0 || block >= a->num_blocks) return 0;
        }
    }
    return 1;
}

EXPORT int outrider_attention(const attention *a, const ragged_batch *batch)
{
    static _Thread_local own_memory own;
    sharing w = {.attention = a, .batch = batch, .shares = 1, .threads = 1};
    int64_t items = 0, parts = 0, before = 0;
    if (!blocks_exist(a, batch)) return BAD_BLOCK;
    for (int64_t s = 0; s < batch->sequences; s++) w.work += divide(&w, s, 0).work;
    if (w.work * a->head_dim >= SERIAL_WORK) w.threads = pool_threads();
    for (int64_t s = 0; s < batch->sequences; s++) {
        const division d = divide(&w, s, before);
        before += d.work;
        items += d.items;
        if (d.chunks > 1) {
            w.split_rows += d.rows;
            parts += d.rows * d.chunks;
        }
    }
    if (parts) w.partials = at_least(&own, parts * partial_bytes(a));
    if (parts && !w.partials) return NO_MEMORY;
    if (w.threads > 1) w.shares = w.threads * least(divide_up(items, w.threads), SHARES_PER_THREAD);
    pool_run(run_share, &w, w.shares);
    if (!w.split_rows) return OK;
    w.shares = parts * a->head_dim < SERIAL_WORK ? 1 : least(w.split_rows, w.shares);
    pool_run(run_whole, &w, w.shares);
    return OK;
}

/* Rows of a sequence against a chunk of its keys; see attention.c.
 *
 * A row is one query head of one token. A tile is the rows of one or more KV heads, as many of each. */
#ifndef OUTRIDER_ATTENTION_TILE_H
#define OUTRIDER_ATTENTION_TILE_H

#include "ops.h"
#include "vec.h"

#define CHUNK 32
#define TILE_ROWS 24
#define MAX_DIM 256

/* Partial result of a row: weights are relative to the highest score, -inf at first. */
typedef struct {
    float highest, total;
    float sum[]; /* head_dim values, weighted */
} partial;

INLINE long partial_bytes(const attention *a) { return sizeof(partial) + a->head_dim * sizeof(float); }
INLINE partial *partial_at(const attention *a, const void *first, long i)
{
    return (partial *)((char *)first + i * partial_bytes(a));
}

typedef struct {
    int heads, rows; /* KV heads, and rows of each */
    int64_t sequence, first_head, position[TILE_ROWS];
    const float *q[TILE_ROWS];
    float *out[TILE_ROWS];
    float score[TILE_ROWS * CHUNK];
    /* Of the first KV head: the current chunk, and the keys after it; the last is repeated. */
    const float *key[2 * CHUNK], *value[CHUNK];
} tile;

/* Rows [first, first + rows) of each of `heads` KV heads; row = query * group + head in group. */
void place_tile(const attention *a, const ragged_batch *batch, tile *t, int64_t sequence, int64_t first_head,
                int heads, int64_t first, int rows);

/* Attention of the tile's rows to keys [begin, begin + CHUNK). */
void attend_chunk(const attention *a, const ragged_batch *batch, tile *t, int64_t begin, void *out);

/* The first key visible to a row at this position. */
INLINE int64_t first_visible(const attention *a, int64_t position)
{
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* The first chunk with a visible key, and the end of the last. */
INLINE int64_t first_chunk(const attention *a, const tile *t)
{
    return first_visible(a, t->position[0]) / CHUNK * CHUNK;
}
INLINE int64_t end_of(const tile *t) { return t->position[t->heads * t->rows - 1] + 1; }

void forget(const attention *a, partial *all);
/* Chunks are added in order: one to each row of a tile, or up to FOLD to one row. */
#define FOLD 16
void add_chunk(const attention *a, void *all, const void *chunk, int rows);
void add_row(const attention *a, partial *all, const partial *const *chunks, int count);
void write_out(const attention *a, const partial *all, float *out);

#endif

#include "attention_rows.h"
#include "vecmath.h"

#include <math.h>
#include <string.h>

#define RUN 16 /* keys of a head before the next: a cache of such blocks is then read straight through */

INLINE int at_most(int64_t a, int b) { return a < b ? (int)a : b; }

/* Where more keys fit with three rows, four only if that leaves none over and three would. */
INLINE int rows_at_once(int left)
{
    return at_most(left, MAX_KEYS == 8 && (left % 4 || left % 3 == 0) ? 3 : 4);
}

static void score_run(const attention *a, tile *t, int head, int begin, int end)
{
    long offset = head * a->block_size * a->head_dim;
    for (int r = 0, rows; r < t->rows; r += rows) {
        rows = rows_at_once(t->rows - r);
        int step = rows == 4 ? 4 : MAX_KEYS, row = head * t->rows + r;
        for (int j = begin; j < end; j += step)
            DOT[rows](t->q + row, t->key + j, offset, a->head_dim, t->score + row * CHUNK + j,
                      r ? 0 : t->value + j);
    }
}

static void mix_run(const attention *a, const tile *t, int head, int begin, int end, void *out)
{
    long offset = head * a->block_size * a->head_dim, dim = a->head_dim;
    for (int r = 0, rows; r < t->rows; r += rows) {
        rows = rows_at_once(t->rows - r);
        int row = head * t->rows + r;
        const float *weight = t->score + row * CHUNK + begin;
        const float *const *ahead = r ? 0 : t->key + CHUNK + begin;
        long d = 0, wide = WIDE_COLUMN(rows);
        for (; d + wide <= dim; d += wide)
            ADD_WIDE[rows](a, weight, t->value + begin, offset, end - begin, d, partial_at(a, out, row), !begin,
                           ahead);
        for (; d < dim; d += COLUMN)
            ADD[rows](a, weight, t->value + begin, offset, end - begin, d, partial_at(a, out, row), !begin,
                      ahead);
    }
}

typedef struct {
    int from, to;
} range;

/* The keys visible to row r, of `width` keys from `begin` on. */
INLINE range visible(const attention *a, const tile *t, int r, int64_t begin, int width)
{
    const int64_t from = first_visible(a, t->position[r]) - begin, to = t->position[r] + 1 - begin;
    return (range){from < 0 ? 0 : at_most(from, width), to < 0 ? 0 : at_most(to, width)};
}

/* Whether any row may attend to only some of these keys. */
INLINE int hides_any(const attention *a, const tile *t, int64_t begin, int keys)
{
    return t->position[0] + 1 < begin + keys || first_visible(a, end_of(t) - 1) > begin;
}

/* Masks all other keys. */
INLINE void mask(range keys, int width, float *score)
{
    for (int j = 0; j < keys.from; j++) score[j] = -INFINITY;
    for (int j = keys.to; j < width; j++) score[j] = -INFINITY;
}

INLINE float highest_lane(vec v)
{
#if defined(__aarch64__)
    return vmaxnmvq_f32(v);
#elif defined(__FMA__) && VEC_LANES == 16
    return _mm512_reduce_max_ps(v);
#else
    float highest = v[0];
    for (int i = 1; i < VEC_LANES; i++) highest = v[i] > highest ? v[i] : highest;
    return highest;
#endif
}

INLINE int padded(int keys)
{
    const int step = AT_ONCE * VEC_LANES;
    return (keys + step - 1) / step * step;
}

static float highest_score(const attention *a, tile *t, int r, int64_t begin, int keys)
{
    float *score = t->score + r * CHUNK;
    const int width = padded(keys);
    mask(visible(a, t, r, begin, width), width, score);
    vec high = vec_load(score);
    for (int j = VEC_LANES; j < width; j += VEC_LANES) high = vec_max(high, vec_load(score + j));
    return highest_lane(high);
}

/* Turns row r's scores into weights and returns their sum. Masked keys have weight zero, which changes
 * no sum. */
static float soften(const attention *a, tile *t, int r, float highest, int keys)
{
    float *score = t->score + r * CHUNK;
    const vec least = vec_set(highest == -INFINITY ? 0 : highest), scale = vec_set(a->scale);
    vec added = {0};
    for (int j = 0; j < padded(keys); j += AT_ONCE * VEC_LANES) {
        vec weight[AT_ONCE];
        EACH(i) weight[i] = (vec_load(score + j + i * VEC_LANES) - least) * scale;
        vec_exps(weight);
        EACH(i) vec_store(score + j + i * VEC_LANES, weight[i]);
        EACH(i) added += weight[i];
    }
    return vec_sum(added);
}

/* Points at [begin, end) of a sequence in a cache, at most a chunk of it; how many there are. */
INLINE int point_at(const attention *a, const ragged_batch *batch, const tile *t, int64_t sequence,
                    int64_t begin, int64_t end, const float *cache, const float **out)
{
    const int count = at_most(end - begin, CHUNK);
    const int32_t *blocks = batch->block_tables + sequence * batch->max_blocks + begin / a->block_size;
    int64_t offset = begin % a->block_size;
    for (int j = 0; j < count; offset = 0, blocks++) {
        const float *from = cache + *blocks * a->block_stride;
        for (; j < count && offset < a->block_size; j++, offset++)
            out[j] = from + (t->first_head * a->block_size + offset) * a->head_dim;
    }
    return count;
}

/* Points at the keys and values from `begin` on, and at the keys that are read next. Keys are read a
 * few at a time: the last one stands in for those that are missing. */
static void locate_keys(const attention *a, const ragged_batch *batch, tile *t, int64_t begin)
{
    const int64_t other = t->sequence + 1;
    int keys = point_at(a, batch, t, t->sequence, begin, end_of(t), a->key_cache, t->key), next = 0;
    point_at(a, batch, t, t->sequence, begin, end_of(t), a->value_cache, t->value);
    if (begin + CHUNK < end_of(t))
        next = point_at(a, batch, t, t->sequence, begin + CHUNK, end_of(t), a->key_cache, t->key + CHUNK);
    else if (other < batch->sequences)
        next = point_at(a, batch, t, other, 0, batch->context_lens[other], a->key_cache, t->key + CHUNK);
    for (int j = keys; j < CHUNK; j++) t->key[j] = t->key[keys - 1];
    for (int j = keys; j < CHUNK; j++) t->value[j] = t->value[keys - 1];
    for (int j = next; j < CHUNK; j++) t->key[CHUNK + j] = t->key[keys - 1];
}

/* Masked keys have weight 0, but 0 times a value that is not finite is NaN: then the row is summed again
 * over its visible keys. Otherwise NaN of other requests' tokens, or of drafts, would spread. */
static void sum_visible(const attention *a, const tile *t, int r, range keys, partial *own)
{
    vec difference = {0};
    for (long d = 0; d < a->head_dim; d += VEC_LANES)
        difference += vec_load(own->sum + d) - vec_load(own->sum + d);
    if (vec_sum(difference) == 0) return;
    const long offset = r / t->rows * a->block_size * a->head_dim;
    for (long d = 0; d < a->head_dim; d += COLUMN)
        ADD[1](a, t->score + r * CHUNK + keys.from, t->value + keys.from, offset, keys.to - keys.from, d, own,
               1, 0);
}

void attend_chunk(const attention *a, const ragged_batch *batch, tile *t, int64_t begin, void *out)
{
    const int keys = at_most(end_of(t) - begin, CHUNK), rows = t->heads * t->rows;
    const int run = t->heads == 1 ? CHUNK : RUN;
    locate_keys(a, batch, t, begin);
    for (int j = 0; j < keys; j += run)
        for (int h = 0; h < t->heads; h++) score_run(a, t, h, j, at_most(keys, j + run));
    float highest[TILE_ROWS];
    for (int r = 0; r < rows; r++) highest[r] = highest_score(a, t, r, begin, keys);
    for (int r = 0; r < rows; r++) {
        partial *own = partial_at(a, out, r);
        own->highest = highest[r] * a->scale;
        own->total = soften(a, t, r, highest[r], keys);
    }
    for (int j = 0; j < keys; j += run)
        for (int h = 0; h < t->heads; h++) mix_run(a, t, h, j, at_most(keys, j + run), out);
    if (!hides_any(a, t, begin, keys)) return;
    for (int r = 0; r < rows; r++) sum_visible(a, t, r, visible(a, t, r, begin, keys), partial_at(a, out, r));
}

void place_tile(const attention *a, const ragged_batch *batch, tile *t, int64_t sequence, int64_t first_head,
                int heads, int64_t first, int rows)
{
    const int64_t group = a->heads / a->kv_heads, start = batch->cu_query_lens[sequence];
    const int64_t base = batch->context_lens[sequence] - (batch->cu_query_lens[sequence + 1] - start);
    t->sequence = sequence;
    t->first_head = first_head;
    t->heads = heads;
    t->rows = rows;
    for (int r = 0; r < heads * rows; r++) {
        int64_t row = first + r % rows, query = row / group;
        int64_t head = (first_head + r / rows) * group + row % group;
        int64_t at = ((start + query) * a->heads + head) * a->head_dim;
        t->q[r] = a->q + at;
        t->out[r] = a->out + at;
        t->position[r] = base + query;
    }
}

void forget(const attention *a, partial *all)
{
    all->highest = -INFINITY;
    all->total = 0;
    memset(all->sum, 0, a->head_dim * sizeof(float));
}

/* Two sums are relative to their own highest scores; this factor rescales one of them. */
INLINE float exponent(float highest, float own) { return own > highest ? highest - own : own - highest; }

INLINE void exponents_to_factors(float *x, int count)
{
    for (int i = 0; i < count; i += AT_ONCE * VEC_LANES) {
        vec factor[AT_ONCE];
        EACH(v) factor[v] = vec_load(x + i + v * VEC_LANES);
        vec_exps(factor);
        EACH(v) vec_store(x + i + v * VEC_LANES, factor[v]);
    }
}

/* all = all * keep + chunk * take, chunk by chunk. */
INLINE void add_chunks(const attention *a, partial *all, const partial *const *chunks, const float *keep,
                       const float *take, int count)
{
    for (int i = 0; i < count; i++) all->total = fmaf(chunks[i]->total, take[i], all->total * keep[i]);
    for (long d = 0; d < a->head_dim; d += COLUMN) {
#define ADD_LOAD(ROWS, DO, c) vec sum##c = vec_load(all->sum + d + c * VEC_LANES);
#define ADD_CHUNK(ROWS, DO, c) \
    sum##c = vec_fma_scalar(vec_load(chunks[i]->sum + d + c * VEC_LANES), take[i], sum##c * keep[i]);
#define ADD_STORE(ROWS, DO, c) vec_store(all->sum + d + c * VEC_LANES, sum##c);
        NARROW(ADD_LOAD, _, _)
        for (int i = 0; i < count; i++) {
            NARROW(ADD_CHUNK, _, _)
        }
        NARROW(ADD_STORE, _, _)
    }
}

void add_chunk(const attention *a, void *all, const void *chunk, int rows)
{
    float factor[TILE_ROWS + FOLD] = {0};
    for (int r = 0; r < rows; r++)
        factor[r] = exponent(partial_at(a, all, r)->highest, partial_at(a, chunk, r)->highest);
    exponents_to_factors(factor, rows);
    for (int r = 0; r < rows; r++) {
        partial *whole = partial_at(a, all, r);
        const partial *own = partial_at(a, chunk, r);
        const int is_higher = own->highest > whole->highest;
        const float keep = is_higher ? factor[r] : 1, take = is_higher ? 1 : factor[r];
        if (is_higher) whole->highest = own->highest;
        add_chunks(a, whole, &own, &keep, &take, 1);
    }
}

void add_row(const attention *a, partial *all, const partial *const *chunks, int count)
{
    float before[FOLD], keep[FOLD] = {0}, take[FOLD];
    for (int i = 0; i < count; i++) {
        before[i] = all->highest;
        keep[i] = exponent(all->highest, chunks[i]->highest);
        if (chunks[i]->highest > all->highest) all->highest = chunks[i]->highest;
    }
    exponents_to_factors(keep, count);
    for (int i = 0; i < count; i++) {
        const int is_higher = chunks[i]->highest > before[i];
        take[i] = is_higher ? 1 : keep[i];
        if (!is_higher) keep[i] = 1;
    }
    add_chunks(a, all, chunks, keep, take, count);
}

void write_out(const attention *a, const partial *all, float *out)
{
    for (long d = 0; d < a->head_dim; d++) out[d] = all->sum[d] / all->total;
}

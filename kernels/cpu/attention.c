/* Causal attention over the paged cache, for decode rows and prompt chunks alike.
 *
 * A row is one query head of one token. Keys are taken in chunks that begin at fixed positions
 * (multiples of CHUNK), each chunk's softmax is merged into the running one, and within a chunk
 * every sum has one order. So a row's result depends on its own position and keys only, not on the
 * rows that share its tile, its thread, its pass or its blocks.
 */
#include "ops.h"
#include "pool.h"
#include "vecmath.h"

#include <math.h>
#include <string.h>

#define CHUNK 64
#define TILE_ROWS 24
#define MAX_DIM 256
#define COLUMN 16 /* head_dim is a multiple of it */
#define SHARE_ROWS 8
#define SERIAL_WORK 65536

/* Rows of one sequence and KV head against the keys they see. */
typedef struct {
    int rows;
    int64_t position[TILE_ROWS];
    float highest[TILE_ROWS], total[TILE_ROWS];
    float q[TILE_ROWS * MAX_DIM], sum[TILE_ROWS * MAX_DIM], score[TILE_ROWS * CHUNK];
    const float *key[CHUNK], *value[CHUNK];
} tile;

#if COLUMN / VEC_LANES == 4
#define COLUMNS(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#elif COLUMN / VEC_LANES == 2
#define COLUMNS(DO, r) DO(r, 0) DO(r, 1)
#else
#define COLUMNS(DO, r) DO(r, 0)
#endif
/* A vector of 16 floats leaves registers for more columns, and needs them: sums that wait for each other
 * would be too few. */
#define WIDE_COLUMN (VEC_LANES == 16 ? 4 * COLUMN : COLUMN)
#if VEC_LANES == 16
#define WIDE_COLUMNS(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#else
#define WIDE_COLUMNS COLUMNS
#endif
#define KEYS(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#define ROWS1(EACH, DO) EACH(DO, 0)
#define ROWS2(EACH, DO) ROWS1(EACH, DO) EACH(DO, 1)
#define ROWS3(EACH, DO) ROWS2(EACH, DO) EACH(DO, 2)
#define ROWS4(EACH, DO) ROWS3(EACH, DO) EACH(DO, 3)

/* The sums over the lanes of four vectors. */
INLINE void store_sums(float *out, vec a, vec b, vec c, vec d)
{
#if defined(__aarch64__)
    vec_store(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#elif defined(__FMA__) && VEC_LANES == 16
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d first = _mm512_castps_pd(ab), second = _mm512_castps_pd(cd);
    vec all = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second)) +
              _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), upper);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__FMA__) && VEC_LANES == 8
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    const vec v[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) out[i] = vec_sum(v[i]);
#endif
}

#define DOT_START(r, k) vec dot##r##k = {0};
#define DOT_QUERY(DO, r) const vec q##r = vec_load(q + r * dim + d);
#define DOT_ADD(r, k) dot##r##k = vec_fma(q##r, key##k, dot##r##k);
#define DOT_STORE(DO, r) store_sums(score + r * CHUNK, dot##r##0, dot##r##1, dot##r##2, dot##r##3);

/* score[row][key] for a few rows and four keys. */
#define DOTS(rows)                                                                              \
    static void dots##rows(const float *q, const float *const *key, long dim, float *score)     \
    {                                                                                           \
        ROWS##rows(KEYS, DOT_START)                                                             \
        for (long d = 0; d < dim; d += VEC_LANES) {                                             \
            const vec key0 = vec_load(key[0] + d), key1 = vec_load(key[1] + d);                 \
            const vec key2 = vec_load(key[2] + d), key3 = vec_load(key[3] + d);                 \
            ROWS##rows(DOT_QUERY, 0)                                                            \
            ROWS##rows(KEYS, DOT_ADD)                                                           \
        }                                                                                       \
        ROWS##rows(DOT_STORE, 0)                                                                \
    }
DOTS(1)
DOTS(2)
DOTS(3)
DOTS(4)

#define MIX_LOAD(r, c) vec sum##r##c = vec_load(sum + r * dim + c * VEC_LANES);
#define MIX_VALUE(r, c) const vec value##c = vec_load(value[j] + d + c * VEC_LANES);
#define MIX_ADD(r, c) sum##r##c = vec_fma_scalar(value##c, weight[r * CHUNK + j], sum##r##c);
#define MIX_STORE(r, c) vec_store(sum + r * dim + c * VEC_LANES, sum##r##c);

/* sum[row][d ..] += weight[row][key] * value[key][d ..] for a few rows and so many columns of values. */
#define MIX(name, rows, COLUMNS)                                                                \
    static void name##rows(const float *weight, const float *const *value, long keys, long d,   \
                           long dim, float *sum)                                                \
    {                                                                                           \
        ROWS##rows(COLUMNS, MIX_LOAD)                                                           \
        for (long j = 0; j < keys; j++) {                                                       \
            COLUMNS(MIX_VALUE, 0)                                                               \
            ROWS##rows(COLUMNS, MIX_ADD)                                                        \
        }                                                                                       \
        ROWS##rows(COLUMNS, MIX_STORE)                                                          \
    }
MIX(mix, 1, COLUMNS)
MIX(mix, 2, COLUMNS)
MIX(mix, 3, COLUMNS)
MIX(mix, 4, COLUMNS)
MIX(mix_wide, 1, WIDE_COLUMNS)
MIX(mix_wide, 2, WIDE_COLUMNS)
MIX(mix_wide, 3, WIDE_COLUMNS)
MIX(mix_wide, 4, WIDE_COLUMNS)

typedef void dots_fn(const float *q, const float *const *key, long dim, float *score);
typedef void mix_fn(const float *weight, const float *const *value, long keys, long d, long dim,
                    float *sum);
static dots_fn *const DOT[] = {0, dots1, dots2, dots3, dots4};
static mix_fn *const ADD[] = {0, mix1, mix2, mix3, mix4};
static mix_fn *const ADD_WIDE[] = {0, mix_wide1, mix_wide2, mix_wide3, mix_wide4};

INLINE int64_t first_visible(const attention *a, int64_t position)
{
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* Hides the keys of [begin, begin + width) that row r does not see. */
INLINE void mask(const attention *a, const tile *t, int r, int64_t begin, int width, float *score)
{
    int64_t from = first_visible(a, t->position[r]) - begin, to = t->position[r] + 1 - begin;
    for (int j = 0; j < from && j < width; j++) score[j] = -INFINITY;
    for (int j = to < 0 ? 0 : (int)to; j < width; j++) score[j] = -INFINITY;
}

INLINE float highest_lane(vec v)
{
#if defined(__FMA__) && VEC_LANES == 16
    return _mm512_reduce_max_ps(v);
#else
    float highest = v[0];
    for (int i = 1; i < VEC_LANES; i++) highest = v[i] > highest ? v[i] : highest;
    return highest;
#endif
}

/* Turns row r's scores of keys [begin, begin + keys) into weights and merges their total.
 * Weights of hidden keys are zero, and adding zeros changes no sum. */
static void soften(const attention *a, tile *t, int r, int64_t begin, int keys)
{
    float *score = t->score + r * CHUNK, before = t->highest[r];
    int width = (keys + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
    mask(a, t, r, begin, width, score);
    vec high = vec_set(before);
    for (int j = 0; j < width; j += VEC_LANES) high = vec_max(high, vec_load(score + j));
    float highest = highest_lane(high);
    if (highest == -INFINITY) {
        memset(score, 0, width * sizeof(float));
        return;
    }
    vec added = {0};
    for (int j = 0; j < width; j += VEC_LANES) {
        vec weight = vec_exp(vec_load(score + j) - highest);
        vec_store(score + j, weight);
        added += weight;
    }
    if (highest > before) {
        float shrink = vec_exp(vec_set(before - highest))[0], *sum = t->sum + r * a->head_dim;
        for (long d = 0; d < a->head_dim; d += VEC_LANES)
            vec_store(sum + d, vec_load(sum + d) * shrink);
        t->total[r] *= shrink;
        t->highest[r] = highest;
    }
    t->total[r] += vec_sum(added);
}

/* Asks for what is read later: the cache of a pass is read once, so nothing but this keeps it near. */
INLINE void ask_for(const float *const *vectors, int from, int to, long dim)
{
    for (int j = from; j < to; j++)
        for (long d = 0; d < dim; d += 16) __builtin_prefetch(vectors[j] + d);
}

static void attend_chunk(const attention *a, tile *t, int64_t begin, int keys)
{
    long dim = a->head_dim;
    ask_for(t->key, 0, keys < 8 ? keys : 8, dim);
    for (int r = 0; r < t->rows; r += 4) {
        int rows = t->rows - r < 4 ? t->rows - r : 4;
        for (int j = 0; j < keys; j += 4) {
            if (!r) {
                ask_for(t->key, j + 8, keys < j + 12 ? keys : j + 12, dim);
                ask_for(t->value, j, keys < j + 4 ? keys : j + 4, dim);
            }
            DOT[rows](t->q + r * dim, t->key + j, dim, t->score + r * CHUNK + j);
        }
    }
    for (int r = 0; r < t->rows; r++) soften(a, t, r, begin, keys);
    for (int r = 0; r < t->rows; r += 4) {
        int rows = t->rows - r < 4 ? t->rows - r : 4;
        long d = 0;
        for (; d + WIDE_COLUMN <= dim; d += WIDE_COLUMN)
            ADD_WIDE[rows](t->score + r * CHUNK, t->value, keys, d, dim, t->sum + r * dim + d);
        for (; d < dim; d += COLUMN)
            ADD[rows](t->score + r * CHUNK, t->value, keys, d, dim, t->sum + r * dim + d);
    }
}

/* Points at the keys and values [begin, begin + keys). Keys are read four at a time: the last one
 * stands in for those that are missing. */
static void locate_keys(const attention *a, const int32_t *blocks, int64_t kv_head, int64_t begin,
                        int keys, tile *t)
{
    int64_t offset = begin % a->block_size;
    blocks += begin / a->block_size;
    for (int j = 0; j < keys; offset = 0, blocks++) {
        int64_t row = (*blocks * a->kv_heads + kv_head) * a->block_size;
        for (; j < keys && offset < a->block_size; j++, offset++) {
            t->key[j] = a->key_cache + (row + offset) * a->head_dim;
            t->value[j] = a->value_cache + (row + offset) * a->head_dim;
        }
    }
    for (int j = keys; j % 4; j++) t->key[j] = t->key[keys - 1];
}

/* Rows [first, first + t->rows) of a sequence's KV head; row = query * group + head in group. */
static void run_tile(const attention *a, const ragged_batch *batch, int64_t sequence,
                     int64_t kv_head, int64_t first, tile *t)
{
    long dim = a->head_dim, group = a->heads / a->kv_heads;
    int64_t start = batch->cu_query_lens[sequence];
    int64_t queries = batch->cu_query_lens[sequence + 1] - start;
    int64_t base = batch->context_lens[sequence] - queries;
    for (int r = 0; r < t->rows; r++) {
        int64_t query = (first + r) / group, head = kv_head * group + (first + r) % group;
        const float *q = a->q + ((start + query) * a->heads + head) * dim;
        for (long d = 0; d < dim; d++) t->q[r * dim + d] = q[d] * a->scale;
        t->position[r] = base + query;
        t->highest[r] = -INFINITY;
        t->total[r] = 0;
    }
    memset(t->sum, 0, t->rows * dim * sizeof(float));
    int64_t end = t->position[t->rows - 1] + 1;
    int64_t begin = first_visible(a, t->position[0]) / CHUNK * CHUNK;
    for (; begin < end; begin += CHUNK) {
        int keys = end - begin < CHUNK ? (int)(end - begin) : CHUNK;
        locate_keys(a, batch->block_tables + sequence * batch->max_blocks, kv_head, begin, keys, t);
        attend_chunk(a, t, begin, keys);
    }
    for (int r = 0; r < t->rows; r++) {
        int64_t query = (first + r) / group, head = kv_head * group + (first + r) % group;
        float *out = a->out + ((start + query) * a->heads + head) * dim;
        for (long d = 0; d < dim; d++) out[d] = t->sum[r * dim + d] / t->total[r];
    }
}

/* Rows [begin, end) of a sequence's queries x heads, ordered by KV head, query, head in group. */
static void run_rows(const attention *a, const ragged_batch *batch, int64_t sequence,
                     int64_t begin, int64_t end, tile *t)
{
    int64_t queries = batch->cu_query_lens[sequence + 1] - batch->cu_query_lens[sequence];
    int64_t rows_per_head = queries * (a->heads / a->kv_heads);
    while (begin < end) {
        int64_t kv_head = begin / rows_per_head, first = begin % rows_per_head;
        int64_t left = rows_per_head - first < end - begin ? rows_per_head - first : end - begin;
        t->rows = left < TILE_ROWS ? (int)left : TILE_ROWS;
        run_tile(a, batch, sequence, kv_head, first, t);
        begin += t->rows;
    }
}

static int64_t rows_of(const attention *a, const ragged_batch *batch, int64_t sequence)
{
    return (batch->cu_query_lens[sequence + 1] - batch->cu_query_lens[sequence]) * a->heads;
}

static int64_t divide_up(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }

typedef struct {
    const attention *attention;
    const ragged_batch *batch;
    int64_t work, shares;
} sharing;

/* A share is the rows whose work, counted in keys, begins within its part of the whole. */
static void run_share(void *context, int64_t share)
{
    const sharing *w = context;
    const ragged_batch *batch = w->batch;
    tile t;
    int64_t low = w->work * share / w->shares, high = w->work * (share + 1) / w->shares, done = 0;
    for (int64_t s = 0; s < batch->sequences; s++) {
        int64_t rows = rows_of(w->attention, batch, s), cost = batch->context_lens[s];
        int64_t begin = divide_up(low - done, cost), end = divide_up(high - done, cost);
        if (rows > 0) run_rows(w->attention, batch, s, begin, end < rows ? end : rows, &t);
        done += rows * cost;
    }
}

/* Rows of a tile share the reading of keys, so a share should not be much smaller than a tile. */
static int64_t count_shares(const attention *a, int64_t rows, int64_t work)
{
    int64_t least = pool_threads(), most = 8 * least, shares = rows / SHARE_ROWS;
    if (work * a->head_dim < SERIAL_WORK) return 1;
    return shares < least ? least : shares > most ? most : shares;
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
    int64_t rows = 0, work = 0;
    if (!blocks_exist(a, batch)) return BAD_BLOCK;
    for (int64_t s = 0; s < batch->sequences; s++) {
        rows += rows_of(a, batch, s);
        work += rows_of(a, batch, s) * batch->context_lens[s];
    }
    sharing w = {a, batch, work, count_shares(a, rows, work)};
    pool_run(run_share, &w, w.shares);
    return OK;
}

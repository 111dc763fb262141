/* Gumbel noise from a hash of (seed, stream, position, token id), and the argmax over it.
 * The integers are those of outrider/kernels/noise.py, bit for bit. */
#include "batch.h"
#include "pool.h"
#include "vecmath.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STREAM_BITS 3
#define TOKEN_STRIDE 0x9E3779B1u
#define PART_TOKENS 8192

static uint64_t mix64(uint64_t z)
{
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t row_state(int64_t seed, int64_t stream, int64_t position)
{
    uint64_t place = (((uint64_t)position << STREAM_BITS) | (uint64_t)stream) * 0x9E3779B97F4A7C15u;
    return mix64(mix64((uint64_t)seed ^ 0x6F75747269646572u) + place);
}

/* `counter` is token id * TOKEN_STRIDE. */
INLINE uvec token_bits(uvec counter, uint64_t state)
{
    uvec x = counter + (uint32_t)state;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    x = (x ^ (x >> 16)) + (uint32_t)(state >> 32);
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

INLINE vec unit_interval(uvec bits)
{
    return (__builtin_convertvector(bits, vec) + 0.5f) * 0x1p-32f;
}

/* -log(-log1p(-u)). Near u = 0 the inner logarithm is taken of u, elsewhere of 1 - u, which is
 * made from the complement of the bits: neither ever rounds to 0 or 1. */
INLINE vec gumbel(uvec bits)
{
    vec u = unit_interval(bits), n, m = vec_split(unit_interval(~bits), &n);
    vec f = vec_select(n == 0.0f, u, 1.0f - m);
    vec exponential = vec_log_ratio(f / (2.0f - f)) - n * 0.693147181f;
    return -vec_log(exponential);
}

/* An upper bound of gumbel(bits) (at most -log(u)) at a tenth of the cost: nearly every token of a large
 * vocabulary needs no logarithms. */
INLINE vec gumbel_bound(uvec bits)
{
    ivec exponent = 127 - ((ivec)unit_interval(bits) >> 23);
    return vec_to_float(exponent) * 0.6931472f + 0.001f;
}

INLINE int any_lane(ivec mask)
{
    int64_t words[VEC_LANES / 2], any = 0;
    memcpy(words, &mask, sizeof words);
    for (int i = 0; i < VEC_LANES / 2; i++) any |= words[i];
    return any != 0;
}

INLINE uvec lane_numbers(void)
{
    uvec lanes;
    for (uint32_t i = 0; i < VEC_LANES; i++) lanes[i] = i;
    return lanes;
}

typedef struct {
    float score;
    int64_t column;
} candidate;

/* NaN ranks first, so that callers notice it. */
INLINE candidate better(candidate a, candidate b)
{
    if (isnan(a.score) || isnan(b.score)) return isnan(a.score) ? a : b;
    return b.score > a.score || (b.score == a.score && b.column < a.column) ? b : a;
}

/* The best of columns [begin, end); `begin` if none has a score above -inf; the first that is NaN, if
 * any is. */
static candidate best_column(const float *scores, uint64_t state, int64_t first_id, int64_t begin,
                             int64_t end)
{
    vec best = vec_set(-INFINITY);
    uvec columns = lane_numbers() + (uint32_t)begin, winners = columns;
    uvec counter = (columns + (uint32_t)first_id) * TOKEN_STRIDE;
    ivec is_nan = {0};
    for (int64_t t = begin; t < end;
         t += VEC_LANES, columns += VEC_LANES, counter += VEC_LANES * TOKEN_STRIDE) {
        vec s = vec_set(-INFINITY);
        if (t + VEC_LANES <= end)
            s = vec_load(scores + t);
        else
            for (int64_t i = t; i < end; i++) s[i - t] = scores[i];
        is_nan |= s != s;
        uvec bits = token_bits(counter, state);
        if (!any_lane(s + gumbel_bound(bits) > best)) continue;
        s += gumbel(bits);
        ivec wins = s > best;
        best = vec_select(wins, s, best);
        winners = (uvec)vec_select(wins, (vec)columns, (vec)winners);
    }
    candidate result = {-INFINITY, begin};
    if (any_lane(is_nan)) {
        while (!isnan(scores[begin])) begin++;
        return (candidate){NAN, begin};
    }
    for (int i = 0; i < VEC_LANES; i++)
        if (best[i] > -INFINITY) result = better(result, (candidate){best[i], winners[i]});
    return result;
}

typedef struct {
    const float *scores;
    const int64_t *seeds, *streams, *positions;
    candidate *found; /* [rows, parts] */
    int64_t vocab, first_id, parts;
} search;

static void search_part(void *context, int64_t chunk)
{
    const search *a = context;
    int64_t row = chunk / a->parts, begin = chunk % a->parts * PART_TOKENS;
    int64_t end = begin + PART_TOKENS < a->vocab ? begin + PART_TOKENS : a->vocab;
    uint64_t state = row_state(a->seeds[row], a->streams[row], a->positions[row]);
    a->found[chunk] = best_column(a->scores + row * a->vocab, state, a->first_id, begin, end);
}

/* Column 0 is token `first_id`. */
EXPORT int outrider_gumbel_max(const float *scores, int64_t rows, int64_t vocab, int64_t first_id,
                               const int64_t *seeds, const int64_t *streams,
                               const int64_t *positions, float *best, int64_t *columns)
{
    int64_t parts = (vocab + PART_TOKENS - 1) / PART_TOKENS;
    candidate *found = malloc((rows * parts + 1) * sizeof(candidate));
    if (!found) return NO_MEMORY;
    search a = {scores, seeds, streams, positions, found, vocab, first_id, parts};
    pool_run(search_part, &a, rows * parts);
    for (int64_t r = 0; r < rows; r++) {
        candidate winner = found[r * parts];
        for (int64_t i = 1; i < parts; i++) winner = better(winner, found[r * parts + i]);
        best[r] = winner.score;
        columns[r] = winner.column;
    }
    free(found);
    return OK;
}

/* The noise itself, for the tests that compare it with the reference. */
EXPORT void outrider_gumbel(int64_t seed, int64_t stream, int64_t position, int64_t vocab,
                            uint32_t *bits, float *noise)
{
    uint64_t state = row_state(seed, stream, position);
    for (int64_t t = 0; t < vocab; t += VEC_LANES) {
        uvec x = token_bits((lane_numbers() + (uint32_t)t) * TOKEN_STRIDE, state);
        vec g = gumbel(x);
        for (int64_t i = t; i < vocab && i < t + VEC_LANES; i++)
            bits[i] = x[i - t], noise[i] = g[i - t];
    }
}

EXPORT void outrider_gumbel_of_bits(const uint32_t *bits, int64_t count, float *noise)
{
    for (int64_t i = 0; i < count; i++) {
        uvec x = (uvec){0} + bits[i];
        noise[i] = gumbel(x)[0];
    }
}

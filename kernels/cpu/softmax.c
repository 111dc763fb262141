/* The softmax probability of one token per row, without writing the others. */
#include "batch.h"
#include "pool.h"
#include "vecmath.h"

#include <math.h>
#include <stdlib.h>

#define PART_TOKENS 8192

typedef struct {
    float highest, mass; /* the sum of exp(score - highest) */
} part;

typedef struct {
    const float *scores;
    part *parts; /* [rows, parts_per_row] */
    int64_t vocab, parts_per_row;
} summation;

/* Four sums side by side hide the latency of each; which score goes into which is fixed. */
static part sum_part(const float *scores, int64_t count)
{
    enum { STEP = 4 * VEC_LANES };
    float highest = -INFINITY, mass = 0.0f;
    vec most = vec_set(-INFINITY), sums[4] = {{0}, {0}, {0}, {0}};
    int64_t whole = count / STEP * STEP;
    for (int64_t i = 0; i < whole; i += VEC_LANES) most = vec_max(most, vec_load(scores + i));
    for (int lane = 0; lane < VEC_LANES; lane++)
        if (whole && most[lane] > highest) highest = most[lane];
    for (int64_t i = whole; i < count; i++)
        if (scores[i] > highest) highest = scores[i];
    if (highest == -INFINITY) return (part){highest, 0.0f};
    for (int64_t i = 0; i < whole; i += STEP)
        for (int s = 0; s < 4; s++)
            sums[s] += vec_exp(vec_load(scores + i + s * VEC_LANES) - highest);
    vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; lane < VEC_LANES; lane++) mass += sum[lane];
    for (int64_t i = whole; i < count; i++) mass += vec_exp(vec_set(scores[i] - highest))[0];
    return (part){highest, mass};
}

static void run_part(void *context, int64_t chunk)
{
    const summation *a = context;
    int64_t row = chunk / a->parts_per_row, begin = chunk % a->parts_per_row * PART_TOKENS;
    int64_t count = a->vocab - begin < PART_TOKENS ? a->vocab - begin : PART_TOKENS;
    a->parts[chunk] = sum_part(a->scores + row * a->vocab + begin, count);
}

EXPORT int outrider_probability_of(const float *scores, int64_t rows, int64_t vocab,
                                   const int64_t *tokens, float *out)
{
    int64_t per_row = (vocab + PART_TOKENS - 1) / PART_TOKENS;
    part *parts = malloc((rows * per_row + 1) * sizeof(part));
    if (!parts) return NO_MEMORY;
    summation a = {scores, parts, vocab, per_row};
    pool_run(run_part, &a, rows * per_row);
    for (int64_t r = 0; r < rows; r++) {
        const part *own = parts + r * per_row;
        float highest = own[0].highest, mass = 0.0f;
        for (int64_t i = 1; i < per_row; i++)
            if (own[i].highest > highest) highest = own[i].highest;
        for (int64_t i = 0; i < per_row; i++) mass += own[i].mass * expf(own[i].highest - highest);
        out[r] = expf(scores[r * vocab + tokens[r]] - highest) / mass;
    }
    free(parts);
    return OK;
}

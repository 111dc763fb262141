/* Drafting for one row in one call: recorded passes of a small model, each over the token that the
 * one before has chosen. Between two of them nothing is left for Python, whose code would come from
 * memory again after each pass of the target. */
#include "ops.h"
#include "vecmath.h"

#include <math.h>

#define MAX_TOKENS 8 /* of a recorded pass: _MAX_ROWS in recording.py */
#define PART_TOKENS 1024

/* `table` are the embeddings and the head alike, of which the first `vocab` tokens are guessed among;
 * `logits` has room for a row. Where `temperature` is not 0 tokens are drawn by the noise of `seed` and
 * `stream`. */
typedef struct {
    const stored_layer *table;
    float *logits;
    const int32_t *blocks; /* [num_blocks]: the row's */
    int64_t num_blocks, block_size, vocab, seed, stream;
    float temperature, least_survival;
} guesser; /* CGuesser in native.py */

static int run_pass(const guesser *g, const recorded_pass *pass, const int64_t *ids, int64_t start)
{
    int64_t positions[MAX_TOKENS], slots[MAX_TOKENS], count = pass->tokens;
    int32_t query_lens[2] = {0, (int32_t)count}, context = (int32_t)(start + count);
    if (count > MAX_TOKENS || start + count > g->num_blocks * g->block_size) return BAD_BLOCK;
    for (int64_t i = 0, at = start; i < count; i++, at++) {
        positions[i] = at;
        slots[i] = g->blocks[at / g->block_size] * g->block_size + at % g->block_size;
    }
    *pass->batch = (ragged_batch){positions, slots, query_lens, &context,
                                  g->blocks, count, 1,          g->num_blocks};
    int code = outrider_stored_rows(g->table, ids, count, pass->hidden);
    return code ? code : outrider_replay(pass->calls, pass->num_calls);
}

static float highest_of(const float *scores, int64_t count)
{
    int64_t whole = count / VEC_LANES * VEC_LANES;
    vec most = vec_set(-INFINITY);
    for (int64_t i = 0; i < whole; i += VEC_LANES) most = vec_max(most, vec_load(scores + i));
    float highest = -INFINITY;
    for (int lane = 0; lane < VEC_LANES; lane++) highest = fmaxf(highest, most[lane]);
    for (int64_t i = whole; i < count; i++) highest = fmaxf(highest, scores[i]);
    return highest;
}

/* The lowest among equals. Only one part is searched for what is the highest of all. */
static int64_t best_of(const float *scores, int64_t count)
{
    int64_t first = 0;
    float best = -INFINITY;
    for (int64_t begin = 0; begin < count; begin += PART_TOKENS) {
        int64_t own = count - begin < PART_TOKENS ? count - begin : PART_TOKENS;
        float highest = highest_of(scores + begin, own);
        if (highest > best) best = highest, first = begin;
    }
    for (int64_t i = first; i < count; i++)
        if (scores[i] == best) return i;
    return 0;
}

static int choose(const guesser *g, int64_t position, int64_t *token, float *confidence)
{
    int code = OK;
    if (g->temperature == 0) {
        *token = best_of(g->logits, g->vocab);
    } else {
        float best, inverse = 1 / g->temperature;
        for (int64_t i = 0; i < g->vocab; i++) g->logits[i] *= inverse;
        code = outrider_gumbel_max(g->logits, 1, g->vocab, 0, &g->seed, &g->stream, &position, &best,
                                   token);
    }
    return code ? code : outrider_probability_of(g->logits, 1, g->vocab, token, confidence);
}

/* Reads the tokens `ids` at `start` by the pass `first`, then drafts up to `depth` tokens, each but the
 * last of them read by the pass `next`. One that is right, with all before it, with less than the
 * least chance is the last. */
EXPORT int outrider_guess(const guesser *g, const recorded_pass *first, const recorded_pass *next,
                          const int64_t *ids, int64_t start, int64_t depth, int64_t *tokens,
                          float *confidences, int64_t *count)
{
    const recorded_pass *pass = first;
    stored_layer head = *g->table;
    float survival = 1;
    if (g->vocab < head.out_features) head.out_features = g->vocab;
    for (int64_t i = 0; i < depth && survival >= g->least_survival; i++, pass = next, ids = tokens + i - 1) {
        int code = run_pass(g, pass, ids, start);
        start += pass->tokens;
        const float *last = pass->result + (pass->tokens - 1) * g->table->in_features;
        if (!code) code = outrider_stored_linear(&head, last, 1, g->logits);
        if (!code) code = choose(g, start, tokens + i, confidences + i);
        if (code) return code;
        survival *= confidences[i];
        *count = i + 1;
    }
    return OK;
}

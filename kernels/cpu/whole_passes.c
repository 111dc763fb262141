/* From tokens to tokens in one call: captured passes between an embedding and its tied head. Python does
 * not run in between, where it would start with cold caches after each pass. */
#include "best.h"
#include "vec.h"

#include <math.h>

#define MAX_TOKENS 8 /* of a captured pass: MAX_ROWS in capture.py */

/* Drafts among the first `vocab` tokens; `logits` has room for a row. If `temperature` is not 0, tokens are
 * sampled with the noise of `seed` and `stream`. */
typedef struct {
    const quant_layer *table;
    float *logits;
    const int32_t *blocks; /* [num_blocks]: the row's */
    int64_t num_blocks, block_size, vocab, seed, stream;
    float temperature, least_survival;
} drafter; /* CDrafter in native.py */

static quant_layer head_of(const quant_layer *table, int64_t vocab)
{
    quant_layer head = *table;
    if (vocab < head.out_features) head.out_features = vocab;
    return head;
}

static int run_pass(const captured_pass *pass, const quant_layer *table, const int64_t *ids,
                    const ragged_batch *batch)
{
    *pass->batch = *batch;
    int code = outrider_quant_rows(table, ids, pass->tokens, pass->hidden);
    return code ? code : outrider_replay(pass->calls, pass->num_calls);
}

static int run_row(const drafter *g, const captured_pass *pass, const int64_t *ids, int64_t start)
{
    int64_t positions[MAX_TOKENS], slots[MAX_TOKENS], count = pass->tokens;
    int32_t query_lens[2] = {0, (int32_t)count}, context = (int32_t)(start + count);
    if (count > MAX_TOKENS || start + count > g->num_blocks * g->block_size) return BAD_BLOCK;
    for (int64_t i = 0, at = start; i < count; i++, at++) {
        positions[i] = at;
        slots[i] = g->blocks[at / g->block_size] * g->block_size + at % g->block_size;
    }
    const ragged_batch batch = {positions, slots, query_lens, &context,
                                g->blocks, count, 1,          g->num_blocks};
    return run_pass(pass, g->table, ids, &batch);
}

static int choose(const drafter *g, int64_t position, int64_t *token, float *confidence)
{
    int code = OK;
    if (g->temperature == 0) {
        code = best_of_scores(g->logits, 1, g->vocab, g->vocab, token);
        if (!code && *token == NO_TOKEN) {
            *token = 0;
            *confidence = NAN;
            return OK;
        }
    } else {
        float best, inverse = 1 / g->temperature;
        for (int64_t i = 0; i < g->vocab; i++) g->logits[i] *= inverse;
        code = outrider_gumbel_max(g->logits, 1, g->vocab, 0, &g->seed, &g->stream, &position, &best,
                                   token);
    }
    return code ? code : outrider_probability_of(g->logits, 1, g->vocab, token, confidence);
}

/* Runs the pass `first` over tokens `ids` at `start`, then drafts up to `depth` tokens, with the pass
 * `next` over each but the last. Drafting ends with the first whose survival is below least_survival. */
EXPORT int outrider_draft(const drafter *g, const captured_pass *first, const captured_pass *next,
                          const int64_t *ids, int64_t start, int64_t depth, int64_t *tokens,
                          float *confidences, int64_t *count)
{
    const captured_pass *pass = first;
    const quant_layer head = head_of(g->table, g->vocab);
    float survival = 1;
    for (int64_t i = 0; i < depth && survival >= g->least_survival; i++, pass = next, ids = tokens + i - 1) {
        int code = run_row(g, pass, ids, start);
        start += pass->tokens;
        const float *last = pass->result + (pass->tokens - 1) * g->table->in_features;
        if (!code) code = outrider_quant_linear(&head, last, 1, g->logits);
        if (!code) code = choose(g, start, tokens + i, confidences + i);
        if (code) return code;
        survival *= confidences[i];
        *count = i + 1;
    }
    return OK;
}

/* Runs a pass over tokens `ids`, laid out as in `batch`, and scores the next tokens of the `count` at
 * `logits_indices`, into rows of `logits`. With `best`, which gets the best token of each row, the scores
 * need not be complete. `norms`: see outrider_quant_best. */
EXPORT int outrider_score(const quant_layer *table, const captured_pass *pass, const ragged_batch *batch,
                          const int64_t *ids, const int64_t *logits_indices, int64_t count, int64_t vocab,
                          float *logits, const float *norms, int64_t *best)
{
    const quant_layer head = head_of(table, vocab);
    int code = run_pass(pass, table, ids, batch);
    for (int64_t i = 0, next; i < count && !code; i = next) {
        for (next = i + 1; next < count && logits_indices[next] == logits_indices[next - 1] + 1;) next++;
        const float *hidden = pass->result + logits_indices[i] * head.in_features;
        float *scores = logits + i * head.out_stride;
        if (best) code = outrider_quant_best(&head, norms, hidden, next - i, scores, best + i);
        else code = outrider_quant_linear(&head, hidden, next - i, scores);
    }
    return code;
}

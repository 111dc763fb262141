/* The argmax of each row of a head's scores, mostly without computing all scores.
 *
 * Products by the first byte of the input take a third of the time of full products, with a known error
 * bound (quant_error). So most tokens cannot be the best, and only panels with a candidate are multiplied
 * in full: half a dozen of thousands. The result is that of a search of all scores. */
#include "best.h"
#include "own_memory.h"
#include "pool.h"
#include "quant.h"
#include "vecmath.h"

#define PART_TOKENS 4096
#define SOME_TOKENS 256
#define MAX_PANELS 64     /* of a part; with more candidates all scores are computed */
#define LARGEST_REACH 1e25 /* sums of such large numbers may not be finite */

typedef struct {
    int64_t token; /* NO_TOKEN: none is known */
    float score;
} found;

typedef struct {
    const quant_layer *head;
    const float *norms, *x;
    const float *scores; /* rows of `vocab`, `stride` apart */
    int64_t vocab, stride, parts;
    float *highest; /* [rows][parts], NaN where a part cannot be searched */
    float *reach;   /* [rows] */
    found *found;   /* [rows][parts] */
} search;

static int64_t num_parts(int64_t vocab) { return (vocab + PART_TOKENS - 1) / PART_TOKENS; }
static int64_t part_len(const search *s, int64_t part)
{
    const int64_t left = s->vocab - part * PART_TOKENS;
    return left < PART_TOKENS ? left : PART_TOKENS;
}
static const float *part_at(const search *s, int64_t chunk)
{
    return s->scores + chunk / s->parts * s->stride + chunk % s->parts * PART_TOKENS;
}

/* NaN if any is. */
static float highest_of(const float *scores, int64_t count)
{
    const int64_t whole = count / VEC_LANES * VEC_LANES;
    vec most = vec_set(-INFINITY);
    ivec is_number = most == most;
    for (int64_t i = 0; i < whole; i += VEC_LANES) {
        const vec some = vec_load(scores + i);
        is_number &= some == some;
        most = vec_max(most, some);
    }
    float highest = -INFINITY;
    for (int lane = 0; lane < VEC_LANES; lane++) {
        if (!is_number[lane]) return NAN;
        highest = fmaxf(highest, most[lane]);
    }
    for (int64_t i = whole; i < count; i++) {
        if (isnan(scores[i])) return NAN;
        highest = fmaxf(highest, scores[i]);
    }
    return highest;
}

static void search_part(void *context, int64_t chunk)
{
    const search *s = context;
    s->highest[chunk] = highest_of(part_at(s, chunk), part_len(s, chunk % s->parts));
}

/* Which part of a row has the highest score, the first of equals; -1 where any is NaN. */
static int64_t highest_part(const search *s, int64_t row)
{
    const float *highest = s->highest + row * s->parts;
    int64_t best = 0;
    for (int64_t part = 0; part < s->parts; part++) {
        if (isnan(highest[part])) return -1;
        if (highest[part] > highest[best]) best = part;
    }
    return best;
}

static int64_t best_in_row(const search *s, int64_t row)
{
    const int64_t part = highest_part(s, row), chunk = row * s->parts + part;
    if (part < 0 || isinf(s->highest[chunk])) return NO_TOKEN;
    const float *scores = part_at(s, chunk);
    int64_t at = 0;
    while (scores[at] != s->highest[chunk]) at++;
    return part * PART_TOKENS + at;
}

/* Parts are searched by the thread that computed them, usually. */
int best_of_scores(const float *scores, int64_t rows, int64_t vocab, int64_t stride, int64_t *best)
{
    static _Thread_local own_memory own;
    search s = {.scores = scores, .vocab = vocab, .stride = stride, .parts = num_parts(vocab)};
    s.highest = at_least(&own, rows * s.parts * sizeof(float));
    if (!s.highest) return NO_MEMORY;
    pool_run(search_part, &s, rows * s.parts);
    for (int64_t r = 0; r < rows; r++) best[r] = best_in_row(&s, r);
    return OK;
}

/* Lower bound of the best score of a part; NaN if any score is not finite. */
static void bound_part(void *context, int64_t chunk)
{
    const search *s = context;
    const float *scores = part_at(s, chunk), *norms = s->norms + chunk % s->parts * PART_TOKENS;
    const float reach = s->reach[chunk / s->parts];
    const int64_t count = part_len(s, chunk % s->parts);
    float least[VEC_LANES], surely = -INFINITY;
    vec most = vec_set(-INFINITY), off = vec_set(reach), difference = vec_set(0);
    int64_t i = 0;
    for (; i + VEC_LANES <= count; i += VEC_LANES) {
        const vec some = vec_load(scores + i);
        difference += some - some;
        most = vec_max(most, some - vec_load(norms + i) * off);
    }
    vec_store(least, most);
    float none = vec_sum(difference);
    for (int lane = 0; lane < VEC_LANES; lane++) surely = fmaxf(surely, least[lane]);
    for (; i < count; i++) {
        none += scores[i] - scores[i];
        surely = fmaxf(surely, scores[i] - norms[i] * reach);
    }
    s->highest[chunk] = none == 0 ? surely : NAN;
}

/* Whether any of these can be as good as `least`. */
static int any_reaches(const float *scores, const float *norms, float reach, float least, int64_t count)
{
    const vec off = vec_set(reach), needed = vec_set(least);
    ivec are = {0};
    int any = 0;
    int64_t i = 0;
    for (; i + VEC_LANES <= count; i += VEC_LANES)
        are |= vec_load(scores + i) + vec_load(norms + i) * off >= needed;
    for (int lane = 0; lane < VEC_LANES; lane++) any |= are[lane];
    for (; i < count; i++) any |= scores[i] + norms[i] * reach >= least;
    return any;
}

/* Compares the full scores of a panel with the best; 0 if any is NaN. */
static int refine_panel(const search *s, int64_t panel, int64_t row, found *best)
{
    quant_layer own = *s->head;
    float scores[PANEL], none = 0;
    own.packed += panel * panel_bytes(own.type, own.in_features);
    own.out_features -= panel * PANEL;
    if (own.out_features > PANEL) own.out_features = PANEL;
    if (outrider_quant_linear(&own, s->x + row * own.in_features, 1, scores)) return 0;
    for (int64_t j = 0; j < own.out_features; j++) {
        none += scores[j] - scores[j];
        if (scores[j] > best->score) *best = (found){panel * PANEL + j, scores[j]};
    }
    return none == 0;
}

/* The best candidate of a part; its score is NaN if the part cannot be searched. */
static void refine_part(void *context, int64_t chunk)
{
    const search *s = context;
    const int64_t row = chunk / s->parts, part = chunk % s->parts, count = part_len(s, part);
    const int64_t best = highest_part(s, row);
    const float *scores = part_at(s, chunk), *norms = s->norms + part * PART_TOKENS, reach = s->reach[row];
    const float least = best < 0 ? NAN : s->highest[row * s->parts + best];
    found *out = s->found + chunk;
    int panels = 0, is_certain = reach < LARGEST_REACH && !isnan(least);
    *out = (found){NO_TOKEN, -INFINITY};
    for (int64_t i = 0; i < count && is_certain; i += SOME_TOKENS) {
        const int64_t end = i + SOME_TOKENS < count ? i + SOME_TOKENS : count;
        if (!any_reaches(scores + i, norms + i, reach, least, end - i)) continue;
        for (int64_t at = i; at < end && is_certain; at += PANEL) {
            if (!any_reaches(scores + at, norms + at, reach, least, end - at < PANEL ? end - at : PANEL)) continue;
            is_certain = ++panels <= MAX_PANELS && refine_panel(s, part * (PART_TOKENS / PANEL) + at / PANEL, row, out);
        }
    }
    if (!is_certain) out->score = NAN;
}

/* The lowest id among equals; NO_TOKEN if any score is NaN. */
static int64_t best_of_found(const search *s, int64_t row)
{
    found best = {NO_TOKEN, -INFINITY};
    for (int64_t part = 0; part < s->parts; part++) {
        const found *own = s->found + row * s->parts + part;
        if (isnan(own->score)) return NO_TOKEN;
        if (own->score > best.score) best = *own;
    }
    return best.token;
}

EXPORT int outrider_quant_best(const quant_layer *head, const float *norms, const float *x, int64_t rows,
                                float *scores, int64_t *best)
{
    static _Thread_local own_memory own;
    const int64_t vocab = head->out_features, parts = num_parts(vocab), chunks = rows * parts;
    if (!norms || head->bias || !outrider_quant_has_first(head)) {
        int code = outrider_quant_linear(head, x, rows, scores);
        return code ? code : best_of_scores(scores, rows, vocab, head->out_stride, best);
    }
    found *memory = at_least(&own, chunks * (sizeof(found) + sizeof(float)) + rows * sizeof(float));
    if (!memory) return NO_MEMORY;
    float *highest = (float *)(memory + chunks), *reach = highest + chunks;
    search s = {head, norms, x, scores, vocab, head->out_stride, parts, highest, reach, memory};
    int code = quant_first(head, x, rows, scores);
    for (int64_t r = 0; r < rows; r++)
        reach[r] = quant_error(x + r * head->in_features, head->in_features / BLOCK);
    if (code) return code;
    pool_run(bound_part, &s, chunks);
    pool_run(refine_part, &s, chunks);
    for (int64_t r = 0; r < rows && !code; r++) {
        best[r] = best_of_found(&s, r);
        if (best[r] == NO_TOKEN)
            code = outrider_quant_best(head, 0, x + r * head->in_features, 1, scores, best + r);
    }
    return code;
}

/* The best token of each row; see best.c. */
#ifndef OUTRIDER_BEST_H
#define OUTRIDER_BEST_H

#include "ops.h"

#define NO_TOKEN (-1)

/* Of scores in rows `stride` apart: the lowest among equals, and NO_TOKEN where any is NaN or the
 * highest not finite. */
int best_of_scores(const float *scores, int64_t rows, int64_t vocab, int64_t stride, int64_t *best);

/* The same for the scores of a head for rows of `x`, not all of which are computed if `norms` of each
 * token's weights are given. `scores` has room for them, head->out_stride apart. */
int outrider_quant_best(const quant_layer *head, const float *norms, const float *x, int64_t rows,
                         float *scores, int64_t *best);

#endif

/* Many rows by weights of 32 or 16 bits; see many.c. */
#ifndef OUTRIDER_MANY_H
#define OUTRIDER_MANY_H

#include "halves.h"

typedef struct {
    const void *packed; /* panels of 16 outputs: [input][16 outputs] */
    int form;           /* of weights: FROM_F16 .. */
    const float *bias;  /* padded to whole panels, or null */
    int64_t out_features, in_features, out_stride;
    const float *x;
    float *out;
    int64_t rows;
} many_product;

/* Only vectors of 16 floats have registers to gain by. */
INLINE int suits_many(int64_t rows) { return VEC_LANES == 16 && rows >= 16; }

void many_linear(const many_product *product);

#endif

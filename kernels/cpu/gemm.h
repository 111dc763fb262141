/* GEMM of many rows with 32-bit or 16-bit weights; see gemm.c. */
#ifndef OUTRIDER_GEMM_H
#define OUTRIDER_GEMM_H

#include "float16.h"

typedef struct {
    const void *packed; /* panels of 16 outputs: [input][16 outputs] */
    int form;           /* of weights: FROM_F16 .. */
    const float *bias;  /* padded to whole panels, or null */
    int64_t out_features, in_features, out_stride;
    const float *x;
    float *out;
    int64_t rows;
} gemm_args;

/* Pays only with vectors of 16 floats, which have enough registers. */
INLINE int suits_gemm(int64_t rows) { return VEC_LANES == 16 && rows >= 16; }

void gemm_linear(const gemm_args *args);

#endif

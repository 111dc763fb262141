/* Weights of 16 bits; see halves.c. */
#ifndef OUTRIDER_HALVES_H
#define OUTRIDER_HALVES_H

#include "stored.h"

INLINE int is_half(int64_t type) { return type == BF16 || type == F16; }

/* Bytes of a panel: [input][16 outputs]. */
INLINE int64_t half_panel_bytes(int64_t in_features) { return in_features * PANEL * 2; }

int halves_linear(const stored_layer *l, const float *x, int64_t rows, float *out);
void halves_pack(const uint8_t *file, int64_t out_features, int64_t in_features, uint8_t *packed);
void halves_row(const stored_layer *l, int64_t row, float *out);

#endif

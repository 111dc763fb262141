/* Up to six rows of inputs by a panel of PANEL outputs in float32, which has to be defined: every
 * column vector of the panel, for row r, and for rows from 0 on. */
#ifndef OUTRIDER_TILE_ROWS_H
#define OUTRIDER_TILE_ROWS_H

#include "vec.h"

#if PANEL / VEC_LANES == 4
#define COLUMNS(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#elif PANEL / VEC_LANES == 2
#define COLUMNS(DO, r) DO(r, 0) DO(r, 1)
#else
#define COLUMNS(DO, r) DO(r, 0)
#endif
#define ROWS1(DO) COLUMNS(DO, 0)
#define ROWS2(DO) ROWS1(DO) COLUMNS(DO, 1)
#define ROWS3(DO) ROWS2(DO) COLUMNS(DO, 2)
#define ROWS4(DO) ROWS3(DO) COLUMNS(DO, 3)
#define ROWS5(DO) ROWS4(DO) COLUMNS(DO, 4)
#define ROWS6(DO) ROWS5(DO) COLUMNS(DO, 5)

#define START(r, c) vec acc##r##c = bias ? vec_load(bias + c * VEC_LANES) : (vec){0};
#define MULTIPLY(r, c) acc##r##c = vec_fma_scalar(w##c, x[r * depth + k], acc##r##c);

#endif

/* Vectors of floats in the compiler's own extension, so that one source serves every CPU. */
#ifndef OUTRIDER_VEC_H
#define OUTRIDER_VEC_H

#include <stdint.h>

#if defined(__AVX512F__)
#define VEC_LANES 16
#elif defined(__AVX__)
#define VEC_LANES 8
#else
#define VEC_LANES 4
#endif

/* aligned(4): tensors are only float-aligned, and unaligned loads cost nothing on these CPUs. */
typedef float vec __attribute__((vector_size(4 * VEC_LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * VEC_LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * VEC_LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

INLINE vec vec_load(const float *p) { return *(const vec *)p; }
INLINE void vec_store(float *p, vec v) { *(vec *)p = v; }
INLINE vec vec_set(float s) { return s - (vec){0}; }

#endif

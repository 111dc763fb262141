/* Vectors of floats in the compiler's own extension, so that one source serves every CPU. */
#ifndef OUTRIDER_VEC_H
#define OUTRIDER_VEC_H

#include <stdint.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__FMA__)
#include <immintrin.h>
#endif

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

/* a * b + c, rounded once. Spelled out wherever a sum must be the same in differently shaped loops:
 * left to itself, a compiler fuses in one loop and not in the next. */
#if defined(__aarch64__)
/* The instruction itself: compilers turn the intrinsics into moves and broadcasts around it. */
INLINE vec vec_fma(vec a, vec b, vec c)
{
    __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(a), "w"(b));
    return c;
}
INLINE vec vec_fma_scalar(vec a, float b, vec c)
{
    __asm__("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(c) : "w"(a), "w"(b));
    return c;
}
#else
INLINE vec vec_fma(vec a, vec b, vec c)
{
#if defined(__FMA__) && VEC_LANES == 16
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) && VEC_LANES == 8
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}
INLINE vec vec_fma_scalar(vec a, float b, vec c) { return vec_fma(a, vec_set(b), c); }
#endif

/* Over the lanes, always in the same order: where there are many, not one after the other, since each
 * addition waits for the one before. */
INLINE float vec_sum(vec v)
{
#if defined(__FMA__) && VEC_LANES == 16
    return _mm512_reduce_add_ps(v);
#elif defined(__FMA__) && VEC_LANES == 8
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float total = 0;
    for (int i = 0; i < VEC_LANES; i++) total += v[i];
    return total;
#endif
}

#endif

/* exp and log of vectors, to about two ulp, without tables, branches or libm. */
#ifndef OUTRIDER_VECMATH_H
#define OUTRIDER_VECMATH_H

#include "vec.h"

#define LN2_HIGH 0.693359375f /* few bits: its product with an exponent is exact */
#define LN2_LOW (-2.12194440e-4f)

/* mask lanes are all ones or all zeros, as comparisons yield them */
INLINE vec vec_select(ivec mask, vec yes, vec no)
{
    return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask));
}

#if defined(__aarch64__)
INLINE vec vec_max(vec a, vec b) { return vmaxnmq_f32(a, b); }
INLINE vec vec_min(vec a, vec b) { return vminnmq_f32(a, b); }
#elif defined(__FMA__) && VEC_LANES == 16
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
#elif defined(__FMA__) && VEC_LANES == 8
INLINE vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }
#else
INLINE vec vec_max(vec a, vec b) { return vec_select(a > b, a, b); }
INLINE vec vec_min(vec a, vec b) { return vec_select(a < b, a, b); }
#endif

INLINE vec vec_to_float(ivec v) { return __builtin_convertvector(v, vec); }

/* Vectors interleaved step by step: a step depends on the one before, but not on those of other
 * vectors. */
#if VEC_LANES == 4
#define AT_ONCE 4
#elif VEC_LANES == 8
#define AT_ONCE 2
#else
#define AT_ONCE 1
#endif
#define EACH(i) _Pragma("GCC unroll 4") for (int i = 0; i < AT_ONCE; i++)

/* Of each its exp. Below -87 the result is zero, which is what a softmax makes of it anyway. */
INLINE void vec_exps(vec x[AT_ONCE])
{
    /* Adding `shift` leaves the nearest integer n in the low bits of the mantissa. */
    const float shift = 12582912.0f;
    vec shifted[AT_ONCE], r[AT_ONCE], p[AT_ONCE];
    EACH(i) r[i] = vec_max(vec_min(x[i], vec_set(88.0f)), vec_set(-87.0f));
    EACH(i) shifted[i] = vec_fma(r[i], vec_set(1.44269504f), vec_set(shift));
    EACH(i) r[i] = vec_fma(shifted[i] - shift, vec_set(-LN2_HIGH), r[i]);
    EACH(i) r[i] = vec_fma(shifted[i] - shift, vec_set(-LN2_LOW), r[i]);
    EACH(i) p[i] = vec_fma(vec_set(1.9875691500e-4f), r[i], vec_set(1.3981999507e-3f));
    EACH(i) p[i] = vec_fma(p[i], r[i], vec_set(8.3334519073e-3f));
    EACH(i) p[i] = vec_fma(p[i], r[i], vec_set(4.1665795894e-2f));
    EACH(i) p[i] = vec_fma(p[i], r[i], vec_set(1.6666665459e-1f));
    EACH(i) p[i] = vec_fma(p[i], r[i], vec_set(5.0000001201e-1f));
    EACH(i) p[i] = vec_fma(p[i] * r[i], r[i], r[i]) + 1.0f;
    EACH(i) p[i] *= (vec)(((ivec)shifted[i] << 23) + (127 << 23));
    EACH(i) x[i] = (vec)((ivec)p[i] & (x[i] >= -87.0f));
}

INLINE vec vec_exp(vec x)
{
    vec all[AT_ONCE] = {x};
    vec_exps(all);
    return all[0];
}

/* 2 atanh(s) for |s| < 0.172, so that log((1 + s) / (1 - s)) needs no table. */
INLINE vec vec_log_ratio(vec s)
{
    vec z = s * s;
    vec p = vec_set(2.0f / 9.0f);
    p = p * z + 2.0f / 7.0f;
    p = p * z + 2.0f / 5.0f;
    p = p * z + 2.0f / 3.0f;
    return (p * z) * s + 2.0f * s;
}

/* x = 2^exponent * m with m in [sqrt(1/2), sqrt(2)), for positive normal x. */
INLINE vec vec_split(vec x, vec *exponent)
{
    ivec bits = (ivec)x;
    ivec e = (bits - 0x3f3504f3) >> 23;
    *exponent = vec_to_float(e);
    return (vec)(bits - (e << 23));
}

INLINE vec vec_log(vec x)
{
    vec n, m = vec_split(x, &n);
    vec s = (m - 1.0f) / (m + 1.0f);
    return n * LN2_HIGH + (n * LN2_LOW + vec_log_ratio(s));
}

#endif

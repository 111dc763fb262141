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

/* Below -87 the result is zero, which is what a softmax makes of it anyway. */
INLINE vec vec_exp(vec x)
{
    /* Adding `shift` leaves the nearest integer n in the low bits of the mantissa. */
    const float shift = 12582912.0f;
    vec y = vec_max(vec_min(x, vec_set(88.0f)), vec_set(-87.0f));
    vec shifted = y * 1.44269504f + shift;
    vec n = shifted - shift;
    vec r = y - n * LN2_HIGH;
    r = r - n * LN2_LOW;
    vec p = vec_set(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vec e = (p * r) * r + r + 1.0f;
    ivec scale = ((ivec)shifted << 23) + (127 << 23);
    return (vec)((ivec)(e * (vec)scale) & (x >= -87.0f));
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

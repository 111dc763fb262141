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

INLINE vec vec_max(vec a, vec b) { return vec_select(a > b, a, b); }

INLINE vec vec_to_float(ivec v) { return __builtin_convertvector(v, vec); }

/* Nearest integer of |x| < 2^22, as a float: the addend pushes the fraction out of the mantissa. */
INLINE vec vec_round(vec x)
{
    const vec shift = vec_set(12582912.0f);
    return (x + shift) - shift;
}

/* Below -87 the result is zero, which is what a softmax makes of it anyway. */
INLINE vec vec_exp(vec x)
{
    ivec tiny = x < -87.0f;
    x = vec_select(x > 88.0f, vec_set(88.0f), vec_select(tiny, vec_set(-87.0f), x));
    vec n = vec_round(x * 1.44269504f);
    vec r = x - n * LN2_HIGH;
    r = r - n * LN2_LOW;
    vec p = vec_set(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vec e = (p * r) * r + r + 1.0f;
    ivec scale = (__builtin_convertvector(n, ivec) + 127) << 23;
    return vec_select(tiny, (vec){0}, e * (vec)scale);
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

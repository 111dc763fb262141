/* One row by a block of one quad, in assembly.
 *
 * A sum of bytes begins not with 0 but with the bits of a float, 1.5 * 2^23 times a power of two:
 * added to these bits, an integer below 2^22 is added to the float in units of its last place. So the
 * sums of the three bytes of X begin with floats whose last places are 2^16, 2^8 and 1 times the
 * row's scale, and less these floats they are to be added up: no conversion and no multiplication.
 * For weights of fewer than 8 bits the floats are taken off all at once, before the sums are added
 * up: nothing is rounded but the last addition (of 8 bits the last but one rounds, too, as the other
 * paths do).
 *
 * Instructions, because compilers copy registers from one intrinsic to the next, and every copy takes
 * the place of a product. A row's sums are added up while the products of the next run. */
#ifndef OUTRIDER_QUANT_NEON_H
#define OUTRIDER_QUANT_NEON_H

#include "quant.h"

#include <stddef.h>

/* Whole: what is left a loop keeps sums in memory. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef struct {
    float32x4_t first, second, third; /* by the bytes of X */
} digit_sums;

#define LOAD(to, from, at) "ldr %" #to ", [%[" #from "], #" #at "]\n"
#define STARTS LOAD(q[first], x, 96) LOAD(q[second], x, 112) LOAD(q[third], x, 128)
_Static_assert(offsetof(x_block, starts) == 96, "STARTS");
#define X_0 LOAD(q[x0], bytes, 0) LOAD(q[x1], bytes, 32) LOAD(q[x2], bytes, 64)
#define X_1 LOAD(q[x0], bytes, 16) LOAD(q[x1], bytes, 48) LOAD(q[x2], bytes, 80)
#define DOT(sum, x, g, at) "sdot %[" #sum "].4s, %[w" #g "].16b, %[" #x "].4b[" #at "]\n"
#define DOTS(g, at) DOT(first, x0, g, at) DOT(second, x1, g, at) DOT(third, x2, g, at)

#define ADD(to, what) "fadd %[" #to "].4s, %[" #to "].4s, %[" #what "].4s\n"
#define LESS_STARTS LOAD(q[rest], before, 144) ADD(old_first, rest)
_Static_assert(offsetof(x_block, minus_starts) == 144, "LESS_STARTS");
#define LESS_LAST LOAD(q[rest], before, 128) "fsub %[old_third].4s, %[old_third].4s, %[rest].4s\n"
#define PLUS_SECOND ADD(old_first, old_second)
#define PLUS_THIRD ADD(old_first, old_third)

/* Four steps that add up the sums of the row before. */
#define FINISH(type, DO)                                                                   \
    if (quant_bits(type) == 8) DO(LESS_STARTS, LESS_LAST, PLUS_SECOND, PLUS_THIRD); \
    else DO(LESS_STARTS, PLUS_SECOND, PLUS_THIRD, "")

#define BESIDE_BLOCK(a, b, c, d)                                                                 \
    __asm__(STARTS X_0 DOTS(0, 0) DOTS(1, 1) DOTS(2, 2) a DOTS(3, 3) b X_1 DOTS(4, 0) c DOTS(5, 1) d \
                DOTS(6, 2) DOTS(7, 3)                                                            \
            : NEW_OUT, OLD_OUT                                                                   \
            : NEW_IN, REST_IN, OLD_IN)
#define BESIDE_HALF(a, b, c, d)                                           \
    __asm__(STARTS X_0 DOTS(0, 0) DOTS(1, 1) a DOTS(2, 2) b c d DOTS(3, 3) \
            : NEW_OUT, OLD_OUT                                            \
            : NEW_IN, OLD_IN)

#define OLD_OUT [old_first] "+&w"(old.first), [old_third] "+&w"(old.third), [rest] "=&w"(rest)
#define OLD_IN [old_second] "w"(old.second), [before] "r"(before), "m"(*before)
#define NEW_OUT                                                                                 \
    [first] "=&w"(new.first), [second] "=&w"(new.second), [third] "=&w"(new.third), [x0] "=&w"(x0), \
        [x1] "=&w"(x1), [x2] "=&w"(x2)
#define NEW_IN FIRST_IN, [bytes] "r"(bytes), [x] "r"(x), "m"(*x)
#define FIRST_IN [w0] "w"(w[0]), [w1] "w"(w[1]), [w2] "w"(w[2]), [w3] "w"(w[3])
#define REST_IN [w4] "w"(w[4]), [w5] "w"(w[5]), [w6] "w"(w[6]), [w7] "w"(w[7])

/* The same steps with no products beside them. */
INLINE float32x4_t finish(int type, digit_sums old, const x_block *before)
{
    float32x4_t sum = vaddq_f32(old.first, vld1q_f32(before->minus_starts));
    if (quant_bits(type) == 8) old.third = vsubq_f32(old.third, vld1q_f32(before->starts[2]));
    return vaddq_f32(vaddq_f32(sum, old.second), old.third);
}

/* Sums of a whole block, or of a half with Q6_K. */
INLINE digit_sums begin_sums(int type, const int8x16_t *w, const x_block *x, const int8_t *bytes)
{
    digit_sums new;
    int8x16_t x0, x1, x2;
    if (type == Q6_K)
        __asm__(STARTS X_0 DOTS(0, 0) DOTS(1, 1) DOTS(2, 2) DOTS(3, 3) : NEW_OUT : NEW_IN);
    else
        __asm__(STARTS X_0 DOTS(0, 0) DOTS(1, 1) DOTS(2, 2) DOTS(3, 3) X_1 DOTS(4, 0) DOTS(5, 1)
                    DOTS(6, 2) DOTS(7, 3)
                : NEW_OUT
                : NEW_IN, REST_IN);
    return new;
}

/* Sums of a whole block by the first byte of two rows of X. They begin with `starts` as well. */
INLINE void two_first_sums(const int8x16_t *w, const x_block *x, float32x4_t sums[2])
{
    const x_block *y = x + 1;
    int8x16_t x0, x1;
#define TWO_DOTS(g, at) DOT(first, x0, g, at) DOT(second, x1, g, at)
#define TWO_X(at) LOAD(q[x0], x, at) LOAD(q[x1], y, at)
    __asm__(LOAD(q[first], x, 96) LOAD(q[second], y, 96) TWO_X(0) TWO_DOTS(0, 0) TWO_DOTS(1, 1)
                TWO_DOTS(2, 2) TWO_DOTS(3, 3) TWO_X(16) TWO_DOTS(4, 0) TWO_DOTS(5, 1) TWO_DOTS(6, 2)
                    TWO_DOTS(7, 3)
            : [first] "=&w"(sums[0]), [second] "=&w"(sums[1]), [x0] "=&w"(x0), [x1] "=&w"(x1)
            : FIRST_IN, REST_IN, [x] "r"(x), [y] "r"(y), "m"(*x), "m"(*y));
}
_Static_assert(offsetof(x_block, bytes) == 0, "TWO_X");

/* As begin_sums, finishing those before meanwhile. */
INLINE digit_sums next_sums(int type, const int8x16_t *w, const x_block *x, const int8_t *bytes,
                            digit_sums old, const x_block *before, float32x4_t *finished)
{
    digit_sums new;
    float32x4_t rest;
    int8x16_t x0, x1, x2;
    if (type == Q6_K) FINISH(type, BESIDE_HALF);
    else FINISH(type, BESIDE_BLOCK);
    *finished = old.first;
    return new;
}

#endif

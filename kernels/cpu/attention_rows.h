/* Inner loops of attention: products of a few rows with keys, and weighted sums of values. */
#ifndef OUTRIDER_ATTENTION_ROWS_H
#define OUTRIDER_ATTENTION_ROWS_H

#include "attention_tile.h"

#define COLUMN 16 /* head_dim is a multiple of it */
#define LINE 16   /* floats that memory hands over together */

/* Keys at once, and columns of values: as many as registers hold. */
#define KEYS4(EACH, ROWS, DO) EACH(ROWS, DO, 0) EACH(ROWS, DO, 1) EACH(ROWS, DO, 2) EACH(ROWS, DO, 3)
#define KEYS8(EACH, ROWS, DO) \
    KEYS4(EACH, ROWS, DO) EACH(ROWS, DO, 4) EACH(ROWS, DO, 5) EACH(ROWS, DO, 6) EACH(ROWS, DO, 7)
#define VECTORS1(EACH, ROWS, DO) EACH(ROWS, DO, 0)
#define VECTORS2(EACH, ROWS, DO) VECTORS1(EACH, ROWS, DO) EACH(ROWS, DO, 1)
#define VECTORS4 KEYS4
#define VECTORS8 KEYS8
#define ROWS1(DO, i) DO(0, i)
#define ROWS2(DO, i) ROWS1(DO, i) DO(1, i)
#define ROWS3(DO, i) ROWS2(DO, i) DO(2, i)
#define ROWS4(DO, i) ROWS3(DO, i) DO(3, i)
#define OF_ROWS(ROWS, DO, i) ROWS(DO, i)
#if VEC_LANES == 16
#define NARROW VECTORS1
#define WIDE VECTORS4
#elif VEC_LANES == 8
#define NARROW VECTORS2
#define WIDE VECTORS2
#else
#define NARROW VECTORS4
#define WIDE VECTORS8
#endif

/* The sums over the lanes of four vectors. */
INLINE void store_sums(float *out, vec a, vec b, vec c, vec d)
{
#if defined(__aarch64__)
    vec_store(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#elif defined(__FMA__) && VEC_LANES == 16
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d first = _mm512_castps_pd(ab), second = _mm512_castps_pd(cd);
    vec all = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second)) +
              _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), upper);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__FMA__) && VEC_LANES == 8
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    const vec v[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) out[i] = vec_sum(v[i]);
#endif
}

#define DOT_ROW(r, _) const float *q##r = q[r];
#define DOT_KEY(ROWS, DO, k) const float *key##k = key[k] + offset;
#define DOT_START(r, k) vec dot##r##k = {0};
#define DOT_QUERY(r, _) const vec now##r = vec_load(q##r + d);
#define DOT_ADD(r, k) dot##r##k = vec_fma(now##r, one, dot##r##k);
#define DOT_ADDS(ROWS, DO, k)                \
    {                                        \
        const vec one = vec_load(key##k + d); \
        ROWS(DO, k)                          \
    }
#define DOT_STORE4(r, _) store_sums(score + r * CHUNK, dot##r##0, dot##r##1, dot##r##2, dot##r##3);
#define DOT_STORE8(r, _) \
    DOT_STORE4(r, _) store_sums(score + r * CHUNK + 4, dot##r##4, dot##r##5, dot##r##6, dot##r##7);

/* Into the first-level cache where that is large enough for it. */
#if defined(__aarch64__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) __builtin_prefetch(address, 0, 2)
#endif
#define DOT_PREFETCH(ROWS, DO, k) PREFETCH(ahead[k] + offset + line);

/* score[row][key] for a few rows and keys. Keys at `ahead`, if any, are prefetched: the KV cache is
 * read once per pass, so it is not in the cache yet. */
#define DOTS(rows, keys)                                                                             \
    static void dots##rows(const float *const *q, const float *const *key, long offset, long dim,    \
                           float *score, const float *const *ahead)                                  \
    {                                                                                                \
        ROWS##rows(DOT_ROW, _)                                                                       \
        KEYS##keys(DOT_KEY, _, _)                                                                    \
        KEYS##keys(OF_ROWS, ROWS##rows, DOT_START)                                                   \
        for (long line = 0; line < dim; line += LINE) {                                              \
            if (ahead) {                                                                             \
                KEYS##keys(DOT_PREFETCH, _, _)                                                            \
            }                                                                                        \
            for (long d = line; d < line + LINE; d += VEC_LANES) {                                   \
                ROWS##rows(DOT_QUERY, _)                                                             \
                KEYS##keys(DOT_ADDS, ROWS##rows, DOT_ADD)                                            \
            }                                                                                        \
        }                                                                                            \
        ROWS##rows(DOT_STORE##keys, _)                                                               \
    }
#if defined(__aarch64__)
#define MAX_KEYS 8
DOTS(1, 8)
DOTS(2, 8)
DOTS(3, 8)
#else
#define MAX_KEYS 4
DOTS(1, 4)
DOTS(2, 4)
DOTS(3, 4)
#endif
DOTS(4, 4)

#define MIX_ROW(r, _) float *const sum##r = partial_at(a, out, r)->sum + d;
#define MIX_START(r, c) vec sum##r##_##c = {0};
#define MIX_LOAD(r, c) sum##r##_##c = vec_load(sum##r + c * VEC_LANES);
#define MIX_WEIGHT(r, _) const float weight##r = weight[r * CHUNK + j];
#define MIX_ADD(r, c) sum##r##_##c = vec_fma_scalar(one, weight##r, sum##r##_##c);
#define MIX_ADDS(ROWS, DO, c)                             \
    {                                                     \
        const vec one = vec_load(from + c * VEC_LANES);   \
        ROWS(DO, c)                                       \
    }
#define MIX_PREFETCH(ROWS, DO, c) \
    if (c * VEC_LANES % LINE == 0) PREFETCH(ahead[j] + offset + d + c * VEC_LANES);
#define MIX_STORE(r, c) vec_store(sum##r + c * VEC_LANES, sum##r##_##c);

/* sum[row][d ..] += weight[row][key] * value[key][d ..] for a few rows and COLUMNS of values; the first
 * keys start from zero. */
#define MIX(name, rows, COLUMNS)                                                                    \
    static void name##rows(const attention *a, const float *weight, const float *const *value,      \
                           long offset, long keys, long d, void *out, int is_first,                 \
                           const float *const *ahead)                                               \
    {                                                                                               \
        ROWS##rows(MIX_ROW, _)                                                                      \
        COLUMNS(OF_ROWS, ROWS##rows, MIX_START)                                                     \
        if (!is_first) {                                                                            \
            COLUMNS(OF_ROWS, ROWS##rows, MIX_LOAD)                                                  \
        }                                                                                           \
        for (long j = 0; j < keys; j++) {                                                           \
            const float *from = value[j] + offset + d;                                              \
            if (ahead) {                                                                            \
                COLUMNS(MIX_PREFETCH, _, _)                                                              \
            }                                                                                       \
            ROWS##rows(MIX_WEIGHT, _)                                                               \
            COLUMNS(MIX_ADDS, ROWS##rows, MIX_ADD)                                                  \
        }                                                                                           \
        COLUMNS(OF_ROWS, ROWS##rows, MIX_STORE)                                                     \
    }
MIX(narrow, 1, NARROW)
MIX(narrow, 2, NARROW)
MIX(narrow, 3, NARROW)
MIX(narrow, 4, NARROW)
MIX(wide, 1, WIDE)
MIX(wide, 2, WIDE)
MIX(wide, 3, WIDE)
#if VEC_LANES == 4 /* 32 sums would leave no register */
#define wide4 narrow4
#define WIDE_COLUMN(rows) (rows == 4 ? COLUMN : 2 * COLUMN)
#else
MIX(wide, 4, WIDE)
#define WIDE_COLUMN(rows) (VEC_LANES == 16 ? 4 * COLUMN : COLUMN)
#endif

typedef void dots_fn(const float *const *q, const float *const *key, long offset, long dim, float *score,
                     const float *const *ahead);
typedef void mix_fn(const attention *a, const float *weight, const float *const *value, long offset,
                    long keys, long d, void *out, int is_first, const float *const *ahead);
static dots_fn *const DOT[] = {0, dots1, dots2, dots3, dots4};
static mix_fn *const ADD[] = {0, narrow1, narrow2, narrow3, narrow4};
static mix_fn *const ADD_WIDE[] = {0, wide1, wide2, wide3, wide4};

#endif

/* Norms, activations, rotation: one pass over each row, in a fixed order within the row. */
#include "ops.h"
#include "pool.h"
#include "vecmath.h"

#include <math.h>
#include <string.h>

/* Floats of a chunk of rows: less is not worth handing to another thread. */
#define CHUNK_FLOATS 1536
#define CHUNK_FLOATS_EXP (192 * VEC_LANES) /* a multiple of AT_ONCE vectors */

typedef struct {
    const float *x, *residual, *weight, *bias;
    float *out, *total;
    int64_t rows, width, rows_per_chunk;
    float eps;
} rowwise;

static float sum_of_squares(const float *x, long n)
{
    vec a = {0}, b = {0};
    long i = 0;
    for (; i + 2 * VEC_LANES <= n; i += 2 * VEC_LANES) {
        vec u = vec_load(x + i), v = vec_load(x + i + VEC_LANES);
        a += u * u;
        b += v * v;
    }
    float total = vec_sum(a + b);
    for (; i < n; i++) total += x[i] * x[i];
    return total;
}

static void rms_norm_row(const float *x, const float *weight, long n, float eps, float *out)
{
    float scale = 1.0f / sqrtf(sum_of_squares(x, n) / n + eps);
    for (long i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

#define EACH_ROW(name, one_row)                                                     \
    static void name(void *context, int64_t chunk)                                  \
    {                                                                               \
        const rowwise *a = context;                                                 \
        int64_t begin = chunk * a->rows_per_chunk, end = begin + a->rows_per_chunk; \
        for (int64_t r = begin; r < end && r < a->rows; r++) one_row(a, r);         \
    }

static void run_rows(pool_task *task, rowwise a, int64_t chunk_floats)
{
    a.rows_per_chunk = chunk_floats / a.width + 1;
    pool_run(task, &a, (a.rows + a.rows_per_chunk - 1) / a.rows_per_chunk);
}

INLINE void rms_norm_one(const rowwise *a, int64_t r)
{
    rms_norm_row(a->x + r * a->width, a->weight, a->width, a->eps, a->out + r * a->width);
}
EACH_ROW(rms_norm_rows, rms_norm_one)

EXPORT void outrider_rms_norm(const float *x, const float *weight, int64_t rows, int64_t width,
                              float eps, float *out)
{
    rowwise a = {.x = x, .weight = weight, .out = out, .rows = rows, .width = width, .eps = eps};
    run_rows(rms_norm_rows, a, CHUNK_FLOATS);
}

INLINE void add_rms_norm_one(const rowwise *a, int64_t r)
{
    long n = a->width;
    const float *x = a->x + r * n, *residual = a->residual + r * n;
    float *total = a->total + r * n;
    for (long i = 0; i < n; i++) total[i] = x[i] + residual[i];
    rms_norm_row(total, a->weight, n, a->eps, a->out + r * n);
}
EACH_ROW(add_rms_norm_rows, add_rms_norm_one)

EXPORT void outrider_add_rms_norm(const float *x, const float *residual, const float *weight,
                                  int64_t rows, int64_t width, float eps, float *out, float *total)
{
    rowwise a = {.x = x, .residual = residual, .weight = weight, .out = out, .total = total,
                 .rows = rows, .width = width, .eps = eps};
    run_rows(add_rms_norm_rows, a, CHUNK_FLOATS);
}

INLINE void layer_norm_one(const rowwise *a, int64_t r)
{
    const float *x = a->x + r * a->width;
    float *out = a->out + r * a->width;
    long n = a->width, i = 0;
    vec sums = {0};
    for (; i + VEC_LANES <= n; i += VEC_LANES) sums += vec_load(x + i);
    float mean = vec_sum(sums);
    for (; i < n; i++) mean += x[i];
    mean /= n;
    for (i = 0; i < n; i++) out[i] = x[i] - mean;
    float scale = 1.0f / sqrtf(sum_of_squares(out, n) / n + a->eps);
    for (i = 0; i < n; i++) out[i] = out[i] * scale * a->weight[i] + (a->bias ? a->bias[i] : 0.0f);
}
EACH_ROW(layer_norm_rows, layer_norm_one)

EXPORT void outrider_layer_norm(const float *x, const float *weight, const float *bias,
                                int64_t rows, int64_t width, float eps, float *out)
{
    rowwise a = {.x = x, .weight = weight, .bias = bias, .out = out,
                 .rows = rows, .width = width, .eps = eps};
    run_rows(layer_norm_rows, a, CHUNK_FLOATS);
}

/* out = silu(gate) * up for AT_ONCE vectors. */
INLINE void silu_mul(const float *gate, const float *up, float *out)
{
    vec e[AT_ONCE];
    EACH(i) e[i] = -vec_load(gate + i * VEC_LANES);
    vec_exps(e);
    EACH(i) {
        const vec g = vec_load(gate + i * VEC_LANES), u = vec_load(up + i * VEC_LANES);
        vec_store(out + i * VEC_LANES, g / (1.0f + e[i]) * u);
    }
}

/* `n` columns of a row. */
static void silu_mul_part(const float *gate, long width, long n, float *out)
{
    const float *up = gate + width;
    long i = 0;
    for (; i + AT_ONCE * VEC_LANES <= n; i += AT_ONCE * VEC_LANES) silu_mul(gate + i, up + i, out + i);
    if (i == n) return;
    float edge[3][AT_ONCE * VEC_LANES] = {{0}};
    memcpy(edge[0], gate + i, (n - i) * sizeof(float));
    memcpy(edge[1], up + i, (n - i) * sizeof(float));
    silu_mul(edge[0], edge[1], edge[2]);
    memcpy(out + i, edge[2], (n - i) * sizeof(float));
}

static int64_t silu_parts(const rowwise *a) { return (a->width + CHUNK_FLOATS_EXP - 1) / CHUNK_FLOATS_EXP; }

static void silu_mul_chunk(void *context, int64_t chunk)
{
    const rowwise *a = context;
    const int64_t r = chunk / silu_parts(a), first = chunk % silu_parts(a) * CHUNK_FLOATS_EXP;
    const int64_t left = a->width - first, n = left < CHUNK_FLOATS_EXP ? left : CHUNK_FLOATS_EXP;
    silu_mul_part(a->x + 2 * r * a->width + first, a->width, n, a->out + r * a->width + first);
}

EXPORT void outrider_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *out)
{
    rowwise a = {.x = gate_up, .out = out, .rows = rows, .width = width};
    pool_run(silu_mul_chunk, &a, rows * silu_parts(&a));
}

/* Rounding to fp8 (e4m3) and back. |v| <= 448 has 3 bits below its first one, or multiples of 2^-9;
 * adding and subtracting 1.5 * 2^23 of these steps rounds to one, ties to even. */
#define FP8_MAX 448.0f

INLINE float fp8_rounded(float v)
{
    v = v > FP8_MAX ? FP8_MAX : v < -FP8_MAX ? -FP8_MAX : v;
    uint32_t bits;
    float power;
    memcpy(&bits, &v, 4);
    bits &= 0x7f800000;
    memcpy(&power, &bits, 4);
    const float step = power < 0x1p-6f ? 0x1p-9f : power * 0x1p-3f, magic = step * 0x1.8p23f;
    return (v + magic) - magic;
}

/* By the bits without the sign, which are ordered like the numbers; NaN is above them. */
static float largest_of(const float *x, long n)
{
    int32_t most = 0;
    for (long i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    return largest;
}

typedef struct {
    const float *x;
    int64_t width, group;
    float scale; /* 0: the largest of a group becomes FP8_MAX */
    float *out;
} fake_quant;

static void fake_quantize_row(void *context, int64_t row)
{
    const fake_quant *a = context;
    for (int64_t start = 0; start < a->width; start += a->group) {
        const int64_t left = a->width - start, n = left < a->group ? left : a->group;
        const float *x = a->x + row * a->width + start;
        float *out = a->out + row * a->width + start, scale = a->scale;
        if (scale == 0) {
            scale = largest_of(x, n) / FP8_MAX;
            if (scale < 0x1p-126f) scale = 1;
        }
        for (long i = 0; i < n; i++) out[i] = fp8_rounded(x[i] / scale) * scale;
    }
}

/* Activations rounded to fp8 and back; see ActivationScheme in quantized.py. */
EXPORT void outrider_fake_quantize(const float *x, int64_t rows, int64_t width, int64_t group,
                                   float scale, float *out)
{
    fake_quant a = {.x = x, .width = width, .group = group, .scale = scale, .out = out};
    pool_run(fake_quantize_row, &a, rows);
}

static void rotate_head(const rotation *a, const float *x, const float *norm, int64_t position,
                        float *out)
{
    long half = a->head_dim / 2;
    if (norm) {
        rms_norm_row(x, norm, a->head_dim, a->norm_eps, out);
        x = out;
    }
    if (!a->cos) {
        if (x != out) memcpy(out, x, a->head_dim * sizeof(float));
        return;
    }
    const float *cos = a->cos + position * half, *sin = a->sin + position * half;
    for (long j = 0; j < half; j++) {
        float first = x[j], second = x[j + half];
        out[j] = first * cos[j] - second * sin[j];
        out[j + half] = second * cos[j] + first * sin[j];
    }
}

typedef struct {
    const rotation *rotation;
    const ragged_batch *batch;
    const float *qkv;
    float *q;
    int64_t tokens_per_chunk;
} rotating;

static void rotate_token(const rotating *w, int64_t t)
{
    const rotation *a = w->rotation;
    long dim = a->head_dim, heads = a->heads, kv_heads = a->kv_heads;
    int64_t position = w->batch->positions[t], slot = w->batch->slots[t];
    const float *from = w->qkv + t * (heads + 2 * kv_heads) * dim;
    const float *k = from + heads * dim, *v = k + kv_heads * dim;
    float *q = w->q + t * heads * dim;
    for (long h = 0; h < heads; h++)
        rotate_head(a, from + h * dim, a->q_norm, position, q + h * dim);
    int64_t block = slot / a->block_size, offset = slot % a->block_size;
    for (long h = 0; h < kv_heads; h++) {
        long at = block * a->block_stride + (h * a->block_size + offset) * dim;
        rotate_head(a, k + h * dim, a->k_norm, position, a->key_cache + at);
        memcpy(a->value_cache + at, v + h * dim, dim * sizeof(float));
    }
}

static void rotate_tokens(void *context, int64_t chunk)
{
    const rotating *w = context;
    int64_t begin = chunk * w->tokens_per_chunk, end = begin + w->tokens_per_chunk;
    for (int64_t t = begin; t < end && t < w->batch->tokens; t++) rotate_token(w, t);
}

EXPORT int outrider_rotate_and_store(const rotation *a, const ragged_batch *batch,
                                     const float *qkv, float *q)
{
    for (int64_t t = 0; t < batch->tokens; t++) {
        if (batch->slots[t] < 0 || batch->slots[t] >= a->num_slots) return BAD_SLOT;
        if (a->cos && (batch->positions[t] < 0 || batch->positions[t] >= a->max_position))
            return BAD_POSITION;
    }
    int64_t width = (a->heads + 2 * a->kv_heads) * a->head_dim;
    rotating w = {a, batch, qkv, q, CHUNK_FLOATS / width + 1};
    pool_run(rotate_tokens, &w, (batch->tokens + w.tokens_per_chunk - 1) / w.tokens_per_chunk);
    return OK;
}

/* Norms, activations, rotation: one pass over each row, always the same order within a row. */
#include "batch.h"
#include "vecmath.h"

#include <math.h>
#include <string.h>

/* Work below this many floats is not worth waking other threads. */
#define PARALLEL_FLOATS 32768

INLINE float vec_sum(vec v)
{
    float total = 0;
    for (int i = 0; i < VEC_LANES; i++) total += v[i];
    return total;
}

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

EXPORT void outrider_rms_norm(const float *x, const float *weight, long rows, long n, float eps,
                              float *out)
{
#pragma omp parallel for if (rows * n > PARALLEL_FLOATS)
    for (long r = 0; r < rows; r++) rms_norm_row(x + r * n, weight, n, eps, out + r * n);
}

EXPORT void outrider_add_rms_norm(const float *x, const float *residual, const float *weight,
                                  long rows, long n, float eps, float *out, float *total)
{
#pragma omp parallel for if (rows * n > PARALLEL_FLOATS)
    for (long r = 0; r < rows; r++) {
        for (long i = r * n; i < r * n + n; i++) total[i] = x[i] + residual[i];
        rms_norm_row(total + r * n, weight, n, eps, out + r * n);
    }
}

EXPORT void outrider_layer_norm(const float *x, const float *weight, const float *bias, long rows,
                                long n, float eps, float *out)
{
#pragma omp parallel for if (rows * n > PARALLEL_FLOATS)
    for (long r = 0; r < rows; r++) {
        const float *in = x + r * n;
        float *row = out + r * n;
        vec sums = {0};
        long i = 0;
        for (; i + VEC_LANES <= n; i += VEC_LANES) sums += vec_load(in + i);
        float mean = vec_sum(sums);
        for (; i < n; i++) mean += in[i];
        mean /= n;
        for (i = 0; i < n; i++) row[i] = in[i] - mean;
        float scale = 1.0f / sqrtf(sum_of_squares(row, n) / n + eps);
        for (i = 0; i < n; i++) row[i] = row[i] * scale * weight[i] + (bias ? bias[i] : 0.0f);
    }
}

INLINE vec silu(vec gate) { return gate / (1.0f + vec_exp(-gate)); }

EXPORT void outrider_silu_mul(const float *gate_up, long rows, long n, float *out)
{
#pragma omp parallel for if (rows * n > PARALLEL_FLOATS / 8)
    for (long r = 0; r < rows; r++) {
        const float *gate = gate_up + 2 * r * n, *up = gate + n;
        float *row = out + r * n;
        long i = 0;
        for (; i + VEC_LANES <= n; i += VEC_LANES)
            vec_store(row + i, silu(vec_load(gate + i)) * vec_load(up + i));
        if (i == n) continue;
        float edge[2][VEC_LANES] = {{0}};
        memcpy(edge[0], gate + i, (n - i) * sizeof(float));
        memcpy(edge[1], up + i, (n - i) * sizeof(float));
        vec last = silu(vec_load(edge[0])) * vec_load(edge[1]);
        memcpy(row + i, &last, (n - i) * sizeof(float));
    }
}

typedef struct {
    const float *cos, *sin; /* [max_position, head_dim / 2], or null */
    const float *q_norm, *k_norm;
    float *key_cache, *value_cache;
    int64_t max_position, num_slots, heads, kv_heads, head_dim, block_size;
    float norm_eps;
} rotation;

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

static void rotate_token(const rotation *a, const ragged_batch *batch, int64_t t, const float *qkv,
                         float *q)
{
    long dim = a->head_dim, heads = a->heads, kv_heads = a->kv_heads;
    int64_t position = batch->positions[t];
    const float *k = qkv + heads * dim, *v = k + kv_heads * dim;
    for (long h = 0; h < heads; h++)
        rotate_head(a, qkv + h * dim, a->q_norm, position, q + h * dim);
    int64_t block = batch->slots[t] / a->block_size, offset = batch->slots[t] % a->block_size;
    for (long h = 0; h < kv_heads; h++) {
        long at = ((block * kv_heads + h) * a->block_size + offset) * dim;
        rotate_head(a, k + h * dim, a->k_norm, position, a->key_cache + at);
        memcpy(a->value_cache + at, v + h * dim, dim * sizeof(float));
    }
}

EXPORT int outrider_rotate_and_store(const rotation *a, const ragged_batch *batch,
                                     const float *qkv, float *q)
{
    for (int64_t t = 0; t < batch->tokens; t++) {
        if (batch->slots[t] < 0 || batch->slots[t] >= a->num_slots) return BAD_SLOT;
        if (a->cos && (batch->positions[t] < 0 || batch->positions[t] >= a->max_position))
            return BAD_POSITION;
    }
    long width = (a->heads + 2 * a->kv_heads) * a->head_dim, q_width = a->heads * a->head_dim;
#pragma omp parallel for if (batch->tokens * width > PARALLEL_FLOATS)
    for (int64_t t = 0; t < batch->tokens; t++)
        rotate_token(a, batch, t, qkv + t * width, q + t * q_width);
    return OK;
}

/* The operations a pass is made of, and their arguments as native.py lays them out. */
#ifndef OUTRIDER_OPS_H
#define OUTRIDER_OPS_H

#include "batch.h"

typedef struct {
    const float *packed;
    const float *bias; /* padded to whole panels, or null */
    int64_t out_features, in_features;
} layer;

typedef struct {
    const uint8_t *packed;
    const float *bias; /* padded to whole panels, or null */
    int64_t type, out_features, in_features, out_stride;
} quant_layer; /* see quant.h */

/* A cache is [num_blocks, kv_heads, block_size, head_dim] with blocks `block_stride` values apart. */
typedef struct {
    const float *cos, *sin; /* [max_position, head_dim / 2], or null */
    const float *q_norm, *k_norm;
    float *key_cache, *value_cache;
    int64_t max_position, num_slots, heads, kv_heads, head_dim, block_size, block_stride;
    float norm_eps;
} rotation;

typedef struct {
    const float *q;
    const float *key_cache, *value_cache;
    float *out;
    int64_t num_blocks, heads, kv_heads, head_dim, block_size, block_stride, window;
    float scale;
} attention;

/* A rank of a group of processes that share `memory`; see shared.c. */
typedef struct {
    char *memory;
    const int32_t *processes; /* a pidfd per rank, or -1 */
    int64_t rank, size, buffer_bytes, limit_ns;
    uint64_t exchange; /* number of the last exchange */
    int64_t failure;   /* error that ended the group, or OK */
} shared_end;

typedef struct {
    int64_t operation, arguments[7];
    double eps;
} captured_call; /* CCall in native.py */

/* The calls of a pass over `tokens` tokens, and its input and output. */
typedef struct {
    const captured_call *calls;
    ragged_batch *batch;
    float *hidden, *result;
    int64_t num_calls, tokens;
} captured_pass; /* CPass in native.py */

void outrider_linear(const layer *l, const float *x, int64_t rows, float *out);
int outrider_quant_linear(const quant_layer *l, const float *x, int64_t rows, float *out);
void outrider_rms_norm(const float *x, const float *weight, int64_t rows, int64_t width, float eps,
                       float *out);
void outrider_add_rms_norm(const float *x, const float *residual, const float *weight,
                           int64_t rows, int64_t width, float eps, float *out, float *total);
void outrider_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *out);
void outrider_fake_quantize(const float *x, int64_t rows, int64_t width, int64_t group, float scale,
                            float *out);
int outrider_rotate_and_store(const rotation *a, const ragged_batch *batch, const float *qkv,
                              float *q);
int outrider_attention(const attention *a, const ragged_batch *batch);
int outrider_all_reduce(shared_end *end, float *x, int64_t count);
int outrider_replay(const captured_call *calls, int64_t count);
int outrider_quant_rows(const quant_layer *l, const int64_t *rows, int64_t count, float *out);
int outrider_gumbel_max(const float *scores, int64_t rows, int64_t vocab, int64_t first_id,
                        const int64_t *seeds, const int64_t *streams, const int64_t *positions,
                        float *best, int64_t *columns);
int outrider_probability_of(const float *scores, int64_t rows, int64_t vocab, const int64_t *tokens,
                            float *out);

#endif

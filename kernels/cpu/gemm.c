/* GEMM: many rows by panels of float32 or 16-bit weights, with vectors of 16 floats.
 *
 * Eight rows by three panels are 24 sums, which hide what a multiply-add takes and use an input three
 * times for one reading. The inputs of a panel are taken in parts, so that the weights of a part stay in
 * the first-level cache, in float32, while all rows pass. An output is the same chain of fused
 * multiply-adds over k = 0, 1, 2, ... as in linear.c: between parts a sum is kept in memory. */
#include "gemm.h"
#include "pool.h"

#if VEC_LANES == 16
#define PANELS 3
#define TILE 8
#define PART 112                /* inputs: 3 panels of them, in float32, are 21 KB */
#define ROWS_PER_CHUNK 128
#define WIDTH (PANELS * PANEL)

#define PANELS_OF(DO, r) DO(r, 0) DO(r, 1) DO(r, 2)
#define ROWS1(EACH, DO) EACH(DO, 0)
#define ROWS2(EACH, DO) ROWS1(EACH, DO) EACH(DO, 1)
#define ROWS3(EACH, DO) ROWS2(EACH, DO) EACH(DO, 2)
#define ROWS4(EACH, DO) ROWS3(EACH, DO) EACH(DO, 3)
#define ROWS5(EACH, DO) ROWS4(EACH, DO) EACH(DO, 4)
#define ROWS6(EACH, DO) ROWS5(EACH, DO) EACH(DO, 5)
#define ROWS7(EACH, DO) ROWS6(EACH, DO) EACH(DO, 6)
#define ROWS8(EACH, DO) ROWS7(EACH, DO) EACH(DO, 7)

#define LOAD(r, p) vec sum##r##p = vec_load(sums + r * WIDTH + p * PANEL);
/* The instruction itself: compilers copy sums from register to register around the intrinsic. */
#define ADD(r, p) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum##r##p) : "v"(one), "v"(w##p));
#define ADD_ROW(DO, r)                           \
    {                                            \
        const vec one = vec_set(x[r * depth + k]); \
        PANELS_OF(ADD, r)                        \
    }
#define STORE(r, p) vec_store(sums + r * WIDTH + p * PANEL, sum##r##p);

#define DEFINE(rows)                                                                              \
    static void tile##rows(const float *restrict x, long depth, const float *restrict w,          \
                           long inputs, float *restrict sums, const char *ahead, long step)       \
    {                                                                                             \
        ROWS##rows(PANELS_OF, LOAD)                                                               \
        for (long k = 0; k < inputs; k++, w += WIDTH, ahead += step) {                            \
            __builtin_prefetch(ahead, 0, 2);                                                      \
            const vec w0 = vec_load(w), w1 = vec_load(w + PANEL), w2 = vec_load(w + 2 * PANEL);   \
            ROWS##rows(ADD_ROW, )                                                                 \
        }                                                                                         \
        ROWS##rows(PANELS_OF, STORE)                                                              \
    }
DEFINE(1)
DEFINE(2)
DEFINE(3)
DEFINE(4)
DEFINE(5)
DEFINE(6)
DEFINE(7)
DEFINE(8)

/* Prefetches from `ahead` in steps of `step`, one per input: read by the next tiles. */
typedef void tile_fn(const float *x, long depth, const float *w, long inputs, float *sums,
                     const char *ahead, long step);
static tile_fn *const TILES[] = {0, tile1, tile2, tile3, tile4, tile5, tile6, tile7, tile8};

INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE long least(long a, long b) { return a < b ? a : b; }

INLINE long step_of(int form) { return PANEL * (form == FROM_F32 ? 4 : 2); }
static const char *weights_at(const gemm_args *a, long panel, long input)
{
    return (const char *)a->packed + (panel * a->in_features + input) * step_of(a->form);
}

/* Inputs [first, first + inputs) of a panel into its place among the three. */
INLINE void widen(int form, const gemm_args *a, long panel, long first, long inputs, float *out)
{
    const char *from = weights_at(a, panel, first);
    for (long k = 0; k < inputs; k++, from += step_of(form), out += WIDTH)
        vec_store(out, widened(form, from, 0));
}

static void widen_any(const gemm_args *a, long panel, long first, long inputs, float *out)
{
    if (a->form == FROM_F32) widen(FROM_F32, a, panel, first, inputs, out);
    else if (a->form == FROM_BF16) widen(FROM_BF16, a, panel, first, inputs, out);
    else widen(FROM_F16, a, panel, first, inputs, out);
}

/* Three panels, or what is left, by a chunk of rows; chunks of the same rows follow each other. */
static void run_chunk(void *context, int64_t chunk)
{
    static const float zeros[PANEL];
    const gemm_args *a = context;
    const long panels = divide_up(a->out_features, PANEL), groups = divide_up(panels, PANELS);
    const long begin = chunk % groups * PANELS, end = least(begin + PANELS, panels);
    const long first = chunk / groups * ROWS_PER_CHUNK, rows = least(a->rows - first, ROWS_PER_CHUNK);
    float weights[PART * WIDTH] __attribute__((aligned(64)));
    float sums[ROWS_PER_CHUNK * WIDTH] __attribute__((aligned(64)));
    if (end - begin < PANELS) memset(weights, 0, sizeof weights); /* padding */
    for (long r = 0; r < rows; r++)
        for (long p = 0; p < PANELS; p++)
            memcpy(sums + r * WIDTH + p * PANEL,
                   a->bias && begin + p < end ? a->bias + (begin + p) * PANEL : zeros, sizeof zeros);
    for (long k = 0; k < a->in_features; k += PART) {
        const long inputs = least(a->in_features - k, PART);
        for (long p = begin; p < end; p++) widen_any(a, p, k, inputs, weights + (p - begin) * PANEL);
        for (long r = 0; r < rows; r += TILE) {
            /* Each of the first tiles prefetches the next part of a panel while it multiplies. */
            const int is_last = k + PART >= a->in_features, prefetches = r / TILE < PANELS;
            const char *next = weights_at(a, begin + r / TILE + (is_last ? PANELS : 0), is_last ? 0 : k + PART);
            TILES[least(rows - r, TILE)](a->x + (first + r) * a->in_features + k, a->in_features, weights,
                                         inputs, sums + r * WIDTH, prefetches ? next : (const char *)weights,
                                         prefetches ? step_of(a->form) : 0);
        }
    }
    const long columns = least(a->out_features - begin * PANEL, WIDTH);
    for (long r = 0; r < rows; r++)
        memcpy(a->out + (first + r) * a->out_stride + begin * PANEL, sums + r * WIDTH,
               columns * sizeof(float));
}

void gemm_linear(const gemm_args *args)
{
    int64_t groups = divide_up(divide_up(args->out_features, PANEL), PANELS);
    pool_run(run_chunk, (void *)args, groups * divide_up(args->rows, ROWS_PER_CHUNK));
}
#else
void gemm_linear(const gemm_args *args) { (void)args; }
#endif

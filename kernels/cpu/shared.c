/* Collectives of processes on one host, through shared memory.
 *
 * Exchanges are numbered. In each, a rank writes its data into one of its two buffers in turn, publishes
 * the number, and reads the others' buffers once they have published it too. A rank that published a
 * number has finished reading all exchanges before. So a buffer may be overwritten two exchanges later,
 * as soon as all ranks have published the one in between.
 *
 * Memory: a counter for each rank, a cache line apart, then two buffers for each rank; all zero at
 * the start. Larger data takes several exchanges. */
#include "ops.h"
#include "waiting.h"

#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#define COUNTER_BYTES 128 /* COUNTER_BYTES in native.py */
/* With a core per rank the others are microseconds behind. With fewer, the awaited rank may need this
 * core: yield soon, and later sleep, in pauses that are a small part of the wait. */
#define SPINS 256
#define YIELD_NS 1000000
#define DOZE_NS 20000
#define PAUSES_A_WAIT 16
#define LONGEST_PAUSE_NS 2000000

typedef _Atomic uint64_t counter;

static counter *published(const shared_end *end, int64_t rank)
{
    return (counter *)(end->memory + rank * COUNTER_BYTES);
}

static char *buffer(const shared_end *end, int64_t rank)
{
    int64_t number = 2 * rank + (end->exchange & 1);
    return end->memory + end->size * COUNTER_BYTES + number * end->buffer_bytes;
}

static int has_published(const shared_end *end, int64_t rank, uint64_t exchange)
{
    return atomic_load_explicit(published(end, rank), memory_order_acquire) >= exchange;
}

static int has_ended(const shared_end *end, int64_t rank)
{
    struct pollfd process = {.fd = end->processes[rank], .events = POLLIN};
    return poll(&process, 1, 0) > 0;
}

static int wait_patiently(const shared_end *end, int64_t rank, uint64_t exchange)
{
    int64_t start = now_ns(), waited;
    while ((waited = now_ns() - start) < YIELD_NS) {
        if (has_published(end, rank, exchange)) return OK;
        sched_yield();
    }
    for (; !has_published(end, rank, exchange); waited = now_ns() - start) {
        if (has_ended(end, rank)) return has_published(end, rank, exchange) ? OK : RANK_ENDED;
        if (waited > end->limit_ns) return RANK_LATE;
        int64_t pause = waited / PAUSES_A_WAIT;
        if (pause > LONGEST_PAUSE_NS) pause = LONGEST_PAUSE_NS;
        nanosleep(&(struct timespec){.tv_nsec = pause}, 0);
    }
    return OK;
}

/* Until `rank` has published `exchange`. A group that failed once stays failed: its ranks no longer
 * agree on the number. */
static int wait_for(shared_end *end, int64_t rank, uint64_t exchange)
{
    for (int spins = 0; spins < SPINS; spins++) {
        if (has_published(end, rank, exchange)) return OK;
        relax();
    }
    return end->failure = wait_patiently(end, rank, exchange);
}

/* Begins the next exchange with `bytes` bytes of this rank. */
static int give(shared_end *end, const void *data, int64_t bytes)
{
    if (end->failure) return end->failure;
    end->exchange++;
    if (data) {
        for (int64_t r = 0; r < end->size; r++)
            if (r != end->rank && wait_for(end, r, end->exchange - 1)) return end->failure;
        memcpy(buffer(end, end->rank), data, bytes);
    }
    atomic_store_explicit(published(end, end->rank), end->exchange, memory_order_release);
    return OK;
}

/* The data of `rank` in this exchange, or null if it exited or timed out. */
static const void *taken_from(shared_end *end, int64_t rank)
{
    if (rank != end->rank && wait_for(end, rank, end->exchange)) return 0;
    return buffer(end, rank);
}

static int64_t piece_of(const shared_end *end, int64_t bytes_left)
{
    return bytes_left < end->buffer_bytes ? bytes_left : end->buffer_bytes;
}

/* Sums `x` over the ranks, in place. Parts are added in the order of ranks: every rank gets the
 * same bits for any shape. */
EXPORT int outrider_all_reduce(shared_end *end, float *x, int64_t count)
{
    int64_t total = count * sizeof(float), piece;
    for (int64_t done = 0; done < total; done += piece, x += piece / sizeof(float)) {
        piece = piece_of(end, total - done);
        if (give(end, x, piece)) return end->failure;
        const float *sum = taken_from(end, 0);
        if (!sum) return end->failure;
        for (int64_t r = 1; r < end->size; r++, sum = x) {
            const float *part = taken_from(end, r);
            if (!part) return end->failure;
            for (int64_t i = 0; i < (int64_t)(piece / sizeof(float)); i++) x[i] = sum[i] + part[i];
        }
    }
    return OK;
}

/* `out` is [size, bytes]: the data of each rank, in the order of ranks. */
EXPORT int outrider_all_gather(shared_end *end, const char *data, int64_t bytes, char *out)
{
    int64_t piece;
    for (int64_t done = 0; done < bytes; done += piece) {
        piece = piece_of(end, bytes - done);
        if (give(end, data + done, piece)) return end->failure;
        for (int64_t r = 0; r < end->size; r++) {
            const void *part = taken_from(end, r);
            if (!part) return end->failure;
            memcpy(out + r * bytes + done, part, piece);
        }
    }
    return OK;
}

/* The root of a broadcast may itself wait for a process outside the group that needs this core, so
 * ranks that wait for it sleep from the start. */
static int doze_for(shared_end *end, int64_t rank, uint64_t exchange)
{
    for (int64_t slept = 0; slept < YIELD_NS; slept += DOZE_NS) {
        if (has_published(end, rank, exchange)) return OK;
        nanosleep(&(struct timespec){.tv_nsec = DOZE_NS}, 0);
    }
    return wait_for(end, rank, exchange);
}

/* Overwrites `data` by that of `root`, which does not wait for the others to read it. */
EXPORT int outrider_broadcast(shared_end *end, char *data, int64_t bytes, int64_t root)
{
    int is_root = end->rank == root;
    int64_t piece;
    for (int64_t done = 0; done < bytes; done += piece, data += piece) {
        piece = piece_of(end, bytes - done);
        if (give(end, is_root ? data : 0, piece)) return end->failure;
        if (is_root) continue;
        if (doze_for(end, root, end->exchange)) return end->failure;
        memcpy(data, buffer(end, root), piece);
    }
    return OK;
}

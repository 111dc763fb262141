/* Why not OpenMP: its loops end in a barrier for every thread of the team. When another process
 * takes a core for a moment, each of the hundreds of small operations of a pass then waits for a
 * time slice, and a pass takes several times as long as on one thread alone. Here helpers take
 * chunks from a counter as they become free, and the caller waits only for chunks in progress.
 *
 * There is one pool per process. */
#include "pool.h"
#include "waiting.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

/* Helpers stay awake from one operation of a pass to the next, and sleep between passes. */
#define SPIN_NS 150000
#define SPINS_PER_CLOCK 128
#define SPINS_BEFORE_YIELD 4096
#define MAX_THREADS 256

/* A lane is one thread's run of consecutive chunks, as end << 32 | next: chunks are taken by raising
 * `next`. A thread that succeeds holds chunks of the current run, which cannot end before, so `task` and
 * `context` may be read afterwards. */
typedef struct {
    _Alignas(128) _Atomic uint64_t ticket;
} lane;

static struct {
    lane lanes[MAX_THREADS];
    _Alignas(128) _Atomic int64_t unfinished;
    _Alignas(128) pool_task *task;
    void *context;
    _Atomic int64_t threads, lanes_in_use, sleepers;
    int64_t started;
    pthread_mutex_t running, sleep_lock;
    pthread_cond_t wake;
} pool = {.threads = 1,
          .running = PTHREAD_MUTEX_INITIALIZER,
          .sleep_lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static int has_work(uint64_t ticket) { return (uint32_t)ticket < ticket >> 32; }

/* Takes half of the remaining chunks at a time, so that helpers find the other half. Taking them orders
 * all earlier memory operations first. Returns the number of chunks done. */
static int64_t empty_lane(lane *l)
{
    int64_t done = 0;
    uint64_t ticket = atomic_load(&l->ticket);
    while (has_work(ticket)) {
        const uint32_t next = (uint32_t)ticket, count = ((uint32_t)(ticket >> 32) - next + 1) / 2;
        if (!atomic_compare_exchange_weak(&l->ticket, &ticket, ticket + count)) continue;
        for (uint32_t i = 0; i < count; i++) pool.task(pool.context, next + i);
        done += count;
        ticket = atomic_load(&l->ticket);
    }
    return done;
}

/* The own lane first: consecutive chunks are consecutive memory. Then those of other lanes. Counted
 * once at the end: threads would contend for the counter. */
static void take_chunks(int64_t own)
{
    int64_t lanes = atomic_load(&pool.lanes_in_use), done = 0;
    for (int64_t i = 0; i < lanes; i++) done += empty_lane(&pool.lanes[(own + i) % lanes]);
    if (done) atomic_fetch_sub(&pool.unfinished, done);
}

static int may_help(int64_t own) { return has_work(atomic_load(&pool.lanes[own].ticket)); }

static int wait_awake(int64_t own)
{
    int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPINS_PER_CLOCK; i++) {
            if (may_help(own)) return 1;
            relax();
        }
    } while (now_ns() < end);
    return 0;
}

static void *help(void *number)
{
    int64_t own = (int64_t)(intptr_t)number;
    for (;;) {
        if (!wait_awake(own)) {
            pthread_mutex_lock(&pool.sleep_lock);
            atomic_fetch_add(&pool.sleepers, 1);
            while (!may_help(own)) pthread_cond_wait(&pool.wake, &pool.sleep_lock);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.sleep_lock);
        }
        take_chunks(own);
    }
    return 0;
}

/* A forked child has none of its parent's helpers and starts its own. */
static void forget_helpers(void)
{
    pool.started = 0;
    for (int i = 0; i < MAX_THREADS; i++) atomic_store(&pool.lanes[i].ticket, 0);
    atomic_store(&pool.sleepers, 0);
    pthread_mutex_init(&pool.running, 0);
    pthread_mutex_init(&pool.sleep_lock, 0);
    pthread_cond_init(&pool.wake, 0);
}

static void start_helpers(int64_t threads)
{
    static int registered;
    if (!registered) registered = !pthread_atfork(0, 0, forget_helpers);
    sigset_t all, before; /* signals belong to the threads of the program */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (; pool.started + 1 < threads; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

static void wake_sleepers(void)
{
    if (!atomic_load(&pool.sleepers)) return;
    pthread_mutex_lock(&pool.sleep_lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep_lock);
}

void pool_run(pool_task *task, void *context, int64_t chunks)
{
    /* Two callers at once occupy two cores already: the second works alone. */
    int64_t threads = pool_threads();
    if (chunks <= 1 || threads <= 1 || pthread_mutex_trylock(&pool.running)) {
        for (int64_t i = 0; i < chunks; i++) task(context, i);
        return;
    }
    if (pool.started + 1 < threads) start_helpers(threads);
    pool.task = task;
    pool.context = context;
    atomic_store(&pool.unfinished, chunks);
    atomic_store(&pool.lanes_in_use, threads);
    for (int64_t i = threads - 1; i >= 0; i--) {
        uint64_t begin = chunks * i / threads, end = chunks * (i + 1) / threads;
        atomic_store(&pool.lanes[i].ticket, end << 32 | begin);
    }
    wake_sleepers();
    take_chunks(0);
    for (int spins = 0; atomic_load(&pool.unfinished) > 0; spins++)
        if (spins < SPINS_BEFORE_YIELD) relax();
        else sched_yield();
    pthread_mutex_unlock(&pool.running);
}

int64_t pool_threads(void) { return atomic_load(&pool.threads); }

EXPORT void outrider_set_num_threads(int64_t threads)
{
    atomic_store(&pool.threads, threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads);
}

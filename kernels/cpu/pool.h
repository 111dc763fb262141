/* Helper threads that take chunks when free; the caller never waits for an idle one. */
#ifndef OUTRIDER_POOL_H
#define OUTRIDER_POOL_H

#include <stdint.h>

typedef void pool_task(void *context, int64_t chunk);

/* Runs task(context, 0 .. chunks - 1) on this thread and free helpers, in any order, and returns when
 * all are done. Results must not depend on which thread runs a chunk. */
void pool_run(pool_task *task, void *context, int64_t chunks);

int64_t pool_threads(void);

#endif

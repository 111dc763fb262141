/* Primitives of waiting loops. */
#ifndef OUTRIDER_WAITING_H
#define OUTRIDER_WAITING_H

#include "vec.h"

#include <time.h>

INLINE void relax(void)
{
#if defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` does nothing on these cores and would flood the bus */
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

INLINE int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

#endif

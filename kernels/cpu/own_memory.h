/* Thread-local scratch memory, kept from call to call. */
#ifndef OUTRIDER_OWN_MEMORY_H
#define OUTRIDER_OWN_MEMORY_H

#include "vec.h"

#include <stdlib.h>

typedef struct {
    void *bytes;
    size_t size;
} own_memory;

/* Null if out of memory. Does not keep the content. */
INLINE void *at_least(own_memory *own, size_t size)
{
    if (size > own->size) {
        free(own->bytes);
        own->bytes = aligned_alloc(64, (size + 63) / 64 * 64);
        own->size = own->bytes ? size : 0;
    }
    return own->bytes;
}

#endif

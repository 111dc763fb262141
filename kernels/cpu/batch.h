/* The ragged batch as the Python side lays it out (CBatch in native.py). */
#ifndef OUTRIDER_BATCH_H
#define OUTRIDER_BATCH_H

#include <stdint.h>

typedef struct {
    const int64_t *positions;     /* [tokens] */
    const int64_t *slots;         /* [tokens] */
    const int32_t *cu_query_lens; /* [sequences + 1] */
    const int32_t *context_lens;  /* [sequences] */
    const int32_t *block_tables;  /* [sequences, max_blocks] */
    int64_t tokens, sequences, max_blocks;
} ragged_batch;

/* What an operation returns; Python raises on anything but OK. */
enum {
    OK = 0,
    NO_MEMORY = 1,
    BAD_POSITION = 2,
    BAD_SLOT = 3,
    BAD_BLOCK = 4,
    RANK_ENDED = 5,
    RANK_LATE = 6,
    BAD_ROW = 7
};

#endif

/* Replays a captured sequence of operations in one call, without overhead in between. */
#include "ops.h"
#include "vec.h"

enum {
    LINEAR, RMS_NORM, ADD_RMS_NORM, SILU_MUL, ROTATE_AND_STORE, ATTENTION, ALL_REDUCE, QUANT_LINEAR,
    FAKE_QUANTIZE
};

EXPORT int outrider_replay(const captured_call *calls, int64_t count)
{
    for (const captured_call *c = calls; c < calls + count; c++) {
        const int64_t *a = c->arguments;
        int code = OK;
        switch (c->operation) {
        case LINEAR:
            outrider_linear((void *)a[0], (float *)a[1], a[2], (float *)a[3]);
            break;
        case RMS_NORM:
            outrider_rms_norm((float *)a[0], (float *)a[1], a[2], a[3], (float)c->eps,
                              (float *)a[4]);
            break;
        case ADD_RMS_NORM:
            outrider_add_rms_norm((float *)a[0], (float *)a[1], (float *)a[2], a[3], a[4],
                                  (float)c->eps, (float *)a[5], (float *)a[6]);
            break;
        case SILU_MUL:
            outrider_silu_mul((float *)a[0], a[1], a[2], (float *)a[3]);
            break;
        case ROTATE_AND_STORE:
            code = outrider_rotate_and_store((void *)a[0], (void *)a[1], (float *)a[2],
                                             (float *)a[3]);
            break;
        case ATTENTION:
            code = outrider_attention((void *)a[0], (void *)a[1]);
            break;
        case ALL_REDUCE:
            code = outrider_all_reduce((void *)a[0], (float *)a[1], a[2]);
            break;
        case QUANT_LINEAR:
            code = outrider_quant_linear((void *)a[0], (float *)a[1], a[2], (float *)a[3]);
            break;
        case FAKE_QUANTIZE:
            outrider_fake_quantize((float *)a[0], a[1], a[2], a[3], (float)c->eps, (float *)a[4]);
            break;
        }
        if (code) return code;
    }
    return OK;
}

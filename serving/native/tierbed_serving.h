/* Looks up the rows of a serving folder from C. Link with libtierbed_serving.so; neither Python nor torch is needed.
 *
 *     tierbed_served* served = tierbed_serving_open("serving", "items", 1);
 *     int64_t ids[2] = {7, 42};
 *     float rows[2 * 64];                                          // 64 is tierbed_serving_dim(served)
 *     tierbed_lookup lookup = {.ids = ids, .num_ids = 2};
 *     if (!served || tierbed_serving_lookup(served, &lookup, rows)) puts(tierbed_serving_last_error());
 *     tierbed_serving_close(served);
 *
 * Any number of threads may look up rows at once, without a lock. */
#ifndef TIERBED_SERVING_H
#define TIERBED_SERVING_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One version of one embedding. It never changes. */
typedef struct tierbed_served tierbed_served;

enum tierbed_pooling { TIERBED_NONE = 0, TIERBED_SUM = 1, TIERBED_MEAN = 2 };
enum tierbed_dtype { TIERBED_FLOAT32 = 0, TIERBED_FLOAT16 = 1, TIERBED_BFLOAT16 = 2 };

typedef struct {
    const int64_t* ids; /* [num_ids]; uint64 ids by their bits */
    uint64_t num_ids;
    const uint32_t* table_ids; /* the table of each id, or of each bag. NULL: id or bag i is of table i % tables */
    const int64_t* offsets;    /* [num_bags + 1] if rows are pooled: where each bag starts, then num_ids */
    uint64_t num_bags;
    const float* weights; /* [num_ids], factors of rows that are pooled, or NULL */
    enum tierbed_pooling pooling;
    enum tierbed_dtype dtype; /* of the result */
} tierbed_lookup;

/* Opens the version that CURRENT names. unknown_initial: if 0, unknown ids get zeros, otherwise their initial rows.
 * Returns NULL after an error. */
tierbed_served* tierbed_serving_open(const char* folder, const char* embedding, int unknown_initial);

/* Opens the version that CURRENT names now, and shares unchanged files with `served`, which remains open. Returns NULL
 * after an error. */
tierbed_served* tierbed_serving_refresh(const tierbed_served* served);

uint64_t tierbed_serving_version(const tierbed_served* served);
uint32_t tierbed_serving_dim(const tierbed_served* served);

/* Writes rows to out [num_ids, dim], or pooled rows to out [num_bags, dim]. Returns 0, or -1 after an error. */
int tierbed_serving_lookup(const tierbed_served* served, const tierbed_lookup* lookup, void* out);

/* Frees a version that no thread uses any more. NULL is allowed. */
void tierbed_serving_close(tierbed_served* served);

/* Describes the calling thread's last error. */
const char* tierbed_serving_last_error(void);

#ifdef __cplusplus
}
#endif

#endif

/* One product as a pair of phases: its inputs are packed, then multiplied.
 *
 * Owns: the tasks of both phases, and their memory.
 * Must not know: layers, or whose adapter a row has.
 */
#ifndef HEADWAY_PRODUCT_PHASES_H
#define HEADWAY_PRODUCT_PHASES_H

#include "adapters.h"
#include "products.h"
#include "team.h"

/* Memory for packed inputs, and for what adapters add. `downs`: `most_rank` floats of each row. */
typedef struct {
    void *tiles;
    float *factors;
    int32_t *offsets;
    float *downs;
    const low_rank **additions;
    int64_t most_rank;
} product_space;

/* `from` NULL: the inputs are packed already. */
typedef struct {
    const linear *with;
    packed_inputs inputs;
    const float *from;
    int64_t from_stride;
    rms_norm norm;
    enum epilogue epilogue;
    float *out;
    int64_t out_stride;
    int64_t num_members;
    row_adapters adapters;
} product;

/* Room for the inputs of products that are at most so wide. 0 when memory is short. */
int reserve_products(product_space *space, int64_t num_rows, int64_t widest_input);

/* Room for what adapters of at most `most_rank` add to so many rows. 0 when memory is short. */
int reserve_additions(product_space *space, int64_t num_rows, int64_t most_rank);

void free_products(product_space *space);

product product_of(const product_space *space, const linear *with, int64_t num_rows, const float *from,
                   int64_t from_stride, rms_norm norm, enum epilogue epilogue, float *out, int64_t out_stride);

/* Two phases, or one if the inputs are packed. The weights of the product after it, `next` or NULL, are fetched
 * meanwhile. */
void run_product(member *self, product *of, const linear *next);

#endif

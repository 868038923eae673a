/* Several products as one pair of phases: each group of rows is multiplied with a matrix of its own.
 *
 * Owns: the tasks of the groups, in the order of the groups.
 * Must not know: why rows are grouped.
 *
 * A group's rows may lie anywhere in the input, so each matrix is read once for all of its rows. As with one product,
 * the order of the additions of an output depends only on the number of inputs.
 */
#ifndef HEADWAY_GROUPED_H
#define HEADWAY_GROUPED_H

#include "adapters.h"
#include "products.h"
#include "team.h"

/* One matrix with its rows. `inputs` have room for the rows of `from` that they name; with `from` NULL they are packed
 * already, and have no adapters. `out` is the first row's, and rows are `out_stride` apart: see `multiply`. */
typedef struct {
    const linear *with;
    packed_inputs inputs;
    const float *from;
    const float *norm; /* weights of its own, or NULL: those of the product */
    float *out;
    int64_t out_stride;
    row_adapters adapters;
    int64_t first_tile; /* tiles to pack of the groups before */
    int64_t first_task; /* products with a panel of the groups before */
} product_group;

typedef struct {
    product_group *groups;
    int64_t num_groups;
    int64_t num_tiles;
    int64_t num_tasks;
    int64_t from_stride;
    rms_norm norm;
    enum epilogue epilogue;
    int64_t num_members; /* of the team */
} grouped_product;

/* Add a group behind the others. It has rows, and its inputs are packed already if those of the others are. */
void add_group(grouped_product *to, product_group group);

/* Two phases, or one if the inputs are packed. The weights that `next` (or NULL) begins with are fetched meanwhile. */
void run_grouped(member *self, grouped_product *product, const grouped_product *next);

#endif

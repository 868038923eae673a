/* Products whose inputs are rounded whole, or not at all.
 *
 * Owns: what both ways to multiply them have in common, on the vector unit and on the matrix unit: a library has one,
 * vector_products.c or tile_products.c.
 * Must not know: how either multiplies.
 *
 * See products.h for what the others do.
 */
#ifndef HEADWAY_WHOLE_PRODUCTS_H
#define HEADWAY_WHOLE_PRODUCTS_H

#include "inputs.h"
#include "linear.h"
#include "sums.h"

/* Ask the system to let the threads of this process use what products use. 0 if it refuses. */
int products_permitted(void);

int64_t packed_bytes_whole(int64_t num_rows, int64_t inputs, int64_t form);
void pack_tile_whole(const packed_inputs *to, int64_t form, int64_t tile, const float *from, int64_t stride,
                     rms_norm norm);
int64_t tiles_at_once_whole(const linear *with);
void multiply_whole(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
                    int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride);

#endif

/* Products on the vector unit with codes that are rounded to bfloat16, where it has an instruction for pairs.
 *
 * Owns: how far codes are widened at once, and for which tiles.
 * Must not know: what codes stand for.
 */
#ifndef HEADWAY_NARROW_PRODUCTS_H
#define HEADWAY_NARROW_PRODUCTS_H

#include "inputs.h"
#include "linear.h"
#include "sums.h"

/* As `multiply_whole`. */
void multiply_narrow(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
                     int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride);

#endif

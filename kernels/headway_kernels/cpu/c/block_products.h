/* Products of integer codes with inputs that become integers block by block, on the vector unit.
 *
 * Owns: multiplying blocks. Must not know: how inputs become integers.
 *
 * The products of a block are added exactly, in integers, of each digit by itself; the sum times the scales is added
 * to the output in float32, block after block. So a row's result depends on the row alone. See products.h for what each
 * function does.
 */
#ifndef HEADWAY_BLOCK_PRODUCTS_H
#define HEADWAY_BLOCK_PRODUCTS_H

#include "inputs.h"
#include "linear.h"
#include "sums.h"

int64_t tiles_at_once_in_blocks(void);
void multiply_in_blocks(const linear *with, const packed_inputs *from, int64_t panel, const char *next,
                        int64_t first_tile, int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride);

#endif

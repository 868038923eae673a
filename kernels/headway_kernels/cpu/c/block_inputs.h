/* Rows of inputs become integers, block by block.
 *
 * Owns: the rounding of blocks, to one digit or several.
 * Must not know: how they are multiplied.
 */
#ifndef HEADWAY_BLOCK_INPUTS_H
#define HEADWAY_BLOCK_INPUTS_H

#include "inputs.h"
#include "linear.h"

/* Of a row of so many inputs, for any matrix. */
int64_t most_bytes_of_packed_row(int64_t inputs);

/* See `pack_tile`. */
void pack_tile_in_blocks(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
                         rms_norm norm);

#endif

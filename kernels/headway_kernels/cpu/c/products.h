/* Products of a few or many rows with a weight matrix that was packed once.
 *
 * Owns: which way to multiply a form of weights takes, and how many tiles of inputs it takes at once.
 * Must not know: how any way multiplies, or what a layer is for.
 *
 * The order of the additions of an output depends only on the number of inputs, not on other rows or their number.
 */
#ifndef HEADWAY_PRODUCTS_H
#define HEADWAY_PRODUCTS_H

#include "inputs.h"
#include "linear.h"
#include "sums.h"

/* Whether two products of bfloat16s at once are faster here than widened ones: on a matrix unit, and where the vector
 * unit has the instruction. Intel's takes as long as four for float32s, and does the work of two. */
int multiplies_pairs(void);

/* Bytes that the tiles of `num_rows` rows need in float32. */
int64_t packed_bytes(int64_t num_rows, int64_t inputs);

/* The most that they need for any form of weights, for so many inputs or fewer. */
int64_t most_packed_bytes(int64_t num_rows, int64_t inputs);

/* Pack tile `tile` of the rows of `from`, which are `stride` apart, normalised, for a product. */
void pack_tile(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
               rms_norm norm);

/* How many tiles to multiply with a panel at once at most, so that their inputs fit the L2 cache. */
int64_t tiles_at_once(const linear *with);

/* Blocks of tiles that are multiplied with a panel at once, and the tiles of each but perhaps the last: blocks are as
 * equal as can be, because a small one waits for memory. On a matrix unit tiles go in pairs. */
static inline int64_t blocks_of(const linear *with, int64_t num_tiles) {
    return (num_tiles + tiles_at_once(with) - 1) / tiles_at_once(with);
}
static inline int64_t tiles_per_block(const linear *with, int64_t num_tiles) {
    const int64_t num_blocks = blocks_of(with, num_tiles), tiles = (num_tiles + num_blocks - 1) / num_blocks;
    return HAS_TILES ? (tiles + 1) / 2 * 2 : tiles;
}

/* Multiply tiles [first_tile, end_tile), at most tiles_at_once, with panel `panel`; `out` rows are `stride` apart,
 * whole panels wide (for packed ones, `stride` is the number of columns). Meanwhile the panel at `next` is fetched
 * into the cache: products of few rows wait for memory. */
void multiply(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
              int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride);

/* How a gated product leaves its results to the next: packed as its inputs, but not if one of both rounds inputs to
 * integers, as that takes more of a row than a panel gives. */
static inline enum epilogue gated_before(const linear *next, const linear *gated) {
    if (next->form == FORM_INT8 || is_in_blocks(next) || is_in_blocks(gated)) return GATED;
    return form_of_inputs(next) == FORM_PAIRS ? GATED_PAIRS : GATED_PACKED;
}

#endif

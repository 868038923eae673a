/* Rows of inputs, packed for one product after the other.
 *
 * Owns: how rows are cut into tiles, normalised, and rounded to 8 bits.
 * Must not know: what they are multiplied with, or how.
 *
 * Inputs [rows, in] are cut into tiles of at most INPUT_ROWS rows. A tile stores, stretch after stretch, the inputs of
 * each row.
 */
#ifndef HEADWAY_INPUTS_H
#define HEADWAY_INPUTS_H

#include "vectors.h"

/* Rows in a tile of inputs, at most. */
#if HAS_TILES
#define INPUT_ROWS 16
#else
#define INPUT_ROWS TILE_ROWS
#endif

#define INT8_MAX_VALUE 127.0f
#define TINY 1e-30f
#define CODES_SIDE_BY_SIDE 64 /* 8-bit codes of a row that a tile of inputs holds side by side */

/* A code of a row of inputs. Where no instruction multiplies bytes, it is as wide as what is multiplied, and the four
 * codes of a QUAD are stored in the order 0, 2, 1, 3: the weights' bytes 0 and 2, and 1 and 3, are widened at once. */
#if HAS_TILES || defined(__AVX512VNNI__)
#define MULTIPLIES_BYTES 1
typedef int8_t code;
#else
#define MULTIPLIES_BYTES 0
typedef int16_t code;
#endif

/* Whether inputs of codes may be cut into digits of bytes (blocks.h): exact, and faster than widening the codes. A
 * matrix unit has a way of its own. */
#define MULTIPLIES_DIGITS (MULTIPLIES_BYTES && !HAS_TILES)

typedef struct added_rows added_rows;

typedef struct {
    int64_t num_rows;
    int64_t inputs;
    int64_t num_tiles;
    void *tiles;             /* float32, bfloat16 parts of it, or int8 */
    float *factors;          /* of each row, on its outputs */
    int32_t *offsets;        /* int8: the amount to subtract from the outputs of each row */
    const int32_t *rows;     /* which rows to pack, or NULL: the first ones, in order */
    const added_rows *added; /* what is added to the outputs of each row, see adapters.h; or NULL */
    const float *weights;    /* a factor on each row that is packed, or NULL: 1 */
} packed_inputs;

/* The preparation of inputs: RMS normalisation (Zhang & Sennrich 2019, arXiv 1910.07467), or nothing if `weight`
 * ([inputs]) is NULL. */
typedef struct {
    const float *weight;
    float eps;
} rms_norm;

/* Tile `tile` of `num_rows` rows: its first row and its number of rows. Tiles differ by at most one row. */
static inline int64_t tile_start(int64_t tile, int64_t num_tiles, int64_t num_rows) {
    return tile * num_rows / num_tiles;
}
static inline int64_t tiles_of(int64_t num_rows) { return (num_rows + INPUT_ROWS - 1) / INPUT_ROWS; }

/* The place in the input of row `row` of those that are packed. */
static inline int64_t row_taken(const packed_inputs *inputs, int64_t row) {
    return inputs->rows == NULL ? row : inputs->rows[row];
}

/* 1 / root mean square of a row. */
float root_mean_square_factor(const float *row, int64_t inputs, float eps);

/* The factor on the inputs of row `row` of those that are packed, which is `from`: of the norm, and its weight. */
float input_factor(const packed_inputs *inputs, int64_t row, const float *from, rms_norm norm);

/* Inputs k to k + LANES - 1 of a row, times the norm's weight if there is one; zeros behind the end. */
INLINE vec normed_inputs(const float *row, const float *weight, int64_t k, int64_t inputs) {
    if (k + LANES <= inputs) return weight == NULL ? load(row + k) : load(row + k) * load(weight + k);
    vec some = {0};
    for (int64_t i = 0; k + i < inputs; i++) some[i] = weight == NULL ? row[k + i] : row[k + i] * weight[k + i];
    return some;
}

/* Quantise one row of a tile of `rows`, symmetrically, to 8 bits: the tile stores 64 codes of each row, then the
 * next 64. Returns the scale of the codes, NaN if a value is not finite. `offset`: 128 times their sum, for weights
 * with 128 added. A factor on the whole row does not change the codes. */
float pack_int8_row(code *tile, int64_t rows, int64_t place, const float *row, int64_t inputs, const float *weight,
                    int32_t *offset);

#endif

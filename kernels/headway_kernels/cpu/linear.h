/* Products of a few or many rows with a weight matrix that was packed once.
 *
 * Owns: the packed forms of weights and inputs, and multiplying them.
 * Must not know: what a layer is for.
 *
 * Weights [out, in] are cut into panels of 2 * LANES outputs. A panel stores, input after input, the weights of its
 * outputs side by side, so a product streams through memory once (Goto & van de Geijn 2008, "Anatomy of
 * high-performance matrix multiplication"). Inputs [rows, in] are cut into tiles of at most INPUT_ROWS rows. A tile
 * stores, stretch after stretch, the inputs of each row. The order of the additions of an output depends only on the
 * number of inputs, not on other rows or their number. A library has one of two ways to multiply: vector_products.c or
 * tile_products.c; products in blocks are block_products.c in each.
 */
#ifndef HEADWAY_LINEAR_H
#define HEADWAY_LINEAR_H

#include <stdint.h>

#include "vectors.h"

#define PANEL (2 * LANES)

/* Rows in a tile of inputs, at most. */
#if HAS_TILES
#define INPUT_ROWS 16
#else
#define INPUT_ROWS TILE_ROWS
#endif

/* The forms of weights. BFLOAT16 is for float32 weights that bfloat16 holds exactly, as in many checkpoints: half
 * the memory to read, and the same result to the last bit. PAIRS are the same weights, for inputs that are rounded to
 * bfloat16: two products at once, only for processors with the instruction. CODES4, CODES8, FP8 and FP4
 * are codes with scales (codes.c): unsigned, signed, and floats of 8 and 4 bits. INT8 and BLOCKS multiply codes as
 * integers, with inputs that are rounded to 8 bits: whole rows, or block by block (block_products.c). */
enum weight_form {
    FORM_FLOAT32 = 0,
    FORM_BFLOAT16 = 1,
    FORM_INT8 = 2,
    FORM_CODES4 = 3,
    FORM_CODES8 = 4,
    FORM_FP8 = 5,
    FORM_FP4 = 6,
    FORM_BLOCKS4 = 7,
    FORM_BLOCKS8 = 8,
    FORM_BLOCKS_FP4 = 9,
    FORM_PAIRS = 10
};

typedef struct shared_memory shared_memory;

typedef struct {
    int64_t form;
    int64_t outputs;
    int64_t inputs;
    int64_t num_panels;
    void *panels;
    shared_memory *memory; /* that the panels lie in; NULL: they have their own */
    float *bias;           /* [num_panels * PANEL], zeros if there is none */
    float *scales;         /* FORM_INT8: of each output, [num_panels * PANEL] */
    int64_t group;         /* codes: inputs that share a scale, and how many such groups there are */
    int64_t num_groups;
    int64_t has_minima;
    int64_t has_half_scales; /* BLOCKS: float16 holds them */
    int64_t num_digits;      /* BLOCKS: of an input, see blocks.h */
    int32_t *group_of;       /* [inputs], or NULL: groups are consecutive */
} linear;

/* A weight as codes, one per byte, [outputs, inputs]: each stands for code * scale + minimum. `scales` and `minima`
 * [outputs, num_groups]. `minima` NULL: 0, or -8 * scale with CODES4. `group_of` [inputs]: each input's group;
 * NULL: each `group` consecutive inputs are one. `rounds_inputs`: inputs may be rounded to 8 bits. */
typedef struct {
    const uint8_t *codes;
    const float *scales;
    const float *minima;
    const int32_t *group_of;
    int64_t group;
    int64_t num_groups;
    int64_t rounds_inputs;
} coded_weight;
typedef struct added_rows added_rows;

/* Rows of inputs, packed for one product after the other. */
typedef struct {
    int64_t num_rows;
    int64_t inputs;
    int64_t num_tiles;
    void *tiles;             /* float32, bfloat16 parts of it, or int8 */
    float *factors;          /* of each row, on its outputs */
    int32_t *offsets;        /* int8: the amount to subtract from the outputs of each row */
    const int32_t *rows;     /* which rows to pack, or NULL: the first ones, in order */
    const added_rows *added; /* what is added to the outputs of each row, see adapters.h; or NULL */
} packed_inputs;

/* The use of the sums. STORE: out = sums. ADD: out += sums. GATED: out = silu(first half of a panel) * second half,
 * for weights packed with `gated`; out has LANES columns per panel. GATED_PACKED: the same, packed as inputs of as
 * many rows and columns for a next product: see `packs_for`. */
enum epilogue { STORE, ADD, GATED, GATED_PACKED };

/* `rows` [outputs]: where each output's weights are, [inputs], as float32 or, if `is_narrow`, as bfloat16 (not for
 * FORM_INT8). `bias` [outputs] or NULL. With `gated`, the outputs are all gates, then all ups, and a panel takes LANES
 * of each. NULL when memory is short. */
linear *linear_new(const void *const *rows, int64_t is_narrow, const float *bias, int64_t outputs, int64_t inputs,
                   int64_t form, int64_t gated);
/* FORM_INT8 of signed codes with one scale an output; `from` has neither minima nor groups. */
linear *linear_of_int8(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t gated);
/* FORM_BLOCKS: groups are consecutive, and one or of whole blocks. */
linear *linear_of_blocks(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                         int64_t gated);
linear *linear_of_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                        int64_t gated);
void linear_free(linear *the_linear);

/* Move the panels of products that are smaller than a huge page into memory that they share, which has huge pages. When
 * memory is short, they stay where they are. */
void linears_join(linear *const *which, int64_t count);

/* Tile `tile` of `num_rows` rows: its first row and its number of rows. Tiles differ by at most one row. */
static inline int64_t tile_start(int64_t tile, int64_t num_tiles, int64_t num_rows) {
    return tile * num_rows / num_tiles;
}
static inline int64_t tiles_of(int64_t num_rows) { return (num_rows + INPUT_ROWS - 1) / INPUT_ROWS; }

/* The place in the input of row `row` of those that are packed. */
static inline int64_t row_taken(const packed_inputs *inputs, int64_t row) {
    return inputs->rows == NULL ? row : inputs->rows[row];
}

/* Whether inputs are rounded block by block. */
static inline int is_in_blocks(const linear *of) { return of->form >= FORM_BLOCKS4 && of->form <= FORM_BLOCKS_FP4; }

/* Whether a gated product can pack its results as the inputs of the next: not if one of both rounds its inputs, as that
 * takes more of a row than a panel gives. */
static inline int packs_for(const linear *gated, const linear *next) {
    return next->form != FORM_INT8 && next->form != FORM_PAIRS && !is_in_blocks(next) && !is_in_blocks(gated);
}

/* Bytes that the tiles of `num_rows` rows need in a form that is not in blocks. */
int64_t packed_bytes(int64_t num_rows, int64_t inputs, int64_t form);

/* The most that they need in any form, for so many inputs or fewer. */
int64_t most_packed_bytes(int64_t num_rows, int64_t inputs);

/* The preparation of inputs: RMS normalisation (Zhang & Sennrich 2019, arXiv 1910.07467), or nothing if `weight`
 * ([inputs]) is NULL. */
typedef struct {
    const float *weight;
    float eps;
} rms_norm;

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
 * whole panels wide (for GATED_PACKED, `stride` is the number of columns). Meanwhile the panel at `next` is fetched
 * into the cache: products of few rows wait for memory. */
void multiply(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
              int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride);

/* Ask the system to let the threads of this process use what products use. 0 if it refuses. */
int products_permitted(void);

/* Where panel `panel` lies. */
const char *panel_at(const linear *of, int64_t panel);

/* Fetch panel `panel` into the cache, or the part of it that the cache should hold. */
void fetch_panel(const linear *from, int64_t panel);

/* Memory that is read in a stream: zeroed, aligned, in huge pages where the system has them. Freed by free(). */
void *stream_alloc(int64_t bytes);

#endif

/* The common parts of the two ways to multiply, on the vector unit and on the matrix unit.
 *
 * Owns: the sizes of packed rows and panels, normalising and quantising rows, and the use of sums.
 * Must not know: how either multiplies.
 */
#ifndef HEADWAY_PRODUCTS_H
#define HEADWAY_PRODUCTS_H

#include "linear.h"

#define INT8_MAX_VALUE 127.0f
#define TINY 1e-30f
#define QUAD 4                /* inputs that one 8-bit instruction takes */
#define LINE 64               /* bytes of a cache line */
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

#define PAIR 2 /* bfloat16 weights of an output that a panel holds side by side (8-bit weights: QUAD of them) */

static inline int is_bfloat16(int64_t form) { return form == FORM_BFLOAT16 || form == FORM_PAIRS; }

/* Inputs per step of a sum; a matrix unit takes a cache line of each output or row. Panels and packed rows are
 * padded with zeros to whole steps. */
static inline int64_t inputs_per_step(int64_t form) {
#if HAS_TILES
    return form == FORM_INT8 ? 64 : 32;
#else
    return form == FORM_INT8 ? QUAD : is_bfloat16(form) ? PAIR : 1;
#endif
}
static inline int64_t steps_of(int64_t inputs, int64_t form) {
    return (inputs + inputs_per_step(form) - 1) / inputs_per_step(form);
}

/* Whether weights are widened to float32 where they are multiplied. */
static inline int is_coded(const linear *of) { return of->form >= FORM_CODES4 && of->form <= FORM_FP4; }

#define FP8_FACTOR 256.0f

/* Bytes of one panel. */
int64_t panel_bytes(const linear *of);
int64_t coded_panel_bytes(const linear *of);
int64_t block_panel_bytes(const linear *of);

/* The number of the panel at `place`; none that `of` has if that is another product's. */
static inline int64_t panel_number(const linear *of, const char *place) {
    return (place - (const char *)of->panels) / panel_bytes(of);
}

/* The weights of `count` inputs of the panel at `codes`, from input `first` on, as float32: [count, PANEL]. */
void widen(const linear *of, const char *codes, int64_t first, int64_t count, float *to);

/* The two kinds of `pack_tile`, `tiles_at_once` and `multiply`: rows that are rounded whole or not at all, and rows
 * that are rounded block by block. */
void pack_tile_whole(const packed_inputs *to, int64_t form, int64_t tile, const float *from, int64_t stride,
                     rms_norm norm);
int64_t tiles_at_once_whole(const linear *with);
void multiply_whole(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
                    int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride);
int64_t most_bytes_of_packed_row(int64_t inputs); /* in blocks */
void pack_tile_in_blocks(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
                         rms_norm norm);
int64_t tiles_at_once_in_blocks(void);
void multiply_in_blocks(const linear *with, const packed_inputs *from, int64_t panel, const char *next,
                        int64_t first_tile, int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride);

/* A product whose panels, and scales of outputs, are still to be filled. NULL when memory is short. */
linear *linear_empty(int64_t outputs, int64_t inputs, int64_t form, int64_t gated);

/* The output in column `column` of panel `panel`; -1 if there is none. */
int64_t output_at(int64_t panel, int64_t column, int64_t outputs, int64_t gated);

/* 1 / root mean square of a row. */
float root_mean_square_factor(const float *row, int64_t inputs, float eps);

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

INLINE void finish_row(enum epilogue epilogue, vec low, vec high, float *out) {
    switch (epilogue) {
    case STORE:
        store(out, low);
        store(out + LANES, high);
        break;
    case ADD:
        store(out, load(out) + low);
        store(out + LANES, load(out + LANES) + high);
        break;
    case GATED:
    case GATED_PACKED: store(out, silu(low) * high); break;
    }
}

#endif

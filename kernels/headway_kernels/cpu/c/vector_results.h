/* The outputs of products on the vector unit.
 *
 * Owns: where the inputs and the outputs of a tile lie, and what becomes of its sums.
 * Must not know: how sums are made.
 */
#ifndef HEADWAY_VECTOR_RESULTS_H
#define HEADWAY_VECTOR_RESULTS_H

#include "adapters.h"
#include "sums.h"
#include "vector_sums.h"

#define CODED_TILES (256 / TILE_ROWS + 1) /* more share codes than other weights: they are widened once for all */

/* Bytes of a row of packed inputs: floats, pairs of bfloat16s, or quads of codes. */
static inline int64_t packed_row_bytes(int64_t inputs, int64_t form) {
    const int64_t count = form == FORM_INT8 || form == FORM_PAIRS ? steps_of(inputs, form) : inputs;
    return (count + STRETCH - 1) / STRETCH * STRETCH * (form == FORM_INT8 ? QUAD * sizeof(code) : sizeof(float));
}

/* The tile whose first row is `first_row`. */
static inline const void *tile_at(const packed_inputs *from, int64_t first_row, int64_t form) {
    return (const char *)from->tiles + first_row * packed_row_bytes(from->inputs, form);
}

/* The outputs of a tile's rows with one panel: they go to `out`, `stride` floats from row to row. */
typedef struct {
    const packed_inputs *from;
    int64_t first_row;
    int64_t panel;
    enum epilogue epilogue;
    float *out;
    int64_t stride;
} tile_results;

/* Those of `rows` rows from `first_row` on; `out` and `stride` are those of all rows and panels, see `multiply`. */
static inline tile_results results_of(const packed_inputs *from, int64_t panel, int64_t first_row, int64_t rows,
                                      enum epilogue epilogue, float *out, int64_t stride) {
    const int64_t column = panel * (epilogue == GATED || is_packed(epilogue) ? LANES : PANEL);
    if (!is_packed(epilogue))
        return (tile_results){from, first_row, panel, epilogue, out + first_row * stride + column, stride};
    const int64_t form = epilogue == GATED_PAIRS ? FORM_PAIRS : FORM_FLOAT32;
    const int64_t place = epilogue == GATED_PAIRS ? column / PAIR : column;
    float *packed = (float *)((char *)out + first_row * packed_row_bytes(stride, form));
    return (tile_results){
        from, first_row, panel, epilogue, packed + place / STRETCH * STRETCH * rows + place % STRETCH, STRETCH};
}

/* Apart, because a call between two rows would take the registers of the sums. */
static APART void finish_adapted(const tile_results *of, int64_t rows, vec (*sums)[2]) {
    for (int64_t i = 0; i < rows; i++) {
        vec low = sums[i][0], high = sums[i][1];
        add_low_rank(of->from->added, of->first_row + i, of->panel, &low, &high);
        finish_row(of->epilogue, low, high, of->out + i * of->stride);
    }
}

/* The sums of a tile's rows are complete; `memory` has room for them. */
INLINE void finish_tile(const int rows, const tile_results *of, vec (*memory)[2], vec (*sums)[2]) {
    if (of->from->added != NULL) {
        UNROLLED
        for (int i = 0; i < rows; i++) memory[i][0] = sums[i][0], memory[i][1] = sums[i][1];
        finish_adapted(of, rows, memory);
        return;
    }
    const enum epilogue epilogue = of->epilogue;
    float *out = of->out;
    const int64_t stride = of->stride;
    UNROLLED
    for (int i = 0; i < rows; i++) finish_row(epilogue, sums[i][0], sums[i][1], out + i * stride);
}

/* What tile `place` of `count` fetches of what follows during so many `steps`. */
static inline fetching part_to_fetch(const char *following, range steps, int64_t step_bytes, int64_t place,
                                     int64_t count) {
    const int64_t stride = (step_bytes + count - 1) / count;
    const char *from = following + place * (steps.end - steps.begin) * stride;
    return (fetching){from, from + ((int64_t)1 << 40), from, 1, stride};
}

#endif

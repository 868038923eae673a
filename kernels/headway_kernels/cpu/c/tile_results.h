/* The outputs of products on a matrix unit.
 *
 * Owns: where the sums of a pair of tiles lie, what becomes of them, and how outputs, as any inputs, are packed.
 * Must not know: how sums are made.
 */
#ifndef HEADWAY_TILE_RESULTS_H
#define HEADWAY_TILE_RESULTS_H

#include "inputs.h"
#include "linear.h"
#include "sums.h"
#include "tile_registers.h"

#if HAS_TILES

#define PARTS 3 /* bfloat16s whose sum is a float32 */

/* The parts of an input. */
static inline int64_t parts_of(int64_t form) { return form == FORM_INT8 || form == FORM_PAIRS ? 1 : PARTS; }

static inline int64_t packed_tile_bytes(int64_t inputs, int64_t form) {
    return steps_of(inputs, form) * parts_of(form) * TILE_BYTES;
}

/* Store the nearest bfloat16 of each value to `to`; return the remainder. */
INLINE vec take_part(vec value, char *to) {
    __m256i part = (__m256i)_mm512_cvtneps_pbh((__m512)value);
    _mm256_storeu_si256((__m256i *)to, part);
    return value - (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16);
}

/* LANES inputs of row `place` of a packed tile, from input `k` on. */
INLINE void pack_parts(const int parts, char *tile, int64_t place, int64_t k, vec value) {
    char *to = tile + k / (TILE_SIDE * PAIR) * parts * TILE_BYTES + place * LINE + k % (TILE_SIDE * PAIR) * 2;
    for (int part = parts - 1; part >= 0; part--) value = take_part(value, to + part * TILE_BYTES);
}

/* The sums of two tiles of rows, one behind the other, with both halves of a panel. */
typedef struct {
    _Alignas(LINE) char halves[2][2 * TILE_BYTES];
} tile_sums;

/* Rows [first, end) of all, whose sums are complete, those of tile `tile` and, from `middle` on, of the next. The
 * vector unit makes outputs of some of them, from `row` on, with each step of the next sums: it would be idle. */
typedef struct {
    const linear *with;
    const packed_inputs *from;
    const tile_sums *sums;
    int64_t panel;
    int64_t tile;
    int64_t first;
    int64_t middle;
    int64_t end;
    int64_t row;
    int64_t rows_per_step;
    enum epilogue epilogue;
    float *out;
    int64_t stride;
} finishing;

/* Make outputs of so many more rows, or of all that are left. */
void finish_rows(finishing *of, int64_t count);

INLINE void finish_some(finishing *of) {
    if (of->row < of->end) finish_rows(of, of->rows_per_step);
}

#endif

#endif

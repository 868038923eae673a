#include "tile_results.h"

#include "adapters.h"

#if HAS_TILES

/* LANES outputs of row `row` of all: its sums, scaled if they are of 8-bit codes, and biased. */
INLINE vec output_of(const int form, const packed_inputs *from, int64_t row, const char *sums, vec scale, vec bias) {
    if (form != FORM_INT8) return load((const float *)sums) + bias;
    vec sum = __builtin_convertvector(*(const unaligned_ivec *)sums - from->offsets[row], vec);
    return sum * (scale * from->factors[row]) + bias;
}

/* Outputs of a gated product as inputs of the next product; behind the last ones the rest of the step is zeros. */
INLINE void pack_gated(const int parts, const finishing *of, int64_t row, vec output) {
    const int is_second = row >= of->middle;
    const int64_t form = parts == 1 ? FORM_PAIRS : FORM_FLOAT32, place = row - (is_second ? of->middle : of->first);
    char *packed = (char *)of->out + (of->tile + is_second) * packed_tile_bytes(of->stride, form);
    pack_parts(parts, packed, place, of->panel * LANES, output);
    const int64_t end = (of->panel + 1) * LANES;
    if (of->panel + 1 == of->with->num_panels && end % inputs_per_step(form) != 0)
        pack_parts(parts, packed, place, end, (vec){0});
}

INLINE void finish_rows_of(const int form, const finishing *of, int64_t end) {
    const linear *with = of->with;
    const packed_inputs *from = of->from;
    const int64_t panel = of->panel, column = panel * (of->epilogue == GATED ? LANES : PANEL);
    const vec low_bias = load(with->bias + panel * PANEL), high_bias = load(with->bias + panel * PANEL + LANES);
    const vec low_scale = load(with->scales + panel * PANEL), high_scale = load(with->scales + panel * PANEL + LANES);
    for (int64_t row = of->row; row < end; row++) {
        const int64_t at = (row - of->first) * LINE;
        vec low = output_of(form, from, row, of->sums->halves[0] + at, low_scale, low_bias);
        vec high = output_of(form, from, row, of->sums->halves[1] + at, high_scale, high_bias);
        if (from->added != NULL) add_low_rank(from->added, row, panel, &low, &high);
        if (of->epilogue == GATED_PACKED)
            pack_gated(PARTS, of, row, silu(low) * high);
        else if (of->epilogue == GATED_PAIRS)
            pack_gated(1, of, row, silu(low) * high);
        else
            finish_row(of->epilogue, low, high, of->out + row * of->stride + column);
    }
}

void finish_rows(finishing *of, int64_t count) {
    const int64_t end = of->row + count < of->end ? of->row + count : of->end;
    if (of->with->form == FORM_INT8)
        finish_rows_of(FORM_INT8, of, end);
    else
        finish_rows_of(FORM_FLOAT32, of, end);
    of->row = end;
}

#endif

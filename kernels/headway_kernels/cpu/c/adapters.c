#include "adapters.h"

#define AT_ONCE 4 /* dot products side by side, so that additions do not wait for each other */

/* LANES of an addition's numbers from the one at `at` on. */
INLINE vec numbers_at(const int is_bfloat16, const void *numbers, int64_t at) {
    return is_bfloat16 ? load_bfloat16((const uint16_t *)numbers + at) : load((const float *)numbers + at);
}

/* `count` dot products of a normed row with rows of `down` from row `first` on. */
INLINE void dot_products(const int is_bfloat16, const int count, int64_t inputs, const float *row, const float *weight,
                         const void *down, int64_t first, float factor, float *out) {
    const int64_t stride = (inputs + LANES - 1) / LANES * LANES;
    vec sums[AT_ONCE] = {{0}};
    for (int64_t k = 0; k < inputs; k += LANES) {
        const vec x = normed_inputs(row, weight, k, inputs);
        UNROLLED
        for (int i = 0; i < count; i++) sums[i] += x * numbers_at(is_bfloat16, down, (first + i) * stride + k);
    }
    UNROLLED
    for (int i = 0; i < count; i++) out[first + i] = factor * sum_of(sums[i]);
}

INLINE void apply(const int is_bfloat16, const low_rank *of, int64_t inputs, const float *row, const float *weight,
                  float factor, float *out) {
    int64_t r = 0;
    for (; r + AT_ONCE <= of->rank; r += AT_ONCE)
        dot_products(is_bfloat16, AT_ONCE, inputs, row, weight, of->down, r, factor, out);
    for (; r < of->rank; r++) dot_products(is_bfloat16, 1, inputs, row, weight, of->down, r, factor, out);
}

void adapt_row(const row_adapters *of, int64_t row, const packed_inputs *inputs, const float *from, rms_norm norm) {
    const int64_t hidden_row = of->rows == NULL ? row : of->rows[row];
    const low_rank *adapter = of->by_token[of->tokens == NULL ? hidden_row : of->tokens[hidden_row]];
    const low_rank *addition = adapter == NULL || adapter[of->addition].rank == 0 ? NULL : &adapter[of->addition];
    of->added.additions[row] = addition;
    if (addition == NULL) return;
    const float factor = input_factor(inputs, row, from, norm);
    float *out = of->added.downs + row * of->added.stride;
    if (addition->is_bfloat16)
        apply(1, addition, inputs->inputs, from, norm.weight, factor, out);
    else
        apply(0, addition, inputs->inputs, from, norm.weight, factor, out);
}

/* LANES of up (down x). */
INLINE vec span_of_up(const int is_bfloat16, const rank_span *span, const void *up, const float *down) {
    vec even = {0}, odd = {0};
    down += span->begin;
    int64_t r = 0, at = span->at;
    for (; r + 2 <= span->count; r += 2, at += 2 * LANES) {
        even += splat(down[r]) * numbers_at(is_bfloat16, up, at);
        odd += splat(down[r + 1]) * numbers_at(is_bfloat16, up, at + LANES);
    }
    if (r < span->count) even += splat(down[r]) * numbers_at(is_bfloat16, up, at);
    return even + odd;
}

void add_low_rank(const added_rows *of, int64_t row, int64_t panel, vec *low, vec *high) {
    const low_rank *addition = of->additions[row];
    if (addition == NULL) return;
    const float *down = of->downs + row * of->stride;
    const rank_span *spans = addition->spans + 2 * panel;
    if (addition->is_bfloat16) {
        *low += span_of_up(1, spans, addition->up, down);
        *high += span_of_up(1, spans + 1, addition->up, down);
    } else {
        *low += span_of_up(0, spans, addition->up, down);
        *high += span_of_up(0, spans + 1, addition->up, down);
    }
}

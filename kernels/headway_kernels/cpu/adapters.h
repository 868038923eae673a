/* Adapters: low-rank additions to the outputs of a product, others for each row.
 *
 * Owns: their form, and adding them to sums of a product.
 * Must not know: what a layer is for, or which row has which adapter.
 *
 * A row's outputs get up (down x) more (LoRA, Hu et al. 2021, arXiv 2106.09685). The order of these additions depends
 * on the row's adapter alone, not on other rows or their adapters.
 */
#ifndef HEADWAY_ADAPTERS_H
#define HEADWAY_ADAPTERS_H

#include <stdint.h>

#include "linear.h"

/* The ranks that add to half a panel, from `begin` on, and where their factors are: `count` times LANES floats. */
typedef struct {
    int64_t begin;
    int64_t count;
    int64_t at;
} rank_span;

/* The addition to one product. `down` [rank, inputs]; `up` by span, two for each of the product's panels. Parts of a
 * product have ranks of their own, so most halves need only some. A rank of 0 adds nothing. */
typedef struct {
    int64_t rank;
    const float *down;
    const float *up;
    const rank_span *spans;
} low_rank;

/* What is added to the rows of one product: by row `additions`, or NULL, and `downs` [rows, stride], which is down x.
 */
struct added_rows {
    const low_rank **additions;
    float *downs;
    int64_t stride;
};

/* out [rank] = down x, with the inputs of a row that the product normalises by `norm`. */
void apply_down(const low_rank *of, int64_t inputs, const float *row, rms_norm norm, float *out);

/* LANES of up (down x). */
INLINE vec span_of_up(const rank_span *span, const float *up, const float *down) {
    vec even = {0}, odd = {0};
    up += span->at;
    down += span->begin;
    int64_t r = 0;
    for (; r + 2 <= span->count; r += 2) {
        even += splat(down[r]) * load(up + r * LANES);
        odd += splat(down[r + 1]) * load(up + (r + 1) * LANES);
    }
    if (r < span->count) even += splat(down[r]) * load(up + r * LANES);
    return even + odd;
}

/* Add up (down x) to a row's sums with a panel. */
INLINE void add_low_rank(const added_rows *of, int64_t row, int64_t panel, vec *low, vec *high) {
    const low_rank *addition = of->additions[row];
    if (addition == NULL) return;
    const float *down = of->downs + row * of->stride;
    *low += span_of_up(&addition->spans[2 * panel], addition->up, down);
    *high += span_of_up(&addition->spans[2 * panel + 1], addition->up, down);
}

#define MOST_ROWS_FETCHED 32
#define FLOATS_OF_A_LINE 16

/* Fetch into the cache what `num_rows` rows from `first` on add to a panel: each may bring its own from memory. */
INLINE void fetch_additions(const added_rows *of, int64_t panel, int64_t first, int64_t num_rows) {
    if (num_rows > MOST_ROWS_FETCHED) return;
    const low_rank *last = NULL;
    for (int64_t row = first; row < first + num_rows; row++) {
        const low_rank *addition = of->additions[row];
        if (addition == NULL || addition == last) continue;
        const rank_span *span = &addition->spans[2 * panel];
        const int64_t end = span[1].at + span[1].count * LANES;
        for (int64_t at = span->at; at < end; at += FLOATS_OF_A_LINE) __builtin_prefetch(addition->up + at, 0, 2);
        last = addition;
    }
}

#endif

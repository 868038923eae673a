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

/* The addition to one product, of float32s, or of bfloat16s, which are half the memory to read. `down` [rank, inputs],
 * rows padded with zeros to whole registers; `up` by span, two for each of the product's panels. Parts of a product
 * have ranks of their own, so most halves need only some. A rank of 0 adds nothing. */
typedef struct {
    int64_t rank;
    int64_t is_bfloat16;
    const void *down;
    const void *up;
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

/* Add up (down x) to a row's sums with a panel. */
void add_low_rank(const added_rows *of, int64_t row, int64_t panel, vec *low, vec *high);

#define MOST_ROWS_FETCHED 32
#define BYTES_OF_A_LINE 64

/* Fetch into the cache what `num_rows` rows from `first` on add to a panel: each may bring its own from memory. */
INLINE void fetch_additions(const added_rows *of, int64_t panel, int64_t first, int64_t num_rows) {
    if (num_rows > MOST_ROWS_FETCHED) return;
    const low_rank *last = NULL;
    for (int64_t row = first; row < first + num_rows; row++) {
        const low_rank *addition = of->additions[row];
        if (addition == NULL || addition == last) continue;
        const rank_span *span = &addition->spans[2 * panel];
        const int64_t size = addition->is_bfloat16 ? 2 : 4, end = (span[1].at + span[1].count * LANES) * size;
        for (int64_t at = span->at * size; at < end; at += BYTES_OF_A_LINE)
            __builtin_prefetch((const char *)addition->up + at, 0, 2);
        last = addition;
    }
}

#endif

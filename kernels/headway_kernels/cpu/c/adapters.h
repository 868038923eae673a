/* Adapters: low-rank additions to the outputs of a product, others for each row.
 *
 * Owns: their form, finding a row's, and adding them to sums of a product.
 * Must not know: what a layer is for, or why a token has an adapter.
 *
 * A row's outputs get up (down x) more (LoRA, Hu et al. 2021, arXiv 2106.09685). The order of these additions depends
 * on the row's adapter alone, not on other rows or their adapters.
 */
#ifndef HEADWAY_ADAPTERS_H
#define HEADWAY_ADAPTERS_H

#include "inputs.h"
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

/* Where the additions to the rows of one product come from. `by_token`: an adapter's additions, or NULL; NULL if no
 * token has any. `tokens`: the token of each row of the hidden state; `rows`: the row of the hidden state of each row
 * of the product; NULL: its number. `addition`: which of an adapter's. `added`: room for what is found. */
typedef struct {
    const low_rank *const *by_token;
    const int64_t *tokens;
    const int32_t *rows;
    int64_t addition;
    added_rows added;
} row_adapters;

/* Find the addition to row `row` of a product with so many inputs, which are at `from` and which the product normalises
 * by `norm`, and apply its first half: down x. */
void adapt_row(const row_adapters *of, int64_t row, const packed_inputs *inputs, const float *from, rms_norm norm);

/* Add up (down x) to a row's sums with a panel. */
void add_low_rank(const added_rows *of, int64_t row, int64_t panel, vec *low, vec *high);

#define MOST_ROWS_FETCHED 32

/* Fetch into the cache what the rows of tiles [first_tile, end_tile) add to the panel at `next`, if it is one of this
 * product: each may bring its own from memory. */
INLINE void fetch_additions(const packed_inputs *from, const linear *with, const char *next, int64_t first_tile,
                            int64_t end_tile) {
    if (from->added == NULL) return;
    const int64_t first = tile_start(first_tile, from->num_tiles, from->num_rows), panel = panel_number(with, next);
    const int64_t end_row = tile_start(end_tile, from->num_tiles, from->num_rows);
    if (end_row - first > MOST_ROWS_FETCHED || panel < 0 || panel >= with->num_panels) return;
    const low_rank *last = NULL;
    for (int64_t row = first; row < end_row; row++) {
        const low_rank *addition = from->added->additions[row];
        if (addition == NULL || addition == last) continue;
        const rank_span *span = &addition->spans[2 * panel];
        const int64_t size = addition->is_bfloat16 ? 2 : 4, end = (span[1].at + span[1].count * LANES) * size;
        for (int64_t at = span->at * size; at < end; at += LINE)
            __builtin_prefetch((const char *)addition->up + at, 0, 2);
        last = addition;
    }
}

#endif

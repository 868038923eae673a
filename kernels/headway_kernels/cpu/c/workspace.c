#include "workspace.h"

#include <stdlib.h>

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

void free_space(workspace *space) {
    free(space->hidden);
    free(space->attended);
    free(space->activations);
    free(space->qkv);
    free(space->normed);
    free(space->added);
    free(space->gate_up);
    free(space->compressed);
    free(space->queries);
    free(space->layer_inputs);
    free(space->attention_tiles);
    free(space->sampled_tiles);
    free_products(&space->products);
    *space = (workspace){0};
}

/* NULL without columns, too: nobody reads that. */
static int get_rows(float **rows, int64_t num_tokens, int64_t columns) {
    if (columns == 0) return 1;
    *rows = stream_alloc(num_tokens * columns * 4);
    return *rows != NULL;
}

/* Rows that ranks share, if there are several. */
static int reserve_wide_rows(workspace *space, const row_strides *strides, int64_t num_tokens) {
    const int64_t packed = packed_bytes(num_tokens, strides->packed_activations);
    space->activations = stream_alloc(larger_of(num_tokens * strides->activations * 4, packed));
    return space->activations && get_rows(&space->hidden, num_tokens, strides->hidden) &&
           get_rows(&space->attended, num_tokens, strides->attended);
}

static int reserve_own_rows(workspace *space, const row_strides *strides, int64_t num_tokens) {
    return get_rows(&space->qkv, num_tokens, strides->qkv) &&
           get_rows(&space->normed, num_tokens, strides->needs_normed ? strides->hidden : 0) &&
           get_rows(&space->added, num_tokens, strides->needs_added ? strides->hidden : 0) &&
           get_rows(&space->gate_up, num_tokens, strides->gate_up) &&
           get_rows(&space->compressed, num_tokens, strides->compressed) &&
           get_rows(&space->queries, num_tokens, strides->queries) &&
           get_rows(&space->layer_inputs, num_tokens, strides->layer_inputs);
}

static int reserve_attention_tiles(workspace *space, int64_t num_tokens) {
    space->attention_tiles = malloc((size_t)num_tokens * sizeof *space->attention_tiles);
    space->sampled_tiles = malloc((size_t)num_tokens * sizeof *space->sampled_tiles);
    return space->attention_tiles && space->sampled_tiles;
}

int reserve_space(workspace *space, const row_strides *strides, int64_t num_tokens, int has_wide_rows) {
    if (num_tokens <= space->num_tokens) return 1;
    free_space(space);
    if ((has_wide_rows && !reserve_wide_rows(space, strides, num_tokens)) ||
        !reserve_own_rows(space, strides, num_tokens) || !reserve_attention_tiles(space, num_tokens) ||
        !reserve_products(&space->products, num_tokens, strides->widest_input)) {
        free_space(space);
        return 0;
    }
    space->num_tokens = num_tokens;
    return 1;
}

/* The working memory of a decoder, for a number of tokens.
 *
 * Owns: its parts, getting and freeing them.
 * Must not know: what a step writes where, or in which order.
 *
 * It is kept from step to step, and grown when a step needs more.
 */
#ifndef HEADWAY_WORKSPACE_H
#define HEADWAY_WORKSPACE_H

#include "product_phases.h"

/* Some consecutive tokens of one row. */
typedef struct {
    int64_t row;
    int64_t token;
    int64_t position;
    int64_t num_tokens;
} attention_tile;

/* What a token needs at most. Rows that only some models need are 0 floats wide, or not needed. */
typedef struct {
    int64_t hidden;
    int64_t qkv;
    int64_t attended;
    int64_t activations;
    int64_t packed_activations; /* inputs of the product behind them */
    int64_t gate_up;
    int64_t compressed;
    int64_t queries;
    int64_t layer_inputs;
    int64_t widest_input; /* of all products */
    int64_t needs_normed;
    int64_t needs_added;
} row_strides;

typedef struct {
    int64_t num_tokens;
    int64_t num_attention_tiles;
    float *hidden; /* these three lie elsewhere if ranks share them */
    float *attended;
    float *activations;
    float *qkv;
    float *normed;
    float *added;
    float *gate_up;
    float *compressed;
    float *queries;
    float *layer_inputs;
    product_space products;
    attention_tile *attention_tiles;
    attention_tile *sampled_tiles; /* one for each sampled token */
} workspace;

/* 0 when memory is short: then there is none. */
int reserve_space(workspace *space, const row_strides *strides, int64_t num_tokens, int has_wide_rows);

void free_space(workspace *space);

#endif

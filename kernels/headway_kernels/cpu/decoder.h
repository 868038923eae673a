/* The forward pass of a decoder-only transformer, from token ids to logits, as one job of a team.
 *
 * Owns: the order of a step's phases, its working memory, and the functions that Python calls.
 * Must not know: requests, the scheduler, sampling, or where weights come from.
 *
 * All pointers are to memory of the caller, which keeps it alive; sizes are in elements.
 */
#ifndef HEADWAY_DECODER_H
#define HEADWAY_DECODER_H

#include <stdint.h>

#include "attention.h"
#include "linear.h"
#include "team.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct decoder decoder;

typedef struct {
    int64_t num_layers;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t vocab_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;      /* padded to a multiple of headway_lanes() */
    int64_t true_head_dim; /* as in the checkpoint */
    int64_t block_size;
    float norm_eps;
    float score_scale;
    const float *embedding;  /* [vocab, hidden] */
    const float *cosines;    /* [context, true_head_dim / 2] */
    const float *sines;      /* the same */
    const float *final_norm; /* [hidden] */
} decoder_shape;

/* One layer. `attention_norm` and `mlp_norm` [hidden]; `qk_norm` [heads + kv_heads, true_head_dim] or NULL.
 * `window`: how many positions a token sees; 0: all. */
typedef struct {
    linear *qkv;
    linear *output;
    linear *gate_up;
    linear *down;
    const float *attention_norm;
    const float *mlp_norm;
    const float *qk_norm;
    int64_t window;
} layer_weights;

/* One step: rows of consecutive tokens. `tables` [rows, table_stride]; `sampled`: tokens whose logits are asked for, in
 * ascending order; `logits` [num_sampled, logits_stride], logits_stride at least headway_logits_stride(). */
typedef struct {
    int64_t num_rows;
    int64_t num_tokens;
    int64_t num_sampled;
    const int32_t *token_ids;
    const int64_t *row_starts;    /* first token of each row */
    const int64_t *row_tokens;    /* how many */
    const int64_t *row_positions; /* position of the first */
    const int32_t *tables;
    int64_t table_stride;
    const int64_t *sampled;
    float *logits;
    float *pool; /* [layers, num_blocks, headway_block_floats] */
    int64_t layer_stride;
} decoder_step;

/* Ask the system for the features that this library needs, before any other call; 0 if it refuses. */
EXPORT int headway_permitted(void);
EXPORT int64_t headway_lanes(void);
EXPORT int64_t headway_max_head_dim(void);
EXPORT int64_t headway_block_floats(const decoder_shape *shape);
EXPORT int64_t headway_logits_stride(int64_t vocab_size);

EXPORT linear *headway_linear_new(const float *weight, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                                  int64_t gated);
EXPORT void headway_linear_free(linear *the_linear);
EXPORT team *headway_team_new(int64_t num_threads);
EXPORT void headway_team_free(team *the_team);

/* `head` is the product that gives the logits. NULL when memory is short. */
EXPORT decoder *headway_decoder_new(const decoder_shape *shape, const layer_weights *layers, linear *head);
EXPORT void headway_decoder_free(decoder *the_decoder);

/* 0 when memory is short (nothing has been written then), else 1. */
EXPORT int headway_decoder_run(decoder *the_decoder, team *with, const decoder_step *step);

/* out [rows, panels wide] = inputs [rows, inputs] x weights: one product alone, for tests and measurements. */
EXPORT int headway_linear_run(const linear *the_linear, team *with, const float *inputs, int64_t num_rows,
                              const float *norm_weight, float norm_eps, int64_t gated, float *out, int64_t stride);

#endif

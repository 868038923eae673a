/* A decoder as Python describes it: its shape, the weights of its layers, and a step.
 *
 * Owns: these structs, which structs.py has, too.
 * Must not know: how a step runs.
 *
 * All pointers are to memory of the caller, which keeps it alive; sizes are in elements.
 */
#ifndef HEADWAY_DECODER_STRUCTS_H
#define HEADWAY_DECODER_STRUCTS_H

#include <stdint.h>

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "meeting.h"
#include "recurrence.h"
#include "rows.h"

/* Inputs of each layer's own: of a token, `size` numbers for each of the layers. They are the sum of what `projection`
 * makes of its embedding, times its factor and normalised with `norm`, [layers, size], and of a row of `table`,
 * [vocab, layers * size], float32 or bfloat16 if it `is_narrow`, times its factor; the sum has one, too. */
typedef struct {
    int64_t size;
    linear *projection;
    const float *norm;
    const void *table;
    int64_t is_narrow;
    float projection_factor;
    float table_factor;
    float sum_factor;
} layer_inputs;

/* A rank of several has some columns of each wide row: of the hidden state, the attended values, the activations and
 * the logits. It computes these for all tokens, from inputs of whole rows, so that each number has the same bits as
 * without ranks. Columns start at a multiple of the panels of the product that writes them. A rank that is alone has
 * all of them, from 0. A later stage gets its hidden state from another rank and has no embedding; an earlier one has
 * no head. */
typedef struct {
    int64_t num_layers;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t vocab_size;
    int64_t num_heads;     /* this rank's */
    int64_t num_kv_heads;  /* this rank's */
    int64_t head_dim;      /* padded to a multiple of headway_lanes() */
    int64_t true_head_dim; /* as in the checkpoint */
    int64_t block_size;
    int64_t block_stride; /* numbers from a block of a layer to its next one */
    int64_t all_heads;    /* of all ranks */
    int64_t first_head;
    int64_t hidden_start;
    int64_t hidden_columns;
    int64_t activation_start;
    int64_t logits_start;
    int64_t norm_kind;
    int64_t is_parallel;     /* attention and feed-forward read the same hidden state */
    int64_t norms_all_heads; /* `qk_norm` is over all heads of queries, and of keys; else of each head */
    int64_t norms_rotated;   /* `qk_norm` is behind the rotation */
    int64_t norms_values;    /* `qk_norm` has rows for the heads of values, too, last */
    int64_t gates;           /* enum gate_kind; `qkv` gives as many as queries, last */
    int64_t head_norm_kind;  /* enum norm_kind, of `qk_norm` */
    int64_t clips_normed;    /* `qkv_clip` is behind `qk_norm` */
    int64_t norms_sums;      /* norms behind attention and feed-forward are of the hidden state after the addition */
    float norm_eps;
    float post_norm_eps; /* of norms of what is added to the hidden state */
    float score_scale;
    float score_softcap;   /* 0: none */
    float qkv_clip;        /* bounds queries, keys and values on both sides; 0: nothing does */
    float residual_factor; /* on what a layer adds to the hidden state */
    float logits_factor;
    float logits_softcap;      /* 0: none */
    int64_t kv_form;           /* enum kv_form */
    const float *embedding;    /* [vocab, hidden_columns], or NULL */
    const float *positions;    /* [context, hidden_columns], added to embeddings, or NULL */
    const float *score_biases; /* as of an `attention_shape` */
    int64_t bias_stride;
    int64_t last_distance;
    norm_weights final_norm;
    linear *before_head; /* [hidden, hidden], then an activation and a norm, behind `final_norm`; or NULL */
    int64_t head_activation;
    norm_weights head_norm;
    const layer_inputs *inputs; /* or NULL */
} decoder_shape;

static inline attention_shape attention_shape_of(const decoder_shape *shape) {
    return (attention_shape){
        .num_heads = shape->num_heads,
        .num_kv_heads = shape->num_kv_heads,
        .head_dim = shape->head_dim,
        .block_size = shape->block_size,
        .block_stride = shape->block_stride,
        .scale = shape->score_scale,
        .softcap = shape->score_softcap,
        .form = shape->kv_form,
        .gates = shape->gates,
        .biases = shape->score_biases,
        .bias_stride = shape->bias_stride,
        .last_distance = shape->last_distance,
    };
}

/* Latent attention: see latent_phases.h. `compress` gives a compressed query, a compressed key and value, and then the
 * `num_shared` channels that all keys of a token share: the first ones of both halves of a head. The first two are
 * normalised, with the root mean square of `norm_eps`. Queries, heads `query_dim` apart, come from the first, or,
 * without `expand_query`, from the hidden state by `query`. By head, `absorb` [rank, channels of a key] is what makes
 * keys, turned, with zeros for shared channels, and `values` [value, rank]. `gates` [num_heads] are of what heads give,
 * or NULL. */
typedef struct {
    linear *query;
    linear *compress;
    linear *expand_query;
    linear *const *absorb;
    linear *const *values;
    int64_t query_dim;
    int64_t num_shared;
    const float *query_norm;
    const float *norm;
    float norm_eps;
    linear *gates;
} latent_weights;

/* The heads of one layer, as `decoder_shape` has them of most, and where its keys and values are: in the pool's
 * layer `kv_layer`, from number `kv_first` of each block on. One that `is_reading` has queries alone: a layer before it
 * has stored what it reads. Latent attention has one key-value head, which is a token's row. */
typedef struct {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t true_head_dim;
    int64_t kv_layer;
    int64_t kv_first;
    int64_t is_reading;
} layer_heads;

/* One layer. Norms [hidden] or none; those behind attention and feed-forward need all columns of a rank that is alone.
 * `output_norm` and `down_norm`: root mean squares of what `output` and `down` read, as wide, or NULL.
 * `qk_norm` and its bias [heads + kv_heads, true_head_dim] or NULL. `cosines` and `sines` [context, true_head_dim / 2],
 * or NULL: no rotation. `qkv` and `output` are of attention, those of a state of its `recurrence`: a layer may have
 * either, both or none. One without `gate_up` and `experts` has no feed-forward. `query_factors` [context], or NULL:
 * all 1. `window`: how many positions a token sees; 0: all. `gate_up` is packed with `gated` if it is gated by SILU;
 * else it gives gates, then ups, or ups alone. `heads` are those of its attention, if it has any. `factor` multiplies
 * the hidden state behind it. */
typedef struct {
    linear *qkv;
    linear *output;
    linear *state_inputs;
    linear *state_selection; /* this and the next two: NULL where inputs have what they would give */
    linear *state_steps;
    linear *state_gates;
    linear *state_output;
    linear *gate_up;
    linear *down;
    norm_weights attention_norm;
    norm_weights attention_post_norm;
    norm_weights mlp_norm;
    norm_weights mlp_post_norm;
    const float *output_norm;
    const float *down_norm;
    const float *qk_norm;
    const float *qk_norm_bias;
    const float *cosines;
    const float *sines;
    const float *query_factors;
    int64_t window;
    int64_t activation;
    int64_t is_gated;
    const float *curve;           /* of XIELU, or NULL */
    const float *sinks;           /* [num_heads] or NULL: see attend() */
    const expert_layer *experts;  /* or NULL; with them, there is no `gate_up` and no `down` */
    const latent_weights *latent; /* or NULL; with them, there is no `qkv` */
    const recurrence *recurrence; /* or NULL */
    linear *input_gate;           /* of the layer's own inputs, if the model has any: gates, [size, hidden] */
    linear *input_back;           /* their way back, [hidden, size], and a norm behind it */
    norm_weights input_norm;
    layer_heads heads;
    float factor;
} layer_weights;

/* What a rank of several shares with the others of its stage, in memory of the caller: rows headway_row_floats() apart.
 * `hidden_in` [tokens, hidden_columns] is the hidden state from an earlier stage, or NULL. With `is_shared`, the ranks
 * write to the same memory; otherwise `meet` copies the columns of the others. */
typedef struct {
    meet_others meet;
    void *context;
    int64_t is_shared;
    float *hidden;
    float *attended;
    float *activations;
    float *pairs;         /* see `expert_part` */
    float *shared_expert; /* the same */
    const float *hidden_in;
} shared_rows;

/* One step: rows of consecutive tokens. `tables` [rows, table_stride]; `sampled`: tokens whose logits are asked for, in
 * ascending order; `logits` [num_sampled, logits_stride], logits_stride at least headway_logits_stride(). `shared`:
 * NULL for a rank that is alone. */
typedef struct {
    int64_t num_rows;
    int64_t num_tokens;
    int64_t num_sampled;
    const int32_t *token_ids;
    const int64_t *row_starts;    /* first token of each row */
    const int64_t *row_tokens;    /* how many */
    const int64_t *row_positions; /* position of the first */
    const int64_t *row_numbers;   /* each row's state, if layers have any */
    const int32_t *tables;
    int64_t table_stride;
    const int64_t *sampled;
    float *logits;
    void *pool; /* [layers, num_blocks, block_stride], of numbers as `kv_form` says */
    int64_t layer_stride;
    const shared_rows *shared;
    const low_rank *const *adapters; /* by token: its adapter's additions, or NULL; NULL if no token has any */
    int64_t most_rank;               /* of those to dense products */
    int64_t most_expert_rank;        /* of those to routers and experts; 0: there are none */
} decoder_step;

/* The products of a layer, in the order of an adapter's additions; those up to SITE_QKV, which latent attention has for
 * its queries, come before attention. Every layer has SITES, and behind them two for each expert, as many as the layer
 * with most experts needs: to its `gate_up`, to its `down`; then two for each head of latent attention: to `absorb`, to
 * `values`. */
enum site {
    SITE_COMPRESS,
    SITE_GATES,
    SITE_STATE_INPUTS,
    SITE_STATE_SELECTION,
    SITE_STATE_STEPS,
    SITE_STATE_GATES,
    SITE_QKV,
    SITE_OUTPUT,
    SITE_STATE_OUTPUT,
    SITE_GATE_UP,
    SITE_DOWN,
    SITE_ROUTER,
    SITES
};

#endif

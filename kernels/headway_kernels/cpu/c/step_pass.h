/* A decoder, and what all phases of a step read.
 *
 * Owns: these structs.
 * Must not know: the order of the phases.
 */
#ifndef HEADWAY_STEP_PASS_H
#define HEADWAY_STEP_PASS_H

#include "decoder_structs.h"
#include "workspace.h"

/* The wide rows of a step: in the workspace, or shared with other ranks. */
typedef struct {
    float *hidden;
    float *attended;
    float *activations;
} wide_rows;

typedef struct decoder {
    decoder_shape shape;
    attention_shape *attentions; /* of each layer */
    int64_t tokens_per_tile;
    layer_weights *layers;
    linear *head;
    row_strides strides; /* without `gate_up`, products activate */
    workspace space;
    wide_rows rows;
    expert_sizes experts; /* without experts: zeros */
    expert_space expert_space;
    int64_t latent_heads; /* 0: no attention is latent */
} decoder;

typedef struct {
    const decoder *of;
    const decoder_step *step;
    const layer_weights *layer; /* each member has a copy of this struct: layers advance member by member */
    const attention_shape *attention;
    void *layer_pool;
    /* The tokens whose attention is wanted: all, or in the last layer the sampled ones. */
    const attention_tile *attending;
    int64_t num_attending;
    int64_t num_members;
    enum meeting meeting;
    int64_t num_met; /* rows that the meeting is about */
    expert_space *expert_space;
} pass;

static inline int attends(const layer_weights *layer) { return layer->output != NULL; }

/* Whether anything in a layer knows other tokens. */
static inline int mixes(const layer_weights *layer) { return attends(layer) || layer->recurrence != NULL; }

/* Of queries and a token's row; gates of latent attention stand behind them. */
static inline int64_t latent_columns(const attention_shape *heads) {
    return (heads->num_heads + heads->num_kv_heads) * heads->head_dim;
}

/* Of queries, keys, values and gates. */
static inline int64_t qkv_columns(const decoder_shape *shape, const layer_weights *layer,
                                  const attention_shape *heads) {
    const int has_gates = shape->gates != GATES_NONE;
    if (layer->latent != NULL) return latent_columns(heads) + (has_gates ? padded_outputs(heads->num_heads) : 0);
    return (heads->num_heads * (has_gates ? 2 : 1) + 2 * heads->num_kv_heads) * heads->head_dim;
}

/* Of what one head gives. */
static inline int64_t attended_dim(const layer_weights *layer, const attention_shape *heads) {
    return layer->latent == NULL ? heads->head_dim : padded_outputs(layer->latent->values[0]->outputs);
}

/* Of what the heads of all ranks give, which have equally many each. */
static inline int64_t attended_columns(const decoder_shape *shape, const layer_weights *layer,
                                       const attention_shape *heads) {
    return shape->all_heads / shape->num_heads * heads->num_heads * attended_dim(layer, heads);
}

/* Of an adapter: see `enum site`. */
static inline int64_t additions_of_layer(const decoder *of) {
    return SITES + 2 * (of->experts.experts + of->latent_heads);
}

#endif

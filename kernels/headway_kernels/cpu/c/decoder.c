#include "decoder.h"

#include "attention_phases.h"
#include "latent_phases.h"
#include "recurrence_phases.h"
#include "step_pass.h"

#include <stdlib.h>

/* Four products of two phases, placing, attending, two norms, activating, adding twice; experts instead of two
 * products, three products instead of one; two products, three phases of a state and adding beside attention; two
 * products and a norm within a state; gates beside latent attention; two products, a gate and adding of a layer's own
 * inputs. */
#define PHASES_PER_LAYER (40 + EXPERT_PHASES)
/* Embedding, inputs of layers, gathering, a norm, a product and a norm before the head, the head's product, scaling
 * logits. */
#define OTHER_PHASES 12
#define MEETINGS_PER_LAYER 6
#define OTHER_MEETINGS 4 /* start, embedding, after moving rows, logits */

static int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static void meet_task(void *work, int64_t task) {
    (void)task;
    const pass *now = work;
    now->step->shared->meet(now->step->shared->context, now->meeting, now->num_met);
}

/* Wait until all ranks of the stage are here. Only the caller's thread speaks to them: it may have to run Python. */
static void meet(member *self, pass *now, enum meeting about, int64_t num_rows) {
    if (now->step->shared == NULL) return;
    now->meeting = about;
    now->num_met = num_rows;
    if (self->number == 0) team_take(self, meet_task, now, 1);
    team_wait(self, 1);
}

static void embed_token(const pass *now, int64_t token, int64_t position) {
    const decoder *of = now->of;
    const decoder_shape *shape = &of->shape;
    const float *from = shape->embedding == NULL
                            ? now->step->shared->hidden_in + token * shape->hidden_columns
                            : shape->embedding + now->step->token_ids[token] * shape->hidden_columns;
    float *to = of->rows.hidden + token * of->strides.hidden + shape->hidden_start;
    memcpy(to, from, (size_t)shape->hidden_columns * sizeof *from);
    if (shape->positions != NULL)
        add_row(to, shape->positions + position * shape->hidden_columns, shape->hidden_columns, 1.0f);
}

static void embed_task(void *work, int64_t task) {
    const pass *now = work;
    const attention_tile *tile = &now->of->space.attention_tiles[task];
    if (now->of->shape.hidden_columns == 0) return; /* a rank of more than there are columns has no embedding */
    for (int64_t i = 0; i < tile->num_tokens; i++) embed_token(now, tile->token + i, tile->position + i);
}

/* Move `columns` of row sampled[i] to row i. `sampled` ascends, so no row is overwritten before it is moved. */
static void gather(const decoder_step *step, float *rows, int64_t stride, int64_t columns) {
    for (int64_t i = 0; i < step->num_sampled; i++) {
        if (step->sampled[i] != i)
            memcpy(rows + i * stride, rows + step->sampled[i] * stride, (size_t)columns * sizeof *rows);
    }
}

/* In memory that ranks share, each moves its own columns. */
static void gather_task(void *work, int64_t task) {
    const pass *now = work;
    const decoder *of = now->of;
    const decoder_shape *shape = &of->shape;
    const int owns_some = now->step->shared != NULL && now->step->shared->is_shared;
    const int owns_heads = owns_some && now->layer->recurrence == NULL;
    if (task == 0)
        gather(now->step, of->rows.hidden + (owns_some ? shape->hidden_start : 0), of->strides.hidden,
               owns_some ? shape->hidden_columns : of->strides.hidden);
    else if (task == 1) /* the results of a state are all of one rank */
        gather(now->step,
               of->rows.attended + (owns_heads ? shape->first_head * attended_dim(now->layer, now->attention) : 0),
               of->strides.attended,
               owns_heads ? now->attention->num_heads * attended_dim(now->layer, now->attention)
                          : of->strides.attended);
    else
        gather(now->step, of->space.normed, of->strides.hidden, of->strides.hidden);
}

/* ---- norms beside products ---- */

/* Rows of a phase: normalised from the hidden state, added to it, activated, or logits that are scaled. `factor`
 * multiplies the hidden state behind an addition. */
typedef struct {
    const pass *now;
    norm_weights norm;
    float factor;
} row_phase;

static void normalise_task(void *work, int64_t row) {
    const row_phase *phase = work;
    const decoder *of = phase->now->of;
    normalise_row((enum norm_kind)of->shape.norm_kind, phase->norm, of->shape.norm_eps,
                  of->rows.hidden + row * of->strides.hidden, of->shape.hidden_size,
                  of->space.normed + row * of->strides.hidden);
}

static void normalise_hidden(member *self, const pass *now, norm_weights norm, int64_t num_rows) {
    row_phase phase = {now, norm, 1.0f};
    team_phase(self, normalise_task, &phase, num_rows);
}

static void add_task(void *work, int64_t row) {
    const row_phase *phase = work;
    const decoder *of = phase->now->of;
    const decoder_shape *shape = &of->shape;
    const int has_norm = phase->norm.weight != NULL;
    float *hidden = of->rows.hidden + row * of->strides.hidden, *added = of->space.added + row * of->strides.hidden;
    if (has_norm && !shape->norms_sums)
        normalise_row((enum norm_kind)shape->norm_kind, phase->norm, shape->post_norm_eps, added, shape->hidden_size,
                      added);
    add_row(hidden + shape->hidden_start, added + shape->hidden_start, shape->hidden_columns, shape->residual_factor);
    if (has_norm && shape->norms_sums)
        normalise_row((enum norm_kind)shape->norm_kind, phase->norm, shape->post_norm_eps, hidden, shape->hidden_size,
                      hidden);
    if (phase->factor != 1.0f) scale_row(hidden + shape->hidden_start, shape->hidden_columns, phase->factor, 0.0f);
}

static void activate_task(void *work, int64_t row) {
    const row_phase *phase = work;
    const decoder *of = phase->now->of;
    const layer_weights *layer = phase->now->layer;
    int64_t width = layer->gate_up->outputs / (layer->is_gated ? 2 : 1);
    activate_row((enum activation)layer->activation, layer->is_gated != 0, layer->curve,
                 of->space.gate_up + row * of->strides.gate_up, width,
                 of->rows.activations + row * of->strides.activations + of->shape.activation_start);
}

static void scale_task(void *work, int64_t row) {
    const row_phase *phase = work;
    const decoder_shape *shape = &phase->now->of->shape;
    scale_row(phase->now->step->logits + row * padded_outputs(shape->vocab_size) + shape->logits_start,
              phase->now->of->head->outputs, shape->logits_factor, shape->logits_softcap);
}

/* ---- a layer ---- */

/* A product that reads the hidden state behind a norm. RMS norms are a part of packing. */
static product product_behind(member *self, const pass *now, norm_weights norm, const linear *with, int64_t num_rows,
                              enum epilogue epilogue, float *out, int64_t out_stride) {
    const decoder *of = now->of;
    const rms_norm packing = {norm.weight, of->shape.norm_eps}, no_norm = {0};
    if (norm.weight == NULL || of->shape.norm_kind == NORM_RMS)
        return product_of(&of->space.products, with, num_rows, of->rows.hidden, of->strides.hidden, packing, epilogue,
                          out, out_stride);
    normalise_hidden(self, now, norm, num_rows);
    return product_of(&of->space.products, with, num_rows, of->space.normed, of->strides.hidden, no_norm, epilogue, out,
                      out_stride);
}

/* What adapters add to the rows of a product. In the last layer, products behind attention have sampled tokens. */
static row_adapters adapters_of(const pass *now, enum site site) {
    const product_space *space = &now->of->space.products;
    return (row_adapters){
        .by_token = now->step->adapters,
        .tokens = site > SITE_QKV && now->attending == now->of->space.sampled_tiles ? now->step->sampled : NULL,
        .addition = (now->layer - now->of->layers) * additions_of_layer(now->of) + site,
        .added = {space->additions, space->downs, space->most_rank},
    };
}

/* Whether something happens to what is added to the hidden state. */
static int adds_beside(const pass *now, norm_weights norm) {
    return norm.weight != NULL || now->of->shape.residual_factor != 1.0f;
}

/* Run a product whose result is added to the hidden state, behind a norm if there is one. */
static void run_adding(member *self, pass *now, product of_layer, norm_weights norm, float factor, const linear *next) {
    const decoder *of = now->of;
    const int64_t num_rows = of_layer.inputs.num_rows;
    const int beside = factor != 1.0f || adds_beside(now, norm);
    of_layer.epilogue = beside ? STORE : ADD;
    of_layer.out = (beside ? of->space.added : of->rows.hidden) + of->shape.hidden_start;
    of_layer.out_stride = of->strides.hidden;
    run_product(self, &of_layer, next);
    if (beside) {
        row_phase phase = {now, norm, factor};
        team_phase(self, add_task, &phase, num_rows);
    }
    meet(self, now, MEET_HIDDEN, num_rows);
}

/* What multiplies the hidden state behind a feed-forward: it may not be the last to add to that. */
static float factor_behind(const layer_weights *layer) { return layer->input_gate == NULL ? layer->factor : 1.0f; }

/* Products that activate by themselves pack their results at once as the next inputs, unless these must be quantised,
 * which needs whole rows, as adapters and norms do, or other ranks have parts of them. */
static void run_feed_forward(member *self, pass *now, int64_t num_tokens, const linear *next) {
    const decoder *of = now->of;
    const workspace *space = &of->space;
    const layer_weights *layer = now->layer;
    const rms_norm no_norm = {0};
    const int activates = layer->activation == SILU && layer->is_gated;
    const rms_norm inner = {layer->down_norm, of->shape.norm_eps};
    const int may_pack = inner.weight == NULL && now->step->shared == NULL && now->step->adapters == NULL;
    const enum epilogue gated = may_pack ? gated_before(layer->down, layer->gate_up) : GATED;
    const enum epilogue epilogue = activates ? gated : STORE;
    const int packs = is_packed(epilogue);
    float *out = activates ? of->rows.activations + of->shape.activation_start : space->gate_up;
    const int64_t stride = packs ? layer->down->inputs : activates ? of->strides.activations : of->strides.gate_up;
    product up = of->shape.is_parallel
                     ? product_of(&space->products, layer->gate_up, num_tokens, space->normed, of->strides.hidden,
                                  no_norm, epilogue, out, stride)
                     : product_behind(self, now, layer->mlp_norm, layer->gate_up, num_tokens, epilogue, out, stride);
    up.adapters = adapters_of(now, SITE_GATE_UP);
    run_product(self, &up, layer->down);
    if (!activates) {
        row_phase phase = {.now = now};
        team_phase(self, activate_task, &phase, num_tokens);
    }
    meet(self, now, MEET_ACTIVATIONS, num_tokens);
    product down = product_of(&space->products, layer->down, num_tokens, packs ? NULL : of->rows.activations,
                              of->strides.activations, inner, ADD, NULL, 0);
    if (packs) down.inputs.tiles = of->rows.activations;
    down.adapters = adapters_of(now, SITE_DOWN);
    run_adding(self, now, down, layer->mlp_post_norm, factor_behind(layer), next);
}

/* Whether the feed-forward's input lies normalised in the workspace. */
static int reads_normed(const decoder_shape *shape, const layer_weights *layer) {
    return shape->is_parallel || (shape->norm_kind != NORM_RMS && layer->mlp_norm.weight != NULL);
}

/* ---- inputs of each layer's own ---- */

static float number_of(const void *table, int64_t is_narrow, int64_t index) {
    if (!is_narrow) return ((const float *)table)[index];
    const uint32_t wide = (uint32_t)((const uint16_t *)table)[index] << 16;
    float number;
    memcpy(&number, &wide, sizeof number);
    return number;
}

static void layer_inputs_task(void *work, int64_t token) {
    const pass *now = work;
    const decoder *of = now->of;
    const layer_inputs *inputs = of->shape.inputs;
    const int64_t columns = of->shape.num_layers * inputs->size;
    const int64_t first = now->step->token_ids[token] * columns;
    float *row = of->space.layer_inputs + token * of->strides.layer_inputs;
    scale_row(row, columns, inputs->projection_factor, 0.0f);
    const head_norm with = {NORM_RMS, of->shape.norm_eps, inputs->size, inputs->size};
    normalise_heads(&with, (norm_weights){inputs->norm, NULL}, row, of->shape.num_layers, 0);
    for (int64_t i = 0; i < columns; i++)
        row[i] = (row[i] + number_of(inputs->table, inputs->is_narrow, first + i) * inputs->table_factor) *
                 inputs->sum_factor;
}

/* Of all tokens, for all layers. */
static void make_layer_inputs(member *self, pass *now) {
    const decoder *of = now->of;
    const rms_norm no_norm = {0};
    product projection =
        product_of(&of->space.products, of->shape.inputs->projection, now->step->num_tokens, of->rows.hidden,
                   of->strides.hidden, no_norm, STORE, of->space.layer_inputs, of->strides.layer_inputs);
    run_product(self, &projection, NULL);
    team_phase(self, layer_inputs_task, now, now->step->num_tokens);
}

/* A layer's own inputs stand beside the gates, as ups do. */
static void gate_input_task(void *work, int64_t row) {
    const pass *now = work;
    const decoder *of = now->of;
    const int64_t size = of->shape.inputs->size, layer = now->layer - of->layers;
    const int64_t token = now->attending == of->space.sampled_tiles ? now->step->sampled[row] : row;
    float *gates = of->space.gate_up + row * of->strides.gate_up;
    memcpy(gates + size, of->space.layer_inputs + token * of->strides.layer_inputs + layer * size,
           (size_t)size * sizeof *gates);
    activate_row((enum activation)now->layer->activation, 1, NULL, gates, size,
                 of->rows.activations + row * of->strides.activations);
}

static void run_layer_input(member *self, pass *now, int64_t num_tokens, const linear *next) {
    const decoder *of = now->of;
    const layer_weights *layer = now->layer;
    const rms_norm no_norm = {0};
    product gate = product_of(&of->space.products, layer->input_gate, num_tokens, of->rows.hidden, of->strides.hidden,
                              no_norm, STORE, of->space.gate_up, of->strides.gate_up);
    run_product(self, &gate, layer->input_back);
    team_phase(self, gate_input_task, now, num_tokens);
    product back = product_of(&of->space.products, layer->input_back, num_tokens, of->rows.activations,
                              of->strides.activations, no_norm, ADD, NULL, 0);
    run_adding(self, now, back, layer->input_norm, layer->factor, next);
}

/* A `meet` of experts. */
static void meet_experts(member *self, void *context, int64_t num_tokens) {
    pass *now = context;
    const expert_layer *layer = now->layer->experts;
    meet(self, now, MEET_PAIRS, num_tokens * layer->choose.num_chosen);
    if (layer->has_shared && !now->step->shared->is_shared) meet(self, now, MEET_SHARED_EXPERT, num_tokens);
}

/* A product behind attention, or behind a state. */
static void run_output(member *self, pass *now, const linear *with, enum site site, float *results, const float *norm,
                       int64_t num_tokens, const linear *next) {
    const decoder *of = now->of;
    const rms_norm before = {norm, of->shape.norm_eps};
    product output =
        product_of(&of->space.products, with, num_tokens, results, of->strides.attended, before, ADD, NULL, 0);
    output.adapters = adapters_of(now, site);
    run_adding(self, now, output, now->layer->attention_post_norm, 1.0f, next);
}

static void run_layer_experts(member *self, pass *now, int64_t num_tokens) {
    const decoder *of = now->of;
    const layer_weights *layer = now->layer;
    /* Experts normalise what they read by root mean squares alone, and add to where they read. */
    const int normed = reads_normed(&of->shape, layer);
    if (normed && !of->shape.is_parallel) normalise_hidden(self, now, layer->mlp_norm, num_tokens);
    const rms_norm norm = {normed ? NULL : layer->mlp_norm.weight, of->shape.norm_eps};
    const shared_rows *shared = now->step->shared;
    expert_part part = {0};
    if (shared != NULL)
        part = (expert_part){.pairs = shared->pairs,
                             .of_shared = shared->shared_expert,
                             .hidden_start = of->shape.hidden_start,
                             .meet = meet_experts,
                             .context = now};
    const int beside = normed || factor_behind(layer) != 1.0f || adds_beside(now, layer->mlp_post_norm);
    if (beside) part.added = of->space.added;
    if (now->step->most_expert_rank > 0) part.adapters = adapters_of(now, SITE_ROUTER);
    run_experts(self, now->expert_space, layer->experts, layer - of->layers,
                normed ? of->space.normed : of->rows.hidden, of->strides.hidden, num_tokens, norm, &part);
    if (beside) {
        row_phase phase = {now, layer->mlp_post_norm, factor_behind(layer)};
        team_phase(self, add_task, &phase, num_tokens);
    }
    meet(self, now, MEET_HIDDEN, num_tokens);
}

/* Attention and feed-forward of the attending tokens of `now`. */
static void run_rest_of_layer(member *self, pass *now, int64_t num_tokens, const linear *next) {
    const decoder *of = now->of;
    const layer_weights *layer = now->layer;
    const linear *behind = layer->experts == NULL ? layer->gate_up : layer->experts->router;
    if (attends(layer))
        run_output(self, now, layer->output, SITE_OUTPUT, of->rows.attended, layer->output_norm, num_tokens,
                   layer->recurrence == NULL ? behind : layer->state_output);
    if (layer->recurrence != NULL)
        run_output(self, now, layer->state_output, SITE_STATE_OUTPUT, results_of_state(now), NULL, num_tokens, behind);
    if (layer->experts != NULL)
        run_layer_experts(self, now, num_tokens);
    else if (behind != NULL)
        run_feed_forward(self, now, num_tokens, layer->input_gate == NULL ? next : layer->input_gate);
    if (layer->input_gate != NULL) run_layer_input(self, now, num_tokens, next);
}

/* Queries, and what is stored, by way of compressed rows. */
static void run_latent(member *self, const pass *now, const latent_weights *latent) {
    const decoder *of = now->of;
    const workspace *space = &of->space;
    const int64_t num_tokens = now->step->num_tokens;
    product compress = product_behind(self, now, now->layer->attention_norm, latent->compress, num_tokens, STORE,
                                      space->compressed, of->strides.compressed);
    compress.adapters = adapters_of(now, SITE_COMPRESS);
    run_product(self, &compress, latent->expand_query == NULL ? latent->query : latent->expand_query);
    product query;
    if (latent->expand_query == NULL) {
        query = product_behind(self, now, now->layer->attention_norm, latent->query, num_tokens, STORE, space->queries,
                               of->strides.queries);
    } else {
        query =
            product_of(&space->products, latent->expand_query, num_tokens, space->compressed, of->strides.compressed,
                       (rms_norm){latent->query_norm, latent->norm_eps}, STORE, space->queries, of->strides.queries);
    }
    query.adapters = adapters_of(now, SITE_QKV);
    run_product(self, &query, latent->absorb[0]);
    absorb_keys(self, now);
    if (latent->gates == NULL) return;
    product gates = product_behind(self, now, now->layer->attention_norm, latent->gates, num_tokens, STORE,
                                   space->qkv + latent_columns(now->attention), of->strides.qkv);
    gates.adapters = adapters_of(now, SITE_GATES);
    run_product(self, &gates, now->layer->output);
}

/* A product within the inputs of a state. */
static void run_within_state(member *self, const pass *now, const linear *with, enum site site, int64_t from,
                             int64_t to) {
    const decoder *of = now->of;
    float *inputs = inputs_of_state(now);
    product made = product_of(&of->space.products, with, now->step->num_tokens, inputs + from, of->strides.qkv,
                              (rms_norm){NULL, 0.0f}, STORE, inputs + to, of->strides.qkv);
    made.adapters = adapters_of(now, site);
    run_product(self, &made, now->layer->state_output);
}

/* From a state's inputs to its results. Few numbers that gates are made of are where gates would be. */
static void run_state(member *self, pass *now) {
    const layer_weights *layer = now->layer;
    const recurrence *of = layer->recurrence;
    if (layer->state_gates != NULL)
        run_within_state(self, now, layer->state_gates, SITE_STATE_GATES, channels_of(of), of->gates_at);
    run_convolution(self, now);
    if (layer->state_selection != NULL)
        run_within_state(self, now, layer->state_selection, SITE_STATE_SELECTION, 0, of->selected_at);
    if (of->selection_norm != NULL) normalise_selection(self, now);
    if (layer->state_steps != NULL) {
        const int64_t low = layer->state_selection != NULL ? of->selected_at : of->strengths_at + of->num_heads;
        run_within_state(self, now, layer->state_steps, SITE_STATE_STEPS, low, of->steps_at);
    }
    run_heads(self, now);
}

/* Queries, keys and values of all tokens; then attention. The input of a feed-forward beside attention is normalised
 * here, before anything is added to the hidden state. */
static void run_attention(member *self, pass *now) {
    const decoder *of = now->of;
    const layer_weights *layer = now->layer;
    if (layer->latent != NULL) {
        run_latent(self, now, layer->latent);
    } else if (attends(layer)) {
        product qkv = product_behind(self, now, layer->attention_norm, layer->qkv, now->step->num_tokens, STORE,
                                     of->space.qkv, of->strides.qkv);
        qkv.adapters = adapters_of(now, SITE_QKV);
        run_product(self, &qkv, layer->output);
    }
    if (layer->recurrence != NULL) {
        /* Behind those of attention, which writes whole panels. */
        product inputs = product_behind(self, now, layer->attention_norm, layer->state_inputs, now->step->num_tokens,
                                        STORE, inputs_of_state(now), of->strides.qkv);
        inputs.adapters = adapters_of(now, SITE_STATE_INPUTS);
        run_product(self, &inputs, layer->state_output);
    }
    if (of->shape.is_parallel) normalise_hidden(self, now, layer->mlp_norm, now->step->num_tokens);
    if (attends(layer)) run_attention_phases(self, now);
    if (layer->recurrence != NULL) run_state(self, now);
    if (now->num_attending > 0) meet(self, now, MEET_ATTENDED, now->step->num_tokens);
}

static void before_head_task(void *work, int64_t row) {
    const pass *now = work;
    const decoder *of = now->of;
    const decoder_shape *shape = &of->shape;
    float *made = of->space.gate_up + row * of->strides.gate_up;
    activate_row((enum activation)shape->head_activation, 0, NULL, made, shape->hidden_size, made);
    normalise_row((enum norm_kind)shape->norm_kind, shape->head_norm, shape->norm_eps, made, shape->hidden_size, made);
}

/* From the hidden state of sampled tokens to logits. */
static void run_logits(member *self, pass *now, int64_t num_sampled) {
    const decoder *of = now->of;
    const decoder_shape *shape = &of->shape;
    const rms_norm no_norm = {0};
    float *logits = now->step->logits + shape->logits_start;
    const int64_t stride = padded_outputs(shape->vocab_size);
    if (shape->before_head == NULL) {
        product head = product_behind(self, now, shape->final_norm, of->head, num_sampled, STORE, logits, stride);
        run_product(self, &head, NULL);
        return;
    }
    product before = product_behind(self, now, shape->final_norm, shape->before_head, num_sampled, STORE,
                                    of->space.gate_up, of->strides.gate_up);
    run_product(self, &before, of->head);
    team_phase(self, before_head_task, now, num_sampled);
    product head = product_of(&of->space.products, of->head, num_sampled, of->space.gate_up, of->strides.gate_up,
                              no_norm, STORE, logits, stride);
    run_product(self, &head, NULL);
}

/* The last layer: tokens that are not sampled need only keys and values. */
static void run_last_layer(member *self, pass *now) {
    const decoder *of = now->of;
    int64_t num_sampled = now->step->num_sampled;
    now->attending = of->space.sampled_tiles;
    now->num_attending = num_sampled;
    if (mixes(now->layer)) run_attention(self, now);
    if (num_sampled == 0) return;
    team_phase(self, gather_task, now, of->shape.is_parallel ? 3 : mixes(now->layer) ? 2 : 1);
    meet(self, now, MEET_MOVED, num_sampled);
    run_rest_of_layer(self, now, num_sampled, of->head);
    run_logits(self, now, num_sampled);
    if (of->shape.logits_factor != 1.0f || of->shape.logits_softcap > 0.0f) {
        row_phase phase = {.now = now};
        team_phase(self, scale_task, &phase, num_sampled);
    }
    meet(self, now, MEET_LOGITS, num_sampled);
}

/* The first product of a layer, if it is known. */
static const linear *first_of(const layer_weights *layer) {
    return attends(layer) ? layer->qkv : layer->recurrence != NULL ? layer->state_inputs : layer->gate_up;
}

static void *layer_pool_of(const pass *now) {
    const layer_heads *heads = &now->layer->heads;
    return (char *)now->step->pool +
           (heads->kv_layer * now->step->layer_stride + heads->kv_first) * bytes_of_number(now->attention);
}

static void run_step(void *work, member *self) {
    pass now = *(const pass *)work;
    const decoder *of = now.of;
    int64_t last = of->shape.num_layers - 1;
    meet(self, &now, MEET_START, now.step->num_tokens);
    team_phase(self, embed_task, &now, of->space.num_attention_tiles);
    meet(self, &now, MEET_HIDDEN, now.step->num_tokens);
    if (of->shape.inputs != NULL) make_layer_inputs(self, &now);
    now.num_members = team_size(self->of);
    now.attending = of->space.attention_tiles;
    now.num_attending = of->space.num_attention_tiles;
    for (int64_t i = 0; i <= last; i++) {
        now.layer = &of->layers[i];
        now.attention = &of->attentions[i];
        now.layer_pool = layer_pool_of(&now);
        if (i == last && of->head != NULL) {
            run_last_layer(self, &now);
        } else {
            if (mixes(now.layer)) run_attention(self, &now);
            run_rest_of_layer(self, &now, now.step->num_tokens, i == last ? NULL : first_of(&of->layers[i + 1]));
        }
    }
}

/* ---- memory, and a step's start ---- */

/* What a layer needs beyond a plain decoder's working memory. */
static void need(decoder *of, const layer_weights *layer, const attention_shape *attention) {
    const decoder_shape *shape = &of->shape;
    if (attends(layer)) {
        of->strides.qkv = larger_of(of->strides.qkv, round_up(qkv_columns(shape, layer, attention), PANEL));
        of->strides.attended =
            larger_of(of->strides.attended, round_up(attended_columns(shape, layer, attention), PANEL));
        if (tokens_per_tile(attention) < of->tokens_per_tile) of->tokens_per_tile = tokens_per_tile(attention);
    }
    of->strides.needs_normed |= shape->is_parallel || shape->norm_kind != NORM_RMS;
    of->strides.needs_added |= shape->residual_factor != 1.0f || layer->factor != 1.0f ||
                               layer->attention_post_norm.weight != NULL || layer->mlp_post_norm.weight != NULL ||
                               (layer->experts != NULL && reads_normed(shape, layer));
    if (layer->input_gate != NULL) {
        const int64_t size = round_up(layer->input_gate->outputs, PANEL);
        of->strides.gate_up = larger_of(of->strides.gate_up, size + layer->input_gate->outputs);
        of->strides.activations = larger_of(of->strides.activations, size);
        of->strides.layer_inputs = round_up(shape->inputs->projection->outputs, PANEL);
        of->strides.needs_added = 1;
    }
    if (layer->recurrence != NULL) {
        const int64_t before = attends(layer) ? qkv_columns(shape, layer, attention) : 0;
        const int64_t heads = attends(layer) ? attended_columns(shape, layer, attention) : 0;
        of->strides.qkv = larger_of(of->strides.qkv, before + layer->recurrence->columns);
        of->strides.attended = larger_of(of->strides.attended, round_up(heads + inner_of(layer->recurrence), PANEL));
    }
    if (layer->latent != NULL) {
        of->latent_heads = attention->num_heads;
        of->strides.compressed = larger_of(of->strides.compressed, round_up(layer->latent->compress->outputs, PANEL));
        of->strides.queries = round_up(attention->num_heads * layer->latent->query_dim, PANEL);
    }
    if (layer->experts != NULL)
        of->experts = larger_sizes(of->experts, layer->experts);
    else if (layer->gate_up != NULL && (layer->activation != SILU || !layer->is_gated))
        of->strides.gate_up = larger_of(of->strides.gate_up, round_up(layer->gate_up->outputs, PANEL));
}

decoder *headway_decoder_new(const decoder_shape *shape, const layer_weights *layers, linear *head) {
    decoder *made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->shape = *shape;
    const attention_shape usual = attention_shape_of(shape);
    made->tokens_per_tile = tokens_per_tile(&usual);
    made->head = head;
    made->strides = (row_strides){
        .hidden = round_up(shape->hidden_size, PANEL),
        .activations = round_up(shape->intermediate_size, PANEL),
        .packed_activations = shape->intermediate_size,
    };
    if (shape->before_head != NULL) made->strides.gate_up = made->strides.hidden;
    made->layers = malloc((size_t)shape->num_layers * sizeof *made->layers);
    made->attentions = malloc((size_t)shape->num_layers * sizeof *made->attentions);
    if (made->layers == NULL || made->attentions == NULL) {
        headway_decoder_free(made);
        return NULL;
    }
    memcpy(made->layers, layers, (size_t)shape->num_layers * sizeof *made->layers);
    made->experts.layers = shape->num_layers;
    for (int64_t i = 0; i < shape->num_layers; i++) {
        made->attentions[i] = usual;
        made->attentions[i].num_heads = layers[i].heads.num_heads;
        made->attentions[i].num_kv_heads = layers[i].heads.num_kv_heads;
        made->attentions[i].head_dim = layers[i].heads.head_dim;
        need(made, &layers[i], &made->attentions[i]);
    }
    made->strides.widest_input = larger_of(larger_of(shape->hidden_size, made->strides.attended),
                                           larger_of(made->strides.activations, made->strides.compressed));
    return made;
}

void headway_decoder_free(decoder *the_decoder) {
    if (the_decoder == NULL) return;
    free_space(&the_decoder->space);
    free_expert_space(&the_decoder->expert_space);
    free(the_decoder->layers);
    free(the_decoder->attentions);
    free(the_decoder);
}

int headway_decoder_run(decoder *the_decoder, team *with, const decoder_step *step) {
    const shared_rows *shared = step->shared;
    const workspace *space = &the_decoder->space;
    if (!reserve_space(&the_decoder->space, &the_decoder->strides, step->num_tokens, shared == NULL)) return 0;
    if (step->adapters != NULL &&
        !reserve_additions(&the_decoder->space.products, space->num_tokens * larger_of(1, the_decoder->latent_heads),
                           step->most_rank))
        return 0;
    the_decoder->experts.shares = shared != NULL;
    if (the_decoder->experts.experts > 0 && !reserve_expert_space(&the_decoder->expert_space, &the_decoder->experts,
                                                                  step->num_tokens, step->most_expert_rank))
        return 0;
    cut_into_tiles(the_decoder, step);
    the_decoder->rows = shared == NULL ? (wide_rows){space->hidden, space->attended, space->activations}
                                       : (wide_rows){shared->hidden, shared->attended, shared->activations};
    int64_t per_layer = PHASES_PER_LAYER, others = OTHER_PHASES;
    if (shared != NULL) per_layer += MEETINGS_PER_LAYER, others += OTHER_MEETINGS;
    pass start = {.of = the_decoder, .step = step, .expert_space = &the_decoder->expert_space};
    return team_run(with, run_step, &start, the_decoder->shape.num_layers * per_layer + others);
}

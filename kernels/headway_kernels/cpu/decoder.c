#include "decoder.h"

#include <stdlib.h>

#define FEW_TILES 4           /* a product with no more tiles than this waits for memory */
#define SMALL_TASK (64 << 10) /* bytes of panels */
#define TASKS_OF_MEMBER 4     /* at least, so that members end at about the same time */
/* Four products of two phases, placing, attending, two norms, activating, adding twice; experts instead of two
 * products, three products instead of one. */
#define PHASES_PER_LAYER (15 + EXPERT_PHASES)
#define OTHER_PHASES 6 /* embedding, gathering, a norm, the head's product, scaling logits */
#define MEETINGS_PER_LAYER 5
#define OTHER_MEETINGS 4 /* start, embedding, after moving rows, logits */

/* Some consecutive tokens of one row. */
typedef struct {
    int64_t row;
    int64_t token;
    int64_t position;
    int64_t num_tokens;
} attention_tile;

/* Working memory for a number of tokens; kept from step to step, grown when a step needs more. */
typedef struct {
    int64_t num_tokens;
    int64_t num_attention_tiles;
    float *hidden;
    float *qkv;
    float *attended;
    float *activations;
    float *normed; /* these three only where a model needs them */
    float *added;
    float *gate_up;
    float *downs; /* these two only once a step has adapters; `most_rank` floats of each token */
    const low_rank **additions;
    int64_t most_rank;
    float *compressed; /* only with latent attention */
    void *tiles;
    float *factors;
    int32_t *offsets;
    attention_tile *attention_tiles;
    attention_tile *sampled_tiles; /* one for each sampled token */
} workspace;

/* The wide rows of a step: in the workspace, or shared with other ranks. */
typedef struct {
    float *hidden;
    float *attended;
    float *activations;
} wide_rows;

struct decoder {
    decoder_shape shape;
    attention_shape attention;
    layer_weights *layers;
    linear *head;
    int64_t hidden_stride;
    int64_t qkv_stride;
    int64_t attended_stride;
    int64_t activation_stride;
    int64_t gate_up_stride; /* 0: products activate */
    int64_t compressed_stride;
    int64_t needs_normed;
    int64_t needs_added;
    workspace space;
    wide_rows rows;
    expert_sizes experts; /* without experts: zeros */
    expert_space expert_space;
};

static int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- products as phases ---- */

/* One product of a phase pair: pack the inputs, then multiply. */
typedef struct {
    const linear *with;
    packed_inputs inputs;
    const float *from; /* NULL: the inputs are packed already */
    int64_t from_stride;
    rms_norm norm;
    enum epilogue epilogue;
    float *out;
    int64_t out_stride;
    int64_t num_members;
    const decoder_step *adapted; /* NULL, or the step whose tokens may have adapters */
    const int64_t *tokens;       /* the token of each row; NULL: its number */
    int64_t addition;            /* which of an adapter's */
    added_rows added;
} product;

/* Find the row's adapter, and apply the first half of its addition. */
static void adapt_row(const product *of, int64_t row) {
    const low_rank *adapter = of->adapted->adapters[of->tokens == NULL ? row : of->tokens[row]];
    const low_rank *addition = adapter == NULL ? NULL : &adapter[of->addition];
    of->added.additions[row] = addition == NULL || addition->rank == 0 ? NULL : addition;
    if (of->added.additions[row] == NULL) return;
    apply_down(addition, of->with->inputs, of->from + row * of->from_stride, of->norm,
               of->added.downs + row * of->added.stride);
}

static void pack_task(void *work, int64_t task) {
    const product *of = work;
    if (task >= of->inputs.num_tiles) {
        adapt_row(of, task - of->inputs.num_tiles);
        return;
    }
    pack_tile(&of->inputs, of->with, task, of->from, of->from_stride, of->norm);
}

/* Panels of a task: to take a task, members wait for each other, longer than a small panel takes with a few rows. */
static int64_t panels_at_once(const linear *with, int64_t num_members) {
    const int64_t small = SMALL_TASK / (panel_at(with, 1) - panel_at(with, 0));
    const int64_t most = with->num_panels / (TASKS_OF_MEMBER * num_members);
    return larger_of(small < most ? small : most, 1);
}

static int64_t tasks_per_block(const linear *with, int64_t num_members) {
    const int64_t panels = panels_at_once(with, num_members);
    return (with->num_panels + panels - 1) / panels;
}

/* Tasks go through all panels with the same block of inputs, which stays in cache, then to the next block. */
static void multiply_task(void *work, int64_t task) {
    const product *of = work;
    const int64_t num_panels = of->with->num_panels, panels = panels_at_once(of->with, of->num_members);
    const int64_t num_tasks = tasks_per_block(of->with, of->num_members);
    int64_t at_once = tiles_per_block(of->with, of->inputs.num_tiles), first = task / num_tasks * at_once;
    int64_t end = first + at_once < of->inputs.num_tiles ? first + at_once : of->inputs.num_tiles;
    const int64_t begin = task % num_tasks * panels, last = begin + panels < num_panels ? begin + panels : num_panels;
    for (int64_t panel = begin; panel < last; panel++) {
        /* Members take turns, more or less: this is the probable next panel of this member. */
        int64_t next = panel + 1 < last ? panel + 1 : (begin + of->num_members * panels) % num_panels;
        multiply(of->with, &of->inputs, panel, panel_at(of->with, next), first, end, of->epilogue, of->out,
                 of->out_stride);
    }
}

/* A product of few rows keeps the memory busy, but between two products the memory is idle. So the next weights are
 * fetched beforehand. With many rows this is not needed, and the cache has better uses. */
static void fetch_first_panel(const member *self, const linear *of, int64_t num_rows) {
    const int64_t panel = self->number * panels_at_once(of, team_size(self->of));
    if (tiles_of(num_rows) <= FEW_TILES && panel < of->num_panels) fetch_panel(of, panel);
}

static void run_product(member *self, product *of, const linear *next) {
    of->num_members = team_size(self->of);
    if (of->adapted != NULL) of->inputs.added = &of->added;
    if (of->from != NULL)
        team_phase(self, pack_task, of, of->inputs.num_tiles + (of->adapted == NULL ? 0 : of->inputs.num_rows));
    int64_t num_tasks = blocks_of(of->with, of->inputs.num_tiles) * tasks_per_block(of->with, of->num_members);
    team_take(self, multiply_task, of, num_tasks);
    if (next != NULL) fetch_first_panel(self, next, of->inputs.num_rows);
    team_wait(self, num_tasks);
}

static product product_of(const workspace *space, const linear *with, int64_t num_rows, const float *from,
                          int64_t from_stride, rms_norm norm, enum epilogue epilogue, float *out, int64_t out_stride) {
    packed_inputs inputs = {num_rows, with->inputs, tiles_of(num_rows), space->tiles, space->factors, space->offsets,
                            NULL,     NULL};
    return (product){with, inputs, from, from_stride, norm, epilogue, out, out_stride, 1, NULL, NULL, 0, {0}};
}

/* ---- the step ---- */

typedef struct {
    const decoder *of;
    const decoder_step *step;
    const layer_weights *layer; /* each member has a copy of this struct: layers advance member by member */
    float *layer_pool;
    const attention_tile
        *attending; /* the tokens whose attention is wanted: all, or in the last layer the sampled ones */
    int64_t num_attending;
    int64_t num_members;
    enum meeting meeting;
    int64_t num_met; /* rows that the meeting is about */
    expert_space *expert_space;
} pass;

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

static void embed_task(void *work, int64_t token) {
    const pass *now = work;
    const decoder *of = now->of;
    const decoder_shape *shape = &of->shape;
    const float *from = shape->embedding == NULL
                            ? now->step->shared->hidden_in + token * shape->hidden_columns
                            : shape->embedding + now->step->token_ids[token] * shape->hidden_columns;
    memcpy(of->rows.hidden + token * of->hidden_stride + shape->hidden_start, from,
           (size_t)shape->hidden_columns * sizeof *from);
}

/* The components that all keys of a token share, the first ones of both halves. */
static void share_components(const decoder *of, const latent_weights *latent, const float *compressed, float *keys) {
    const int64_t half = of->shape.true_head_dim / 2, inputs = latent->expand->inputs;
    const int64_t first = (latent->expand_query == NULL ? 0 : latent->expand_query->inputs) + inputs;
    const int64_t count = (latent->compress->outputs - first) / 2;
    for (int64_t head = 0; head < of->shape.num_kv_heads; head++, keys += of->shape.head_dim) {
        memcpy(keys, compressed + first, (size_t)count * sizeof *keys);
        memcpy(keys + half, compressed + first + count, (size_t)count * sizeof *keys);
    }
}

/* Queries and keys of one token: normalise, rotate; store key and value. */
static void place_token(const pass *now, const attention_tile *tile, int64_t which) {
    const decoder *of = now->of;
    const decoder_shape *shape = &of->shape;
    int64_t position = tile->position + which, half = shape->true_head_dim / 2;
    float *qkv = of->space.qkv + (tile->token + which) * of->qkv_stride;
    float *keys = qkv + shape->num_heads * shape->head_dim;
    const layer_weights *layer = now->layer;
    if (layer->latent != NULL)
        share_components(of, layer->latent, of->space.compressed + (tile->token + which) * of->compressed_stride, keys);
    if (layer->qk_norm != NULL) {
        const float *key_norm = layer->qk_norm + shape->num_heads * shape->true_head_dim;
        normalise_heads(qkv, shape->num_heads, shape->head_dim, shape->true_head_dim, layer->qk_norm, shape->norm_eps,
                        shape->norms_all_heads != 0);
        normalise_heads(keys, shape->num_kv_heads, shape->head_dim, shape->true_head_dim, key_norm, shape->norm_eps,
                        shape->norms_all_heads != 0);
    }
    for (int64_t head = 0; layer->cosines != NULL && head < shape->num_heads + shape->num_kv_heads; head++) {
        rotate(qkv + head * shape->head_dim, layer->cosines + position * half, layer->sines + position * half, half);
    }
    const int32_t *table = now->step->tables + tile->row * now->step->table_stride;
    const float *values = keys + shape->num_kv_heads * shape->head_dim;
    for (int64_t head = 0; head < shape->num_kv_heads; head++) {
        store_key_value(&of->attention, now->layer_pool, table, position, head, keys + head * shape->head_dim,
                        values + head * shape->head_dim);
    }
}

static void place_task(void *work, int64_t task) {
    const pass *now = work;
    const attention_tile *tile = &now->of->space.attention_tiles[task];
    for (int64_t i = 0; i < tile->num_tokens; i++) place_token(now, tile, i);
}

/* The task with this number: tile after tile, key-value head after head. */
static attention_task attention_task_at(const pass *now, int64_t number) {
    int64_t parts = parts_per_head(&now->of->attention), per_tile = parts * now->of->shape.num_kv_heads;
    const attention_tile *tile = &now->attending[number / per_tile];
    return (attention_task){now->step->tables + tile->row * now->step->table_stride, tile->position, tile->num_tokens,
                            number % per_tile / parts, number % parts};
}

static int64_t num_attention_tasks(const pass *now) {
    return now->num_attending * now->of->shape.num_kv_heads * parts_per_head(&now->of->attention);
}

static void attend_task(void *work, int64_t number) {
    const pass *now = work;
    const decoder *of = now->of;
    int64_t token = now->attending[number / (num_attention_tasks(now) / now->num_attending)].token;
    const attention_task task = attention_task_at(now, number);
    /* As with panels: members take turns. The tiles of a prompt share their keys, which are in the cache. */
    const int fetches = task.num_tokens == 1 && number + now->num_members < num_attention_tasks(now);
    const attention_task next = fetches ? attention_task_at(now, number + now->num_members) : task;
    attend(&of->attention, now->layer_pool, &task, fetches ? &next : NULL, now->layer->window, now->layer->sinks,
           of->space.qkv + token * of->qkv_stride, of->qkv_stride,
           of->rows.attended + token * of->attended_stride + of->shape.first_head * of->shape.head_dim,
           of->attended_stride);
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
    if (task == 0)
        gather(now->step, of->rows.hidden + (owns_some ? shape->hidden_start : 0), of->hidden_stride,
               owns_some ? shape->hidden_columns : of->hidden_stride);
    else if (task == 1)
        gather(now->step, of->rows.attended + (owns_some ? shape->first_head * shape->head_dim : 0),
               of->attended_stride, owns_some ? shape->num_heads * shape->head_dim : of->attended_stride);
    else
        gather(now->step, of->space.normed, of->hidden_stride, of->hidden_stride);
}

/* ---- norms beside products ---- */

/* Rows of a phase: normalised from the hidden state, added to it, activated, or logits that are scaled. */
typedef struct {
    const pass *now;
    norm_weights norm;
} row_phase;

static void normalise_task(void *work, int64_t row) {
    const row_phase *phase = work;
    const decoder *of = phase->now->of;
    normalise_row((enum norm_kind)of->shape.norm_kind, phase->norm, of->shape.norm_eps,
                  of->rows.hidden + row * of->hidden_stride, of->shape.hidden_size,
                  of->space.normed + row * of->hidden_stride);
}

static void normalise_hidden(member *self, const pass *now, norm_weights norm, int64_t num_rows) {
    row_phase phase = {now, norm};
    team_phase(self, normalise_task, &phase, num_rows);
}

static void add_task(void *work, int64_t row) {
    const row_phase *phase = work;
    const decoder *of = phase->now->of;
    const decoder_shape *shape = &of->shape;
    float *added = of->space.added + row * of->hidden_stride;
    if (phase->norm.weight != NULL)
        normalise_row((enum norm_kind)shape->norm_kind, phase->norm, shape->norm_eps, added, shape->hidden_size, added);
    add_row(of->rows.hidden + row * of->hidden_stride + shape->hidden_start, added + shape->hidden_start,
            shape->hidden_columns, shape->residual_factor);
}

static void activate_task(void *work, int64_t row) {
    const row_phase *phase = work;
    const decoder *of = phase->now->of;
    const layer_weights *layer = phase->now->layer;
    int64_t width = layer->gate_up->outputs / (layer->is_gated ? 2 : 1);
    activate_row((enum activation)layer->activation, layer->is_gated != 0, of->space.gate_up + row * of->gate_up_stride,
                 width, of->rows.activations + row * of->activation_stride + of->shape.activation_start);
}

static void scale_task(void *work, int64_t row) {
    const row_phase *phase = work;
    const decoder_shape *shape = &phase->now->of->shape;
    scale_row(phase->now->step->logits + row * headway_logits_stride(shape->vocab_size) + shape->logits_start,
              phase->now->of->head->outputs, shape->logits_factor, shape->logits_softcap);
}

/* ---- a layer ---- */

/* A product that reads the hidden state behind a norm. RMS norms are a part of packing. */
static product product_behind(member *self, const pass *now, norm_weights norm, const linear *with, int64_t num_rows,
                              enum epilogue epilogue, float *out, int64_t out_stride) {
    const decoder *of = now->of;
    const rms_norm packing = {norm.weight, of->shape.norm_eps}, no_norm = {0};
    if (norm.weight == NULL || of->shape.norm_kind == NORM_RMS)
        return product_of(&of->space, with, num_rows, of->rows.hidden, of->hidden_stride, packing, epilogue, out,
                          out_stride);
    normalise_hidden(self, now, norm, num_rows);
    return product_of(&of->space, with, num_rows, of->space.normed, of->hidden_stride, no_norm, epilogue, out,
                      out_stride);
}

/* Let the rows of a product have what their adapters add. In the last layer, all but the first have sampled tokens. */
static void adapt(product *of, const pass *now, enum site site) {
    const workspace *space = &now->of->space;
    if (now->step->adapters == NULL) return;
    of->adapted = now->step;
    of->tokens = site != SITE_QKV && now->attending == space->sampled_tiles ? now->step->sampled : NULL;
    of->addition = (now->layer - now->of->layers) * SITES + site;
    of->added = (added_rows){space->additions, space->downs, space->most_rank};
}

/* Run a product whose result is added to the hidden state, behind a norm if there is one. */
static void run_adding(member *self, pass *now, product of_layer, norm_weights norm, const linear *next) {
    const decoder *of = now->of;
    const int64_t num_rows = of_layer.inputs.num_rows;
    const int beside = norm.weight != NULL || of->shape.residual_factor != 1.0f;
    of_layer.epilogue = beside ? STORE : ADD;
    of_layer.out = (beside ? of->space.added : of->rows.hidden) + of->shape.hidden_start;
    of_layer.out_stride = of->hidden_stride;
    run_product(self, &of_layer, next);
    if (beside) {
        row_phase phase = {now, norm};
        team_phase(self, add_task, &phase, num_rows);
    }
    meet(self, now, MEET_HIDDEN, num_rows);
}

/* Products that activate by themselves pack their results at once as the next inputs, unless these must be quantised,
 * which needs whole rows, as adapters do, or other ranks have parts of them. */
static void run_feed_forward(member *self, pass *now, int64_t num_tokens, const linear *next) {
    const decoder *of = now->of;
    const workspace *space = &of->space;
    const layer_weights *layer = now->layer;
    const rms_norm no_norm = {0};
    const int activates = layer->activation == SILU && layer->is_gated;
    const int packs =
        activates && packs_for(layer->gate_up, layer->down) && now->step->shared == NULL && now->step->adapters == NULL;
    float *out = activates ? of->rows.activations + of->shape.activation_start : space->gate_up;
    const int64_t stride = packs ? layer->down->inputs : activates ? of->activation_stride : of->gate_up_stride;
    const enum epilogue epilogue = packs ? GATED_PACKED : activates ? GATED : STORE;
    product up = of->shape.is_parallel
                     ? product_of(space, layer->gate_up, num_tokens, space->normed, of->hidden_stride, no_norm,
                                  epilogue, out, stride)
                     : product_behind(self, now, layer->mlp_norm, layer->gate_up, num_tokens, epilogue, out, stride);
    adapt(&up, now, SITE_GATE_UP);
    run_product(self, &up, layer->down);
    if (!activates) {
        row_phase phase = {.now = now};
        team_phase(self, activate_task, &phase, num_tokens);
    }
    meet(self, now, MEET_ACTIVATIONS, num_tokens);
    product down = product_of(space, layer->down, num_tokens, packs ? NULL : of->rows.activations,
                              of->activation_stride, no_norm, ADD, NULL, 0);
    if (packs) down.inputs.tiles = of->rows.activations;
    adapt(&down, now, SITE_DOWN);
    run_adding(self, now, down, layer->mlp_post_norm, next);
}

/* A `meet` of experts. */
static void meet_experts(member *self, void *context, int64_t num_tokens) {
    pass *now = context;
    const expert_layer *layer = now->layer->experts;
    meet(self, now, MEET_PAIRS, num_tokens * layer->choose.num_chosen);
    if (layer->has_shared && !now->step->shared->is_shared) meet(self, now, MEET_SHARED_EXPERT, num_tokens);
}

/* Attention and feed-forward of the attending tokens of `now`. */
static void run_rest_of_layer(member *self, pass *now, int64_t num_tokens, const linear *next) {
    const decoder *of = now->of;
    const layer_weights *layer = now->layer;
    const rms_norm no_norm = {0};
    product output = product_of(&of->space, layer->output, num_tokens, of->rows.attended, of->attended_stride, no_norm,
                                ADD, NULL, 0);
    adapt(&output, now, SITE_OUTPUT);
    run_adding(self, now, output, layer->attention_post_norm,
               layer->experts == NULL ? layer->gate_up : layer->experts->router);
    if (layer->experts == NULL) {
        run_feed_forward(self, now, num_tokens, next);
        return;
    }
    const rms_norm norm = {layer->mlp_norm.weight, of->shape.norm_eps};
    const shared_rows *shared = now->step->shared;
    expert_part part = {0};
    if (shared != NULL)
        part = (expert_part){shared->pairs, shared->shared_expert, of->shape.hidden_start, meet_experts, now};
    run_experts(self, now->expert_space, layer->experts, layer - of->layers, of->rows.hidden, of->hidden_stride,
                num_tokens, norm, &part);
    meet(self, now, MEET_HIDDEN, num_tokens);
}

/* Queries, keys and values by way of compressed rows. A product writes whole panels, so queries come first: keys follow
 * them and overwrite what is too much. */
static void run_latent(member *self, const pass *now, const latent_weights *latent) {
    const decoder *of = now->of;
    const workspace *space = &of->space;
    const int64_t num_tokens = now->step->num_tokens;
    const float *compressed = space->compressed;
    product compress = product_behind(self, now, now->layer->attention_norm, latent->compress, num_tokens, STORE,
                                      space->compressed, of->compressed_stride);
    run_product(self, &compress, latent->expand_query == NULL ? latent->query : latent->expand_query);
    product query;
    if (latent->expand_query == NULL) {
        query = product_behind(self, now, now->layer->attention_norm, latent->query, num_tokens, STORE, space->qkv,
                               of->qkv_stride);
    } else {
        query = product_of(space, latent->expand_query, num_tokens, compressed, of->compressed_stride,
                           (rms_norm){latent->query_norm, latent->norm_eps}, STORE, space->qkv, of->qkv_stride);
        compressed += latent->expand_query->inputs;
    }
    run_product(self, &query, latent->expand);
    product expand = product_of(space, latent->expand, num_tokens, compressed, of->compressed_stride,
                                (rms_norm){latent->norm, latent->norm_eps}, STORE,
                                space->qkv + of->shape.num_heads * of->shape.head_dim, of->qkv_stride);
    run_product(self, &expand, now->layer->output);
}

/* Queries, keys and values of all tokens; then attention. The input of a feed-forward beside attention is normalised
 * here, before anything is added to the hidden state. */
static void run_attention(member *self, pass *now) {
    const decoder *of = now->of;
    const layer_weights *layer = now->layer;
    if (layer->latent != NULL) {
        run_latent(self, now, layer->latent);
    } else {
        product qkv = product_behind(self, now, layer->attention_norm, layer->qkv, now->step->num_tokens, STORE,
                                     of->space.qkv, of->qkv_stride);
        adapt(&qkv, now, SITE_QKV);
        run_product(self, &qkv, layer->output);
    }
    if (of->shape.is_parallel) normalise_hidden(self, now, layer->mlp_norm, now->step->num_tokens);
    team_phase(self, place_task, now, of->space.num_attention_tiles);
    team_phase(self, attend_task, now, num_attention_tasks(now));
    if (now->num_attending > 0) meet(self, now, MEET_ATTENDED, now->step->num_tokens);
}

/* The last layer: tokens that are not sampled need only keys and values. */
static void run_last_layer(member *self, pass *now) {
    const decoder *of = now->of;
    int64_t num_sampled = now->step->num_sampled;
    now->attending = of->space.sampled_tiles;
    now->num_attending = num_sampled;
    run_attention(self, now);
    if (num_sampled == 0) return;
    team_phase(self, gather_task, now, of->shape.is_parallel ? 3 : 2);
    meet(self, now, MEET_MOVED, num_sampled);
    run_rest_of_layer(self, now, num_sampled, of->head);
    product head =
        product_behind(self, now, of->shape.final_norm, of->head, num_sampled, STORE,
                       now->step->logits + of->shape.logits_start, headway_logits_stride(of->shape.vocab_size));
    run_product(self, &head, NULL);
    if (of->shape.logits_factor != 1.0f || of->shape.logits_softcap > 0.0f) {
        row_phase phase = {.now = now};
        team_phase(self, scale_task, &phase, num_sampled);
    }
    meet(self, now, MEET_LOGITS, num_sampled);
}

static void run_step(void *work, member *self) {
    pass now = *(const pass *)work;
    const decoder *of = now.of;
    int64_t last = of->shape.num_layers - 1;
    meet(self, &now, MEET_START, now.step->num_tokens);
    team_phase(self, embed_task, &now, now.step->num_tokens);
    meet(self, &now, MEET_HIDDEN, now.step->num_tokens);
    now.num_members = team_size(self->of);
    now.attending = of->space.attention_tiles;
    now.num_attending = of->space.num_attention_tiles;
    for (int64_t i = 0; i <= last; i++) {
        now.layer = &of->layers[i];
        now.layer_pool = now.step->pool + i * now.step->layer_stride;
        if (i == last && of->head != NULL) {
            run_last_layer(self, &now);
        } else {
            run_attention(self, &now);
            run_rest_of_layer(self, &now, now.step->num_tokens, i == last ? NULL : of->layers[i + 1].qkv);
        }
    }
}

/* ---- memory ---- */

static void free_space(workspace *space) {
    free(space->hidden);
    free(space->qkv);
    free(space->compressed);
    free(space->attended);
    free(space->activations);
    free(space->normed);
    free(space->added);
    free(space->gate_up);
    free(space->downs);
    free(space->additions);
    free(space->tiles);
    free(space->factors);
    free(space->offsets);
    free(space->attention_tiles);
    free(space->sampled_tiles);
    *space = (workspace){0};
}

/* Wide rows that ranks share lie elsewhere. */
static int reserve_wide_rows(decoder *of, int64_t num_tokens) {
    workspace *space = &of->space;
    space->hidden = stream_alloc(num_tokens * of->hidden_stride * 4);
    space->attended = stream_alloc(num_tokens * of->attended_stride * 4);
    int64_t packed_activations = packed_bytes(num_tokens, of->shape.intermediate_size, FORM_FLOAT32);
    space->activations = stream_alloc(larger_of(num_tokens * of->activation_stride * 4, packed_activations));
    return space->hidden && space->attended && space->activations;
}

/* Rows that only some models need. */
static int reserve_other_rows(decoder *of, int64_t num_tokens) {
    workspace *space = &of->space;
    const int64_t hidden_bytes = num_tokens * of->hidden_stride * 4;
    if (of->needs_normed) space->normed = stream_alloc(hidden_bytes);
    if (of->needs_added) space->added = stream_alloc(hidden_bytes);
    if (of->gate_up_stride > 0) space->gate_up = stream_alloc(num_tokens * of->gate_up_stride * 4);
    return (space->normed || !of->needs_normed) && (space->added || !of->needs_added) &&
           (space->gate_up || of->gate_up_stride == 0);
}

static int reserve_space(decoder *of, int64_t num_tokens, int has_wide_rows) {
    workspace *space = &of->space;
    if (num_tokens <= space->num_tokens) return 1;
    free_space(space);
    int64_t widest = larger_of(of->shape.hidden_size, of->attended_stride);
    widest = larger_of(larger_of(widest, of->shape.intermediate_size), of->compressed_stride);
    const int has_rows = (!has_wide_rows || reserve_wide_rows(of, num_tokens)) && reserve_other_rows(of, num_tokens);
    space->qkv = stream_alloc(num_tokens * of->qkv_stride * 4);
    space->compressed = stream_alloc(num_tokens * of->compressed_stride * 4);
    space->tiles = stream_alloc(most_packed_bytes(num_tokens, widest));
    space->factors = stream_alloc(num_tokens * 4);
    space->offsets = stream_alloc(num_tokens * 4);
    space->attention_tiles = malloc((size_t)num_tokens * sizeof *space->attention_tiles);
    space->sampled_tiles = malloc((size_t)num_tokens * sizeof *space->sampled_tiles);
    if (!has_rows || !space->qkv || !space->compressed || !space->tiles || !space->factors || !space->offsets ||
        !space->attention_tiles || !space->sampled_tiles) {
        free_space(space);
        return 0;
    }
    space->num_tokens = num_tokens;
    return 1;
}

static int reserve_adapters(decoder *of, const decoder_step *step) {
    workspace *space = &of->space;
    if (step->adapters == NULL || (space->downs != NULL && step->most_rank <= space->most_rank)) return 1;
    free(space->downs);
    free(space->additions);
    space->most_rank = step->most_rank;
    space->downs = stream_alloc(space->num_tokens * space->most_rank * 4);
    space->additions = malloc((size_t)space->num_tokens * sizeof *space->additions);
    if (space->downs && space->additions) return 1;
    free_space(space);
    return 0;
}

static void cut_into_tiles(decoder *of, const decoder_step *step) {
    int64_t most = tokens_per_tile(&of->attention), count = 0, sampled = 0;
    for (int64_t row = 0; row < step->num_rows; row++) {
        int64_t start = step->row_starts[row], tokens = step->row_tokens[row], position = step->row_positions[row];
        for (int64_t done = 0; done < tokens; done += most) {
            int64_t left = tokens - done;
            of->space.attention_tiles[count++] =
                (attention_tile){row, start + done, position + done, left < most ? left : most};
        }
        for (; sampled < step->num_sampled && step->sampled[sampled] < start + tokens; sampled++) {
            int64_t token = step->sampled[sampled];
            of->space.sampled_tiles[sampled] = (attention_tile){row, token, position + token - start, 1};
        }
    }
    of->space.num_attention_tiles = count;
}

/* ---- what Python calls ---- */

static attention_shape attention_of(const decoder_shape *shape) {
    return (attention_shape){shape->num_heads,  shape->num_kv_heads, shape->head_dim,
                             shape->block_size, shape->score_scale,  shape->score_softcap};
}

int headway_permitted(void) { return products_permitted(); }
int64_t headway_lanes(void) { return LANES; }
int64_t headway_max_head_dim(void) { return MAX_HEAD_DIM; }
int64_t headway_block_floats(const decoder_shape *shape) {
    attention_shape attention = attention_of(shape);
    return block_floats(&attention);
}
int64_t headway_logits_stride(int64_t vocab_size) { return round_up(vocab_size, PANEL); }

linear *headway_linear_new(const float *weight, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                           int64_t gated) {
    return linear_new(weight, bias, outputs, inputs, form, gated);
}
linear *headway_linear_of_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs,
                                int64_t form, int64_t gated) {
    return linear_of_codes(from, bias, outputs, inputs, form, gated);
}
void headway_linear_free(linear *the_linear) { linear_free(the_linear); }
void headway_linears_join(linear *const *which, int64_t count) { linears_join(which, count); }
team *headway_team_new(int64_t num_threads) { return team_new(num_threads); }
void headway_team_free(team *the_team) { team_free(the_team); }

/* What a layer needs beyond a plain decoder's working memory. */
static void need(decoder *of, const layer_weights *layer) {
    const decoder_shape *shape = &of->shape;
    of->needs_normed |= shape->is_parallel || shape->norm_kind != NORM_RMS;
    of->needs_added |= shape->residual_factor != 1.0f || layer->attention_post_norm.weight != NULL ||
                       layer->mlp_post_norm.weight != NULL;
    if (layer->latent != NULL)
        of->compressed_stride = larger_of(of->compressed_stride, round_up(layer->latent->compress->outputs, PANEL));
    if (layer->experts != NULL)
        of->experts = larger_sizes(of->experts, layer->experts);
    else if (layer->activation != SILU || !layer->is_gated)
        of->gate_up_stride = larger_of(of->gate_up_stride, round_up(layer->gate_up->outputs, PANEL));
}

decoder *headway_decoder_new(const decoder_shape *shape, const layer_weights *layers, linear *head) {
    decoder *made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->shape = *shape;
    made->attention = attention_of(shape);
    made->head = head;
    made->hidden_stride = round_up(shape->hidden_size, PANEL);
    made->qkv_stride = round_up((shape->num_heads + 2 * shape->num_kv_heads) * shape->head_dim, PANEL);
    made->attended_stride = round_up(shape->all_heads * shape->head_dim, PANEL);
    made->activation_stride = round_up(shape->intermediate_size, PANEL);
    made->layers = malloc((size_t)shape->num_layers * sizeof *made->layers);
    if (made->layers == NULL) {
        free(made);
        return NULL;
    }
    memcpy(made->layers, layers, (size_t)shape->num_layers * sizeof *made->layers);
    made->experts.layers = shape->num_layers;
    for (int64_t i = 0; i < shape->num_layers; i++) need(made, &layers[i]);
    return made;
}

void headway_decoder_free(decoder *the_decoder) {
    if (the_decoder == NULL) return;
    free_space(&the_decoder->space);
    free_expert_space(&the_decoder->expert_space);
    free(the_decoder->layers);
    free(the_decoder);
}

int headway_decoder_run(decoder *the_decoder, team *with, const decoder_step *step) {
    const shared_rows *shared = step->shared;
    const workspace *space = &the_decoder->space;
    if (!reserve_space(the_decoder, step->num_tokens, shared == NULL)) return 0;
    if (!reserve_adapters(the_decoder, step)) return 0;
    the_decoder->experts.shares = shared != NULL;
    if (the_decoder->experts.experts > 0 &&
        !reserve_expert_space(&the_decoder->expert_space, &the_decoder->experts, step->num_tokens))
        return 0;
    cut_into_tiles(the_decoder, step);
    the_decoder->rows = shared == NULL ? (wide_rows){space->hidden, space->attended, space->activations}
                                       : (wide_rows){shared->hidden, shared->attended, shared->activations};
    int64_t per_layer = PHASES_PER_LAYER, others = OTHER_PHASES;
    if (shared != NULL) per_layer += MEETINGS_PER_LAYER, others += OTHER_MEETINGS;
    pass start = {.of = the_decoder, .step = step, .expert_space = &the_decoder->expert_space};
    return team_run(with, run_step, &start, the_decoder->shape.num_layers * per_layer + others);
}

static void run_alone(void *work, member *self) {
    product own = *(const product *)work; /* running a product writes to it, so each member has a copy, as in a step */
    run_product(self, &own, NULL);
}

int headway_linear_run(const linear *the_linear, team *with, const float *inputs, int64_t num_rows,
                       const float *norm_weight, float norm_eps, int64_t gated, float *out, int64_t stride) {
    workspace space = {0};
    space.tiles = stream_alloc(most_packed_bytes(num_rows, the_linear->inputs));
    space.factors = stream_alloc(num_rows * 4);
    space.offsets = stream_alloc(num_rows * 4);
    int done = space.tiles && space.factors && space.offsets;
    if (done) {
        product alone = product_of(&space, the_linear, num_rows, inputs, the_linear->inputs,
                                   (rms_norm){norm_weight, norm_eps}, gated ? GATED : STORE, out, stride);
        done = team_run(with, run_alone, &alone, 2);
    }
    free_space(&space);
    return done;
}

#include "decoder.h"

#include <stdlib.h>

#define FEW_TILES 4         /* a product with no more tiles than this waits for memory */
#define PHASES_PER_LAYER 10 /* four products of two phases, placing, attending */
#define OTHER_PHASES 4      /* embedding, gathering, the head's product */

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
    void *tiles;
    float *factors;
    int32_t *offsets;
    attention_tile *attention_tiles;
    attention_tile *sampled_tiles; /* one for each sampled token */
} workspace;

struct decoder {
    decoder_shape shape;
    attention_shape attention;
    layer_weights *layers;
    linear *head;
    int64_t hidden_stride;
    int64_t qkv_stride;
    int64_t attended_stride;
    int64_t activation_stride;
    workspace space;
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
} product;

static void pack_task(void *work, int64_t task) {
    const product *of = work;
    pack_tile(&of->inputs, of->with->form, task, of->from, of->from_stride, of->norm);
}

/* Tasks go through all panels with the same block of inputs, which stays in cache, then to the next block. */
static void multiply_task(void *work, int64_t task) {
    const product *of = work;
    int64_t at_once = tiles_at_once(of->with), first = task / of->with->num_panels * at_once;
    int64_t end = first + at_once < of->inputs.num_tiles ? first + at_once : of->inputs.num_tiles;
    int64_t panel = task % of->with->num_panels;
    /* Members take turns, more or less: this is the probable next panel of this member. */
    int64_t next = (panel + of->num_members) % of->with->num_panels;
    multiply(of->with, &of->inputs, panel, next, first, end, of->epilogue, of->out, of->out_stride);
}

/* A product of few rows keeps the memory busy, but between two products the memory is idle. So the next weights are
 * fetched beforehand. With many rows this is not needed, and the cache has better uses. */
static void fetch_first_panel(const member *self, const linear *of, int64_t num_rows) {
    if (tiles_of(num_rows) <= FEW_TILES && self->number < of->num_panels) fetch_panel(of, self->number);
}

static void run_product(member *self, product *of, const linear *next) {
    of->num_members = team_size(self->of);
    if (of->from != NULL) team_phase(self, pack_task, of, of->inputs.num_tiles);
    int64_t at_once = tiles_at_once(of->with), num_blocks = (of->inputs.num_tiles + at_once - 1) / at_once;
    int64_t num_tasks = num_blocks * of->with->num_panels;
    team_take(self, multiply_task, of, num_tasks);
    if (next != NULL) fetch_first_panel(self, next, of->inputs.num_rows);
    team_wait(self, num_tasks);
}

static product product_of(const workspace *space, const linear *with, int64_t num_rows, const float *from,
                          int64_t from_stride, rms_norm norm, enum epilogue epilogue, float *out, int64_t out_stride) {
    packed_inputs inputs = {num_rows, with->inputs, tiles_of(num_rows), space->tiles, space->factors, space->offsets};
    return (product){with, inputs, from, from_stride, norm, epilogue, out, out_stride, 1};
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
} pass;

static void embed_task(void *work, int64_t token) {
    const pass *now = work;
    const decoder *of = now->of;
    const float *from = of->shape.embedding + now->step->token_ids[token] * of->shape.hidden_size;
    memcpy(of->space.hidden + token * of->hidden_stride, from, (size_t)of->shape.hidden_size * sizeof *from);
}

static void normalise_head(float *head, const float *weight, int64_t width, float eps) {
    float sum = 0.0f;
    for (int64_t i = 0; i < width; i++) sum += head[i] * head[i];
    float factor = 1.0f / sqrtf(sum / (float)width + eps);
    for (int64_t i = 0; i < width; i++) head[i] *= factor * weight[i];
}

/* Rotary embedding (Su et al. 2021, arXiv 2104.09864), components i and i + width / 2 as a pair. */
static void rotate(float *restrict head, const float *restrict cosines, const float *restrict sines, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec low = load(head + i), high = load(head + half + i), cosine = load(cosines + i), sine = load(sines + i);
        store(head + i, low * cosine - high * sine);
        store(head + half + i, high * cosine + low * sine);
    }
    for (; i < half; i++) {
        float low = head[i], high = head[half + i];
        head[i] = low * cosines[i] - high * sines[i];
        head[half + i] = high * cosines[i] + low * sines[i];
    }
}

/* Queries and keys of one token: normalise, rotate; store key and value. */
static void place_token(const pass *now, const attention_tile *tile, int64_t which) {
    const decoder *of = now->of;
    const decoder_shape *shape = &of->shape;
    int64_t position = tile->position + which, half = shape->true_head_dim / 2;
    float *qkv = of->space.qkv + (tile->token + which) * of->qkv_stride;
    for (int64_t head = 0; head < shape->num_heads + shape->num_kv_heads; head++) {
        float *components = qkv + head * shape->head_dim;
        if (now->layer->qk_norm != NULL) {
            normalise_head(components, now->layer->qk_norm + head * shape->true_head_dim, shape->true_head_dim,
                           shape->norm_eps);
        }
        rotate(components, shape->cosines + position * half, shape->sines + position * half, half);
    }
    const int32_t *table = now->step->tables + tile->row * now->step->table_stride;
    const float *keys = qkv + shape->num_heads * shape->head_dim;
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
    attend(&of->attention, now->layer_pool, &task, fetches ? &next : NULL, now->layer->window,
           of->space.qkv + token * of->qkv_stride, of->qkv_stride, of->space.attended + token * of->attended_stride,
           of->attended_stride);
}

/* Move row sampled[i] to row i. `sampled` ascends, so no row is overwritten before it is moved. */
static void gather(const decoder_step *step, float *rows, int64_t stride) {
    for (int64_t i = 0; i < step->num_sampled; i++) {
        if (step->sampled[i] != i)
            memcpy(rows + i * stride, rows + step->sampled[i] * stride, (size_t)stride * sizeof *rows);
    }
}

static void gather_task(void *work, int64_t task) {
    const pass *now = work;
    const decoder *of = now->of;
    if (task == 0)
        gather(now->step, of->space.hidden, of->hidden_stride);
    else
        gather(now->step, of->space.attended, of->attended_stride);
}

/* Attention and MLP of the attending tokens of `now`. */
static void run_rest_of_layer(member *self, pass *now, int64_t num_tokens, const linear *next) {
    const decoder *of = now->of;
    const workspace *space = &of->space;
    const layer_weights *layer = now->layer;
    const rms_norm mlp_norm = {layer->mlp_norm, of->shape.norm_eps}, no_norm = {0};
    product output = product_of(space, layer->output, num_tokens, space->attended, of->attended_stride, no_norm, ADD,
                                space->hidden, of->hidden_stride);
    run_product(self, &output, layer->gate_up);
    /* The input of the last product: packed at once, unless it must be quantised, which needs whole rows. */
    const int packs = layer->down->form != FORM_INT8;
    product gate_up = product_of(space, layer->gate_up, num_tokens, space->hidden, of->hidden_stride, mlp_norm,
                                 packs ? GATED_PACKED : GATED, space->activations,
                                 packs ? layer->down->inputs : of->activation_stride);
    run_product(self, &gate_up, layer->down);
    product down = product_of(space, layer->down, num_tokens, packs ? NULL : space->activations, of->activation_stride,
                              no_norm, ADD, space->hidden, of->hidden_stride);
    if (packs) down.inputs.tiles = space->activations;
    run_product(self, &down, next);
}

/* Queries, keys and values of all tokens; then attention. */
static void run_attention(member *self, pass *now) {
    const decoder *of = now->of;
    const layer_weights *layer = now->layer;
    const rms_norm norm = {layer->attention_norm, of->shape.norm_eps};
    product qkv = product_of(&of->space, layer->qkv, now->step->num_tokens, of->space.hidden, of->hidden_stride, norm,
                             STORE, of->space.qkv, of->qkv_stride);
    run_product(self, &qkv, layer->output);
    team_phase(self, place_task, now, of->space.num_attention_tiles);
    team_phase(self, attend_task, now, num_attention_tasks(now));
}

/* The last layer: tokens that are not sampled need only keys and values. */
static void run_last_layer(member *self, pass *now) {
    const decoder *of = now->of;
    int64_t num_sampled = now->step->num_sampled;
    now->attending = of->space.sampled_tiles;
    now->num_attending = num_sampled;
    run_attention(self, now);
    if (num_sampled == 0) return;
    team_phase(self, gather_task, now, 2);
    run_rest_of_layer(self, now, num_sampled, of->head);
    const rms_norm norm = {of->shape.final_norm, of->shape.norm_eps};
    product head = product_of(&of->space, of->head, num_sampled, of->space.hidden, of->hidden_stride, norm, STORE,
                              now->step->logits, headway_logits_stride(of->shape.vocab_size));
    run_product(self, &head, NULL);
}

static void run_step(void *work, member *self) {
    pass now = *(const pass *)work;
    const decoder *of = now.of;
    int64_t last = of->shape.num_layers - 1;
    team_phase(self, embed_task, &now, now.step->num_tokens);
    now.num_members = team_size(self->of);
    now.attending = of->space.attention_tiles;
    now.num_attending = of->space.num_attention_tiles;
    for (int64_t i = 0; i <= last; i++) {
        now.layer = &of->layers[i];
        now.layer_pool = now.step->pool + i * now.step->layer_stride;
        if (i == last) {
            run_last_layer(self, &now);
        } else {
            run_attention(self, &now);
            run_rest_of_layer(self, &now, now.step->num_tokens, of->layers[i + 1].qkv);
        }
    }
}

/* ---- memory ---- */

static void free_space(workspace *space) {
    free(space->hidden);
    free(space->qkv);
    free(space->attended);
    free(space->activations);
    free(space->tiles);
    free(space->factors);
    free(space->offsets);
    free(space->attention_tiles);
    free(space->sampled_tiles);
    *space = (workspace){0};
}

static int reserve_space(decoder *of, int64_t num_tokens) {
    workspace *space = &of->space;
    if (num_tokens <= space->num_tokens) return 1;
    free_space(space);
    int64_t widest = larger_of(of->shape.hidden_size, of->attended_stride);
    widest = larger_of(widest, of->shape.intermediate_size);
    space->hidden = stream_alloc(num_tokens * of->hidden_stride * 4);
    space->qkv = stream_alloc(num_tokens * of->qkv_stride * 4);
    space->attended = stream_alloc(num_tokens * of->attended_stride * 4);
    int64_t packed_activations = packed_bytes(num_tokens, of->shape.intermediate_size, FORM_FLOAT32);
    space->activations = stream_alloc(larger_of(num_tokens * of->activation_stride * 4, packed_activations));
    space->tiles = stream_alloc(packed_bytes(num_tokens, widest, FORM_FLOAT32));
    space->factors = stream_alloc(num_tokens * 4);
    space->offsets = stream_alloc(num_tokens * 4);
    space->attention_tiles = malloc((size_t)num_tokens * sizeof *space->attention_tiles);
    space->sampled_tiles = malloc((size_t)num_tokens * sizeof *space->sampled_tiles);
    if (!space->hidden || !space->qkv || !space->attended || !space->activations || !space->tiles || !space->factors ||
        !space->offsets || !space->attention_tiles || !space->sampled_tiles) {
        free_space(space);
        return 0;
    }
    space->num_tokens = num_tokens;
    return 1;
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
    return (attention_shape){shape->num_heads, shape->num_kv_heads, shape->head_dim, shape->block_size,
                             shape->score_scale};
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
void headway_linear_free(linear *the_linear) { linear_free(the_linear); }
team *headway_team_new(int64_t num_threads) { return team_new(num_threads); }
void headway_team_free(team *the_team) { team_free(the_team); }

decoder *headway_decoder_new(const decoder_shape *shape, const layer_weights *layers, linear *head) {
    decoder *made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->shape = *shape;
    made->attention = attention_of(shape);
    made->head = head;
    made->hidden_stride = round_up(shape->hidden_size, PANEL);
    made->qkv_stride = round_up((shape->num_heads + 2 * shape->num_kv_heads) * shape->head_dim, PANEL);
    made->attended_stride = round_up(shape->num_heads * shape->head_dim, PANEL);
    made->activation_stride = round_up(shape->intermediate_size, PANEL);
    made->layers = malloc((size_t)shape->num_layers * sizeof *made->layers);
    if (made->layers == NULL) {
        free(made);
        return NULL;
    }
    memcpy(made->layers, layers, (size_t)shape->num_layers * sizeof *made->layers);
    return made;
}

void headway_decoder_free(decoder *the_decoder) {
    if (the_decoder == NULL) return;
    free_space(&the_decoder->space);
    free(the_decoder->layers);
    free(the_decoder);
}

int headway_decoder_run(decoder *the_decoder, team *with, const decoder_step *step) {
    if (!reserve_space(the_decoder, step->num_tokens)) return 0;
    cut_into_tiles(the_decoder, step);
    pass start = {.of = the_decoder, .step = step};
    return team_run(with, run_step, &start, the_decoder->shape.num_layers * PHASES_PER_LAYER + OTHER_PHASES);
}

static void run_alone(void *work, member *self) {
    product own = *(const product *)work; /* running a product writes to it, so each member has a copy, as in a step */
    run_product(self, &own, NULL);
}

int headway_linear_run(const linear *the_linear, team *with, const float *inputs, int64_t num_rows,
                       const float *norm_weight, float norm_eps, int64_t gated, float *out, int64_t stride) {
    workspace space = {0};
    space.tiles = stream_alloc(packed_bytes(num_rows, the_linear->inputs, FORM_FLOAT32));
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

#include "latent_phases.h"

#define BYTES_OF_PACKED 8 /* the most that an input takes, in any form */

/* A product of each head with weights of its own. Rows lie `from_stride` and `out_stride` apart, heads `from_head` and
 * `out_head`. */
typedef struct {
    const pass *now;
    linear *const *with;
    float *from;
    int64_t from_stride;
    int64_t from_head;
    float *out;
    int64_t out_stride;
    int64_t out_head;
    int64_t is_behind; /* attention: rows may be gated, and few may be wanted */
} head_products;

static int64_t num_tasks_of(const head_products *of) {
    return of->now->attention->num_heads * tiles_of(of->now->step->num_tokens);
}

/* In the last layer, sampled tokens alone attend. */
static int is_wanted(const pass *now, int64_t first, int64_t end) {
    if (now->attending != now->of->space.sampled_tiles) return 1;
    for (int64_t i = 0; i < now->step->num_sampled; i++)
        if (now->step->sampled[i] >= first && now->step->sampled[i] < end) return 1;
    return 0;
}

static void gate_rows(const pass *now, int64_t head, int64_t first, int64_t count, float *rows, int64_t width) {
    const int64_t stride = now->of->strides.qkv;
    for (int64_t i = 0; i < count; i++) {
        const float *gates = now->of->space.qkv + (first + i) * stride + latent_columns(now->attention);
        scale_row(rows + i * stride, width, sigmoid(splat(gates[head]))[0], 0.0f);
    }
}

/* Room for what adapters add: each head has its own. */
static row_adapters adapters_of_head(const head_products *of, int64_t head, int64_t first) {
    const decoder *decoder = of->now->of;
    const product_space *space = &decoder->space.products;
    const int64_t place = head * of->now->step->num_tokens + first;
    return (row_adapters){
        .by_token = of->now->step->adapters + first,
        .addition = (of->now->layer - decoder->layers) * additions_of_layer(decoder) + SITES +
                    2 * decoder->experts.experts + 2 * head + of->is_behind,
        .added = {space->additions + place, space->downs + place * space->most_rank, space->most_rank},
    };
}

/* A tile of rows with all weights of a head, which the cache holds for the tiles after it. */
static void head_task(void *work, int64_t task) {
    const head_products *of = work;
    const pass *now = of->now;
    const int64_t num_tokens = now->step->num_tokens, num_tiles = tiles_of(num_tokens);
    const int64_t head = task / num_tiles, tile = task % num_tiles;
    const int64_t first = tile_start(tile, num_tiles, num_tokens);
    const int64_t end = tile_start(tile + 1, num_tiles, num_tokens);
    if (of->is_behind && !is_wanted(now, first, end)) return;
    const linear *with = of->with[head];
    const int64_t after = task + now->num_members < num_tasks_of(of) ? (task + now->num_members) / num_tiles : head;
    const rms_norm no_norm = {0};
    _Alignas(64) char tiles[INPUT_ROWS * MAX_HEAD_DIM * BYTES_OF_PACKED];
    float factors[INPUT_ROWS];
    int32_t offsets[INPUT_ROWS];
    packed_inputs inputs = {.num_rows = end - first,
                            .inputs = with->inputs,
                            .num_tiles = 1,
                            .tiles = tiles,
                            .factors = factors,
                            .offsets = offsets};
    float *from = of->from + first * of->from_stride + head * of->from_head;
    if (of->is_behind && now->layer->latent->gates != NULL)
        gate_rows(now, head, first, inputs.num_rows, from, with->inputs);
    pack_tile(&inputs, with, 0, from, of->from_stride, no_norm);
    row_adapters adapters;
    if (now->step->adapters != NULL) {
        adapters = adapters_of_head(of, head, first);
        inputs.added = &adapters.added;
        for (int64_t row = 0; row < inputs.num_rows; row++)
            adapt_row(&adapters, row, &inputs, from + row * of->from_stride, no_norm);
    }
    float *out = of->out + first * of->out_stride + head * of->out_head;
    for (int64_t panel = 0; panel < with->num_panels; panel++) {
        const char *next = panel + 1 < with->num_panels ? panel_at(with, panel + 1) : panel_at(of->with[after], 0);
        multiply(with, &inputs, panel, next, 0, 1, STORE, out, of->out_stride);
    }
}

void absorb_keys(member *self, const pass *now) {
    const workspace *space = &now->of->space;
    const row_strides *strides = &now->of->strides;
    head_products each = {
        .now = now,
        .with = now->layer->latent->absorb,
        .from = space->queries,
        .from_stride = strides->queries,
        .from_head = now->layer->latent->query_dim,
        .out = space->qkv,
        .out_stride = strides->qkv,
        .out_head = now->attention->head_dim,
    };
    team_phase(self, head_task, &each, num_tasks_of(&each));
}

void expand_values(member *self, const pass *now) {
    const decoder *of = now->of;
    const int64_t width = attended_dim(now->layer, now->attention);
    head_products each = {
        .now = now,
        .with = now->layer->latent->values,
        .from = of->space.qkv,
        .from_stride = of->strides.qkv,
        .from_head = now->attention->head_dim,
        .out = of->rows.attended + of->shape.first_head * width,
        .out_stride = of->strides.attended,
        .out_head = width,
        .is_behind = 1,
    };
    team_phase(self, head_task, &each, num_tasks_of(&each));
}

/* `low` and `high` of `half` channels each, rotated, side by side; zeros up to `width`. */
static void place_shared(const layer_weights *layer, int64_t position, const float *low, const float *high, float *to,
                         int64_t width) {
    const latent_weights *latent = layer->latent;
    const int64_t half = latent->num_shared / 2, all = latent->absorb[0]->inputs / 2;
    memset(to, 0, (size_t)width * sizeof *to);
    memcpy(to, low, (size_t)half * sizeof *to);
    memcpy(to + half, high, (size_t)half * sizeof *to);
    if (layer->cosines != NULL) rotate(to, layer->cosines + position * all, layer->sines + position * all, half);
}

void place_latent_token(const pass *now, const attention_tile *tile, int64_t which) {
    const decoder *of = now->of;
    const layer_weights *layer = now->layer;
    const latent_weights *latent = layer->latent;
    const attention_shape *heads = now->attention;
    const int64_t token = tile->token + which, position = tile->position + which, width = heads->head_dim;
    const int64_t rank = latent->values[0]->inputs, shared_at = padded_outputs(rank);
    const float *query = of->space.queries + token * of->strides.queries;
    const float *compressed = of->space.compressed + token * of->strides.compressed +
                              (latent->expand_query == NULL ? 0 : latent->expand_query->inputs);
    float *queries = of->space.qkv + token * of->strides.qkv, *row = queries + heads->num_heads * width;
    for (int64_t head = 0; head < heads->num_heads; head++, query += latent->query_dim)
        place_shared(layer, position, query, query + latent->absorb[0]->inputs / 2, queries + head * width + shared_at,
                     width - shared_at);
    if (layer->query_factors != NULL)
        scale_row(queries, heads->num_heads * width, layer->query_factors[position], 0.0f);
    memset(row, 0, (size_t)width * sizeof *row);
    normalise_row(NORM_RMS, (norm_weights){latent->norm, NULL}, latent->norm_eps, compressed, rank, row);
    place_shared(layer, position, compressed + rank, compressed + rank + latent->num_shared / 2, row + shared_at,
                 width - shared_at);
    const int32_t *table = now->step->tables + tile->row * now->step->table_stride;
    store_key_value(heads, now->layer_pool, table, position, 0, row, row);
}

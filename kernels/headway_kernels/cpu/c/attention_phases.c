#include "attention_phases.h"

#include "latent_phases.h"

/* Queries; then keys, and values if they are, unless another layer has stored them. */
static void normalise_qkv(const pass *now, float *qkv) {
    const decoder_shape *shape = &now->of->shape;
    const attention_shape *heads = now->attention;
    norm_weights norm = {now->layer->qk_norm, now->layer->qk_norm_bias};
    const head_norm of = {
        .kind = (enum norm_kind)shape->head_norm_kind,
        .eps = shape->norm_eps,
        .stride = heads->head_dim,
        .width = now->layer->heads.true_head_dim,
    };
    const int together = shape->norms_all_heads != 0;
    normalise_heads(&of, norm, qkv, heads->num_heads, together);
    if (now->layer->heads.is_reading) return;
    float *keys = qkv + heads->num_heads * heads->head_dim;
    norm = further_weights(norm, heads->num_heads * of.width);
    normalise_heads(&of, norm, keys, heads->num_kv_heads, together);
    if (shape->norms_values)
        normalise_heads(&of, further_weights(norm, heads->num_kv_heads * of.width),
                        keys + heads->num_kv_heads * heads->head_dim, heads->num_kv_heads, 0);
}

/* Queries, keys and values of one token: bound them; normalise and rotate queries and keys, or the other way round;
 * scale queries; store key and value. */
static void place_token(const pass *now, const attention_tile *tile, int64_t which) {
    const decoder *of = now->of;
    const decoder_shape *shape = &of->shape;
    const layer_weights *layer = now->layer;
    const attention_shape *heads = now->attention;
    const int64_t position = tile->position + which, half = layer->heads.true_head_dim / 2, width = heads->head_dim;
    const int64_t num_new = layer->heads.is_reading ? 0 : heads->num_kv_heads;
    float *qkv = of->space.qkv + (tile->token + which) * of->strides.qkv;
    float *keys = qkv + heads->num_heads * width;
    const int64_t num_channels = (heads->num_heads + 2 * num_new) * width;
    if (shape->qkv_clip > 0.0f && !shape->clips_normed) clip_row(qkv, num_channels, shape->qkv_clip);
    if (layer->qk_norm != NULL && !shape->norms_rotated) normalise_qkv(now, qkv);
    if (shape->qkv_clip > 0.0f && shape->clips_normed) clip_row(qkv, num_channels, shape->qkv_clip);
    if (shape->gates == GATES_SOFTPLUS) soft_plus_row(qkv + num_channels, heads->num_heads * width);
    for (int64_t head = 0; layer->cosines != NULL && head < heads->num_heads + num_new; head++) {
        rotate(qkv + head * width, layer->cosines + position * half, layer->sines + position * half, half);
    }
    if (layer->qk_norm != NULL && shape->norms_rotated) normalise_qkv(now, qkv);
    for (int64_t i = 0; layer->query_factors != NULL && i < heads->num_heads * width; i++)
        qkv[i] *= layer->query_factors[position];
    const int32_t *table = now->step->tables + tile->row * now->step->table_stride;
    const float *values = keys + num_new * width;
    for (int64_t head = 0; head < num_new; head++)
        store_key_value(heads, now->layer_pool, table, position, head, keys + head * width, values + head * width);
}

static void place_task(void *work, int64_t task) {
    const pass *now = work;
    const attention_tile *tile = &now->of->space.attention_tiles[task];
    for (int64_t i = 0; i < tile->num_tokens; i++)
        (now->layer->latent == NULL ? place_token : place_latent_token)(now, tile, i);
}

/* The task with this number: tile after tile, key-value head after head. */
static attention_task attention_task_at(const pass *now, int64_t number) {
    int64_t parts = parts_per_head(now->attention), per_tile = parts * now->attention->num_kv_heads;
    const attention_tile *tile = &now->attending[number / per_tile];
    return (attention_task){now->step->tables + tile->row * now->step->table_stride, tile->position, tile->num_tokens,
                            number % per_tile / parts, number % parts};
}

static int64_t num_attention_tasks(const pass *now) {
    return now->num_attending * now->attention->num_kv_heads * parts_per_head(now->attention);
}

static void attend_task(void *work, int64_t number) {
    const pass *now = work;
    const decoder *of = now->of;
    int64_t token = now->attending[number / (num_attention_tasks(now) / now->num_attending)].token;
    const attention_task task = attention_task_at(now, number);
    /* As with panels: members take turns. The tiles of a prompt share their keys, which are in the cache. */
    const int fetches = task.num_tokens == 1 && number + now->num_members < num_attention_tasks(now);
    const attention_task next = fetches ? attention_task_at(now, number + now->num_members) : task;
    float *queries = of->space.qkv + token * of->strides.qkv;
    const int64_t qkv_heads = now->attention->num_heads + 2 * now->attention->num_kv_heads;
    const float *gates = of->shape.gates != GATES_NONE ? queries + qkv_heads * now->attention->head_dim : NULL;
    float *out = of->rows.attended + token * of->strides.attended + of->shape.first_head * now->attention->head_dim;
    const int is_latent = now->layer->latent != NULL; /* then sums of rows take the place of the queries */
    attend(now->attention, now->layer_pool, &task, fetches ? &next : NULL, now->layer->window, now->layer->sinks,
           queries, is_latent ? NULL : gates, of->strides.qkv, is_latent ? queries : out,
           is_latent ? of->strides.qkv : of->strides.attended);
}

void cut_into_tiles(decoder *of, const decoder_step *step) {
    int64_t most = of->tokens_per_tile, count = 0, sampled = 0;
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

void run_attention_phases(member *self, pass *now) {
    team_phase(self, place_task, now, now->of->space.num_attention_tiles);
    team_phase(self, attend_task, now, num_attention_tasks(now));
    if (now->layer->latent != NULL) expand_values(self, now);
}

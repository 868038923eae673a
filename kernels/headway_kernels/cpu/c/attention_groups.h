/* The positions that a task of attention sees, in groups and chunks.
 *
 * Owns: where groups lie, which of them a tile sees and which come next, and what scores become.
 * Must not know: how keys and values are multiplied: vector_attention.c and tile_attention.c do that.
 */
#ifndef HEADWAY_ATTENTION_GROUPS_H
#define HEADWAY_ATTENTION_GROUPS_H

#include "attention.h"

#define CHUNK 128
#define CHUNK_GROUPS (CHUNK / LANES)
#define NOTHING_YET -1e30f /* below any score, and its difference to one is a number */

static inline int64_t groups_per_block(const attention_shape *shape) { return (shape->block_size + LANES - 1) / LANES; }

static inline int64_t head_floats(const attention_shape *shape) {
    return 2 * groups_per_block(shape) * LANES * shape->head_dim;
}

static inline int64_t head_start(const attention_shape *shape, int64_t block, int64_t head) {
    return block * shape->block_stride + head * head_floats(shape);
}

/* One group of positions: the place of its keys and values, and its positions. */
typedef struct {
    const char *keys;
    const char *values;
    int64_t first_position;
    int64_t num_positions;
} group;

/* The data that all query rows of one task share. Rows are (token, head) pairs, token after token. */
typedef struct {
    const attention_shape *shape;
    const char *layer;
    const attention_task *task;
    int64_t window;
    int64_t heads;
} tile;

static inline group group_at(const tile *of, int64_t index) {
    const attention_shape *shape = of->shape;
    int64_t per_block = groups_per_block(shape);
    int64_t block = index / per_block, within = index % per_block;
    int64_t left = shape->block_size - within * LANES;
    const int64_t size = bytes_of_number(shape), start = within * LANES * shape->head_dim;
    const char *keys = of->layer + head_start(shape, of->task->table[block], of->task->kv_head) * size;
    return (group){
        .keys = keys + start * size,
        .values = keys + (head_floats(shape) / 2 + start) * size,
        .first_position = block * shape->block_size + within * LANES,
        .num_positions = left < LANES ? left : LANES,
    };
}

static inline int64_t last_position(const tile *of) { return of->task->first_position + of->task->num_tokens - 1; }

/* The end of the groups that the tile sees. */
static inline int64_t end_group(const tile *of) {
    int64_t last = last_position(of), block_size = of->shape->block_size;
    return last / block_size * groups_per_block(of->shape) + last % block_size / LANES + 1;
}

/* The first group of the first chunk that the tile sees. */
static inline int64_t start_group(const tile *of) {
    int64_t first_seen = of->window > 0 ? of->task->first_position + 1 - of->window : 0;
    if (first_seen <= 0) return 0;
    return first_seen / of->shape->block_size * groups_per_block(of->shape) / CHUNK_GROUPS * CHUNK_GROUPS;
}

/* The groups that a tile sees; none without a tile. They are computed once, because that takes divisions. */
typedef struct {
    const tile *by;
    int64_t start;
    int64_t end;
} seen_groups;

static inline seen_groups groups_seen(const tile *by) {
    return by == NULL ? (seen_groups){0} : (seen_groups){by, start_group(by), end_group(by)};
}

/* The group that is fetched into the cache while group `index` is worked on: the one CHUNK_GROUPS later, or one of
 * the next tile, or the group itself if there is no other. */
static inline group group_ahead(const seen_groups *of, const seen_groups *next, int64_t index) {
    int64_t ahead = index + CHUNK_GROUPS;
    if (ahead < of->end) return group_at(of->by, ahead);
    if (ahead - of->end + next->start >= next->end) return group_at(of->by, index);
    return group_at(next->by, ahead - of->end + next->start);
}

/* The groups of a chunk, and those to fetch meanwhile. What is behind the last is like it. */
static inline void find_groups(const seen_groups *own, const seen_groups *following, int64_t first, int64_t num_groups,
                               group *groups, group *ahead) {
    for (int64_t i = 0; i < CHUNK_GROUPS; i++) {
        groups[i] = i < num_groups ? group_at(own->by, first + i) : groups[i - 1];
        ahead[i] = i < num_groups ? group_ahead(own, following, first + i) : ahead[i - 1];
    }
}

/* How many positions of a group are before `end`. */
static inline int64_t positions_before(const group *at, int64_t end) {
    const int64_t left = end - at->first_position;
    return left < at->num_positions ? left : at->num_positions;
}

/* Which of a group's positions the token at `position` sees. */
static inline ivec visible(const tile *of, const group *at, int64_t position) {
    ivec lanes = lane_numbers();
    ivec mask = lanes < (int32_t)positions_before(at, position + 1);
    if (of->window > 0) {
        int64_t hidden = position + 1 - of->window - at->first_position;
        mask &= lanes >= (int32_t)(hidden < 0 ? 0 : hidden > LANES ? LANES : hidden);
    }
    return mask;
}

/* The biases of a row of the tile, where that of the key at position 0 would be; or NULL. */
static inline const float *biases_of(const tile *of, int64_t row) {
    const attention_shape *shape = of->shape;
    if (shape->biases == NULL) return NULL;
    const int64_t group_size = shape->num_heads / shape->num_kv_heads;
    const int64_t head = of->task->kv_head * group_size + of->task->part * heads_per_part(shape) + row % of->heads;
    const int64_t position = of->task->first_position + row / of->heads;
    const int64_t start = shape->last_distance > 0 ? shape->last_distance - position : 0;
    return shape->biases + head * shape->bias_stride + start;
}

/* Whether the token at `position` sees all positions of a group, as most groups of a long row. */
static inline int sees_all(const tile *of, const group *at, int64_t position) {
    const int64_t hidden = position + 1 - of->window;
    return positions_before(at, position + 1) == LANES && (of->window == 0 || at->first_position >= hidden);
}

/* What a tile has attended so far: for each row sums of weighted values [head_dim], the sum of its weights, and its
 * largest score. */
typedef struct {
    float *values;
    float *totals;
    float *largest;
} attended_rows;

static inline void start_rows(const attended_rows *to, int64_t rows, int64_t head_dim) {
    memset(to->values, 0, (size_t)(rows * head_dim) * sizeof *to->values);
    for (int64_t i = 0; i < rows; i++) {
        to->largest[i] = NOTHING_YET;
        to->totals[i] = 0.0f;
    }
}

/* Turn the scores of one row into weights; returns their sum, updates the row's largest score, sets its decay. */
INLINE float soften(const int form, const tile *of, const group *groups, int64_t num_groups, int64_t position,
                    const float *biases, float *scores, float *largest, float *decay) {
    vec maximum = splat(*largest);
    for (int64_t g = 0; g < num_groups; g++) {
        vec wide = load(scores + g * LANES);
        if (of->shape->softcap > 0.0f) wide = capped(wide, of->shape->softcap);
        if (biases != NULL) wide += load(biases + groups[g].first_position);
        if (!sees_all(of, &groups[g], position))
            wide = choose(visible(of, &groups[g], position), wide, splat(-INFINITY));
        store(scores + g * LANES, wide);
        maximum = larger(maximum, wide);
    }
    float new_largest = largest_of(maximum);
    vec sum = {0};
    for (int64_t g = 0; g < num_groups; g++) {
        vec weights = exponential(load(scores + g * LANES) - new_largest);
        if (form == KV_PAIRS)
            *(half_ivec *)(scores + g * LANES) = as_pairs(weights);
        else
            store(scores + g * LANES, weights);
        sum += weights;
    }
    *decay = exponential(splat(*largest - new_largest))[0];
    *largest = new_largest;
    return sum_of(sum);
}

/* Soften the scores of all rows, [rows][CHUNK], and set the decays of their values. */
INLINE void soften_rows(const int form, const tile *of, const group *groups, int64_t num_groups, int64_t rows,
                        float *scores, const attended_rows *to, float *decays) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t position = of->task->first_position + i / of->heads;
        const float sum = soften(form, of, groups, num_groups, position, biases_of(of, i), scores + i * CHUNK,
                                 &to->largest[i], &decays[i]);
        to->totals[i] = to->totals[i] * decays[i] + sum;
    }
}

/* The sums of all `rows` rows of a tile. `query_rows`: of its first token and first head. */
void attend_on_vectors(const tile *of, const tile *next, int64_t rows, const float *query_rows, int64_t query_stride,
                       const attended_rows *to);
void attend_on_tiles(const tile *of, const tile *next, int64_t rows, const float *query_rows, int64_t query_stride,
                     const attended_rows *to);

#endif

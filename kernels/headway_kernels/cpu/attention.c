#include "attention.h"

#define CHUNK 128
#define CHUNK_GROUPS (CHUNK / LANES)
#define SCORED 4           /* the most registers of scores, or of values, that are summed at once */
#define NOTHING_YET -1e30f /* below any score, and its difference to one is a number */

static int64_t groups_per_block(const attention_shape *shape) { return (shape->block_size + LANES - 1) / LANES; }

static int64_t head_floats(const attention_shape *shape) {
    return 2 * groups_per_block(shape) * LANES * shape->head_dim;
}

int64_t block_floats(const attention_shape *shape) { return shape->num_kv_heads * head_floats(shape); }

static int64_t head_start(const attention_shape *shape, int64_t block, int64_t head) {
    return (block * shape->num_kv_heads + head) * head_floats(shape);
}

void store_key_value(const attention_shape *shape, float *layer, const int32_t *table, int64_t position, int64_t head,
                     const float *key, const float *value) {
    int64_t offset = position % shape->block_size;
    float *keys = layer + head_start(shape, table[position / shape->block_size], head);
    float *values = keys + head_floats(shape) / 2 + offset * shape->head_dim;
    keys += offset / LANES * LANES * shape->head_dim + offset % LANES;
    for (int64_t i = 0; i < shape->head_dim; i++) keys[i * LANES] = key[i];
    for (int64_t i = 0; i < shape->head_dim; i += LANES) store(values + i, load(value + i));
}

/* One group of positions: the place of its keys and values, and its positions. */
typedef struct {
    const float *keys;
    const float *values;
    int64_t first_position;
    int64_t num_positions;
} group;

/* The data that all query rows of one task share. Rows are (token, head) pairs, token after token. */
typedef struct {
    const attention_shape *shape;
    const float *layer;
    const attention_task *task;
    int64_t window;
    int64_t heads;
} tile;

static group group_at(const tile *of, int64_t index) {
    const attention_shape *shape = of->shape;
    int64_t per_block = groups_per_block(shape);
    int64_t block = index / per_block, within = index % per_block;
    int64_t left = shape->block_size - within * LANES;
    const float *keys = of->layer + head_start(shape, of->task->table[block], of->task->kv_head);
    return (group){
        .keys = keys + within * LANES * shape->head_dim,
        .values = keys + head_floats(shape) / 2 + within * LANES * shape->head_dim,
        .first_position = block * shape->block_size + within * LANES,
        .num_positions = left < LANES ? left : LANES,
    };
}

static int64_t last_position(const tile *of) { return of->task->first_position + of->task->num_tokens - 1; }

/* The end of the groups that the tile sees. */
static int64_t end_group(const tile *of) {
    int64_t last = last_position(of), block_size = of->shape->block_size;
    return last / block_size * groups_per_block(of->shape) + last % block_size / LANES + 1;
}

/* The first group of the first chunk that the tile sees. */
static int64_t start_group(const tile *of) {
    int64_t first_seen = of->window > 0 ? of->task->first_position + 1 - of->window : 0;
    if (first_seen <= 0) return 0;
    return first_seen / of->shape->block_size * groups_per_block(of->shape) / CHUNK_GROUPS * CHUNK_GROUPS;
}

/* The groups that a tile sees. They are computed once, because that takes divisions. */
typedef struct {
    const tile *by;
    int64_t start;
    int64_t end;
} seen_groups;

static seen_groups groups_seen(const tile *by) { return (seen_groups){by, start_group(by), end_group(by)}; }

/* The group that is fetched into the cache while group `index` is worked on: the one CHUNK_GROUPS later, or one of
 * the next tile, or the group itself if there is no other. */
static group group_ahead(const seen_groups *of, const seen_groups *next, int64_t index) {
    int64_t ahead = index + CHUNK_GROUPS;
    if (ahead < of->end) return group_at(of->by, ahead);
    if (next == NULL || ahead - of->end + next->start >= next->end) return group_at(of->by, index);
    return group_at(next->by, ahead - of->end + next->start);
}

/* Which of a group's positions the token at `position` sees. */
static inline ivec visible(const tile *of, const group *at, int64_t position) {
    ivec lanes = lane_numbers();
    int64_t end = position + 1 - at->first_position;
    if (end > at->num_positions) end = at->num_positions;
    ivec mask = lanes < (int32_t)end;
    if (of->window > 0) {
        int64_t hidden = position + 1 - of->window - at->first_position;
        mask &= lanes >= (int32_t)(hidden < 0 ? 0 : hidden > LANES ? LANES : hidden);
    }
    return mask;
}

/* Scores of `width` groups, each [rows][CHUNK] at its place in the chunk; `queries` is scaled, [rows][LANES] components
 * after [rows][LANES] components.
 *
 * Keys come from memory in a stream; at the same time the keys of `ahead` are fetched. */
INLINE void score(const int rows, const int width, const float *queries, const group *groups, const group *ahead,
                  int64_t head_dim, float *scores) {
    vec sums[TILE_ROWS][SCORED];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) sums[i][j] = (vec){0};
    }
    for (int64_t d = 0; d < head_dim; d++) {
        vec keys[SCORED];
        UNROLLED
        for (int j = 0; j < width; j++) {
            keys[j] = load(groups[j].keys + d * LANES);
            __builtin_prefetch(ahead[j].keys + d * LANES);
        }
        const float *column = queries + d / LANES * LANES * rows + d % LANES;
        UNROLLED
        for (int i = 0; i < rows; i++) {
            vec query = splat(column[i * LANES]);
            UNROLLED
            for (int j = 0; j < width; j++) sums[i][j] += query * keys[j];
        }
    }
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) store(scores + i * CHUNK + j * LANES, sums[i][j]);
    }
}

/* attended = attended * decay + weights x values, for `width` registers of components from `d` on, of all rows. The
 * values of `ahead` are fetched. */
INLINE void add_values(const int rows, const int width, const group *groups, const group *ahead, int64_t num_groups,
                       int64_t end, const float *weights, const float *decays, int64_t head_dim, int64_t d,
                       float *attended) {
    vec sums[TILE_ROWS][SCORED];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) {
            sums[i][j] = load(attended + i * head_dim + d + j * LANES) * decays[i];
        }
    }
    for (int64_t g = 0; g < num_groups; g++) {
        /* Positions from `end` on may hold a NaN of an earlier owner. A weight of zero would not hide it. */
        int64_t left = end - groups[g].first_position;
        int64_t count = left < groups[g].num_positions ? left : groups[g].num_positions;
        const float *values = groups[g].values + d, *values_ahead = ahead[g].values + d;
        const float *group_weights = weights + g * LANES;
        for (int64_t p = 0; p < count; p++) {
            vec value[SCORED];
            UNROLLED
            for (int j = 0; j < width; j++) {
                value[j] = load(values + p * head_dim + j * LANES);
                __builtin_prefetch(values_ahead + p * head_dim + j * LANES);
            }
            UNROLLED
            for (int i = 0; i < rows; i++) {
                vec weight = splat(group_weights[i * CHUNK + p]);
                UNROLLED
                for (int j = 0; j < width; j++) sums[i][j] += weight * value[j];
            }
        }
    }
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) store(attended + i * head_dim + d + j * LANES, sums[i][j]);
    }
}

/* Turn the scores of one row into weights; returns their sum, updates the row's largest score, sets its decay. */
static float soften(const tile *of, const group *groups, int64_t num_groups, int64_t position, float *scores,
                    float *largest, float *decay) {
    vec maximum = splat(*largest);
    for (int64_t g = 0; g < num_groups; g++) {
        ivec seen = visible(of, &groups[g], position);
        vec wide = load(scores + g * LANES);
        if (of->shape->softcap > 0.0f) wide = capped(wide, of->shape->softcap);
        vec masked = choose(seen, wide, splat(-INFINITY));
        store(scores + g * LANES, masked);
        maximum = larger(maximum, masked);
    }
    float new_largest = largest_of(maximum);
    vec sum = {0};
    for (int64_t g = 0; g < num_groups; g++) {
        vec weights = exponential(load(scores + g * LANES) - new_largest);
        store(scores + g * LANES, weights);
        sum += weights;
    }
    *decay = exponential(splat(*largest - new_largest))[0];
    *largest = new_largest;
    return sum_of(sum);
}

INLINE void attend_rows(const int rows, const tile *of, const tile *next, float *queries, float *attended,
                        float *totals, float *largest) {
    /* With few rows, more registers at once: an addition takes several cycles, in which others can begin. */
    const int width = 2 * rows <= TILE_ROWS ? 4 : 2;
    const int64_t head_dim = of->shape->head_dim, end = last_position(of) + 1;
    const seen_groups own = groups_seen(of), following = next == NULL ? own : groups_seen(next);
    float decays[TILE_ROWS];
    _Alignas(64) float scores[TILE_ROWS * CHUNK];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        largest[i] = NOTHING_YET;
        totals[i] = 0.0f;
    }
    for (int64_t g = own.start; g < own.end; g += CHUNK_GROUPS) {
        int64_t num_groups = own.end - g < CHUNK_GROUPS ? own.end - g : CHUNK_GROUPS;
        group groups[CHUNK_GROUPS], ahead[CHUNK_GROUPS];
        for (int64_t i = 0; i < CHUNK_GROUPS; i++) {
            groups[i] = i < num_groups ? group_at(of, g + i) : groups[i - 1];
            ahead[i] = i < num_groups ? group_ahead(&own, next == NULL ? NULL : &following, g + i) : groups[i - 1];
        }
        for (int64_t i = 0; i < num_groups; i += width) {
            score(rows, width, queries, groups + i, ahead + i, head_dim, scores + i * LANES);
        }
        for (int i = 0; i < rows; i++) {
            int64_t position = of->task->first_position + i / of->heads;
            float sum = soften(of, groups, num_groups, position, scores + i * CHUNK, &largest[i], &decays[i]);
            totals[i] = totals[i] * decays[i] + sum;
        }
        int64_t d = 0;
        for (; d + width * LANES <= head_dim; d += width * LANES) {
            add_values(rows, width, groups, ahead, num_groups, end, scores, decays, head_dim, d, attended);
        }
        for (; d < head_dim; d += LANES) {
            add_values(rows, 1, groups, ahead, num_groups, end, scores, decays, head_dim, d, attended);
        }
    }
}

/* A sink is a score without a value. It may be larger than all others: these are then `kept` in part. */
static void add_sink(float sink, float largest, float *total, float *kept) {
    const float maximum = sink > largest ? sink : largest;
    *kept = exponential(splat(largest - maximum))[0];
    *total = *total * *kept + exponential(splat(sink - maximum))[0];
}

#define CASE(rows)                                                                                                     \
    case rows: attend_rows(rows, &of, next == NULL ? NULL : &after, queries, attended, totals, largest); break;

void attend(const attention_shape *shape, const float *layer, const attention_task *task, const attention_task *next,
            int64_t window, const float *sinks, const float *query_rows, int64_t query_stride, float *out,
            int64_t out_stride) {
    const int64_t head_dim = shape->head_dim;
    const int64_t group_size = shape->num_heads / shape->num_kv_heads;
    const int64_t first_head = task->part * heads_per_part(shape);
    int64_t heads = group_size - first_head;
    if (heads > heads_per_part(shape)) heads = heads_per_part(shape);
    const int64_t rows = heads * task->num_tokens;
    const int64_t head_offset = (task->kv_head * group_size + first_head) * head_dim;
    const tile of = {shape, layer, task, window, heads}, after = {shape, layer, next, window, heads};

    _Alignas(64) float queries[TILE_ROWS * MAX_HEAD_DIM];
    _Alignas(64) float attended[TILE_ROWS * MAX_HEAD_DIM];
    float totals[TILE_ROWS], largest[TILE_ROWS];
    for (int64_t i = 0; i < rows; i++) {
        const float *row = query_rows + i / heads * query_stride + head_offset + i % heads * head_dim;
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(queries + d * rows + i * LANES, load(row + d) * shape->scale);
    }
    memset(attended, 0, (size_t)(rows * head_dim) * sizeof *attended);
    switch (rows) { EACH_TILE_SIZE(CASE) }
    for (int64_t i = 0; i < rows; i++) {
        float *row = out + i / heads * out_stride + head_offset + i % heads * head_dim;
        float kept = 1.0f;
        if (sinks != NULL) {
            const int64_t head = task->kv_head * group_size + first_head + i % heads;
            add_sink(sinks[head], largest[i], &totals[i], &kept);
        }
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(row + d, load(attended + i * head_dim + d) * kept / totals[i]);
    }
}

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
    return block * shape->block_stride + head * head_floats(shape);
}

static void store_float32(int64_t head_dim, float *keys, float *values, int64_t offset, const float *key,
                          const float *value) {
    keys += offset / LANES * LANES * head_dim + offset % LANES;
    values += offset * head_dim;
    for (int64_t i = 0; i < head_dim; i++) keys[i * LANES] = key[i];
    for (int64_t i = 0; i < head_dim; i += LANES) store(values + i, load(value + i));
}

/* A neighbour's value may be written at the same time, so values are stored one by one. */
static void store_bfloat16(int64_t head_dim, uint16_t *keys, uint16_t *values, int64_t offset, const float *key,
                           const float *value) {
    bfloat16_pair *pairs = (bfloat16_pair *)keys + offset / LANES * LANES * head_dim / 2 + offset % LANES;
    values += offset / 2 * 2 * head_dim + offset % 2;
    for (int64_t i = 0; i < head_dim; i += LANES) {
        const half_ivec of_key = as_pairs(load(key + i)), of_value = as_pairs(load(value + i));
        uint16_t rounded[LANES];
        memcpy(rounded, &of_value, sizeof rounded);
        for (int64_t j = 0; j < LANES / 2; j++) pairs[(i / 2 + j) * LANES] = of_key[j];
        for (int64_t j = 0; j < LANES; j++) values[(i + j) * 2] = rounded[j];
    }
}

void store_key_value(const attention_shape *shape, void *layer, const int32_t *table, int64_t position, int64_t head,
                     const float *key, const float *value) {
    const int64_t offset = position % shape->block_size, half = head_floats(shape) / 2;
    const int64_t start = head_start(shape, table[position / shape->block_size], head);
    if (shape->form == KV_FLOAT32)
        store_float32(shape->head_dim, (float *)layer + start, (float *)layer + start + half, offset, key, value);
    else
        store_bfloat16(shape->head_dim, (uint16_t *)layer + start, (uint16_t *)layer + start + half, offset, key,
                       value);
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

static group group_at(const tile *of, int64_t index) {
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

/* Queries: scaled, [rows][LANES] components after [rows][LANES] components; with KV_PAIRS the same in pairs. */
INLINE void pack_query(const int form, const int64_t rows, int64_t row, const float *query, float scale,
                       int64_t head_dim, float *queries) {
    for (int64_t d = 0; d < head_dim; d += LANES) {
        const vec scaled = load(query + d) * scale;
        if (form == KV_PAIRS)
            *(half_ivec *)((bfloat16_pair *)queries + (d * rows + row * LANES) / 2) = as_pairs(scaled);
        else
            store(queries + d * rows + row * LANES, scaled);
    }
}

/* What one register of keys, at `at`, adds to the scores of a group: of one component, or two. `queries`: these
 * components of the first row. */
INLINE void add_scores(const int form, const int rows, const int j, const char *at, const float *queries,
                       vec (*sums)[SCORED]) {
    if (form == KV_FLOAT32) {
        const vec keys = load((const float *)at);
        UNROLLED
        for (int i = 0; i < rows; i++) sums[i][j] += splat(queries[i * LANES]) * keys;
        return;
    }
    const ivec pairs = *(const unaligned_ivec *)at;
    if (form == KV_PAIRS) {
        UNROLLED
        for (int i = 0; i < rows; i++)
            sums[i][j] =
                add_bfloat16_products(sums[i][j], pairs, splat_int(((const bfloat16_pair *)queries)[i * LANES / 2]));
        return;
    }
    const vec first = of_lower_halves(pairs), second = of_upper_halves(pairs);
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][j] += splat(queries[i * LANES]) * first;
        sums[i][j] += splat(queries[i * LANES + 1]) * second;
    }
}

/* Scores of `width` groups, each [rows][CHUNK] at its place in the chunk.
 *
 * Keys come from memory in a stream; at the same time the keys of `ahead` are fetched. */
INLINE void score(const int form, const int rows, const int width, const float *queries, const group *groups,
                  const group *ahead, int64_t head_dim, float *scores) {
    const int64_t step = form == KV_FLOAT32 ? 1 : 2, wide = form == KV_PAIRS ? LANES / 2 : LANES;
    vec sums[TILE_ROWS][SCORED];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) sums[i][j] = (vec){0};
    }
    for (int64_t d = 0; d < head_dim; d += step) {
        const int64_t at = form == KV_PAIRS ? d / 2 : d;
        const float *column = queries + at / wide * wide * rows + at % wide;
        UNROLLED
        for (int j = 0; j < width; j++) {
            const int64_t place = d / step * LANES * (int64_t)sizeof(float);
            __builtin_prefetch(ahead[j].keys + place);
            add_scores(form, rows, j, groups[j].keys + place, column, sums);
        }
    }
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) store(scores + i * CHUNK + j * LANES, sums[i][j]);
    }
}

/* What one register of values, at `at`, adds: of the position `p` of a group, or of that and the next, whose value
 * counts only if it is not the `last`. `weights`: of the first row in this group. */
INLINE void add_weighted(const int form, const int rows, const int j, const char *at, const float *weights, int64_t p,
                         const int last, vec (*sums)[SCORED]) {
    if (form == KV_FLOAT32) {
        const vec values = load((const float *)at);
        UNROLLED
        for (int i = 0; i < rows; i++) sums[i][j] += splat(weights[i * CHUNK + p]) * values;
        return;
    }
    ivec pairs = *(const unaligned_ivec *)at;
    if (last) pairs &= 0xffff;
    if (form == KV_PAIRS) {
        UNROLLED
        for (int i = 0; i < rows; i++)
            sums[i][j] = add_bfloat16_products(sums[i][j], pairs,
                                               splat_int(((const bfloat16_pair *)(weights + i * CHUNK))[p / 2]));
        return;
    }
    const vec first = of_lower_halves(pairs), second = of_upper_halves(pairs);
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][j] += splat(weights[i * CHUNK + p]) * first;
        sums[i][j] += splat(weights[i * CHUNK + p + 1]) * second;
    }
}

/* attended = attended * decay + weights x values, for `width` registers of components from `d` on, of all rows. The
 * values of `ahead` are fetched. */
INLINE void add_values(const int form, const int rows, const int width, const group *groups, const group *ahead,
                       int64_t num_groups, int64_t end, const float *weights, const float *decays, int64_t head_dim,
                       int64_t d, float *attended) {
    const int64_t step = form == KV_FLOAT32 ? 1 : 2;
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
        const int64_t left = end - groups[g].first_position;
        const int64_t count = left < groups[g].num_positions ? left : groups[g].num_positions;
        for (int64_t p = 0; p < count; p += step) {
            UNROLLED
            for (int j = 0; j < width; j++) {
                const int64_t place = (p / step * head_dim + d + j * LANES) * (int64_t)sizeof(float);
                __builtin_prefetch(ahead[g].values + place);
                add_weighted(form, rows, j, groups[g].values + place, weights + g * LANES, p, p + 1 == count, sums);
            }
        }
    }
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) store(attended + i * head_dim + d + j * LANES, sums[i][j]);
    }
}

/* The biases of a row of the tile, where that of the key at position 0 would be; or NULL. */
static const float *biases_of(const tile *of, int64_t row) {
    const attention_shape *shape = of->shape;
    if (shape->biases == NULL) return NULL;
    const int64_t group_size = shape->num_heads / shape->num_kv_heads;
    const int64_t head = of->task->kv_head * group_size + of->task->part * heads_per_part(shape) + row % of->heads;
    const int64_t position = of->task->first_position + row / of->heads;
    const int64_t start = shape->last_distance > 0 ? shape->last_distance - position : 0;
    return shape->biases + head * shape->bias_stride + start;
}

/* Turn the scores of one row into weights; returns their sum, updates the row's largest score, sets its decay. */
INLINE float soften(const int form, const tile *of, const group *groups, int64_t num_groups, int64_t position,
                    const float *biases, float *scores, float *largest, float *decay) {
    vec maximum = splat(*largest);
    for (int64_t g = 0; g < num_groups; g++) {
        ivec seen = visible(of, &groups[g], position);
        vec wide = load(scores + g * LANES);
        if (of->shape->softcap > 0.0f) wide = capped(wide, of->shape->softcap);
        if (biases != NULL) wide += load(biases + groups[g].first_position);
        vec masked = choose(seen, wide, splat(-INFINITY));
        store(scores + g * LANES, masked);
        maximum = larger(maximum, masked);
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

/* Queries are packed; `attended` holds zeros. */
INLINE void attend_packed(const int form, const int rows, const tile *of, const tile *next, const float *queries,
                          float *attended, float *totals, float *largest) {
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
            score(form, rows, width, queries, groups + i, ahead + i, head_dim, scores + i * LANES);
        }
        for (int i = 0; i < rows; i++) {
            int64_t position = of->task->first_position + i / of->heads;
            float sum = soften(form, of, groups, num_groups, position, biases_of(of, i), scores + i * CHUNK,
                               &largest[i], &decays[i]);
            totals[i] = totals[i] * decays[i] + sum;
        }
        int64_t d = 0;
        for (; d + width * LANES <= head_dim; d += width * LANES) {
            add_values(form, rows, width, groups, ahead, num_groups, end, scores, decays, head_dim, d, attended);
        }
        for (; d < head_dim; d += LANES) {
            add_values(form, rows, 1, groups, ahead, num_groups, end, scores, decays, head_dim, d, attended);
        }
    }
}

INLINE void attend_in_form(const int form, const int rows, const tile *of, const tile *next, const float *query_rows,
                           int64_t query_stride, float *attended, float *totals, float *largest) {
    const int64_t head_dim = of->shape->head_dim;
    _Alignas(64) float queries[TILE_ROWS * MAX_HEAD_DIM];
    for (int64_t i = 0; i < rows; i++) {
        const float *row = query_rows + i / of->heads * query_stride + i % of->heads * head_dim;
        pack_query(form, rows, i, row, of->shape->scale, head_dim, queries);
    }
    memset(attended, 0, (size_t)(rows * head_dim) * sizeof *attended);
    attend_packed(form, rows, of, next, queries, attended, totals, largest);
}

/* As in vector_products.c: all in one function, a compiler takes many times as long. */
#define ATTEND_ROWS_OF(rows)                                                                                           \
    static APART void attend_rows_##rows(const tile *of, const tile *next, const float *query_rows,                    \
                                         int64_t query_stride, float *attended, float *totals, float *largest) {       \
        switch (of->shape->form) {                                                                                     \
        case KV_FLOAT32:                                                                                               \
            attend_in_form(KV_FLOAT32, rows, of, next, query_rows, query_stride, attended, totals, largest);           \
            break;                                                                                                     \
        case KV_BFLOAT16:                                                                                              \
            attend_in_form(KV_BFLOAT16, rows, of, next, query_rows, query_stride, attended, totals, largest);          \
            break;                                                                                                     \
        default: attend_in_form(KV_PAIRS, rows, of, next, query_rows, query_stride, attended, totals, largest);        \
        }                                                                                                              \
    }
#define CASE(rows)                                                                                                     \
    case rows: attend_rows_##rows(&of, following, query_rows, query_stride, attended, totals, largest); break;

EACH_TILE_SIZE(ATTEND_ROWS_OF)

/* A sink is a score without a value. It may be larger than all others: these are then `kept` in part. */
static void add_sink(float sink, float largest, float *total, float *kept) {
    const float maximum = sink > largest ? sink : largest;
    *kept = exponential(splat(largest - maximum))[0];
    *total = *total * *kept + exponential(splat(sink - maximum))[0];
}

void attend(const attention_shape *shape, const void *layer, const attention_task *task, const attention_task *next,
            int64_t window, const float *sinks, const float *query_rows, const float *gates, int64_t query_stride,
            float *out, int64_t out_stride) {
    const int64_t head_dim = shape->head_dim;
    const int64_t group_size = shape->num_heads / shape->num_kv_heads;
    const int64_t first_head = task->part * heads_per_part(shape);
    int64_t heads = group_size - first_head;
    if (heads > heads_per_part(shape)) heads = heads_per_part(shape);
    const int64_t rows = heads * task->num_tokens;
    const int64_t head_offset = (task->kv_head * group_size + first_head) * head_dim;
    const tile of = {shape, layer, task, window, heads}, after = {shape, layer, next, window, heads};
    const tile *following = next == NULL ? NULL : &after;

    _Alignas(64) float attended[TILE_ROWS * MAX_HEAD_DIM];
    float totals[TILE_ROWS], largest[TILE_ROWS];
    query_rows += head_offset;
    switch (rows) { EACH_TILE_SIZE(CASE) }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t head_start = head_offset + i % heads * head_dim;
        float *row = out + i / heads * out_stride + head_start;
        float kept = 1.0f;
        if (sinks != NULL) {
            const int64_t head = task->kv_head * group_size + first_head + i % heads;
            add_sink(sinks[head], largest[i], &totals[i], &kept);
        }
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(row + d, load(attended + i * head_dim + d) * kept / totals[i]);
        if (gates == NULL) continue;
        const float *gate_row = gates + i / heads * query_stride + head_start;
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const vec gate = load(gate_row + d);
            store(row + d, load(row + d) * (shape->gates == GATES_SIGMOID ? sigmoid(gate) : gate));
        }
    }
}

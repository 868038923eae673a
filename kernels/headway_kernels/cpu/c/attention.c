#include "attention_groups.h"

int64_t block_floats(const attention_shape *shape) { return shape->num_kv_heads * head_floats(shape); }

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

    _Alignas(64) float values[MOST_ATTENDING * MAX_HEAD_DIM];
    float totals[MOST_ATTENDING], largest[MOST_ATTENDING];
    const attended_rows attended = {values, totals, largest};
    (is_on_tiles(shape) ? attend_on_tiles : attend_on_vectors)(&of, next == NULL ? NULL : &after, rows,
                                                               query_rows + head_offset, query_stride, &attended);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t head_start = head_offset + i % heads * head_dim;
        float *row = out + i / heads * out_stride + head_start;
        float kept = 1.0f;
        if (sinks != NULL) {
            const int64_t head = task->kv_head * group_size + first_head + i % heads;
            add_sink(sinks[head], largest[i], &totals[i], &kept);
        }
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(row + d, load(values + i * head_dim + d) * kept / totals[i]);
        if (gates == NULL) continue;
        const float *gate_row = gates + i / heads * query_stride + head_start;
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const vec gate = load(gate_row + d);
            store(row + d, load(row + d) * (shape->gates == GATES_SIGMOID ? sigmoid(gate) : gate));
        }
    }
}

#include "recurrence.h"

#include "rows.h"
#include "vectors.h"

#define KEY_EPS 1e-6f
#define MOST_VECTORS 4 /* of a head's values at a time */

int64_t inner_of(const recurrence *of) { return of->num_heads * of->value_dim; }

int64_t channels_of(const recurrence *of) { return 2 * of->num_key_heads * of->key_dim + inner_of(of); }

/* ---- the convolution ---- */

/* The channels of one register; `width` floats of them. The inputs of the tokens before are in registers. */
INLINE void convolve_vector(const recurrence *of, token_run tokens, int64_t first, int64_t width) {
    const int64_t channels = channels_of(of), past = of->taps - 1;
    float *kept = past == 0 ? NULL : of->past + tokens.number * past * channels + first; /* one tap has no memory */
    const vec bias = of->taps_bias == NULL ? (vec){0} : load_some(of->taps_bias + first, width);
    vec taps[MOST_TAPS], seen[MOST_TAPS];
    for (int64_t i = 0; i < of->taps; i++) taps[i] = load_some(of->taps_of + i * channels + first, width);
    for (int64_t i = 0; i < past; i++) seen[i] = tokens.begins ? (vec){0} : load_some(kept + i * channels, width);
    float *token = tokens.inputs + first;
    for (int64_t t = 0; t < tokens.count; t++, token += tokens.stride) {
        seen[past] = load_some(token, width);
        if (of->kind == GATED_CONVOLUTION) seen[past] *= load_some(token + channels, width);
        vec sum = bias;
        for (int64_t i = 0; i < of->taps; i++) sum += taps[i] * seen[i];
        store_some(token, of->kind == GATED_CONVOLUTION || of->kind == UNIT ? sum : silu(sum), width);
        for (int64_t i = 0; i < past; i++) seen[i] = seen[i + 1];
    }
    for (int64_t i = 0; i < past; i++) store_some(kept + i * channels, seen[i], width);
}

void convolve(const recurrence *of, token_run tokens, int64_t first, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) convolve_vector(of, tokens, first + i, LANES);
    if (i < count) convolve_vector(of, tokens, first + i, count - i);
}

/* ---- heads ---- */

/* One token of one head. `written`: how much of the value is; with DELTA, of what is new of it. */
typedef struct {
    const float *query;
    const float *key;
    const float *value;
    const float *kept_of; /* of each channel of a key, or NULL: `kept` */
    float query_factor;
    float key_factor;
    float kept;
    float written;
    float skip;
} head_step;

static float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

static float unit_factor(const float *vector, int64_t width) {
    float squares = 0.0f;
    for (int64_t i = 0; i < width; i++) squares += vector[i] * vector[i];
    return 1.0f / sqrtf(squares + KEY_EPS);
}

/* From steps of the channels of a head's key to what stays. */
static void keep_channels(const recurrence *of, int64_t head, float *steps) {
    const float *bias = of->step_bias + head * of->key_dim, decay = of->decay[head];
    for (int64_t i = 0; i < of->key_dim; i++) {
        const float step = steps[i] + bias[i];
        steps[i] = expf(of->decay_bound < 0.0f ? of->decay_bound * logistic(-decay * step) : soft_plus(step) * decay);
    }
}

static head_step step_of(const recurrence *of, float *inputs, int64_t head) {
    const int64_t keys = of->num_key_heads * of->key_dim;
    const int64_t key_head =
        of->keys_take_turns ? head % of->num_key_heads : head / (of->num_heads / of->num_key_heads);
    const int is_delta = of->kind == DELTA, by_channel = of->decays_channels != 0;
    const int has_step = of->step_bias != NULL && !by_channel;
    float *steps = inputs + of->steps_at + head * (by_channel ? of->key_dim : 1);
    const float step = has_step ? soft_plus(*steps + of->step_bias[head]) : 1.0f;
    head_step now = {
        .query = inputs + key_head * of->key_dim,
        .key = inputs + keys + key_head * of->key_dim,
        .value = inputs + 2 * keys + head * of->value_dim,
        .query_factor = 1.0f,
        .key_factor = 1.0f,
        .kept = expf(step * of->decay[head]),
        .written = step,
        .skip = of->skip == NULL ? 0.0f : of->skip[head],
    };
    if (by_channel) {
        keep_channels(of, head, steps);
        now.kept_of = steps;
    }
    if (is_delta) {
        now.query_factor = unit_factor(now.query, of->key_dim) / sqrtf((float)of->key_dim);
        now.key_factor = unit_factor(now.key, of->key_dim);
        now.written = logistic(inputs[of->strengths_at + head]) * (of->doubles_strengths ? 2.0f : 1.0f);
    }
    return now;
}

/* Some columns of a head's matrix, `vectors` registers wide, the last one with `width` floats. */
INLINE void step_columns(const recurrence *of, const int vectors, const int by_channel, int64_t width,
                         const head_step *now, float *matrix, const float *value, float *out) {
    vec results[MOST_VECTORS], written[MOST_VECTORS];
    UNROLLED
    for (int v = 0; v < vectors; v++) results[v] = (vec){0};
    for (int64_t i = 0; of->kind == DELTA && i < of->key_dim; i++) {
        const float key = by_channel ? now->key[i] * now->kept_of[i] : now->key[i];
        UNROLLED
        for (int v = 0; v < vectors; v++) results[v] += key * load_some(matrix + i * of->value_dim + v * LANES, width);
    }
    const float answered = by_channel ? now->key_factor : now->key_factor * now->kept;
    UNROLLED
    for (int v = 0; v < vectors; v++) {
        const vec of_token = load_some(value + v * LANES, width);
        written[v] = (of_token - results[v] * answered) * now->written * now->key_factor;
        results[v] = of_token * now->skip;
    }
    for (int64_t i = 0; i < of->key_dim; i++) {
        const float key = now->key[i], query = now->query[i] * now->query_factor;
        const float kept = by_channel ? now->kept_of[i] : now->kept;
        UNROLLED
        for (int v = 0; v < vectors; v++) {
            float *place = matrix + i * of->value_dim + v * LANES;
            const vec state = load_some(place, width) * kept + key * written[v];
            store_some(place, state, width);
            results[v] += query * state;
        }
    }
    UNROLLED
    for (int v = 0; v < vectors; v++) store_some(out + v * LANES, results[v], width);
}

INLINE void step_head(const recurrence *of, const int by_channel, const head_step *now, float *matrix, float *out) {
    const float *value = now->value;
    int64_t i = 0;
    for (; i + MOST_VECTORS * LANES <= of->value_dim; i += MOST_VECTORS * LANES)
        step_columns(of, MOST_VECTORS, by_channel, LANES, now, matrix + i, value + i, out + i);
    for (; i + LANES <= of->value_dim; i += LANES)
        step_columns(of, 1, by_channel, LANES, now, matrix + i, value + i, out + i);
    if (i < of->value_dim) step_columns(of, 1, by_channel, of->value_dim - i, now, matrix + i, value + i, out + i);
}

void run_head(const recurrence *of, token_run tokens, int64_t head, float *out, int64_t out_stride) {
    float *matrix = of->heads + (tokens.number * of->num_heads + head) * of->key_dim * of->value_dim;
    if (tokens.begins) memset(matrix, 0, (size_t)(of->key_dim * of->value_dim) * sizeof *matrix);
    for (int64_t t = 0; t < tokens.count; t++, out += out_stride) {
        const head_step now = step_of(of, tokens.inputs + t * tokens.stride, head);
        if (now.kept_of != NULL)
            step_head(of, 1, &now, matrix, out);
        else
            step_head(of, 0, &now, matrix, out);
    }
}

/* ---- channels ---- */

void normalise_selected(const recurrence *of, float *inputs) {
    const int64_t widths[] = {of->step_rank, of->key_dim, of->key_dim};
    float *part = inputs + of->selected_at;
    const float *weight = of->selection_norm;
    for (int i = 0; i < 3; part += widths[i], weight += widths[i], i++)
        normalise_row(NORM_RMS, (norm_weights){weight, NULL}, of->norm_eps, part, widths[i], part);
}

/* The channels of one register; `width` floats of them. */
INLINE void scan_vector(const recurrence *of, token_run tokens, int64_t first, int64_t width, float *out,
                        int64_t out_stride) {
    const int64_t inner = inner_of(of);
    float *state = of->heads + tokens.number * of->key_dim * inner + first;
    const vec skip = load_some(of->skip + first, width);
    for (int64_t t = 0; t < tokens.count; t++) {
        const float *inputs = tokens.inputs + t * tokens.stride;
        const float *key = inputs + of->selected_at + of->step_rank, *query = key + of->key_dim;
        const vec value = load_some(inputs + first, width);
        vec step = load_some(inputs + of->steps_at + first, width) + load_some(of->step_bias + first, width);
        for (int64_t i = 0; i < width; i++) step[i] = soft_plus(step[i]);
        const vec written = value * step;
        const int is_new = tokens.begins && t == 0;
        vec result = value * skip;
        for (int64_t i = 0; i < of->key_dim; i++) {
            const vec before = is_new ? (vec){0} : load_some(state + i * inner, width);
            const vec kept = exponential(step * load_some(of->decay + i * inner + first, width));
            const vec after = before * kept + key[i] * written;
            store_some(state + i * inner, after, width);
            result += query[i] * after;
        }
        store_some(out + t * out_stride + first, result, width);
    }
}

void scan_channels(const recurrence *of, token_run tokens, int64_t first, int64_t count, float *out,
                   int64_t out_stride) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) scan_vector(of, tokens, first + i, LANES, out, out_stride);
    if (i < count) scan_vector(of, tokens, first + i, count - i, out, out_stride);
}

/* What a matrix of a block makes of a token's values, some columns of it: a sigmoid. */
INLINE vec made_by_block(const float *matrix, const float *bias, const float *values, int64_t size, int64_t width) {
    vec sum = load_some(bias, width);
    for (int64_t i = 0; i < size; i++) sum += values[i] * load_some(matrix + i * size, width);
    return sigmoid(sum);
}

INLINE void step_unit(const recurrence *of, const float *values, int64_t block, int64_t column, int64_t width,
                      int is_first, float *out) {
    const int64_t inner = inner_of(of), size = inner / of->num_blocks, first = block * size;
    const float *matrix = of->blocks + block * size * size + column, *bias = of->block_bias + first + column;
    const vec taken = made_by_block(matrix, bias, values, size, width);
    const vec staying = made_by_block(matrix + inner * size, bias + inner, values, size, width);
    const vec decay = staying * load_some(of->decay + first + column, width);
    const vec squares = 1.0f - exponential(2.0f * decay);
    vec written = splat(1.0f);
    for (int64_t i = 0; !is_first && i < LANES; i++) written[i] = sqrtf(squares[i]);
    const vec before = is_first ? (vec){0} : load_some(out, width);
    store_some(out, before * exponential(decay) + written * load_some(values + column, width) * taken, width);
}

void run_block(const recurrence *of, token_run tokens, int64_t block, float *out, int64_t out_stride) {
    const int64_t inner = inner_of(of), size = inner / of->num_blocks, first = block * size;
    float *state = of->heads + tokens.number * inner + first;
    for (int64_t t = 0; t < tokens.count; t++) {
        const float *values = tokens.inputs + t * tokens.stride + first;
        const int is_first = tokens.begins && t == 0;
        for (int64_t i = 0; i < size; i += LANES)
            step_unit(of, values, block, i, size - i < LANES ? size - i : LANES, is_first, state + i);
        memcpy(out + t * out_stride + first, state, (size_t)size * sizeof *state);
    }
}

/* ---- gates ---- */

INLINE vec activated_gate(const recurrence *of, vec gate) {
    if (of->gate == GATE_SILU) return silu(gate);
    return of->gate == GATE_SIGMOID ? sigmoid(gate) : gelu_tanh(gate);
}

static void multiply_by_gates(const recurrence *of, const float *gates, int64_t width, float *out) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t count = width - i < LANES ? width - i : LANES;
        const vec gate = load_some(gates + i, count);
        store_some(out + i, load_some(out + i, count) * activated_gate(of, gate), count);
    }
}

void gate_token(const recurrence *of, const float *inputs, float *out) {
    const int64_t inner = inner_of(of);
    const float *gates = inputs + of->gates_at;
    if (of->kind == GATED_CONVOLUTION) {
        for (int64_t i = 0; i < inner; i++) out[i] = inputs[i] * gates[inner + i];
        return;
    }
    const int gates_behind = of->kind != SELECTIVE || of->gates_behind;
    if (!gates_behind) multiply_by_gates(of, gates, inner, out);
    for (int64_t i = 0; of->norm != NULL && i < inner; i += of->norm_dim)
        normalise_row(NORM_RMS, (norm_weights){of->norm + i, NULL}, of->norm_eps, out + i, of->norm_dim, out + i);
    if (gates_behind) multiply_by_gates(of, gates, inner, out);
}

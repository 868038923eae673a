/* Products on the vector unit: for all processors but those with a matrix unit (tile_products.c). */
#include "codes.h"
#include "narrow_products.h"
#include "vector_results.h"
#include "vector_sums.h"
#include "whole_products.h"

#if !HAS_TILES

#include <assert.h>

#define LINES_AHEAD 128
#define MOST_TILES 10
/* All tiles take so many steps of a sum before the next steps: this much of a panel, 8 KiB, stays in the L1 cache. */
#define DEPTH (2048 / PANEL)
#define FEW_TILES 2
#define MANY_DEPTH 768 /* with more tiles than FEW, or codes that are widened, the L2 cache will do */
#define LEAST_GROUP 16 /* smaller ones are widened input by input, when several tiles share them */

int64_t packed_bytes_whole(int64_t num_rows, int64_t inputs, int64_t form) {
    return num_rows * packed_row_bytes(inputs, form);
}

static void pack_float32_row(float *tile, int64_t rows, int64_t place, const float *row, int64_t inputs, float factor,
                             const float *weight) {
    for (int64_t k = 0; k < inputs; k += STRETCH) {
        float *to = tile + k * rows + place * STRETCH;
        for (int64_t i = 0; i < STRETCH; i += LANES) store(to + i, normed_inputs(row, weight, k + i, inputs) * factor);
    }
}

static void pack_pairs_row(int32_t *tile, int64_t rows, int64_t place, const float *row, int64_t inputs, float factor,
                           const float *weight) {
    for (int64_t k = 0; k < inputs; k += PAIR * STRETCH) {
        int32_t *to = tile + k / PAIR * rows + place * STRETCH;
        for (int64_t i = 0; i < PAIR * STRETCH; i += LANES)
            *(half_ivec *)(to + i / PAIR) = as_pairs(normed_inputs(row, weight, k + i, inputs) * factor);
    }
}

void pack_tile_whole(const packed_inputs *to, int64_t form, int64_t tile, const float *from, int64_t stride,
                     rms_norm norm) {
    int64_t first = tile_start(tile, to->num_tiles, to->num_rows);
    int64_t rows = tile_start(tile + 1, to->num_tiles, to->num_rows) - first;
    char *start = (char *)to->tiles + first * packed_row_bytes(to->inputs, form);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = from + row_taken(to, first + i) * stride;
        float factor = input_factor(to, first + i, row, norm);
        if (form == FORM_INT8) {
            float scale = pack_int8_row((code *)start, rows, i, row, to->inputs, norm.weight, &to->offsets[first + i]);
            to->factors[first + i] = factor * scale;
        } else if (form == FORM_PAIRS) {
            pack_pairs_row((int32_t *)start, rows, i, row, to->inputs, factor, norm.weight);
        } else {
            pack_float32_row((float *)start, rows, i, row, to->inputs, factor, norm.weight);
        }
    }
}

/* Rows of a tile that is not alone, at least: tiles differ by at most one row. */
#define LEAST_OF_SEVERAL (TILE_ROWS / 2)

/* The sums of one tile with one panel, kept between one range of steps and the next. */
typedef union {
    vec floats[TILE_ROWS][2];
    ivec integers[TILE_ROWS][2];
} tile_sums;

/* Steps of the sums of one tile with one panel. The weights of these steps are at `weights`, in `form`, which is
 * FLOAT32 for widened codes, too. With `widens`, codes are widened for other tiles, at `widened`. */
typedef struct {
    const linear *with;
    tile_results results; /* after the last step */
    int64_t form;
    const char *weights;
    range steps;
    fetching ahead;
    int widens;
    float *widened;
    group_values *values;
    tile_sums *kept;
} tile_task;

static const void *tile_of(const tile_task *task, int64_t form) {
    return tile_at(task->results.from, task->results.first_row, form);
}

INLINE void multiply_int8(const int rows, const tile_task *task) {
    const linear *with = task->with;
    const packed_inputs *from = task->results.from;
    const int64_t first = task->results.first_row, panel = task->results.panel;
    const range steps = task->steps;
    tile_sums *kept = task->kept;
    ivec sums[TILE_ROWS][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][0] = steps.begin > 0 ? kept->integers[i][0] : (ivec){0};
        sums[i][1] = steps.begin > 0 ? kept->integers[i][1] : (ivec){0};
    }
    sum_int8(rows, tile_of(task, FORM_INT8), task->weights, steps, sums, task->ahead);
    if (steps.end < steps_of(with->inputs, FORM_INT8)) {
        UNROLLED
        for (int i = 0; i < rows; i++) {
            kept->integers[i][0] = sums[i][0];
            kept->integers[i][1] = sums[i][1];
        }
        return;
    }
    const vec low_bias = load(with->bias + panel * PANEL), low_scale = load(with->scales + panel * PANEL);
    const vec high_bias = load(with->bias + panel * PANEL + LANES);
    const vec high_scale = load(with->scales + panel * PANEL + LANES);
    vec outputs[TILE_ROWS][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        vec low = __builtin_convertvector(sums[i][0] - from->offsets[first + i], vec);
        vec high = __builtin_convertvector(sums[i][1] - from->offsets[first + i], vec);
        vec factor = splat(from->factors[first + i]);
        outputs[i][0] = low * (low_scale * factor) + low_bias;
        outputs[i][1] = high * (high_scale * factor) + high_bias;
    }
    finish_tile(rows, &task->results, kept->floats, outputs);
}

/* What `pointer` points to is loaded anew once `value` is known, and takes no register until then. */
#if defined(__AVX2__)
#define LOADED_ANEW(pointer, value) __asm__("" : "+r"(pointer) : "v"(value))
#else
#define LOADED_ANEW(pointer, value)
#endif

/* An input of a run, with its weights: input `place` of a word, or, if that is -1, any. The sums of many rows leave few
 * registers: then whatever all inputs share is loaded again for each half of a panel, once no sum waits. */
INLINE void add_input(const int rows, const int form, coded_run run, int64_t k, const int place, const float *column,
                      vec (*sums)[2]) {
    const int has_constants = form == FORM_FP8 || form == FORM_TABLE4; /* which take registers, too */
    const int has_registers = rows + has_constants <= TILE_ROWS * 2 / 3;
    vec weights[2];
    UNROLLED
    for (int i = 0; i < 2 * rows && !has_registers; i++) LOADED_ANEW(run.codes, sums[i / 2][i % 2]);
    if (!has_registers) LOADED_ANEW(run.values, sums[rows - 1][1]);
    UNROLLED
    for (int half = 0; half < 2; half++) {
        weights[half] = place < 0 ? weights_at(form, &run, k, half) : weights_of_word(form, &run, k, half, place);
        if (has_registers) continue;
        LOADED_ANEW(run.codes, weights[half]);
        LOADED_ANEW(run.values, weights[half]);
    }
    add_products(rows, place < 0 ? 0 : place, column, weights[0], weights[1], sums);
}

/* Products with the codes of the panel at `codes`, which are widened on the way. */
INLINE void sum_codes(const int rows, const int form, const linear *with, const char *codes, const float *tile,
                      range inputs, vec (*sums)[2], fetching ahead) {
    for (int64_t k = inputs.begin; k < inputs.end;) {
        group_values values;
        const coded_run run = run_at(form, with, codes, k, inputs.end, &values);
        while (k < run.end) {
            const float *column = tile + k / STRETCH * STRETCH * rows + k % STRETCH;
            if (is_word(form, &run, k)) {
                turn(&ahead);
                fetch(&ahead);
                UNROLLED
                for (int i = 0; i < WORD; i++) add_input(rows, form, run, k, i, column + i, sums);
                k += WORD;
            } else {
                if (!has_words(form) && k % (LINE / PANEL) == 0) turn(&ahead), fetch(&ahead);
                add_input(rows, form, run, k, -1, column, sums);
                k++;
            }
        }
    }
}

/* Registers hold the sums of a tile and little else, so what is widened goes through memory, and nothing else is in a
 * register from one part to the next. */
#if LANES == 8 && TILE_ROWS == 6
#define SUMS(i) "+x"(sums[i][0]), "+x"(sums[i][1])
#define PART_ENDS(...) __asm__ volatile("" : __VA_ARGS__, "+r"(*codes), "+r"(*values)::"memory")
#endif
INLINE void part_ends(const int rows, vec (*sums)[2], const char **codes, const group_values **values) {
#if LANES == 8 && TILE_ROWS == 6
    if (rows == 6) PART_ENDS(SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5));
    if (rows == 5) PART_ENDS(SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4));
    if (rows == 4) PART_ENDS(SUMS(0), SUMS(1), SUMS(2), SUMS(3));
    if (rows == 3) PART_ENDS(SUMS(0), SUMS(1), SUMS(2));
#else
    (void)rows, (void)sums, (void)codes, (void)values;
    __asm__ volatile("" ::: "memory");
#endif
}

/* Whether no word of WORD inputs has several groups. */
INLINE int has_whole_words(const linear *of) {
    return of->group_of == NULL && (of->num_groups == 1 || (of->group >= LEAST_GROUP && of->group % WORD == 0));
}

/* A quarter of the weights of inputs [k, k + WORD) of a group: of half of them, with a half of the panel. */
INLINE void widen_quarter(const int rows, const int form, const coded_run *run, int64_t k, const int quarter,
                          float *restrict to) {
    const int half = quarter / 2, first = quarter % 2 * (WORD / 2);
    const words from = has_words(form) ? words_at(run, k, half) : (words){0};
    const code_table *table = run->table;
    const group_values *values = run->values;
    const int looks_up = form == FORM_TABLE4 && rows >= TILE_ROWS - 1; /* which takes two more registers */
    vec scale = values->scales[half];
    UNROLLED
    for (int i = first; i < first + WORD / 2; i++) {
        const char *bytes = run->codes + (k + i) * PANEL + half * LANES;
        if (looks_up) LOADED_ANEW(table, from);
        const vec numbers = has_words(form) ? codes_of_words(form, table, from, i) : codes_of_bytes(form, bytes);
        if (looks_up) LOADED_ANEW(values, numbers);
        if (looks_up) scale = values->scales[half];
        if (rows == TILE_ROWS) LOADED_ANEW(values, numbers);
        store(to + i * PANEL + half * LANES, numbers * scale + values->minima[half]);
    }
}

/* The weights of inputs [k, end). */
INLINE void widen_runs(const int form, const linear *with, const char *codes, int64_t k, int64_t end, float *to) {
    while (k < end) {
        group_values values;
        const coded_run run = run_at(form, with, codes, k, end, &values);
        for (; k < run.end; k++, to += PANEL) {
            store(to, weights_at(form, &run, k, 0));
            store(to + LANES, weights_at(form, &run, k, 1));
        }
    }
}

static APART void widen_inputs(const linear *with, const char *codes, int64_t k, int64_t end, float *to) {
    switch (with->form) {
    case FORM_CODES4: widen_runs(FORM_CODES4, with, codes, k, end, to); break;
    case FORM_CODES8: widen_runs(FORM_CODES8, with, codes, k, end, to); break;
    case FORM_TABLE4: widen_runs(FORM_TABLE4, with, codes, k, end, to); break;
    default: widen_runs(FORM_FP8, with, codes, k, end, to);
    }
}

/* Before the sums of a tile that widens for others: the first and the last few inputs are widened, or all if some words
 * have several groups, and what the other codes are multiplied with is written down. */
static void prepare_to_keep(const tile_task *task) {
    const linear *with = task->with;
    const range inputs = task->steps;
    const char *codes = panel_at(with, task->results.panel);
    const int64_t first = inputs.begin + WORD, last = first + (inputs.end - first) / WORD * WORD;
    if (!has_whole_words(with) || first >= inputs.end) {
        widen_inputs(with, codes, inputs.begin, inputs.end, task->widened);
        return;
    }
    widen_inputs(with, codes, inputs.begin, first, task->widened);
    widen_inputs(with, codes, last, inputs.end, task->widened + (last - inputs.begin) * PANEL);
    const int64_t group = inputs.begin / with->group, groups = (inputs.end - 1) / with->group + 1 - group;
    const float *scales = scales_of(with, codes) + group * PANEL;
    for (int64_t i = 0; i < groups; i++, scales += PANEL) {
        task->values[i] = values_at(with->form, with, scales);
        /* The next panel's, probably. */
        const float *next = scales + with->panel_bytes / 4, *minima = next + with->num_groups * PANEL;
        __builtin_prefetch(next);
        __builtin_prefetch(next + LANES);
        if (with->has_minima) __builtin_prefetch(minima), __builtin_prefetch(minima + LANES);
    }
}

/* Products with codes that are widened for other tiles, too: while the inputs of one word are multiplied, the next ones
 * are widened, on units that a sum leaves idle. Returns the input from which on products are still to be summed. */
INLINE int64_t keep_words(const int rows, const int form, const tile_task *task) {
    const linear *with = task->with;
    const range inputs = task->steps;
    if (rows < LEAST_OF_SEVERAL || !has_whole_words(with)) return inputs.begin;
    const vec low_bias = load(with->bias + task->results.panel * PANEL);
    const vec high_bias = load(with->bias + task->results.panel * PANEL + LANES);
    tile_sums *kept = task->kept;
    vec sums[TILE_ROWS][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][0] = inputs.begin > 0 ? kept->floats[i][0] : low_bias;
        sums[i][1] = inputs.begin > 0 ? kept->floats[i][1] : high_bias;
    }
    coded_run run = {.codes = panel_at(with, task->results.panel), .values = task->values, .table = &with->table};
    int64_t k = inputs.begin + WORD, end_of_group = (inputs.begin / with->group + 1) * with->group;
    const float *column = (const float *)tile_of(task, form) + inputs.begin * rows;
    float *widened = task->widened;
    for (; k + WORD <= inputs.end; k += WORD) {
        const int64_t is_next = k >= end_of_group;
        end_of_group += is_next * with->group;
        run.values += is_next;
        UNROLLED
        for (int i = 0; i < WORD; i++) {
            part_ends(rows, sums, &run.codes, &run.values);
            if (i % 2 == 0) widen_quarter(rows, form, &run, k, i / 2, widened + WORD * PANEL);
            if (i % 2 == 0) part_ends(rows, sums, &run.codes, &run.values);
            add_products(rows, i, column + i, load(widened + i * PANEL), load(widened + i * PANEL + LANES), sums);
        }
        part_ends(rows, sums, &run.codes, &run.values);
        widened += WORD * PANEL;
        column += k % STRETCH == 0 ? WORD + STRETCH * (rows - 1) : WORD;
    }
    UNROLLED
    for (int i = 0; i < rows; i++) kept->floats[i][0] = sums[i][0], kept->floats[i][1] = sums[i][1];
    return k - WORD;
}

/* Functions of their own, because all registers are taken. */
#define KEEP_WORDS_OF(rows)                                                                                            \
    static APART int64_t keep_words_of_##rows(const tile_task *task) {                                                 \
        switch (task->form) {                                                                                          \
        case FORM_CODES4: return keep_words(rows, FORM_CODES4, task);                                                  \
        case FORM_CODES8: return keep_words(rows, FORM_CODES8, task);                                                  \
        case FORM_TABLE4: return keep_words(rows, FORM_TABLE4, task);                                                  \
        default: return keep_words(rows, FORM_FP8, task);                                                              \
        }                                                                                                              \
    }

EACH_TILE_SIZE(KEEP_WORDS_OF)

/* Products with inputs before `done` are summed. */
INLINE void multiply_floats(const int rows, const int form, const tile_task *task, int64_t done) {
    const linear *with = task->with;
    const int64_t panel = task->results.panel;
    const range steps = task->steps;
    tile_sums *kept = task->kept;
    const void *tile = tile_of(task, form), *weights = task->weights;
    const vec low_bias = load(with->bias + panel * PANEL);
    const vec high_bias = load(with->bias + panel * PANEL + LANES);
    const int64_t per_step = inputs_per_step(form), end = steps.end * per_step;
    const range inputs = {steps.begin * per_step, end < with->inputs ? end : with->inputs};
    vec sums[TILE_ROWS][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][0] = done > 0 ? kept->floats[i][0] : low_bias;
        sums[i][1] = done > 0 ? kept->floats[i][1] : high_bias;
    }
    assert(!task->widens || rows >= LEAST_OF_SEVERAL);
    if (form == FORM_PAIRS)
        sum_pairs(rows, tile, weights, steps, sums, task->ahead);
    else if (form >= FORM_CODES4 && task->widens)
        sum_float32(rows, tile, task->widened + (done - inputs.begin) * PANEL, (range){done, inputs.end}, sums,
                    task->ahead);
    else if (form >= FORM_CODES4)
        sum_codes(rows, form, with, panel_at(with, panel), tile, inputs, sums, task->ahead);
    else if (form == FORM_BFLOAT16)
        sum_bfloat16(rows, tile, weights, inputs, sums, task->ahead);
    else
        sum_float32(rows, tile, weights, inputs, sums, task->ahead);
    if (inputs.end == with->inputs) {
        finish_tile(rows, &task->results, kept->floats, sums);
        return;
    }
    UNROLLED
    for (int i = 0; i < rows; i++) kept->floats[i][0] = sums[i][0], kept->floats[i][1] = sums[i][1];
}

#define CASE_OF_FLOATS(rows, form)                                                                                     \
    case form: multiply_floats(rows, form, task, done); break;

/* A function for each size of a tile: all in one, a compiler takes many times as long. */
#define MULTIPLY_TILE_OF(rows)                                                                                         \
    static APART void multiply_tile_of_##rows(const tile_task *task) {                                                 \
        const int64_t done =                                                                                           \
            task->widens && task->form != FORM_FLOAT32 ? keep_words_of_##rows(task) : task->steps.begin;               \
        switch (task->form) {                                                                                          \
        case FORM_INT8:                                                                                                \
            multiply_int8(rows, task);                                                                                 \
            break;                                                                                                     \
            CASE_OF_FLOATS(rows, FORM_FLOAT32)                                                                         \
            CASE_OF_FLOATS(rows, FORM_BFLOAT16)                                                                        \
            CASE_OF_FLOATS(rows, FORM_CODES4)                                                                          \
            CASE_OF_FLOATS(rows, FORM_CODES8)                                                                          \
            CASE_OF_FLOATS(rows, FORM_FP8)                                                                             \
            CASE_OF_FLOATS(rows, FORM_TABLE4)                                                                          \
            CASE_OF_FLOATS(rows, FORM_PAIRS)                                                                           \
        default: assert(0);                                                                                            \
        }                                                                                                              \
    }

EACH_TILE_SIZE(MULTIPLY_TILE_OF)

/* What tile `place` of `count` fetches with the weights at `current`, of a panel that ends at `end`. A tile alone
 * fetches a little ahead, and near the end from the next panel: the memory behind the end belongs to another member.
 * Several tiles, which bring their weights into the nearest cache, fetch a part each of what follows. */
static fetching what_to_fetch(const char *current, const char *end, const char *next, range steps, int64_t step_bytes,
                              int64_t place, int64_t count) {
    if (count > 1) return part_to_fetch(next, steps, step_bytes, place, count);
    return (fetching){current + LINES_AHEAD * LINE, end, next, (step_bytes + LINE - 1) / LINE, step_bytes};
}

int64_t tiles_at_once_whole(const linear *with) { return is_coded(with) ? CODED_TILES : MOST_TILES; }

#define CASE(rows)                                                                                                     \
    case rows: multiply_tile_of_##rows(&task); break;

void multiply_whole(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
                    int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    assert(end_tile - first_tile <= tiles_at_once_whole(with));
    if (HAS_PAIR_PRODUCTS && with->is_narrow) {
        multiply_narrow(with, from, panel, next, first_tile, end_tile, epilogue, out, stride);
        return;
    }
    const int64_t count = end_tile - first_tile;
    const int widens = is_coded(with) && count > 1; /* a tile alone takes codes as they are */
    const int64_t num_steps = steps_of(with->inputs, is_coded(with) ? FORM_FLOAT32 : with->form);
    const int64_t depth = widens || count > FEW_TILES ? MANY_DEPTH : count > 1 ? DEPTH : num_steps;
    const int64_t bytes = with->panel_bytes, step_bytes = (is_coded(with) ? bytes_of_codes(with) : bytes) / num_steps;
    /* What is widened in the register is fetched a word, or as many bytes, at a time. */
    const int64_t fetched = !is_coded(with) ? step_bytes : has_words(with->form) ? PANEL * 4 : LINE;
    const char *weights = panel_at(with, panel);
    vec widened[MANY_DEPTH * PANEL / LANES];
    group_values values[MANY_DEPTH / LEAST_GROUP + 1];
    tile_sums kept[CODED_TILES];
    fetch_additions(from, with, next, first_tile, end_tile);
    for (int64_t begin = 0; begin < num_steps; begin += depth) {
        const range steps = {begin, begin + depth < num_steps ? begin + depth : num_steps};
        const char *current = weights + begin * step_bytes;
        const char *following = steps.end < num_steps ? weights + steps.end * step_bytes : next;
        int64_t first = tile_start(first_tile, from->num_tiles, from->num_rows), rows;
        for (int64_t place = 0; place < count; place++, first += rows) {
            rows = tile_start(first_tile + place + 1, from->num_tiles, from->num_rows) - first;
            /* The first of several tiles widens for all. */
            const int is_widened = widens && place > 0;
            const tile_task task = {
                .with = with,
                .results = results_of(from, panel, first, rows, epilogue, out, stride),
                .form = is_widened ? FORM_FLOAT32 : with->form,
                .weights = is_widened ? (const char *)widened : current,
                .steps = steps,
                .ahead = widens ? part_to_fetch(following, steps, (bytes + num_steps - 1) / num_steps,
                                                place - is_widened, count - 1)
                                : what_to_fetch(current, weights + bytes, following, steps, fetched, place, count),
                .widens = widens,
                .widened = (float *)widened,
                .values = values,
                .kept = &kept[place],
            };
            if (widens && place == 0) prepare_to_keep(&task);
            switch (rows) { EACH_TILE_SIZE(CASE) }
        }
    }
}

int products_permitted(void) { return 1; }

#endif

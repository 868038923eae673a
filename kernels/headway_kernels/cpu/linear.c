#define _GNU_SOURCE
#include "products.h"

#include <stdatomic.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define HUGE_PAGE (2 << 20)
#define MOST_FETCHED (128 << 10)
#define WORDS_AT_ONCE 64 /* of each output: what is read and written stays in the first cache */

static void *huge_alloc(int64_t bytes, int is_zeroed) {
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    size_t rounded = ((size_t)bytes + alignment - 1) / alignment * alignment;
    void *made = aligned_alloc(alignment, rounded > 0 ? rounded : alignment);
    if (made == NULL) return NULL;
#if defined(__linux__)
    if (alignment == HUGE_PAGE) madvise(made, rounded, MADV_HUGEPAGE);
#endif
    if (is_zeroed) memset(made, 0, rounded);
    return made;
}

void *stream_alloc(int64_t bytes) { return huge_alloc(bytes, 1); }

int64_t panel_bytes(const linear *of) {
    if (is_in_blocks(of)) return block_panel_bytes(of);
    if (is_coded(of)) return coded_panel_bytes(of);
    int64_t padded = steps_of(of->inputs, of->form) * inputs_per_step(of->form);
    return padded * PANEL * (of->form == FORM_FLOAT32 ? 4 : is_bfloat16(of->form) ? 2 : 1);
}

int64_t output_at(int64_t panel, int64_t column, int64_t outputs, int64_t gated) {
    int64_t output = panel * PANEL + column;
    if (gated) {
        int64_t half = outputs / 2;
        output = panel * LANES + column % LANES;
        if (output >= half) return -1;
        return column < LANES ? output : half + output;
    }
    return output < outputs ? output : -1;
}

/* Symmetric, one scale per output; stored with 128 added, because the instruction takes weights as unsigned. */
static float pack_int8(uint8_t *to, const float *row, int64_t inputs) {
    float largest = TINY;
    for (int64_t k = 0; k < inputs; k++) largest = fmaxf(largest, fabsf(row[k]));
    float scale = fmaxf(largest / INT8_MAX_VALUE, TINY);
    for (int64_t k = 0; k < inputs; k++) {
        to[k / QUAD * PANEL * QUAD + k % QUAD] = (uint8_t)((int32_t)rintf(row[k] / scale) + 128);
    }
    return scale;
}

linear *linear_empty(int64_t outputs, int64_t inputs, int64_t form, int64_t gated) {
    linear *made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->form = form;
    made->outputs = outputs;
    made->inputs = inputs;
    made->num_panels = gated ? (outputs / 2 + LANES - 1) / LANES : (outputs + PANEL - 1) / PANEL;
    made->bias = stream_alloc(made->num_panels * PANEL * 4);
    made->scales = stream_alloc(made->num_panels * PANEL * 4);
    if (made->bias == NULL || made->scales == NULL) {
        linear_free(made);
        return NULL;
    }
    return made;
}

typedef uint32_t word __attribute__((may_alias)); /* a float32, or a pair of bfloat16s */

/* `count` inputs of a row, from `k` on, and zeros behind them up to WORDS_AT_ONCE. Without a row, zeros alone. */
static void read_words(word *words, int64_t form, const void *row, int64_t is_narrow, int64_t k, int64_t count) {
    const int64_t bytes = row == NULL ? 0 : count * (is_bfloat16(form) ? 2 : 4);
    memset((char *)words + bytes, 0, (size_t)(WORDS_AT_ONCE * 4 - bytes));
    if (row == NULL) return;
    if (is_bfloat16(form) == is_narrow) {
        memcpy(words, (const char *)row + k * (is_narrow ? 2 : 4), (size_t)bytes);
    } else if (is_narrow) {
        for (int64_t i = 0; i < count; i++) words[i] = (word)((const uint16_t *)row)[k + i] << 16;
    } else {
        for (int64_t i = 0; i < count; i++) ((uint16_t *)words)[i] = (uint16_t)(((const word *)row)[k + i] >> 16);
    }
}

/* All columns of a panel for a stretch of inputs at a time: what is read and written stays in the first cache. */
static void pack_panel(const linear *to, int64_t panel, const void *const *rows, int64_t is_narrow, int64_t gated) {
    const int64_t per_word = is_bfloat16(to->form) ? PAIR : 1;
    const int64_t num_words = panel_bytes(to) / (PANEL * 4);
    word *packed = (word *)((char *)to->panels + panel * panel_bytes(to));
    for (int64_t at = 0; at < num_words; at += WORDS_AT_ONCE) {
        word words[PANEL][WORDS_AT_ONCE];
        const int64_t k = at * per_word, most = WORDS_AT_ONCE * per_word;
        const int64_t left = to->inputs - k < most ? to->inputs - k : most;
        for (int64_t column = 0; column < PANEL; column++) {
            const int64_t output = output_at(panel, column, to->outputs, gated);
            read_words(words[column], to->form, output < 0 ? NULL : rows[output], is_narrow, k, left);
        }
        const int64_t count = num_words - at < WORDS_AT_ONCE ? num_words - at : WORDS_AT_ONCE;
        for (int64_t i = 0; i < count; i += LANES) {
            for (int64_t column = 0; column < PANEL; column += LANES) {
                ivec square[LANES];
                UNROLLED
                for (int64_t j = 0; j < LANES; j++) square[j] = *(const unaligned_ivec *)&words[column + j][i];
                transpose(square);
                word *place = packed + (at + i) * PANEL + column;
                const int64_t inputs = count - i < LANES ? count - i : LANES;
                for (int64_t j = 0; j < inputs; j++) *(unaligned_ivec *)(place + j * PANEL) = square[j];
            }
        }
    }
}

linear *linear_new(const void *const *rows, int64_t is_narrow, const float *bias, int64_t outputs, int64_t inputs,
                   int64_t form, int64_t gated) {
    linear *made = linear_empty(outputs, inputs, form, gated);
    if (made == NULL) return NULL;
    made->panels = huge_alloc(made->num_panels * panel_bytes(made), form == FORM_INT8); /* others are written whole */
    if (made->panels == NULL) {
        linear_free(made);
        return NULL;
    }
    for (int64_t panel = 0; panel < made->num_panels; panel++) {
        if (form != FORM_INT8) pack_panel(made, panel, rows, is_narrow, gated);
        for (int64_t column = 0; column < PANEL; column++) {
            const int64_t output = output_at(panel, column, outputs, gated);
            const int64_t place = panel * PANEL + column;
            if (output < 0) continue;
            uint8_t *to = (uint8_t *)made->panels + panel * panel_bytes(made) + column * QUAD;
            if (form == FORM_INT8) made->scales[place] = pack_int8(to, rows[output], inputs);
            if (bias != NULL) made->bias[place] = bias[output];
        }
    }
    return made;
}

linear *linear_of_int8(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t gated) {
    linear *made = linear_empty(outputs, inputs, FORM_INT8, gated);
    if (made == NULL) return NULL;
    made->panels = stream_alloc(made->num_panels * panel_bytes(made));
    if (made->panels == NULL) {
        linear_free(made);
        return NULL;
    }
    for (int64_t place = 0; place < made->num_panels * PANEL; place++) {
        const int64_t panel = place / PANEL, column = place % PANEL;
        const int64_t output = output_at(panel, column, outputs, gated);
        if (output < 0) continue;
        uint8_t *to = (uint8_t *)made->panels + panel * panel_bytes(made) + column * QUAD;
        const int8_t *row = (const int8_t *)from->codes + output * inputs;
        for (int64_t k = 0; k < inputs; k++) to[k / QUAD * PANEL * QUAD + k % QUAD] = (uint8_t)(row[k] + 128);
        made->scales[place] = from->scales[output];
        if (bias != NULL) made->bias[place] = bias[output];
    }
    return made;
}

/* The beginning of memory that several products share; panels follow. */
struct shared_memory {
    _Alignas(LINE) atomic_int_least64_t holders;
};

static void free_panels(linear *of) {
    if (of->memory == NULL)
        free(of->panels);
    else if (atomic_fetch_sub(&of->memory->holders, 1) == 1)
        free(of->memory);
}

void linears_join(linear *const *which, int64_t count) {
    int64_t bytes = sizeof(shared_memory), holders = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = which[i]->num_panels * panel_bytes(which[i]);
        if (own < HUGE_PAGE && which[i]->memory == NULL) bytes += own, holders++;
    }
    shared_memory *memory = holders > 1 ? stream_alloc(bytes) : NULL;
    if (memory == NULL) return;
    atomic_init(&memory->holders, holders);
    char *to = (char *)(memory + 1);
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = which[i]->num_panels * panel_bytes(which[i]);
        if (own >= HUGE_PAGE || which[i]->memory != NULL) continue;
        memcpy(to, which[i]->panels, (size_t)own);
        free(which[i]->panels);
        which[i]->panels = to;
        which[i]->memory = memory;
        to += own;
    }
}

void linear_free(linear *the_linear) {
    if (the_linear == NULL) return;
    free_panels(the_linear);
    free(the_linear->bias);
    free(the_linear->scales);
    free(the_linear->group_of);
    free(the_linear);
}

float root_mean_square_factor(const float *row, int64_t inputs, float eps) {
    vec squares = {0};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        vec x = load(row + k);
        squares += x * x;
    }
    float sum = sum_of(squares);
    for (; k < inputs; k++) sum += row[k] * row[k];
    return 1.0f / sqrtf(sum / (float)inputs + eps);
}

typedef code codes __attribute__((vector_size(LANES * sizeof(code)), aligned(1), may_alias));

/* In the order in which a tile stores them. */
INLINE codes as_codes(ivec numbers) {
    codes made = __builtin_convertvector(numbers, codes);
#if !MULTIPLIES_BYTES && LANES == 16
    return __builtin_shufflevector(made, made, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#elif !MULTIPLIES_BYTES && LANES == 8
    return __builtin_shufflevector(made, made, 0, 2, 1, 3, 4, 6, 5, 7);
#elif !MULTIPLIES_BYTES
    return __builtin_shufflevector(made, made, 0, 2, 1, 3);
#else
    return made;
#endif
}

float pack_int8_row(code *tile, int64_t rows, int64_t place, const float *row, int64_t inputs, const float *weight,
                    int32_t *offset) {
    const ivec sign_off = splat_int(0x7fffffff);
    vec magnitudes = splat(TINY), not_finite = {0};
    for (int64_t k = 0; k < inputs; k += LANES) {
        vec x = normed_inputs(row, weight, k, inputs);
        magnitudes = larger(magnitudes, bits_as_vec((ivec)x & sign_off));
        not_finite += x * 0.0f;
    }
    const float largest = largest_of(magnitudes), scale = INT8_MAX_VALUE / largest;
    const int64_t stretch = CODES_SIDE_BY_SIDE;
    ivec sums = {0};
    for (int64_t k = 0; k < inputs; k += stretch) {
        code *to = tile + k * rows + place * stretch;
        for (int64_t i = 0; i < stretch; i += LANES) {
            vec scaled = normed_inputs(row, weight, k + i, inputs) * scale;
            scaled = choose(scaled == scaled, scaled, (vec){0});
            ivec rounded = __builtin_convertvector(__builtin_elementwise_rint(scaled), ivec);
            *(codes *)(to + i) = as_codes(rounded);
            sums += rounded;
        }
    }
    *offset = 128 * __builtin_reduce_add(sums);
    return largest / INT8_MAX_VALUE + sum_of(not_finite);
}

int64_t most_packed_bytes(int64_t num_rows, int64_t inputs) {
    const int64_t floats = packed_bytes(num_rows, inputs, FORM_FLOAT32);
    const int64_t codes = packed_bytes(num_rows, inputs, FORM_INT8);
    const int64_t digits = num_rows * most_bytes_of_packed_row(inputs);
    const int64_t largest = floats > codes ? floats : codes;
    return largest > digits ? largest : digits;
}

void pack_tile(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
               rms_norm norm) {
    if (is_in_blocks(with))
        pack_tile_in_blocks(to, with, tile, from, stride, norm);
    else
        pack_tile_whole(to, with->form, tile, from, stride, norm);
}

int64_t tiles_at_once(const linear *with) {
    return is_in_blocks(with) ? tiles_at_once_in_blocks() : tiles_at_once_whole(with);
}

void multiply(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
              int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    (is_in_blocks(with) ? multiply_in_blocks : multiply_whole)(with, from, panel, next, first_tile, end_tile, epilogue,
                                                               out, stride);
}

const char *panel_at(const linear *of, int64_t panel) { return (const char *)of->panels + panel * panel_bytes(of); }

void fetch_panel(const linear *from, int64_t panel) {
    int64_t bytes = panel_bytes(from);
    const char *start = panel_at(from, panel);
    if (bytes > MOST_FETCHED) bytes = MOST_FETCHED;
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(start + at, 0, 2);
}

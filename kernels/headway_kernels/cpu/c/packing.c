#include "packing.h"

#include "blocks.h"
#include "codes.h"

#define WORDS_AT_ONCE 64 /* of each output: what is read and written stays in the first cache */

/* A quad of inputs of each output side by side, with 128 added, because the instruction takes weights as unsigned. */
static uint8_t *int8_column(const linear *of, int64_t panel, int64_t column) {
    return (uint8_t *)panel_at(of, panel) + column * QUAD;
}
static int64_t int8_place(int64_t k) { return k / QUAD * PANEL * QUAD + k % QUAD; }

/* Symmetric, one scale per output. */
static float round_to_int8(uint8_t *to, const float *row, int64_t inputs) {
    float largest = TINY;
    for (int64_t k = 0; k < inputs; k++) largest = fmaxf(largest, fabsf(row[k]));
    float scale = fmaxf(largest / INT8_MAX_VALUE, TINY);
    for (int64_t k = 0; k < inputs; k++) to[int8_place(k)] = (uint8_t)((int32_t)rintf(row[k] / scale) + 128);
    return scale;
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
static void pack_panel(const linear *to, int64_t panel, const void *const *rows, int64_t is_narrow) {
    const int64_t per_word = is_bfloat16(to->form) ? PAIR : 1;
    const int64_t num_words = to->panel_bytes / (PANEL * 4);
    word *packed = (word *)panel_at(to, panel);
    for (int64_t at = 0; at < num_words; at += WORDS_AT_ONCE) {
        word words[PANEL][WORDS_AT_ONCE];
        const int64_t k = at * per_word, most = WORDS_AT_ONCE * per_word;
        const int64_t left = to->inputs - k < most ? to->inputs - k : most;
        for (int64_t column = 0; column < PANEL; column++) {
            const int64_t output = output_at(to, panel, column);
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

static int64_t bytes_of_plain_panel(int64_t inputs, int64_t form) {
    const int64_t padded = steps_of(inputs, form) * inputs_per_step(form);
    return padded * PANEL * (form == FORM_FLOAT32 ? 4 : is_bfloat16(form) ? 2 : 1);
}

static linear *plain_linear(const float *bias, int64_t outputs, int64_t inputs, int64_t form, int64_t gated) {
    /* All but INT8 are written whole. */
    return linear_with_panels(linear_empty(bias, outputs, inputs, form, gated), bytes_of_plain_panel(inputs, form),
                              form == FORM_INT8);
}

linear *linear_new(const void *const *rows, int64_t is_narrow, const float *bias, int64_t outputs, int64_t inputs,
                   int64_t form, int64_t gated) {
    linear *made = plain_linear(bias, outputs, inputs, form, gated);
    if (made == NULL) return NULL;
    for (int64_t panel = 0; panel < made->num_panels; panel++) {
        if (form != FORM_INT8) {
            pack_panel(made, panel, rows, is_narrow);
            continue;
        }
        for (int64_t column = 0; column < PANEL; column++) {
            const int64_t output = output_at(made, panel, column);
            if (output < 0) continue;
            made->scales[panel * PANEL + column] =
                round_to_int8(int8_column(made, panel, column), rows[output], inputs);
        }
    }
    return made;
}

static linear *linear_of_int8(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs,
                              int64_t gated) {
    linear *made = plain_linear(bias, outputs, inputs, FORM_INT8, gated);
    if (made == NULL) return NULL;
    for (int64_t place = 0; place < made->num_panels * PANEL; place++) {
        const int64_t panel = place / PANEL, column = place % PANEL, output = output_at(made, panel, column);
        if (output < 0) continue;
        uint8_t *to = int8_column(made, panel, column);
        const int8_t *row = (const int8_t *)from->codes + output * inputs;
        for (int64_t k = 0; k < inputs; k++) to[int8_place(k)] = (uint8_t)(row[k] + 128);
        made->scales[place] = from->scales[output];
    }
    return made;
}

linear *linear_of_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                        int64_t gated) {
    if (form == FORM_INT8) return linear_of_int8(from, bias, outputs, inputs, gated);
    if (form >= FORM_BLOCKS4) return linear_of_blocks(from, bias, outputs, inputs, form, gated);
    return linear_of_widened_codes(from, bias, outputs, inputs, form, gated);
}

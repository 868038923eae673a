/* A weight matrix that was packed once, for products with it.
 *
 * Owns: the forms of weights, where the panels of a matrix lie, and its memory.
 * Must not know: what a panel holds, how anything multiplies, or what a layer is for.
 *
 * Weights [out, in] are cut into panels of 2 * LANES outputs. A panel stores, input after input, the weights of its
 * outputs side by side, so a product streams through memory once (Goto & van de Geijn 2008, "Anatomy of
 * high-performance matrix multiplication").
 */
#ifndef HEADWAY_LINEAR_H
#define HEADWAY_LINEAR_H

#include <stdint.h>

#include "code_table.h"

#define PANEL (2 * LANES)
#define MIDDLE_OF_CODES4 8 /* stands for zero without minima */
#define QUAD 4             /* inputs that one 8-bit instruction takes */
#define INPUTS_OF_PAIRS 32 /* that a tile of rows holds side by side, as pairs */
#define PAIR 2 /* bfloat16 weights of an output that a panel holds side by side (8-bit weights: QUAD of them) */

/* The forms of weights. BFLOAT16 is for float32 weights that bfloat16 holds exactly, as in many checkpoints: half
 * the memory to read, and the same result to the last bit. PAIRS are the same weights, for inputs that are rounded to
 * bfloat16: two products at once, only for processors with the instruction. CODES4, CODES8, FP8 and TABLE4
 * are codes with scales (codes.h): unsigned, signed, floats of 8 bits, and codes into a table. INT8 and BLOCKS multiply
 * codes as integers, with inputs that are rounded to 8 bits: whole rows, or block by block (blocks.h). */
enum weight_form {
    FORM_FLOAT32 = 0,
    FORM_BFLOAT16 = 1,
    FORM_INT8 = 2,
    FORM_CODES4 = 3,
    FORM_CODES8 = 4,
    FORM_FP8 = 5,
    FORM_TABLE4 = 6,
    FORM_BLOCKS4 = 7,
    FORM_BLOCKS8 = 8,
    FORM_BLOCKS_TABLE4 = 9,
    FORM_PAIRS = 10
};

typedef struct shared_memory shared_memory;

typedef struct {
    int64_t form;
    int64_t outputs;
    int64_t inputs;
    int64_t is_gated; /* see output_at */
    int64_t num_panels;
    int64_t panel_bytes;
    void *panels;
    shared_memory *memory; /* that the panels lie in; NULL: they have their own */
    float *bias;           /* [num_panels * PANEL], zeros if there is none */
    float *scales;         /* FORM_INT8: of each output, [num_panels * PANEL] */
    int64_t group;         /* codes: inputs that share a scale, and how many such groups there are */
    int64_t num_groups;
    int64_t has_minima;
    int64_t has_half_scales; /* BLOCKS: float16 holds them */
    int64_t num_digits;      /* BLOCKS: of an input, see blocks.h */
    int64_t is_narrow;       /* codes: they and their inputs are rounded to bfloat16 where they are multiplied */
    int64_t scales_sums;     /* narrow codes: sums of a group are scaled, not weights */
    uint16_t narrow[2 * CODES_OF_TABLE]; /* then what codes are looked up as, bfloat16s */
    int32_t *group_of;                   /* [inputs], or NULL: groups are consecutive */
    code_table table;                    /* TABLE4; BLOCKS: with what the instruction wants added */
} linear;

/* A weight as codes, one per byte, [outputs, inputs]: each stands for code * scale + minimum. `scales` and `minima`
 * [outputs, num_groups]. `minima` NULL: 0, or -8 * scale with CODES4. `group_of` [inputs]: each input's group;
 * NULL: each `group` consecutive inputs are one. `rounds_inputs`: inputs may be rounded to 8 bits. `is_narrow`:
 * inputs and weights are rounded to bfloat16; only where pairs are multiplied. `table`: what the codes of TABLE4 stand
 * for. */
typedef struct {
    const uint8_t *codes;
    const float *scales;
    const float *minima;
    const int32_t *group_of;
    int64_t group;
    int64_t num_groups;
    int64_t rounds_inputs;
    int64_t is_narrow;
    float table[CODES_OF_TABLE];
} coded_weight;

/* A matrix of so many outputs without panels; `bias` [outputs] or NULL. With `gated`, the outputs are all gates, then
 * all ups, and a panel takes LANES of each. NULL when memory is short. */
linear *linear_empty(const float *bias, int64_t outputs, int64_t inputs, int64_t form, int64_t gated);

/* Room for its panels of so many bytes, to be written whole unless it `is_zeroed`. When memory is short, or `of` is
 * NULL: NULL, and `of` is freed. */
linear *linear_with_panels(linear *of, int64_t panel_bytes, int is_zeroed);

void linear_free(linear *the_linear);

/* Move the panels of products that are smaller than a huge page into memory that they share, which has huge pages. When
 * memory is short, they stay where they are. */
void linears_join(linear *const *which, int64_t count);

/* Fetch panel `panel` into the cache, or the part of it that the cache should hold. */
void fetch_panel(const linear *from, int64_t panel);

/* Memory that is read in a stream: zeroed, aligned, in huge pages where the system has them. Freed by free(). */
void *stream_alloc(int64_t bytes);

/* The output in column `column` of panel `panel`; -1 if there is none. */
static inline int64_t output_at(const linear *of, int64_t panel, int64_t column) {
    if (!of->is_gated) return panel * PANEL + column < of->outputs ? panel * PANEL + column : -1;
    const int64_t half = of->outputs / 2, output = panel * LANES + column % LANES;
    if (output >= half) return -1;
    return column < LANES ? output : half + output;
}

static inline char *panel_at(const linear *of, int64_t panel) { return (char *)of->panels + panel * of->panel_bytes; }

/* The number of the panel at `place`; none that `of` has if that is another product's. */
static inline int64_t panel_number(const linear *of, const char *place) {
    return (place - (const char *)of->panels) / of->panel_bytes;
}

/* How wide the outputs of a product are, whole panels. */
static inline int64_t padded_outputs(int64_t outputs) { return (outputs + PANEL - 1) / PANEL * PANEL; }

static inline int is_bfloat16(int64_t form) { return form == FORM_BFLOAT16 || form == FORM_PAIRS; }

/* Whether weights are widened to float32 where they are multiplied. */
static inline int is_coded(const linear *of) { return of->form >= FORM_CODES4 && of->form <= FORM_TABLE4; }

/* The form of a matrix that is not in blocks, as far as its inputs go. */
static inline int64_t form_of_inputs(const linear *of) { return of->is_narrow ? FORM_PAIRS : of->form; }

/* Whether inputs are rounded block by block. */
static inline int is_in_blocks(const linear *of) { return of->form >= FORM_BLOCKS4 && of->form <= FORM_BLOCKS_TABLE4; }

/* Inputs per step of a sum; a matrix unit takes a cache line of each output or row. Panels and packed rows are
 * padded with zeros to whole steps. */
static inline int64_t inputs_per_step(int64_t form) {
#if HAS_TILES
    return form == FORM_INT8 ? 64 : 32;
#else
    return form == FORM_INT8 ? QUAD : is_bfloat16(form) ? PAIR : 1;
#endif
}
static inline int64_t steps_of(int64_t inputs, int64_t form) {
    return (inputs + inputs_per_step(form) - 1) / inputs_per_step(form);
}

#endif

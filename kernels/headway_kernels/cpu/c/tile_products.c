/* Products on a matrix unit: AMX (Intel 2023, "Architecture instruction set extensions programming reference", chapter
 * 3). Compiled only for the variant that asks for it.
 *
 * A float32 is the sum of three bfloat16s of 8 bits each, so a product of two is nine products of bfloat16s, added in
 * float32 (Henry, Tang & Heinecke 2019, arXiv 1904.06376). The three smallest, together below 2^-22 of the product, are
 * left out. This leaves six instructions on a unit that is sixteen times as fast as the vector unit. Weights are split
 * panel by panel, in the cache, so memory is read no more than without. 8-bit and bfloat16 weights need no split.
 * Inputs that are rounded to bfloat16 are one part: one instruction in place of three. Narrow codes are rounded so,
 * too: their weights, or, where sums of groups are scaled, the numbers that codes are looked up as.
 *
 * The order of the additions of an output depends only on the number of inputs, and on their groups where sums of these
 * are scaled, as everywhere in these kernels.
 *
 * The unit takes denormals as zeros and makes none: parts and products below 1.2e-38 are lost. A row with an infinity
 * gives NaN in all outputs, because infinity minus infinity is no number; the next normalisation would give NaN anyway.
 */
#define _GNU_SOURCE
#include "adapters.h"
#include "narrow_codes.h"
#include "tile_results.h"
#include "whole_products.h"

#if HAS_TILES

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SPLIT_STEP (2 * PARTS * TILE_BYTES)
#define SPLIT_STEPS 2         /* steps in memory: one in use, one in preparation */
#define LINES_AHEAD 512       /* in the L2 cache */
#define INPUT_BYTES (1 << 20) /* of the tiles that are multiplied with a panel at once */
#define MOST_TILES 16
#define LEAST_TILES 6
#define FEW_TILES 2 /* of inputs: with so few, a product waits for memory */
/* Steps for which codes are widened at once, for several pairs of tiles: they stay in the L1 cache. */
#define DEPTH 16

/* Tile registers: sums of two tiles of rows with both halves of a panel, two tiles of inputs, two of weights. */
#define SUMS_LOW 0
#define SUMS_HIGH 1
#define MORE_SUMS_LOW 2
#define MORE_SUMS_HIGH 3
#define INPUTS 4
#define MORE_INPUTS 5
#define WEIGHTS_LOW 6
#define WEIGHTS_HIGH 7

static void shape_tiles(int64_t rows) {
    tile_shapes shapes = {.palette = TILE_PALETTE};
    for (int i = 0; i < TILE_REGISTERS; i++) {
        shapes.row_bytes[i] = LINE;
        shapes.rows[i] = (uint8_t)(i < WEIGHTS_LOW ? rows : TILE_SIDE);
    }
    _tile_loadconfig(&shapes);
}

int64_t packed_bytes_whole(int64_t num_rows, int64_t inputs, int64_t form) {
    return tiles_of(num_rows) * packed_tile_bytes(inputs, form);
}

/* ---- inputs ---- */

INLINE void pack_float_row(const int parts, char *tile, int64_t place, const float *row, int64_t inputs, float factor,
                           const float *weight) {
    int64_t end = steps_of(inputs, FORM_FLOAT32) * TILE_SIDE * PAIR;
    for (int64_t k = 0; k < end; k += LANES) {
        pack_parts(parts, tile, place, k, normed_inputs(row, weight, k, inputs) * factor);
    }
}

void pack_tile_whole(const packed_inputs *to, int64_t form, int64_t tile, const float *from, int64_t stride,
                     rms_norm norm) {
    int64_t first = tile_start(tile, to->num_tiles, to->num_rows);
    int64_t rows = tile_start(tile + 1, to->num_tiles, to->num_rows) - first;
    char *start = (char *)to->tiles + tile * packed_tile_bytes(to->inputs, form);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = from + row_taken(to, first + i) * stride;
        float factor = input_factor(to, first + i, row, norm);
        if (form == FORM_INT8) {
            float scale =
                pack_int8_row((code *)start, TILE_SIDE, i, row, to->inputs, norm.weight, &to->offsets[first + i]);
            to->factors[first + i] = factor * scale;
        } else if (form == FORM_PAIRS) {
            pack_float_row(1, start, i, row, to->inputs, factor, norm.weight);
        } else {
            pack_float_row(PARTS, start, i, row, to->inputs, factor, norm.weight);
        }
    }
}

/* ---- weights ---- */

/* Memory that is fetched little by little: from `at` to `end`, then from `then` on if that is not NULL. `lines` per
 * step of a sum, `lines_per_pair` per pair of inputs whose weights are split. */
typedef struct {
    const char *at;
    const char *end;
    const char *then;
    int64_t lines;
    int64_t lines_per_pair;
} fetching;

INLINE void fetch_lines(fetching *ahead, int64_t lines) {
    for (int64_t line = 0; line < lines; line++, ahead->at += LINE) {
        if (ahead->at == ahead->end) {
            if (ahead->then == NULL) return;
            ahead->at = ahead->then;
            ahead->end = NULL;
        }
        __builtin_prefetch(ahead->at, 0, 2);
    }
}

/* The upper halves of two float32s, side by side. */
INLINE __m512i upper_halves(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

INLINE __m512i without_upper_half(__m512i value) {
    __m512i upper = _mm512_and_si512(value, _mm512_set1_epi32((int32_t)0xffff0000));
    return (__m512i)_mm512_sub_ps((__m512)value, (__m512)upper);
}

/* Pairs of inputs [begin, end) of one step of a float32 panel as bfloat16 tiles: all first parts (low and high half
 * of the panel), all second, all third. A part is the remainder of the part before, cut after 8 bits: nothing is
 * lost, and no value grows to infinity. */
INLINE void split_pairs(const float *weights, char *tiles, const int begin, const int end, fetching *ahead) {
    UNROLLED
    for (int pair = begin; pair < end; pair++) {
        fetch_lines(ahead, ahead->lines_per_pair);
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const float *from = weights + pair * PAIR * PANEL + half * LANES;
            char *to = tiles + half * TILE_BYTES + pair * LINE;
            __m512i even = _mm512_loadu_si512(from), odd = _mm512_loadu_si512(from + PANEL);
            _mm512_store_si512(to, upper_halves(even, odd));
            even = without_upper_half(even), odd = without_upper_half(odd);
            _mm512_store_si512(to + 2 * TILE_BYTES, upper_halves(even, odd));
            even = without_upper_half(even), odd = without_upper_half(odd);
            _mm512_store_si512(to + 4 * TILE_BYTES, upper_halves(even, odd));
        }
    }
}

/* ---- sums ---- */

/* Two tiles of inputs, or one, and a panel of weights, over steps [begin, end). */
typedef struct {
    const char *inputs;
    const char *more;
    const char *weights;
    int64_t begin;
    int64_t end;
    const linear *coded; /* whose panel at `weights` is widened step by step; NULL: `weights` are not codes */
    char *widened;       /* narrow codes: tiles of both halves of a panel, of so many steps */
    int64_t num_widened;
    int is_widened;   /* by the first pair of tiles */
    int64_t num_rows; /* of both tiles */
    int64_t rows_of_first;
    tile_sums *sums; /* of former steps */
} factors;

INLINE void load_inputs(const int both, const factors *of, int64_t at) {
    _tile_loadd(INPUTS, of->inputs + at, LINE);
    if (both) _tile_loadd(MORE_INPUTS, of->more + at, LINE);
}

INLINE void load_split_weights(const char *at) {
    _tile_loadd(WEIGHTS_LOW, at, LINE);
    _tile_loadd(WEIGHTS_HIGH, at + TILE_BYTES, LINE);
}

INLINE void load_weights(const char *at) {
    _tile_loadd(WEIGHTS_LOW, at, 2 * LINE);
    _tile_loadd(WEIGHTS_HIGH, at + LINE, 2 * LINE);
}

INLINE void add_products(const int both, const int form) {
    if (form == FORM_INT8) {
        _tile_dpbsud(SUMS_LOW, INPUTS, WEIGHTS_LOW);
        _tile_dpbsud(SUMS_HIGH, INPUTS, WEIGHTS_HIGH);
        if (!both) return;
        _tile_dpbsud(MORE_SUMS_LOW, MORE_INPUTS, WEIGHTS_LOW);
        _tile_dpbsud(MORE_SUMS_HIGH, MORE_INPUTS, WEIGHTS_HIGH);
    } else {
        _tile_dpbf16ps(SUMS_LOW, INPUTS, WEIGHTS_LOW);
        _tile_dpbf16ps(SUMS_HIGH, INPUTS, WEIGHTS_HIGH);
        if (!both) return;
        _tile_dpbf16ps(MORE_SUMS_LOW, MORE_INPUTS, WEIGHTS_LOW);
        _tile_dpbf16ps(MORE_SUMS_HIGH, MORE_INPUTS, WEIGHTS_HIGH);
    }
}

/* The float32 weights of one step; `widened` has room for them. */
INLINE const float *weights_of_step(const factors *of, int64_t step, float *widened) {
    const int64_t inputs = TILE_SIDE * PAIR;
    if (of->coded == NULL) return (const float *)of->weights + step * inputs * PANEL;
    widen(of->coded, of->weights, step * inputs, inputs, widened);
    return widened;
}

/* Sums of former steps, or zeros. */
INLINE void load_sums(const int both, int64_t rows_of_first, const tile_sums *sums) {
    if (sums == NULL) {
        _tile_zero(SUMS_LOW);
        _tile_zero(SUMS_HIGH);
        if (both) _tile_zero(MORE_SUMS_LOW);
        if (both) _tile_zero(MORE_SUMS_HIGH);
        return;
    }
    _tile_loadd(SUMS_LOW, sums->halves[0], LINE);
    _tile_loadd(SUMS_HIGH, sums->halves[1], LINE);
    if (both) _tile_loadd(MORE_SUMS_LOW, sums->halves[0] + rows_of_first * LINE, LINE);
    if (both) _tile_loadd(MORE_SUMS_HIGH, sums->halves[1] + rows_of_first * LINE, LINE);
}

/* Registers may have more rows than a tile: the second tile overwrites those of the first. */
INLINE void store_sums(const int both, int64_t rows_of_first, tile_sums *sums) {
    _tile_stored(SUMS_LOW, sums->halves[0], LINE);
    _tile_stored(SUMS_HIGH, sums->halves[1], LINE);
    if (both) _tile_stored(MORE_SUMS_LOW, sums->halves[0] + rows_of_first * LINE, LINE);
    if (both) _tile_stored(MORE_SUMS_HIGH, sums->halves[1] + rows_of_first * LINE, LINE);
}

/* Part i of the inputs times part j of the weights, for i + j <= 2, in an order in which one operand stays in its
 * register. Meanwhile the idle vector unit splits the weights of the next step. It does so again for the next two
 * tiles: writing and reading the parts in L2 takes longer than making them. */
INLINE void sum_float32(const int both, const factors *of, fetching *ahead, finishing *before) {
    _Alignas(LINE) char split[SPLIT_STEPS * SPLIT_STEP];
    _Alignas(LINE) float widened[TILE_SIDE * PAIR * PANEL];
    const float *weights = weights_of_step(of, 0, widened);
    split_pairs(weights, split, 0, TILE_SIDE, ahead);
    for (int64_t step = 0; step < of->end; step++) {
        const int64_t inputs = step * PARTS * TILE_BYTES;
        const char *tiles = split + step % SPLIT_STEPS * SPLIT_STEP;
        char *next_tiles = split + (step + 1) % SPLIT_STEPS * SPLIT_STEP;
        const int more = step + 1 < of->end;
        if (more) weights = weights_of_step(of, step + 1, widened);
        finish_some(before);
        load_split_weights(tiles);
        load_inputs(both, of, inputs);
        add_products(both, FORM_FLOAT32);
        if (more) split_pairs(weights, next_tiles, 0, 3, ahead);
        load_inputs(both, of, inputs + TILE_BYTES);
        add_products(both, FORM_FLOAT32);
        if (more) split_pairs(weights, next_tiles, 3, 6, ahead);
        load_split_weights(tiles + 2 * TILE_BYTES);
        add_products(both, FORM_FLOAT32);
        if (more) split_pairs(weights, next_tiles, 6, 9, ahead);
        load_inputs(both, of, inputs + 2 * TILE_BYTES);
        add_products(both, FORM_FLOAT32);
        if (more) split_pairs(weights, next_tiles, 9, 12, ahead);
        load_split_weights(tiles + 4 * TILE_BYTES);
        add_products(both, FORM_FLOAT32);
        if (more) split_pairs(weights, next_tiles, 12, 14, ahead);
        load_split_weights(tiles);
        add_products(both, FORM_FLOAT32);
        if (more) split_pairs(weights, next_tiles, 14, TILE_SIDE, ahead);
    }
}

/* The same for weights of one part, with inputs of so many. */
INLINE void sum_unsplit(const int both, const int form, const int parts, const factors *of, fetching *ahead,
                        finishing *before) {
    for (int64_t step = 0; step < of->end; step++) {
        fetch_lines(ahead, ahead->lines);
        finish_some(before);
        load_weights(of->weights + step * 2 * TILE_BYTES);
        for (int64_t part = 0; part < parts; part++) {
            load_inputs(both, of, (step * parts + part) * TILE_BYTES);
            add_products(both, form);
        }
    }
}

INLINE char *widened_at(const factors *of, int64_t step) {
    return of->widened + (step - of->begin) % of->num_widened * 2 * TILE_BYTES;
}

INLINE void widen_step(const factors *of, int64_t step) {
    const int64_t inputs = TILE_SIDE * PAIR;
    widen_to_pairs(of->coded, of->weights, step * inputs, inputs, widened_at(of, step));
}

/* The same for narrow codes: the first pair of tiles widens them for all, always for the step after this one. */
INLINE void sum_narrow_codes(const int both, const factors *of, fetching *ahead, finishing *before) {
    if (!of->is_widened) widen_step(of, of->begin);
    for (int64_t step = of->begin; step < of->end; step++) {
        if (of->is_widened)
            fetch_lines(ahead, ahead->lines);
        else if (step + 1 < of->end)
            widen_step(of, step + 1);
        finish_some(before);
        load_weights(widened_at(of, step));
        load_inputs(both, of, step * TILE_BYTES);
        add_products(both, FORM_PAIRS);
    }
}

/* Add the sums of a group, scaled, to those of all. */
INLINE void add_group(int64_t rows, const tile_sums *group, const float *scales, tile_sums *to) {
    const vec low = load(scales), high = load(scales + LANES);
    for (int64_t at = 0; at < rows * LINE; at += LINE) {
        *(vec *)(to->halves[0] + at) += low * *(const vec *)(group->halves[0] + at);
        *(vec *)(to->halves[1] + at) += high * *(const vec *)(group->halves[1] + at);
    }
}

/* The same for codes whose sums are scaled. A group is added once the next one is summed, since it is complete then. */
INLINE void sum_scaled_codes(const int both, const factors *of, fetching *ahead, finishing *before) {
    tile_sums groups[2];
    const linear *with = of->coded;
    const int64_t per_group = with->num_groups == 1 ? of->end : with->group / (TILE_SIDE * PAIR);
    const int64_t first = of->begin / per_group;
    const float *scales = scales_of(with, of->weights) + first * PANEL;
    int64_t end = (first + 1) * per_group, number = 0;
    load_sums(both, 0, NULL);
    if (!of->is_widened) widen_step(of, of->begin);
    for (int64_t step = of->begin; step < of->end; step++) {
        fetch_lines(ahead, ahead->lines);
        if (!of->is_widened && step + 1 < of->end) widen_step(of, step + 1);
        finish_some(before);
        load_weights(widened_at(of, step));
        load_inputs(both, of, step * TILE_BYTES);
        add_products(both, FORM_PAIRS);
        if (step + 1 < end && step + 1 < of->end) continue;
        store_sums(both, of->rows_of_first, &groups[number % 2]);
        load_sums(both, 0, NULL);
        if (number > 0) add_group(of->num_rows, &groups[(number - 1) % 2], scales + (number - 1) * PANEL, of->sums);
        number++, end += per_group;
    }
    add_group(of->num_rows, &groups[(number - 1) % 2], scales + (number - 1) * PANEL, of->sums);
}

/* The sums of two tiles, or one, with those of former steps if there are some; `before` is finished meanwhile. Scaled
 * sums are added in memory, all others in registers. */
INLINE void sum_tiles(const int both, int64_t form, const factors *of, int has_sums, fetching *ahead,
                      finishing *before) {
    const int in_memory = of->coded != NULL && of->coded->scales_sums;
    if (!in_memory) load_sums(both, of->rows_of_first, has_sums ? of->sums : NULL);
    if (in_memory)
        sum_scaled_codes(both, of, ahead, before);
    else if (of->coded != NULL && of->coded->is_narrow)
        sum_narrow_codes(both, of, ahead, before);
    else if (form == FORM_INT8)
        sum_unsplit(both, FORM_INT8, 1, of, ahead, before);
    else if (form == FORM_PAIRS)
        sum_unsplit(both, FORM_PAIRS, 1, of, ahead, before);
    else if (form == FORM_BFLOAT16)
        sum_unsplit(both, FORM_BFLOAT16, PARTS, of, ahead, before);
    else
        sum_float32(both, of, ahead, before);
    finish_rows(before, before->end - before->row);
    if (!in_memory) store_sums(both, of->rows_of_first, of->sums);
}

static void clear_sums(int64_t rows, tile_sums *sums) {
    memset(sums->halves[0], 0, (size_t)(rows * LINE));
    memset(sums->halves[1], 0, (size_t)(rows * LINE));
}

/* The memory to fetch while `num_tiles` tiles are multiplied. Few tiles wait for memory: they fetch a little ahead,
 * near the end from the next panel. More tiles have their weights in the cache, and fetch the next panel, a little
 * per step. */
static fetching what_to_fetch(const char *weights, const char *next, int64_t bytes, int64_t lines, int64_t num_tiles) {
    const int few = num_tiles <= FEW_TILES;
    fetching ahead = {.at = next, .end = next + bytes};
    if (few && LINES_AHEAD * LINE < bytes)
        ahead = (fetching){.at = weights + LINES_AHEAD * LINE, .end = weights + bytes, .then = next};
    ahead.lines = few ? lines : (2 * lines + num_tiles - 1) / num_tiles;
    ahead.lines_per_pair = (ahead.lines + TILE_SIDE - 1) / TILE_SIDE;
    return ahead;
}

int64_t tiles_at_once_whole(const linear *with) {
    int64_t fitting = INPUT_BYTES / packed_tile_bytes(with->inputs, form_of_inputs(with)) / 2 * 2;
    return fitting > MOST_TILES ? MOST_TILES : fitting < LEAST_TILES ? LEAST_TILES : fitting;
}

void multiply_whole(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
                    int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    const int64_t form = with->form, num_steps = steps_of(with->inputs, form), bytes = with->panel_bytes;
    const int64_t tile_bytes = packed_tile_bytes(with->inputs, form_of_inputs(with));
    const int several = end_tile - first_tile > 2;
    const int in_parts = with->scales_sums || (with->is_narrow && several); /* the former at the same places always */
    const int64_t num_parts = in_parts ? (num_steps + DEPTH - 1) / DEPTH : 1;
    fetching ahead = what_to_fetch(panel_at(with, panel), next, bytes, bytes / num_steps / LINE, end_tile - first_tile);
    fetch_additions(from, with, next, first_tile, end_tile);
    _Alignas(LINE) char widened[DEPTH * 2 * TILE_BYTES];
    tile_sums sums[MOST_TILES / 2];
    finishing before = {.with = with,
                        .from = from,
                        .panel = panel,
                        .rows_per_step = (2 * TILE_SIDE * num_parts + num_steps - 1) / num_steps,
                        .epilogue = epilogue,
                        .out = out,
                        .stride = stride};
    shape_tiles((from->num_rows + from->num_tiles - 1) / from->num_tiles);
    for (int64_t part = 0; part < num_parts; part++) {
        factors of = {.weights = panel_at(with, panel),
                      .begin = part * num_steps / num_parts,
                      .end = (part + 1) * num_steps / num_parts,
                      .coded = is_coded(with) ? with : NULL,
                      .widened = widened,
                      .num_widened = several ? DEPTH : 2};
        for (int64_t tile = first_tile; tile < end_tile; tile += 2) {
            const int64_t first = tile_start(tile, from->num_tiles, from->num_rows);
            const int64_t middle = tile_start(tile + 1, from->num_tiles, from->num_rows);
            const int both = tile + 1 < end_tile;
            const int64_t end = both ? tile_start(tile + 2, from->num_tiles, from->num_rows) : middle;
            tile_sums *own = &sums[in_parts ? (tile - first_tile) / 2 : 0];
            of.inputs = (const char *)from->tiles + tile * tile_bytes;
            of.more = of.inputs + tile_bytes;
            of.is_widened = tile > first_tile;
            of.num_rows = end - first;
            of.rows_of_first = middle - first;
            of.sums = own;
            if (part == 0 && with->scales_sums) clear_sums(end - first, own);
            if (both)
                sum_tiles(1, form, &of, part > 0, &ahead, &before);
            else
                sum_tiles(0, form, &of, part > 0, &ahead, &before);
            if (part + 1 < num_parts) continue;
            before.sums = own;
            before.tile = tile;
            before.first = before.row = first;
            before.middle = middle;
            before.end = end;
        }
    }
    finish_rows(&before, before.end - before.row);
    _tile_release();
}

/* A thread's tile registers are 8 KB that the system has to save: a process must ask (Linux,
 * Documentation/arch/x86/xstate.rst). */
int products_permitted(void) {
#if defined(__linux__)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

#endif

/* As many groups at a time as a register has lanes: each lane has a group of its own, so nothing is summed across
 * lanes. */
#include "rounding.h"

#include "vectors.h"

#pragma clang fp contract(off) /* the errors of scales are those that separate operators would give */

#define GROUP 32
#define MIDDLE 8
#define LEAST_HALF 0x1p-24f

static const float EXTREME_CODES[] = {-8, -9, -7};

/* Number k of each group; zeros behind the end of a row. */
typedef struct {
    vec numbers[GROUP];
} groups;

static void read_groups(groups *to, const void *row, int64_t is_narrow, int64_t first, int64_t inputs) {
    float numbers[LANES * GROUP] = {0};
    const int64_t count = inputs - first < LANES * GROUP ? inputs - first : LANES * GROUP;
    if (is_narrow) {
        const uint16_t *from = (const uint16_t *)row + first;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = (uint32_t)from[i] << 16;
            memcpy(numbers + i, &bits, sizeof bits);
        }
    } else {
        memcpy(numbers, (const float *)row + first, (size_t)count * sizeof *numbers);
    }
    for (int k = 0; k < GROUP; k++) {
        UNROLLED
        for (int lane = 0; lane < LANES; lane++) to->numbers[k][lane] = numbers[lane * GROUP + k];
    }
}

/* The first one of the largest magnitude; not a number if one of a group is not finite. */
INLINE vec extremes_of(const groups *of) {
    vec extremes = {0}, largest = splat(-1.0f), not_finite = {0};
    for (int k = 0; k < GROUP; k++) {
        const vec number = of->numbers[k], magnitude = magnitude_of(number);
        extremes = choose(magnitude > largest, number, extremes);
        largest = larger(magnitude, largest);
        not_finite += number * 0.0f;
    }
    return extremes + not_finite;
}

/* float16s, but none that is 0 or infinite. */
INLINE vec nearest_halves(vec scales) {
    typedef _Float16 halves __attribute__((vector_size(LANES * 2)));
    vec rounded = __builtin_convertvector(__builtin_convertvector(scales, halves), vec);
    rounded = choose(magnitude_of(rounded) < LEAST_HALF, splat(LEAST_HALF), rounded);
    return choose(magnitude_of(rounded) == INFINITY, scales, rounded);
}

INLINE vec code_of(vec number, vec scale) {
    const vec nearest = __builtin_elementwise_rint(number / scale);
    return __builtin_elementwise_min(__builtin_elementwise_max(nearest, splat(-MIDDLE)), splat(MIDDLE - 1));
}

INLINE vec errors_with(const groups *of, vec scales) {
    vec errors = {0};
    for (int k = 0; k < GROUP; k++) {
        const vec difference = code_of(of->numbers[k], scales) * scales - of->numbers[k];
        errors += difference * difference;
    }
    return errors;
}

static vec best_scales(const groups *of) {
    const vec extremes = extremes_of(of);
    vec best = nearest_halves(extremes / EXTREME_CODES[0]), least = errors_with(of, best);
    for (int i = 1; i < (int)(sizeof EXTREME_CODES / sizeof *EXTREME_CODES); i++) {
        const vec scales = nearest_halves(extremes / EXTREME_CODES[i]), errors = errors_with(of, scales);
        best = choose(errors < least, scales, best);
        least = choose(errors < least, errors, least);
    }
    return best;
}

static void write_codes(uint8_t *codes, const groups *of, vec scales, int64_t count) {
    uint8_t own[LANES * GROUP];
    for (int k = 0; k < GROUP; k++) {
        vec code = code_of(of->numbers[k], scales);
        const ivec numbers = __builtin_convertvector(choose(code == code, code, (vec){0}), ivec) + MIDDLE;
        UNROLLED
        for (int lane = 0; lane < LANES; lane++) own[lane * GROUP + k] = (uint8_t)numbers[lane];
    }
    memcpy(codes, own, (size_t)count);
}

void round_to_4_bits(const void *const *rows, int64_t is_narrow, int64_t outputs, int64_t inputs, uint8_t *codes,
                     float *scales) {
    const int64_t num_groups = (inputs + GROUP - 1) / GROUP;
    for (int64_t row = 0; row < outputs; row++) {
        for (int64_t group = 0; group < num_groups; group += LANES) {
            const int64_t first = group * GROUP, left = inputs - first, some = num_groups - group;
            groups of;
            read_groups(&of, rows[row], is_narrow, first, inputs);
            const vec best = best_scales(&of);
            memcpy(scales + row * num_groups + group, &best, (size_t)(some < LANES ? some : LANES) * sizeof(float));
            write_codes(codes + row * inputs + first, &of, best, left < LANES * GROUP ? left : LANES * GROUP);
        }
    }
}

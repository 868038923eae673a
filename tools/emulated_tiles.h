/* The instructions of the matrix unit in C, for processors without one. It is included before all else.
 *
 * Owns: what each instruction does to a thread's tile registers (Intel 2023, "Architecture instruction set extensions
 * programming reference", chapter 3).
 * Must not know: what the kernels compute.
 *
 * Denormals stay, which the unit takes as zeros.
 */
#ifndef HEADWAY_EMULATED_TILES_H
#define HEADWAY_EMULATED_TILES_H

#define _GNU_SOURCE

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EMULATED_LINE 64 /* bytes of a row of a register, which has 16 */

typedef float emulated_floats __attribute__((vector_size(EMULATED_LINE)));
typedef int32_t emulated_words __attribute__((vector_size(EMULATED_LINE)));

typedef struct {
    uint16_t row_bytes[16];
    uint8_t rows[16];
    char registers[8][16][EMULATED_LINE];
} emulated_unit;

/* One for all files of the library. */
_Thread_local emulated_unit emulated __attribute__((weak));

/* `shapes`: 16 bytes of other fields, then those of the unit. */
static inline void emulated_loadconfig(const void *shapes) {
    memset(&emulated, 0, sizeof emulated);
    memcpy(emulated.row_bytes, (const char *)shapes + 16, sizeof emulated.row_bytes);
    memcpy(emulated.rows, (const char *)shapes + 48, sizeof emulated.rows);
}

static inline void emulated_zero(int which) { memset(emulated.registers[which], 0, sizeof emulated.registers[which]); }

static inline void emulated_loadd(int which, const void *from, int64_t stride) {
    emulated_zero(which);
    for (int row = 0; row < emulated.rows[which]; row++)
        memcpy(emulated.registers[which][row], (const char *)from + row * stride, emulated.row_bytes[which]);
}

static inline void emulated_stored(int which, void *to, int64_t stride) {
    for (int row = 0; row < emulated.rows[which]; row++)
        memcpy((char *)to + row * stride, emulated.registers[which][row], emulated.row_bytes[which]);
}

/* Each word of a row of `left` holds two bfloat16s, as does each word of the row of `right` with its number. The
 * products of the lower and of the upper ones are summed apart. */
static inline void emulated_dpbf16ps(int sums, int left, int right) {
    for (int row = 0; row < emulated.rows[sums]; row++) {
        emulated_floats sum, lower = {0}, upper = {0};
        const emulated_words bits = (int32_t)0xffff0000 - (emulated_words){0};
        memcpy(&sum, emulated.registers[sums][row], sizeof sum);
        for (int k = 0; k < emulated.row_bytes[left] / 4; k++) {
            int32_t pair;
            emulated_words others;
            memcpy(&pair, emulated.registers[left][row] + 4 * k, sizeof pair);
            memcpy(&others, emulated.registers[right][k], sizeof others);
            const emulated_words pairs = pair - (emulated_words){0};
            lower += (emulated_floats)(pairs << 16) * (emulated_floats)(others << 16);
            upper += (emulated_floats)(pairs & bits) * (emulated_floats)(others & bits);
        }
        sum += lower + upper;
        memcpy(emulated.registers[sums][row], &sum, sizeof sum);
    }
}

/* Each word holds four bytes, signed ones in `left`, unsigned ones in `right`. */
static inline void emulated_dpbsud(int sums, int left, int right) {
    for (int row = 0; row < emulated.rows[sums]; row++) {
        int32_t sum[EMULATED_LINE / 4];
        memcpy(sum, emulated.registers[sums][row], sizeof sum);
        for (int at = 0; at < emulated.row_bytes[left]; at++) {
            const int factor = (int8_t)emulated.registers[left][row][at];
            for (int n = 0; n < emulated.row_bytes[sums] / 4; n++)
                sum[n] += factor * (uint8_t)emulated.registers[right][at / 4][4 * n + at % 4];
        }
        memcpy(emulated.registers[sums][row], sum, sizeof sum);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated_loadconfig
#define _tile_release() ((void)0)
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbsud emulated_dpbsud
/* The only call that the kernels make so asks for the unit's registers. */
#define syscall(...) 0

#endif

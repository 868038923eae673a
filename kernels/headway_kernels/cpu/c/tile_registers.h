/* The registers of the matrix unit: AMX (Intel 2023, "Architecture instruction set extensions programming reference",
 * chapter 3).
 *
 * Owns: how their shapes are written. Must not know: what they hold.
 */
#ifndef HEADWAY_TILE_REGISTERS_H
#define HEADWAY_TILE_REGISTERS_H

#include "vectors.h"

#if HAS_TILES

#include <immintrin.h>

#define TILE_PALETTE 1
#define TILE_REGISTERS 8
#define TILE_BYTES 1024 /* of a whole one: TILE_SIDE rows of a cache line */

typedef struct {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

#endif

#endif

/* The use of the sums of a product.
 *
 * Owns: what becomes of a row's sums with one panel.
 * Must not know: how they were summed, or what a layer is for.
 */
#ifndef HEADWAY_SUMS_H
#define HEADWAY_SUMS_H

#include "vectors.h"

/* STORE: out = sums. ADD: out += sums. GATED: out = silu(first half of a panel) * second half,
 * for weights packed with `gated`; out has LANES columns per panel. GATED_PACKED and GATED_PAIRS: the same, packed as
 * inputs of as many rows and columns for a next product, of PAIRS or of what is not rounded: see `gated_before`. */
enum epilogue { STORE, ADD, GATED, GATED_PACKED, GATED_PAIRS };

static inline int is_packed(enum epilogue epilogue) { return epilogue == GATED_PACKED || epilogue == GATED_PAIRS; }

INLINE void finish_row(enum epilogue epilogue, vec low, vec high, float *out) {
    switch (epilogue) {
    case STORE:
        store(out, low);
        store(out + LANES, high);
        break;
    case ADD:
        store(out, load(out) + low);
        store(out + LANES, load(out + LANES) + high);
        break;
    case GATED:
    case GATED_PACKED: store(out, silu(low) * high); break;
    case GATED_PAIRS: *(half_ivec *)out = as_pairs(silu(low) * high); break;
    }
}

#endif

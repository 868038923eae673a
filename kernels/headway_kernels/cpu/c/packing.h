/* Weights are packed into panels.
 *
 * Owns: panels of float32, bfloat16 and int8, and which packing a form asks for.
 * Must not know: how products multiply, or what codes a checkpoint has.
 */
#ifndef HEADWAY_PACKING_H
#define HEADWAY_PACKING_H

#include "linear.h"

/* `rows` [outputs]: where each output's weights are, [inputs], as float32 or, if `is_narrow`, as bfloat16 (not for
 * FORM_INT8). `bias` and `gated`: see linear_empty. NULL when memory is short. */
linear *linear_new(const void *const *rows, int64_t is_narrow, const float *bias, int64_t outputs, int64_t inputs,
                   int64_t form, int64_t gated);

/* The same of codes, in a form of codes: FORM_INT8 (signed codes with one scale an output, neither minima nor groups),
 * or one of codes.h or blocks.h. */
linear *linear_of_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                        int64_t gated);

#endif

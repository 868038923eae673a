/* Weights become codes of 4 bits, as `rounded_to_4_bits` of coded_weight.py describes.
 *
 * Owns: the choice of scales and codes. Must not know: how products pack or use them.
 */
#ifndef HEADWAY_ROUNDING_H
#define HEADWAY_ROUNDING_H

#include <stdint.h>

/* Each row has `inputs` numbers: float32, or bfloat16 if `is_narrow`. `codes` [outputs, inputs], `scales` [outputs,
 * groups of 32 inputs]. A group with a number that is not finite gets a scale that is none. */
void round_to_4_bits(const void *const *rows, int64_t is_narrow, int64_t outputs, int64_t inputs, uint8_t *codes,
                     float *scales);

#endif

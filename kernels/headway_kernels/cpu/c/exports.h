/* What Python calls beside decoders, experts and meetings.
 *
 * Owns: the names of these functions. Must not know: how any of them works.
 */
#ifndef HEADWAY_EXPORTS_H
#define HEADWAY_EXPORTS_H

#include "decoder.h"

/* Ask the system for the features that this library needs, before any other call; 0 if it refuses. */
EXPORT int headway_permitted(void);
EXPORT int64_t headway_lanes(void);
EXPORT int headway_multiplies_pairs(void);
EXPORT int headway_multiplies_digits(void);
EXPORT int64_t headway_max_head_dim(void);
EXPORT int64_t headway_block_floats(const decoder_shape *shape);
EXPORT int64_t headway_logits_stride(int64_t vocab_size);

EXPORT linear *headway_linear_new(const void *const *rows, int64_t is_narrow, const float *bias, int64_t outputs,
                                  int64_t inputs, int64_t form, int64_t gated);
EXPORT linear *headway_linear_of_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs,
                                       int64_t form, int64_t gated);
EXPORT int headway_sums_can_be_scaled(const coded_weight *from, int64_t outputs, int64_t form);
/* See rounding.h. */
EXPORT void headway_round_to_4_bits(const void *const *rows, int64_t is_narrow, int64_t outputs, int64_t inputs,
                                    uint8_t *codes, float *scales);
EXPORT void headway_linear_free(linear *the_linear);
EXPORT void headway_linears_join(linear *const *which, int64_t count);
EXPORT team *headway_team_new(int64_t num_threads);
EXPORT void headway_team_free(team *the_team);

/* out [rows, panels wide] = inputs [rows, inputs] x weights: one product alone, for tests and measurements. */
EXPORT int headway_linear_run(const linear *the_linear, team *with, const float *inputs, int64_t num_rows,
                              const float *norm_weight, float norm_eps, int64_t gated, float *out, int64_t stride);

#endif

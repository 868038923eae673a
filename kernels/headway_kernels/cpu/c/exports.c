#include "exports.h"

#include "codes.h"
#include "packing.h"
#include "rounding.h"
#include "whole_products.h"

int headway_permitted(void) { return products_permitted(); }
int64_t headway_lanes(void) { return LANES; }
int headway_multiplies_pairs(void) { return multiplies_pairs(); }
int headway_multiplies_digits(void) { return MULTIPLIES_DIGITS; }
int64_t headway_max_head_dim(void) { return MAX_HEAD_DIM; }
int64_t headway_block_floats(const decoder_shape *shape) {
    attention_shape attention = attention_shape_of(shape);
    return block_floats(&attention);
}
int64_t headway_logits_stride(int64_t vocab_size) { return padded_outputs(vocab_size); }

linear *headway_linear_new(const void *const *rows, int64_t is_narrow, const float *bias, int64_t outputs,
                           int64_t inputs, int64_t form, int64_t gated) {
    return linear_new(rows, is_narrow, bias, outputs, inputs, form, gated);
}
linear *headway_linear_of_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs,
                                int64_t form, int64_t gated) {
    return linear_of_codes(from, bias, outputs, inputs, form, gated);
}
int headway_sums_can_be_scaled(const coded_weight *from, int64_t outputs, int64_t form) {
    return sums_can_be_scaled(from, outputs, form);
}
void headway_round_to_4_bits(const void *const *rows, int64_t is_narrow, int64_t outputs, int64_t inputs,
                             uint8_t *codes, float *scales) {
    round_to_4_bits(rows, is_narrow, outputs, inputs, codes, scales);
}
void headway_linear_free(linear *the_linear) { linear_free(the_linear); }
void headway_linears_join(linear *const *which, int64_t count) { linears_join(which, count); }
team *headway_team_new(int64_t num_threads) { return team_new(num_threads); }
void headway_team_free(team *the_team) { team_free(the_team); }

static void run_alone(void *work, member *self) {
    product own = *(const product *)work; /* running a product writes to it, so each member has a copy, as in a step */
    run_product(self, &own, NULL);
}

int headway_linear_run(const linear *the_linear, team *with, const float *inputs, int64_t num_rows,
                       const float *norm_weight, float norm_eps, int64_t gated, float *out, int64_t stride) {
    product_space space = {0};
    int done = reserve_products(&space, num_rows, the_linear->inputs);
    if (done) {
        product alone = product_of(&space, the_linear, num_rows, inputs, the_linear->inputs,
                                   (rms_norm){norm_weight, norm_eps}, gated ? GATED : STORE, out, stride);
        done = team_run(with, run_alone, &alone, 2);
    }
    free_products(&space);
    return done;
}

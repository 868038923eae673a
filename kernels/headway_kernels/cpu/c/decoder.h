/* The forward pass of a decoder-only transformer, from token ids to logits, as one job of a team.
 *
 * Owns: the order of a step's phases, its working memory, and the functions for decoders that Python calls.
 * Must not know: requests, the scheduler, sampling, or where weights come from.
 */
#ifndef HEADWAY_DECODER_H
#define HEADWAY_DECODER_H

#include "decoder_structs.h"
#include "team.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct decoder decoder;

/* `head` is the product that gives the logits, or NULL. The result is NULL when memory is short. */
EXPORT decoder *headway_decoder_new(const decoder_shape *shape, const layer_weights *layers, linear *head);
EXPORT void headway_decoder_free(decoder *the_decoder);

/* 0 when memory is short (nothing has been written then), else 1. */
EXPORT int headway_decoder_run(decoder *the_decoder, team *with, const decoder_step *step);

#endif

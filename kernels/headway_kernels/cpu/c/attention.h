/* Attention over paged keys and values.
 *
 * Owns: the layout of a block, writing to it, and attending over a block table.
 * Must not know: layers, projections, or which request a row belongs to.
 *
 * A block of one layer and one key-value head is its keys, then its values. Positions form groups of LANES. The keys of
 * a group are stored component by component: one register is one component of LANES positions. The values are stored
 * position by position. A block size that is not a multiple of LANES wastes the rest of a group. In bfloat16, two
 * components of a position's key stand side by side, and a component of two positions' values.
 *
 * Softmax runs over chunks of CHUNK positions, always cut at multiples of CHUNK from the start of the sequence (Milakov
 * & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). So the result of a token is the same to the
 * last bit in a prompt, in a later chunk or alone, and in any batch.
 */
#ifndef HEADWAY_ATTENTION_H
#define HEADWAY_ATTENTION_H

#include <stdint.h>

#include "vectors.h"

#define MAX_HEAD_DIM 576 /* a row of latent attention, as it is published: 512 channels and 64 */

/* How keys and values are stored: float32; bfloat16, which is widened; or bfloat16 whose pairs are multiplied, with
 * queries and weights that are rounded to bfloat16, too: only for processors with the instruction. */
enum kv_form { KV_FLOAT32 = 0, KV_BFLOAT16 = 1, KV_PAIRS = 2 };

/* Of what heads give: none; their sigmoids multiply it; or they do, once they are ln(1 + e^gate). */
enum gate_kind { GATES_NONE = 0, GATES_SIGMOID = 1, GATES_SOFTPLUS = 2 };

/* head_dim is a multiple of LANES, at most MAX_HEAD_DIM: the caller pads heads with zeros.
 *
 * `biases` [num_heads, bias_stride] or NULL are added to scaled scores. That of a key is at its position; or, if there
 * is a last_distance, at last_distance less its distance (Press et al. 2021, arXiv 2108.12409). LANES +
 * MOST_ATTENDING more of them are readable. */
typedef struct {
    int64_t gates; /* enum gate_kind */
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t block_stride; /* numbers from a block of a layer to its next one */
    float scale;
    float softcap; /* bounds scores smoothly; 0: does not */
    int64_t form;
    const float *biases;
    int64_t bias_stride;
    int64_t last_distance;
} attention_shape;

/* Numbers of one block for one layer, all its heads; and bytes of a number. */
int64_t block_floats(const attention_shape *shape);
static inline int64_t bytes_of_number(const attention_shape *shape) { return shape->form == KV_FLOAT32 ? 4 : 2; }

/* Whether the matrix unit multiplies; and the rows, each of a token and a head, that one task takes at most. */
#define MOST_ON_TILES (2 * TILE_SIDE)
#define MOST_ATTENDING (HAS_TILES ? MOST_ON_TILES : TILE_ROWS)
static inline int is_on_tiles(const attention_shape *shape) { return HAS_TILES && shape->form == KV_PAIRS; }

/* How many parts a group of query heads has, and the heads of each but perhaps the last, which one task takes together:
 * parts are as equal as can be, because a task of few heads uses its registers badly. */
static inline int64_t parts_per_head(const attention_shape *shape) {
    const int64_t most = is_on_tiles(shape) ? TILE_SIDE : TILE_ROWS;
    return (shape->num_heads / shape->num_kv_heads + most - 1) / most;
}
static inline int64_t heads_per_part(const attention_shape *shape) {
    const int64_t parts = parts_per_head(shape);
    return (shape->num_heads / shape->num_kv_heads + parts - 1) / parts;
}
/* Tokens of one row that one task takes together at most. */
static inline int64_t tokens_per_tile(const attention_shape *shape) {
    return (is_on_tiles(shape) ? MOST_ON_TILES : TILE_ROWS) / heads_per_part(shape);
}

/* Store key and value of one head (each head_dim floats) at `position` of the row with block table `table`. */
void store_key_value(const attention_shape *shape, void *layer, const int32_t *table, int64_t position, int64_t head,
                     const float *key, const float *value);

/* The input of one task: `num_tokens` (at most tokens_per_tile) tokens of the row with block table `table`, from
 * position first_position on, and part `part` of the query heads of `kv_head`. */
typedef struct {
    const int32_t *table;
    int64_t first_position;
    int64_t num_tokens;
    int64_t kv_head;
    int64_t part;
} attention_task;

/* `queries` and `out`: head 0 of the first token; tokens are `query_stride` and `out_stride` apart. `gates`, which lie
 * as queries do, or their sigmoids if they are such, multiply the results; NULL: nothing does. A token sees the last
 * `window` positions up to its own; 0: all. `sinks` [num_heads] or NULL: in the softmax of each head one more score,
 * which has no value (Xiao et al. 2023, arXiv 2309.17453). `next`, if not NULL, is the probable next task of this
 * thread: its keys and values are fetched into the cache. */
void attend(const attention_shape *shape, const void *layer, const attention_task *task, const attention_task *next,
            int64_t window, const float *sinks, const float *queries, const float *gates, int64_t query_stride,
            float *out, int64_t out_stride);

#endif

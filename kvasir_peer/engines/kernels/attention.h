/* Attention of some rows over a cache of keys and values. */
#ifndef KVASIR_ATTENTION_H
#define KVASIR_ATTENTION_H

#include "work.h"

/* Positions of a block of keys. */
#define BLOCK 16
/* Most dimensions of a key; latent ones have 576. */
#define WIDEST_KEY 1024

/* Keys of a slot and head lie in blocks of 16 positions, [context / 16, key, 16], so that a vector holds one dimension
 * of 16 keys; values lie position by position, [context, value_wide]. With latent attention there are no values: they
 * are the first dimensions of the keys. */
struct attention {
    size_t heads, kv_heads; /* of queries; of keys and values */
    size_t key, value;      /* dimensions of a head */
    size_t slots, context;  /* of the cache; the context is a multiple of 16 */
    size_t rotated, from;   /* dimensions that are rotated by position, and the first of them */
    bool adjacent;          /* pairs are neighbours, else halves of what is rotated */
    bool latent;
    size_t window; /* positions that a row sees, itself included; 0 for all */
    float scale;   /* of scores */
    float cap;     /* scores become cap * tanh(score / cap); 0 for as they are */
};

/* What one call reads and writes. */
struct attended {
    const float *q, *k, *v; /* [n, heads * key], [n, kv_heads * key], [n, kv_heads * value] */
    size_t q_step, k_step, v_step; /* from one row to the next */
    const int32_t *slots, *positions; /* [n]; rows of a slot follow each other, at consecutive positions */
    const float *cos, *sin; /* [context, rotated / 2] */
    const float *sinks;     /* [heads]: takes part in the softmax and adds nothing; or NULL */
    float *keys, *values;   /* the cache */
    float *out;             /* [n, heads * value] */
    size_t n;
};

/* Values of a head in the cache: whole vectors. */
INLINE size_t value_wide(const struct attention *a) { return (a->value + BLOCK - 1) / BLOCK * BLOCK; }

/* Floats of the caches of keys and of values. */
INLINE size_t keys_size(const struct attention *a) { return a->slots * a->kv_heads * a->context * a->key; }
INLINE size_t values_size(const struct attention *a) {
    return a->latent ? 0 : a->slots * a->kv_heads * a->context * value_wide(a);
}

/* Put the rows' keys and values into the cache, and attend. False without memory. */
bool attend(const struct threads *threads, const struct attention *a, const struct attended *c);

#endif

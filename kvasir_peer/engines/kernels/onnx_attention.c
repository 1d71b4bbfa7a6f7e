/* Attention (q float [n, ...], k, v float [n, ...] or none where they stand behind q in its rows, slots int32 [n, 1],
 *            positions int32 [n, 1], keys float, values float or none, cos, sin float [context, rotated / 2],
 *            sinks float [heads] or none) -> float [n, heads * value]
 *     attributes heads, kv_heads, key, value, slots, context, rotated, from, adjacent, latent, window; scale, cap
 *     writes to keys and values, in place (see attention.h)
 */
#include <stdlib.h>

#include "attention.h"
#include "onnx_shared.h"

enum { Q, K, V_INPUT, SLOTS, POSITIONS, KEYS, VALUES, COS, SIN, SINKS, ATTENTION_INPUTS };

struct attention_operator {
    Api api;
    struct attention a;
};

static Status *attention_create(const struct operator_v20 *self, Api api, const Info *info, void **made) {
    (void)self;
    static const char *const NAMES[] = {"heads",   "kv_heads", "key",      "value",  "slots", "context",
                                        "rotated", "from",     "adjacent", "latent", "window"};
    int64_t v[11];
    float scale, cap;
    Status *status = attributes(api, info, NAMES, v, 11);
    if (status || (status = FLOAT_ATTRIBUTE(api)(info, "scale", &scale)) ||
        (status = FLOAT_ATTRIBUTE(api)(info, "cap", &cap)))
        return status;
    for (int i = 0; i < 11; i++)
        if (v[i] < (i < 6) || v[i] > INT32_MAX)
            return refuse(api, "Attention: an attribute is out of range");
    if (v[0] % v[1] || v[2] > WIDEST_KEY || v[5] % BLOCK || v[6] % 2 || v[6] + v[7] > v[2] || (v[9] && v[3] > v[2]))
        return refuse(api, "Attention: attributes do not fit each other");
    struct attention_operator *op = malloc(sizeof *op);
    if (!op)
        return CREATE_STATUS(api)(FAILED, "Attention: out of memory");
    *op = (struct attention_operator){api,
                                      {.heads = (size_t)v[0], .kv_heads = (size_t)v[1], .key = (size_t)v[2],
                                       .value = (size_t)v[3], .slots = (size_t)v[4], .context = (size_t)v[5],
                                       .rotated = (size_t)v[6], .from = (size_t)v[7], .adjacent = v[8] != 0,
                                       .latent = v[9] != 0, .window = (size_t)v[10], .scale = scale, .cap = cap}};
    *made = op;
    return NULL;
}

static Status *attention_compute(void *self, Context *context) {
    const struct attention_operator *op = self;
    const struct attention *a = &op->a;
    Api api = op->api;
    void *in[ATTENTION_INPUTS];
    int64_t dims[SLOTS][2] = {{0, 0}};
    Status *status;
    for (size_t i = Q; i < SLOTS; i++)
        if ((status = input(api, context, i, &in[i], dims[i], 0)))
            return status;
    const size_t n = (size_t)dims[Q][0], table = a->context * (a->rotated / 2);
    const size_t q = a->heads * a->key, k = a->kv_heads * a->key, v = a->latent ? 0 : a->kv_heads * a->value;
    const size_t elements[ATTENTION_INPUTS] = {[SLOTS] = n, [POSITIONS] = n, [KEYS] = keys_size(a),
                                               [VALUES] = values_size(a), [COS] = table, [SIN] = table,
                                               [SINKS] = a->heads};
    for (size_t i = SLOTS; i < ATTENTION_INPUTS; i++)
        if ((status = input(api, context, i, &in[i], NULL, elements[i])))
            return status;
    const bool apart = in[K] != NULL;
    if (!in[Q] || !in[SLOTS] || !in[POSITIONS] || !in[KEYS] || !in[COS] || !in[SIN] || (!a->latent && !in[VALUES]))
        return refuse(api, "Attention: an input is missing");
    if (dims[Q][1] != (int64_t)(apart ? q : q + k + v) ||
        (apart && (dims[K][0] != dims[Q][0] || dims[K][1] != (int64_t)k)) ||
        (in[V_INPUT] != NULL) != (apart && !a->latent) ||
        (in[V_INPUT] && (dims[V_INPUT][0] != dims[Q][0] || dims[V_INPUT][1] != (int64_t)v)))
        return refuse(api, "Attention: queries, keys and values do not fit each other and the heads");
    const int32_t *slots = in[SLOTS], *positions = in[POSITIONS];
    for (size_t i = 0; i < n; i++)
        if (slots[i] < 0 || (size_t)slots[i] >= a->slots || positions[i] < 0 || (size_t)positions[i] >= a->context)
            return refuse(api, "Attention: a row is outside of the cache");
    float *y;
    if ((status = output(api, context, 0, dims[Q][0], (int64_t)(a->heads * a->value), &y)))
        return status;
    struct call call = {api, context};
    struct threads threads = {run_parts, &call};
    struct attended c = {.q = in[Q], .k = in[K], .v = in[V_INPUT], .q_step = q, .k_step = k, .v_step = v,
                         .slots = slots, .positions = positions, .cos = in[COS], .sin = in[SIN], .sinks = in[SINKS],
                         .keys = in[KEYS], .values = in[VALUES], .out = y, .n = n};
    if (!apart) {
        c.k = c.q + q;
        c.v = c.k + k;
        c.q_step = c.k_step = c.v_step = q + k + v;
    }
    if (!attend(&threads, a, &c))
        return CREATE_STATUS(api)(FAILED, "Attention: out of memory");
    return NULL;
}

static const char *attention_name(const struct operator_v20 *self) {
    (void)self;
    return "Attention";
}
static size_t attention_inputs(const struct operator_v20 *self) {
    (void)self;
    return ATTENTION_INPUTS;
}
static enum element attention_input(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index == SLOTS || index == POSITIONS ? INT32 : FLOAT;
}
static enum presence attention_presence(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index == K || index == V_INPUT || index == VALUES || index == SINKS ? OPTIONAL : REQUIRED;
}

const struct operator_v20 ATTENTION = {
    .version = API_VERSION, .name = attention_name, .provider = no_provider, .input_type = attention_input,
    .input_count = attention_inputs, .output_type = is_float, .output_count = one, .destroy = free,
    .input_presence = attention_presence, .output_presence = required, .input_memory = no_memory,
    .create_v2 = attention_create, .compute = attention_compute,
};

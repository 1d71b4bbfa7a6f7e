/* Operators for onnxruntime, in the domain "kvasir": Linear, Embedding, FeedForward and Attention.
 *
 * Linear (x float [n, columns], panels uint8, bias float [rows] or none) -> float [n, rows]
 *     attributes type, rows, columns, exact
 * Embedding (tokens int32 [n, 1], panels uint8) -> float [n, columns]: rows of the matrix
 *     attributes type, rows, columns; scale
 * FeedForward (x float [n, columns], gate, up, down uint8, places int32 [n, k] or none, mix float [n, k] or none,
 *              gate_bias, up_bias float [experts, width] or none, down_bias float [experts, columns] or none)
 *     -> float [n, columns], int32 [1, 2] or none: experts that were computed, and rows of all of them
 *     attributes gate_type, up_type, down_type, columns, width, experts, activation, exact
 * Attention (q float [n, ...], k, v float [n, ...] or none where they stand behind q in its rows, slots int32 [n, 1],
 *            positions int32 [n, 1], keys float, values float or none, cos, sin float [context, rotated / 2],
 *            sinks float [heads] or none) -> float [n, heads * value]
 *     attributes heads, kv_heads, key, value, slots, context, rotated, from, adjacent, latent, window; scale, cap
 *     writes to keys and values, in place (see attention.h)
 *
 * With `exact` activations stay float32 in Linear and FeedForward; else they are rounded to int8, 32 at a time.
 */
#include <stdio.h>
#include <stdlib.h>

#include "attention.h"
#include "onnx_abi.h"
#include "work.h"

/* No matrix is so long or wide, nor are there so many experts; sizes of any within fit a size_t. */
#define MOST (1 << 22)

struct call {
    Api api;
    Context *context;
};

static bool run_parts(const void *self, void (*part)(void *, size_t), size_t count, void *data) {
    const struct call *call = self;
    return PARALLEL_FOR(call->api)(call->context, part, count, 0, data) == NULL;
}

static Status *refuse(Api api, const char *what) { return CREATE_STATUS(api)(INVALID_ARGUMENT, what); }

/* An input's data, NULL where it is left out. It has two dimensions, which are returned, or as many elements as given. */
static Status *input(Api api, const Context *context, size_t index, void **data, int64_t dims[2], size_t elements) {
    size_t count;
    const Value *value = NULL;
    Shape *shape;
    *data = NULL;
    Status *status = INPUT_COUNT(api)(context, &count);
    if (status || index >= count)
        return status;
    status = INPUT(api)(context, index, &value);
    if (status || !value)
        return status;
    status = SHAPE_OF(api)(value, &shape);
    if (status)
        return status;
    status = dims ? DIMENSIONS_COUNT(api)(shape, &count) : ELEMENTS(api)(shape, &count);
    if (!status && dims)
        status = count == 2 ? DIMENSIONS(api)(shape, dims, 2) : refuse(api, "an input has not two dimensions");
    else if (!status && count != elements)
        status = refuse(api, "weights or biases are not of the size that type, rows and columns make");
    RELEASE_SHAPE(api)(shape);
    return status ? status : TENSOR_DATA(api)((Value *)value, data);
}

static Status *output(Api api, Context *context, size_t index, int64_t n, int64_t width, void *data) {
    int64_t dims[2] = {n, width};
    Value *value;
    Status *status = OUTPUT(api)(context, index, dims, 2, &value);
    return status ? status : TENSOR_DATA(api)(value, data);
}

static Status *attributes(Api api, const Info *info, const char *const *names, int64_t *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        Status *status = ATTRIBUTE(api)(info, names[i], &values[i]);
        if (status)
            return status;
    }
    return NULL;
}

static bool fits(const struct kind *kind, int64_t rows, int64_t columns) {
    return kind && rows > 0 && rows <= MOST && columns > 0 && columns <= MOST && columns % kind->block == 0;
}

static size_t bytes_of(const struct matrix *w, size_t count) {
    return count * ((w->rows + PANEL_ROWS - 1) / PANEL_ROWS) * panel_bytes(w->kind->bits, w->kind->scales, w->columns);
}

static enum element is_float(const struct operator_v20 *self, size_t index) {
    (void)self, (void)index;
    return FLOAT;
}
static size_t one(const struct operator_v20 *self) {
    (void)self;
    return 1;
}
static enum presence required(const struct operator_v20 *self, size_t index) {
    (void)self, (void)index;
    return REQUIRED;
}
static const char *no_provider(const struct operator_v20 *self) {
    (void)self;
    return NULL;
}
static int no_memory(const struct operator_v20 *self, size_t index) {
    (void)self, (void)index;
    return 0;
}

/* ------------------------------------------------------------------------------------------------ Linear */

struct linear_operator {
    Api api;
    struct matrix w;
    bool exact;
};

static Status *find_matrix(Api api, const Info *info, struct matrix *w) {
    static const char *const NAMES[] = {"type", "rows", "columns"};
    int64_t v[3];
    Status *status = attributes(api, info, NAMES, v, 3);
    if (status)
        return status;
    const struct kind *kind = find_kind((int)v[0]);
    if (!fits(kind, v[1], v[2]))
        return refuse(api, "Linear: no such type, or a width that is no whole number of its blocks");
    *w = (struct matrix){kind, NULL, (size_t)v[1], (size_t)v[2]};
    return NULL;
}

static Status *linear_create(const struct operator_v20 *self, Api api, const Info *info, void **made) {
    (void)self;
    struct matrix w;
    int64_t exact;
    Status *status = find_matrix(api, info, &w);
    if (status || (status = ATTRIBUTE(api)(info, "exact", &exact)))
        return status;
    struct linear_operator *op = malloc(sizeof *op);
    if (!op)
        return CREATE_STATUS(api)(FAILED, "Linear: out of memory");
    *op = (struct linear_operator){api, w, exact != 0};
    *made = op;
    return NULL;
}

static Status *linear_compute(void *self, Context *context) {
    const struct linear_operator *op = self;
    Api api = op->api;
    int64_t dims[2];
    void *x, *panels, *bias;
    float *y;
    Status *status;
    if ((status = input(api, context, 0, &x, dims, 0)) ||
        (status = input(api, context, 1, &panels, NULL, bytes_of(&op->w, 1))) ||
        (status = input(api, context, 2, &bias, NULL, op->w.rows)))
        return status;
    if (!x || !panels || dims[1] != (int64_t)op->w.columns)
        return refuse(api, "Linear: an input is missing, or not as wide as the weights");
    if ((status = output(api, context, 0, dims[0], (int64_t)op->w.rows, &y)))
        return status;
    struct call call = {api, context};
    struct threads threads = {run_parts, &call};
    struct matrix w = op->w;
    w.panels = panels;
    if (!linear(&threads, &w, bias, x, (size_t)dims[0], op->exact, y))
        return CREATE_STATUS(api)(FAILED, "Linear: out of memory");
    return NULL;
}

static const char *linear_name(const struct operator_v20 *self) {
    (void)self;
    return "Linear";
}
static size_t linear_inputs(const struct operator_v20 *self) {
    (void)self;
    return 3;
}
static enum element linear_input(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index == 1 ? UINT8 : FLOAT;
}
static enum presence linear_presence(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index == 2 ? OPTIONAL : REQUIRED;
}

/* ------------------------------------------------------------------------------------------------ Embedding */

struct embedding_operator {
    Api api;
    struct matrix w;
    float scale;
};

static Status *embedding_create(const struct operator_v20 *self, Api api, const Info *info, void **made) {
    (void)self;
    struct matrix w;
    float scale;
    Status *status = FLOAT_ATTRIBUTE(api)(info, "scale", &scale);
    if (status || (status = find_matrix(api, info, &w)))
        return status;
    struct embedding_operator *op = malloc(sizeof *op);
    if (!op)
        return CREATE_STATUS(api)(FAILED, "Embedding: out of memory");
    *op = (struct embedding_operator){api, w, scale};
    *made = op;
    return NULL;
}

static Status *embedding_compute(void *self, Context *context) {
    const struct embedding_operator *op = self;
    Api api = op->api;
    struct matrix w = op->w;
    int64_t dims[2];
    void *tokens, *panels;
    float *y;
    Status *status;
    if ((status = input(api, context, 0, &tokens, dims, 0)) ||
        (status = input(api, context, 1, &panels, NULL, bytes_of(&w, 1))))
        return status;
    if (!tokens || !panels || dims[1] != 1)
        return refuse(api, "Embedding: an input is missing, or there is not one token in each row");
    const int32_t *which = tokens;
    for (int64_t i = 0; i < dims[0]; i++)
        if (which[i] < 0 || (size_t)which[i] >= w.rows)
            return refuse(api, "Embedding: a token is outside of the vocabulary");
    if ((status = output(api, context, 0, dims[0], (int64_t)w.columns, &y)))
        return status;
    struct call call = {api, context};
    struct threads threads = {run_parts, &call};
    w.panels = panels;
    if (!look_up(&threads, &w, op->scale, which, (size_t)dims[0], y))
        return CREATE_STATUS(api)(FAILED, "Embedding: out of memory");
    return NULL;
}

static const char *embedding_name(const struct operator_v20 *self) {
    (void)self;
    return "Embedding";
}
static size_t embedding_inputs(const struct operator_v20 *self) {
    (void)self;
    return 2;
}
static enum element embedding_input(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index ? UINT8 : INT32;
}

/* ------------------------------------------------------------------------------------------------ FeedForward */

enum { X, GATE, UP, DOWN, PLACES, MIX, GATE_BIAS, UP_BIAS, DOWN_BIAS, FORWARD_INPUTS };

struct forward_operator {
    Api api;
    struct experts experts;
};

static Status *forward_create(const struct operator_v20 *self, Api api, const Info *info, void **made) {
    (void)self;
    static const char *const NAMES[] = {"gate_type", "up_type", "down_type", "columns",
                                        "width", "experts", "activation", "exact"};
    int64_t v[8];
    Status *status = attributes(api, info, NAMES, v, 8);
    if (status)
        return status;
    const struct kind *gate = find_kind((int)v[0]), *up = find_kind((int)v[1]), *down = find_kind((int)v[2]);
    if (!fits(gate, v[4], v[3]) || !fits(up, v[4], v[3]) || !fits(down, v[3], v[4]) || v[5] < 1 || v[5] > MOST ||
        v[6] < SILU || v[6] > SWIGLU_OAI)
        return refuse(api, "FeedForward: no such type or activation, or a width that is no whole number of blocks");
    struct forward_operator *op = malloc(sizeof *op);
    if (!op)
        return CREATE_STATUS(api)(FAILED, "FeedForward: out of memory");
    const size_t columns = (size_t)v[3], width = (size_t)v[4];
    *op = (struct forward_operator){.api = api,
                                    .experts = {.gate = {gate, NULL, width, columns},
                                                .up = {up, NULL, width, columns},
                                                .down = {down, NULL, columns, width},
                                                .count = (size_t)v[5],
                                                .activation = (enum activation)v[6],
                                                .exact = v[7] != 0}};
    *made = op;
    return NULL;
}

static Status *forward_compute(void *self, Context *context) {
    const struct forward_operator *op = self;
    Api api = op->api;
    void *in[FORWARD_INPUTS];
    int64_t dims[2], choices[2] = {0, 1}, weights[2] = {0, 1};
    const struct matrix *gate = &op->experts.gate, *up = &op->experts.up, *down = &op->experts.down;
    const size_t count = op->experts.count, hidden = count * gate->rows;
    const size_t sizes[FORWARD_INPUTS] = {[GATE] = bytes_of(gate, count), [UP] = bytes_of(up, count),
                                          [DOWN] = bytes_of(down, count), [GATE_BIAS] = hidden,
                                          [UP_BIAS] = hidden, [DOWN_BIAS] = count * down->rows};
    float *y;
    Status *status;
    for (size_t i = 0; i < FORWARD_INPUTS; i++) {
        int64_t *wanted = i == X ? dims : i == PLACES ? choices : i == MIX ? weights : NULL;
        if ((status = input(api, context, i, &in[i], wanted, sizes[i])))
            return status;
    }
    if (!in[X] || !in[GATE] || !in[UP] || !in[DOWN] || dims[1] != (int64_t)op->experts.gate.columns)
        return refuse(api, "FeedForward: an input is missing, or not as wide as the weights");
    if (!in[PLACES] != !in[MIX] ||
        (in[PLACES] && (choices[0] != dims[0] || weights[0] != dims[0] || choices[1] != weights[1])))
        return refuse(api, "FeedForward: places and mix are not of one shape with a row for each of x");
    size_t outputs;
    int32_t *done = NULL;
    if ((status = output(api, context, 0, dims[0], dims[1], &y)) || (status = OUTPUT_COUNT(api)(context, &outputs)) ||
        (outputs > 1 && (status = output(api, context, 1, 1, 2, &done))))
        return status;
    struct call call = {api, context};
    struct threads threads = {run_parts, &call};
    struct experts e = op->experts;
    e.gate.panels = in[GATE];
    e.up.panels = in[UP];
    e.down.panels = in[DOWN];
    e.gate_bias = in[GATE_BIAS];
    e.up_bias = in[UP_BIAS];
    e.down_bias = in[DOWN_BIAS];
    if (!feed_forward(&threads, &e, in[X], in[PLACES], in[MIX], (size_t)dims[0], (size_t)choices[1], y, done))
        return CREATE_STATUS(api)(FAILED, "FeedForward: out of memory");
    return NULL;
}

static const char *forward_name(const struct operator_v20 *self) {
    (void)self;
    return "FeedForward";
}
static size_t forward_inputs(const struct operator_v20 *self) {
    (void)self;
    return FORWARD_INPUTS;
}
static enum element forward_input(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index == PLACES ? INT32 : index >= GATE && index <= DOWN ? UINT8 : FLOAT;
}
static enum presence forward_presence(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index >= PLACES ? OPTIONAL : REQUIRED;
}

static enum element forward_output(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index ? INT32 : FLOAT;
}
static size_t forward_outputs(const struct operator_v20 *self) {
    (void)self;
    return 2;
}
static enum presence forward_output_presence(const struct operator_v20 *self, size_t index) {
    (void)self;
    return index ? OPTIONAL : REQUIRED;
}

/* ------------------------------------------------------------------------------------------------ Attention */

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
    const size_t elements[ATTENTION_INPUTS] = {[SLOTS] = n,     [POSITIONS] = n, [KEYS] = keys_size(a), [VALUES] = values_size(a),
                                               [COS] = table, [SIN] = table,   [SINKS] = a->heads};
    for (size_t i = SLOTS; i < ATTENTION_INPUTS; i++)
        if ((status = input(api, context, i, &in[i], NULL, elements[i])))
            return status;
    const bool apart = in[K] != NULL;
    if (!in[Q] || !in[SLOTS] || !in[POSITIONS] || !in[KEYS] || !in[COS] || !in[SIN] || (!a->latent && !in[VALUES]))
        return refuse(api, "Attention: an input is missing");
    if (dims[Q][1] != (int64_t)(apart ? q : q + k + v) || (apart && (dims[K][0] != dims[Q][0] || dims[K][1] != (int64_t)k)) ||
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

/* ------------------------------------------------------------------------------------------------ registration */

static const struct operator_v20 LINEAR = {
    .version = API_VERSION, .name = linear_name, .provider = no_provider, .input_type = linear_input,
    .input_count = linear_inputs, .output_type = is_float, .output_count = one, .destroy = free,
    .input_presence = linear_presence, .output_presence = required, .input_memory = no_memory,
    .create_v2 = linear_create, .compute = linear_compute,
};
static const struct operator_v20 EMBEDDING = {
    .version = API_VERSION, .name = embedding_name, .provider = no_provider, .input_type = embedding_input,
    .input_count = embedding_inputs, .output_type = is_float, .output_count = one, .destroy = free,
    .input_presence = required, .output_presence = required, .input_memory = no_memory,
    .create_v2 = embedding_create, .compute = embedding_compute,
};
static const struct operator_v20 FEED_FORWARD = {
    .version = API_VERSION, .name = forward_name, .provider = no_provider, .input_type = forward_input,
    .input_count = forward_inputs, .output_type = forward_output, .output_count = forward_outputs, .destroy = free,
    .input_presence = forward_presence, .output_presence = forward_output_presence, .input_memory = no_memory,
    .create_v2 = forward_create, .compute = forward_compute,
};

static const struct operator_v20 ATTENTION = {
    .version = API_VERSION, .name = attention_name, .provider = no_provider, .input_type = attention_input,
    .input_count = attention_inputs, .output_type = is_float, .output_count = one, .destroy = free,
    .input_presence = attention_presence, .output_presence = required, .input_memory = no_memory,
    .create_v2 = attention_create, .compute = attention_compute,
};

/* One domain for all sessions of the process, which may refer to it as long as they live. */
static void *domain_of_all;

static Status *make_domain(Api api, void **made) {
    void *domain;
    Status *status;
    if ((status = CREATE_DOMAIN(api)("kvasir", &domain)) || (status = ADD_OPERATOR(api)(domain, &LINEAR)) ||
        (status = ADD_OPERATOR(api)(domain, &FEED_FORWARD)) || (status = ADD_OPERATOR(api)(domain, &ATTENTION)) || (status = ADD_OPERATOR(api)(domain, &EMBEDDING)))
        return status;
    void *none = NULL;
    /* Where two threads begin at once, one domain is made for nothing. */
    *made = __atomic_compare_exchange_n(&domain_of_all, &none, domain, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ? domain
                                                                                                        : none;
    return NULL;
}

__attribute__((visibility("default"))) Status *RegisterCustomOps(void *options, const struct api_base *base) {
    Api api = base->get_api(API_VERSION);
    if (!api)
        return NULL; /* older than what is asked for: the operators are missing then, which their use will show */
    void *domain = __atomic_load_n(&domain_of_all, __ATOMIC_ACQUIRE);
    Status *status = domain ? NULL : make_domain(api, &domain);
    return status ? status : ADD_DOMAIN(api)(options, domain);
}

/* Embedding (tokens int32 [n, 1], panels uint8) -> float [n, columns]: rows of the matrix
 *     attributes type, rows, columns; scale
 */
#include <stdlib.h>

#include "onnx_shared.h"

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

const struct operator_v20 EMBEDDING = {
    .version = API_VERSION, .name = embedding_name, .provider = no_provider, .input_type = embedding_input,
    .input_count = embedding_inputs, .output_type = is_float, .output_count = one, .destroy = free,
    .input_presence = required, .output_presence = required, .input_memory = no_memory,
    .create_v2 = embedding_create, .compute = embedding_compute,
};

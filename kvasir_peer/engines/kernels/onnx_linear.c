/* Linear (x float [n, columns], panels uint8, bias float [rows] or none) -> float [n, rows]
 *     attributes type, rows, columns, exact
 *
 * With `exact` activations stay float32; else they are rounded to int8, 32 at a time.
 */
#include <stdlib.h>

#include "onnx_shared.h"

struct linear_operator {
    Api api;
    struct matrix w;
    bool exact;
};

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

const struct operator_v20 LINEAR = {
    .version = API_VERSION, .name = linear_name, .provider = no_provider, .input_type = linear_input,
    .input_count = linear_inputs, .output_type = is_float, .output_count = one, .destroy = free,
    .input_presence = linear_presence, .output_presence = required, .input_memory = no_memory,
    .create_v2 = linear_create, .compute = linear_compute,
};

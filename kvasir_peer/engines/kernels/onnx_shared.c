/* What the operators share: see onnx_shared.h. */
#include "onnx_shared.h"

bool run_parts(const void *self, void (*part)(void *, size_t), size_t count, void *data) {
    const struct call *call = self;
    return PARALLEL_FOR(call->api)(call->context, part, count, 0, data) == NULL;
}

Status *refuse(Api api, const char *what) { return CREATE_STATUS(api)(INVALID_ARGUMENT, what); }

Status *attributes(Api api, const Info *info, const char *const *names, int64_t *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        Status *status = ATTRIBUTE(api)(info, names[i], &values[i]);
        if (status)
            return status;
    }
    return NULL;
}

bool fits(const struct kind *kind, int64_t rows, int64_t columns) {
    return kind && rows > 0 && rows <= MOST && columns > 0 && columns <= MOST && columns % kind->block == 0;
}

Status *find_matrix(Api api, const Info *info, struct matrix *w) {
    static const char *const NAMES[] = {"type", "rows", "columns"};
    int64_t v[3];
    Status *status = attributes(api, info, NAMES, v, 3);
    if (status)
        return status;
    const struct kind *kind = find_kind((int)v[0]);
    if (!fits(kind, v[1], v[2]))
        return refuse(api, "Linear or Embedding: no such type, or a width that is no whole number of its blocks");
    *w = (struct matrix){kind, NULL, (size_t)v[1], (size_t)v[2]};
    return NULL;
}

size_t bytes_of(const struct matrix *w, size_t count) {
    return count * ((w->rows + PANEL_ROWS - 1) / PANEL_ROWS) * panel_bytes(w->kind->bits, w->kind->scales, w->columns);
}

Status *input(Api api, const Context *context, size_t index, void **data, int64_t dims[2], size_t elements) {
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

Status *output(Api api, Context *context, size_t index, int64_t n, int64_t width, void *data) {
    int64_t dims[2] = {n, width};
    Value *value;
    Status *status = OUTPUT(api)(context, index, dims, 2, &value);
    return status ? status : TENSOR_DATA(api)(value, data);
}

enum element is_float(const struct operator_v20 *self, size_t index) {
    (void)self, (void)index;
    return FLOAT;
}
size_t one(const struct operator_v20 *self) {
    (void)self;
    return 1;
}
enum presence required(const struct operator_v20 *self, size_t index) {
    (void)self, (void)index;
    return REQUIRED;
}
const char *no_provider(const struct operator_v20 *self) {
    (void)self;
    return NULL;
}
int no_memory(const struct operator_v20 *self, size_t index) {
    (void)self, (void)index;
    return 0;
}

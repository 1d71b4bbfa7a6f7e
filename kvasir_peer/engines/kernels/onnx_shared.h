/* What operators for onnxruntime share: how they come by attributes, inputs, outputs and threads. */
#ifndef KVASIR_ONNX_SHARED_H
#define KVASIR_ONNX_SHARED_H

#include "onnx_abi.h"
#include "work.h"

/* No matrix is so long or wide, nor are there so many experts. */
#define MOST (1 << 22)

extern const struct operator_v20 LINEAR, EMBEDDING, FEED_FORWARD, ATTENTION;

/* One call of an operator. */
struct call {
    Api api;
    Context *context;
};

/* For `struct threads`, whose `self` is a call. */
bool run_parts(const void *self, void (*part)(void *, size_t), size_t count, void *data);

/* An error of who made the graph. */
Status *refuse(Api api, const char *what);

Status *attributes(Api api, const Info *info, const char *const *names, int64_t *values, size_t count);

/* Whether a matrix can be of that type and size. */
bool fits(const struct kind *kind, int64_t rows, int64_t columns);

/* A matrix by the attributes type, rows and columns; its panels are an input. */
Status *find_matrix(Api api, const Info *info, struct matrix *w);

/* Bytes of the panels of `count` matrices. */
size_t bytes_of(const struct matrix *w, size_t count);

/* An input's data, NULL where it is left out. It has two dimensions, which are returned, or as many elements as
 * given. */
Status *input(Api api, const Context *context, size_t index, void **data, int64_t dims[2], size_t elements);

/* Where an output [n, width] goes. */
Status *output(Api api, Context *context, size_t index, int64_t n, int64_t width, void *data);

/* What most operators answer to onnxruntime's questions. */
enum element is_float(const struct operator_v20 *self, size_t index);
size_t one(const struct operator_v20 *self);
enum presence required(const struct operator_v20 *self, size_t index);
const char *no_provider(const struct operator_v20 *self);
int no_memory(const struct operator_v20 *self, size_t index);

#endif

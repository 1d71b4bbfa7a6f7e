/* The part of onnxruntime's C interface that operators of our own need.
 *
 * The interface is a table of functions that only ever grows at its end, and a structure for operators that states
 * its version; so places in the table and the fields below are the same in every release since the one named here
 * (onnxruntime_c_api.h, API version 20, onnxruntime 1.20). onnxruntime's wheels bring no headers.
 */
#ifndef KVASIR_ONNX_ABI_H
#define KVASIR_ONNX_ABI_H

#include <stddef.h>
#include <stdint.h>

#define API_VERSION 20

typedef void *const *Api; /* the table */
struct api_base {
    Api (*get_api)(uint32_t version);
    const char *(*get_version)(void);
};

typedef struct status Status; /* NULL where all went well */
typedef struct context Context;
typedef struct info Info;
typedef struct value Value;
typedef struct shape Shape;

/* Functions of the table that are used, by their places. */
#define CREATE_STATUS(api) ((Status * (*)(int, const char *))(api)[0])
#define CREATE_DOMAIN(api) ((Status * (*)(const char *, void **))(api)[26])
#define ADD_OPERATOR(api) ((Status * (*)(void *, const struct operator_v20 *))(api)[27])
#define ADD_DOMAIN(api) ((Status * (*)(void *, void *))(api)[28])
#define TENSOR_DATA(api) ((Status * (*)(Value *, void **))(api)[51])
#define DIMENSIONS_COUNT(api) ((Status * (*)(const Shape *, size_t *))(api)[61])
#define DIMENSIONS(api) ((Status * (*)(const Shape *, int64_t *, size_t))(api)[62])
#define ELEMENTS(api) ((Status * (*)(const Shape *, size_t *))(api)[64])
#define SHAPE_OF(api) ((Status * (*)(const Value *, Shape **))(api)[65])
#define FLOAT_ATTRIBUTE(api) ((Status * (*)(const Info *, const char *, float *))(api)[85])
#define ATTRIBUTE(api) ((Status * (*)(const Info *, const char *, int64_t *))(api)[86])
#define INPUT_COUNT(api) ((Status * (*)(const Context *, size_t *))(api)[88])
#define OUTPUT_COUNT(api) ((Status * (*)(const Context *, size_t *))(api)[89])
#define INPUT(api) ((Status * (*)(const Context *, size_t, const Value **))(api)[90])
#define OUTPUT(api) ((Status * (*)(Context *, size_t, const int64_t *, size_t, Value **))(api)[91])
#define RELEASE_SHAPE(api) ((void (*)(Shape *))(api)[99])
#define PARALLEL_FOR(api) ((Status * (*)(const Context *, void (*)(void *, size_t), size_t, size_t, void *))(api)[274])

enum element { FLOAT = 1, UINT8 = 2, INT32 = 6 };
enum presence { REQUIRED = 0, OPTIONAL = 1 };
enum { FAILED = 1, INVALID_ARGUMENT = 2 };

/* OrtCustomOp, up to what API version 20 knows. */
struct operator_v20 {
    uint32_t version;
    void *(*create)(const struct operator_v20 *, Api, const Info *);
    const char *(*name)(const struct operator_v20 *);
    const char *(*provider)(const struct operator_v20 *);
    enum element (*input_type)(const struct operator_v20 *, size_t);
    size_t (*input_count)(const struct operator_v20 *);
    enum element (*output_type)(const struct operator_v20 *, size_t);
    size_t (*output_count)(const struct operator_v20 *);
    void (*compute_v1)(void *, Context *);
    void (*destroy)(void *);
    enum presence (*input_presence)(const struct operator_v20 *, size_t);
    enum presence (*output_presence)(const struct operator_v20 *, size_t);
    int (*input_memory)(const struct operator_v20 *, size_t);
    int (*variadic_input_least)(const struct operator_v20 *);
    int (*variadic_input_alike)(const struct operator_v20 *);
    int (*variadic_output_least)(const struct operator_v20 *);
    int (*variadic_output_alike)(const struct operator_v20 *);
    Status *(*create_v2)(const struct operator_v20 *, Api, const Info *, void **);
    Status *(*compute)(void *, Context *);
    Status *(*infer_shape)(const struct operator_v20 *, void *);
    int (*first_version)(const struct operator_v20 *);
    int (*last_version)(const struct operator_v20 *);
    size_t (*may_reuse)(int **, int **);
    void (*release_may_reuse)(int *, int *);
    size_t (*aliases)(int **, int **);
    void (*release_aliases)(int *, int *);
};

#endif

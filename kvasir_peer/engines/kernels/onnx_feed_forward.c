/* FeedForward (x float [n, columns], gate, up, down uint8, places int32 [n, k] or none, mix float [n, k] or none,
 *              gate_bias, up_bias float [experts, width] or none, down_bias float [experts, columns] or none)
 *     -> float [n, columns], int32 [1, 2] or none: experts that were computed, and rows of all of them
 *     attributes gate_type, up_type, down_type, columns, width, experts, activation, exact, first
 *
 * With `exact` activations stay float32; else they are rounded to int8, 32 at a time. `first` says that it is the first
 * of a run to use other threads, which may sleep then.
 */
#include <stdlib.h>
#include <time.h>

#include "onnx_shared.h"
#include "pace.h"

enum { X, GATE, UP, DOWN, PLACES, MIX, GATE_BIAS, UP_BIAS, DOWN_BIAS, FORWARD_INPUTS };

struct forward_operator {
    Api api;
    struct experts experts;
    bool first;
    struct pace pace;
};

static bool run_alone(const void *self, void (*part)(void *, size_t), size_t count, void *data) {
    (void)self;
    for (size_t i = 0; i < count; i++)
        part(data, i);
    return true;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static Status *forward_create(const struct operator_v20 *self, Api api, const Info *info, void **made) {
    (void)self;
    static const char *const NAMES[] = {"gate_type", "up_type", "down_type", "columns",
                                        "width", "experts", "activation", "exact",
                                        "first"};
    int64_t v[9];
    Status *status = attributes(api, info, NAMES, v, 9);
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
                                                .exact = v[7] != 0},
                                    .first = v[8] != 0};
    *made = op;
    return NULL;
}

static Status *forward_compute(void *self, Context *context) {
    struct forward_operator *op = self;
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
    const size_t pairs = (size_t)(dims[0] * choices[1]), used = pairs < count ? pairs : count;
    const size_t bytes = bytes_of(gate, used) + bytes_of(up, used) + bytes_of(down, used);
    const bool alone = op->first && go_alone(&op->pace, bytes);
    const double begin = op->first ? now() : 0.0;
    if (alone)
        threads.run = run_alone;
    const bool well = feed_forward(&threads, &e, in[X], in[PLACES], in[MIX], (size_t)dims[0], (size_t)choices[1], y, done);
    if (op->first)
        note_pace(&op->pace, alone, bytes, now() - begin);
    if (!well)
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

const struct operator_v20 FEED_FORWARD = {
    .version = API_VERSION, .name = forward_name, .provider = no_provider, .input_type = forward_input,
    .input_count = forward_inputs, .output_type = forward_output, .output_count = forward_outputs, .destroy = free,
    .input_presence = forward_presence, .output_presence = forward_output_presence, .input_memory = no_memory,
    .create_v2 = forward_create, .compute = forward_compute,
};

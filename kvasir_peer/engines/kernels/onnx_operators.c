/* Operators for onnxruntime, in the domain "kvasir". */
#include "onnx_shared.h"

static const struct operator_v20 *const OPERATORS[] = {&LINEAR, &EMBEDDING, &FEED_FORWARD, &ATTENTION};

/* One domain for all sessions of the process, which may refer to it as long as they live. */
static void *domain_of_all;

static Status *make_domain(Api api, void **made) {
    void *domain;
    Status *status = CREATE_DOMAIN(api)("kvasir", &domain);
    for (size_t i = 0; !status && i < sizeof OPERATORS / sizeof *OPERATORS; i++)
        status = ADD_OPERATOR(api)(domain, OPERATORS[i]);
    if (status)
        return status;
    void *none = NULL;
    /* Where two threads begin at once, one domain is made for nothing. */
    const bool first =
        __atomic_compare_exchange_n(&domain_of_all, &none, domain, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    *made = first ? domain : none;
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

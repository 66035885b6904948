// How far every method is from the full cache, document by document.
#pragma once

#include "compare.h"
#include "documents.h"
#include "methods.h"

#include <string>
#include <vector>

namespace sekv_eval {

// One line of the table, and of "rows" in eval.json.
struct fidelity_row {
    std::string document;
    int32_t n_ctx = 0;               // prompt tokens
    std::string method;
    sekv_llama::fidelity fidelity;
    double top1() const { return fidelity.top1(); }
    double dnll() const;             // nats a token more than the full cache needs
    uint64_t fast_bytes = 0;
    uint64_t slow_bytes = 0;
    uint64_t full_f16_bytes = 0;
    double fetched_mean = 0.0;
    double fetched_p99 = 0.0;
    double fast_fraction() const { return full_f16_bytes > 0 ? static_cast<double>(fast_bytes) / full_f16_bytes : 0.0; }
};

// Teacher-forces the document's continuation through all methods at once. `stretches`, where
// given, gets each method's fidelity over that many equal stretches, one after another.
std::vector<fidelity_row> measure_document(const sekv_llama::loaded_model & model, const sekv_model * sekv,
                                           const document & document, const std::vector<method> & methods, int32_t n_threads,
                                           std::vector<std::vector<sekv_llama::fidelity>> * stretches = nullptr,
                                           int32_t n_stretches = 1);

// Every document; the first row of each is `full`.
std::vector<fidelity_row> measure_documents(const sekv_llama::loaded_model & model, const sekv_model * sekv,
                                            const std::vector<document> & documents, const std::vector<method> & methods,
                                            int32_t n_threads);

// By document, then pooled over all tokens by context length and over everything.
void print_fidelity(const std::vector<fidelity_row> & rows, const std::vector<method> & methods);

// The bounds that the project promises for these rows; each missed one is printed. True: all hold.
bool check_fidelity(const std::vector<fidelity_row> & rows);

}  // namespace sekv_eval

#include "fidelity.h"

#include "fan_out.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>

namespace sekv_eval {

namespace {

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Means over all tokens of the rows; bytes and fetches over rows.
struct pooled_rows {
    sekv_llama::fidelity fidelity;
    double fast_fraction = 0.0, fetched = 0.0, worst_document = 0.0;
    int32_t n_rows = 0;

    void add(const fidelity_row & row) {
        fidelity.n_tokens += row.fidelity.n_tokens;
        fidelity.kl_sum += row.fidelity.kl_sum;
        fidelity.kl_max = std::max(fidelity.kl_max, row.fidelity.kl_max);
        fidelity.n_agree += row.fidelity.n_agree;
        fidelity.reference_nll += row.fidelity.reference_nll;
        fidelity.other_nll += row.fidelity.other_nll;
        fast_fraction += row.fast_fraction();
        fetched += row.fetched_mean;
        worst_document = std::max(worst_document, row.fidelity.kl_mean());
        n_rows++;
    }
};

pooled_rows pool(const std::vector<fidelity_row> & rows, const std::string & method, int32_t n_ctx) {
    pooled_rows pooled;
    for (const fidelity_row & row : rows) {
        if (row.method == method && (n_ctx == 0 || row.n_ctx == n_ctx)) {
            pooled.add(row);
        }
    }
    return pooled;
}

void print_pooled(const std::string & label, const std::string & method, const pooled_rows & pooled) {
    if (pooled.n_rows == 0) {
        return;
    }
    const double n = pooled.fidelity.n_tokens;
    std::printf("%-22s %-26s %9.6f %8.4f %7.2f %9.5f %8.2f %9.1f\n", label.c_str(), method.c_str(),
                pooled.fidelity.kl_mean(), pooled.fidelity.kl_max, 100.0 * pooled.fidelity.top1(),
                (pooled.fidelity.other_nll - pooled.fidelity.reference_nll) / n, 100.0 * pooled.fast_fraction / pooled.n_rows,
                pooled.fetched / pooled.n_rows);
}

void print_heading() {
    std::printf("%-22s %-26s %9s %8s %7s %9s %8s %9s\n", "document", "method", "KL mean", "KL max", "top1 %", "dNLL",
                "fast %", "fetched");
}

fidelity_row full_row(const document & document, const fidelity_row & like) {
    fidelity_row row;
    row.document = document.name;
    row.n_ctx = document.n_prompt;
    row.method = "full";
    row.fidelity = like.fidelity;
    row.fidelity.kl_sum = row.fidelity.kl_max = row.fidelity.max_logit_difference = 0.0;
    row.fidelity.n_agree = row.fidelity.n_tokens;
    row.fidelity.other_nll = row.fidelity.reference_nll;
    row.fast_bytes = row.full_f16_bytes = like.full_f16_bytes;
    return row;
}

}  // namespace

double fidelity_row::dnll() const {
    return fidelity.n_tokens > 0 ? (fidelity.other_nll - fidelity.reference_nll) / fidelity.n_tokens : 0.0;
}

std::vector<fidelity_row> measure_document(const sekv_llama::loaded_model & model, const sekv_model * sekv,
                                           const document & document, const std::vector<method> & methods, int32_t n_threads,
                                           std::vector<std::vector<sekv_llama::fidelity>> * stretches, int32_t n_stretches) {
    const double start = seconds_now();
    const recording recorded = record(model, document.tokens, document.n_prompt, document.n_forced, n_threads);
    const double recorded_at = seconds_now();
    std::vector<running_method> running = start_methods(sekv, methods, recorded, n_threads);
    const double ingested_at = seconds_now();

    std::vector<fidelity_row> rows(methods.size());
    if (stretches != nullptr) {
        stretches->assign(methods.size(), std::vector<sekv_llama::fidelity>(n_stretches));
    }
    fan_out steps(model, running, n_threads);
    for (int32_t i = 0; i < document.n_forced; i++) {
        const int32_t pos = document.n_prompt + i;
        steps.step(document.tokens[pos], pos);
        const llama_token next = document.tokens[pos + 1];
        for (size_t m = 0; m < methods.size(); m++) {
            const float * logits = steps.logits(static_cast<int32_t>(m));
            rows[m].fidelity.add(recorded.reference_logits(i), logits, recorded.n_vocab, next);
            if (stretches != nullptr) {
                (*stretches)[m][i * n_stretches / document.n_forced].add(recorded.reference_logits(i), logits, recorded.n_vocab, next);
            }
        }
    }
    for (size_t m = 0; m < methods.size(); m++) {
        const sekv_statistics statistics = running[m].statistics();
        rows[m].document = document.name;
        rows[m].n_ctx = document.n_prompt;
        rows[m].method = methods[m].name;
        rows[m].fast_bytes = statistics.memory.fast_bytes;
        rows[m].slow_bytes = statistics.memory.slow_bytes;
        rows[m].full_f16_bytes = statistics.memory.full_f16_bytes;
        rows[m].fetched_mean = statistics.fetched_mean;
        rows[m].fetched_p99 = statistics.fetched_p99;
    }
    std::fprintf(stderr, "%s: read in %.0f s, %zu methods filled in %.0f s, %d steps in %.0f s\n", document.name.c_str(),
                 recorded_at - start, methods.size(), ingested_at - recorded_at, document.n_forced, seconds_now() - ingested_at);
    return rows;
}

std::vector<fidelity_row> measure_documents(const sekv_llama::loaded_model & model, const sekv_model * sekv,
                                            const std::vector<document> & documents, const std::vector<method> & methods,
                                            int32_t n_threads) {
    std::vector<fidelity_row> rows;
    for (const document & document : documents) {
        const std::vector<fidelity_row> measured = measure_document(model, sekv, document, methods, n_threads);
        if (!measured.empty()) {
            rows.push_back(full_row(document, measured[0]));
        }
        rows.insert(rows.end(), measured.begin(), measured.end());
    }
    return rows;
}

void print_fidelity(const std::vector<fidelity_row> & rows, const std::vector<method> & methods) {
    print_heading();
    std::map<int32_t, int32_t> lengths;
    for (const fidelity_row & row : rows) {
        lengths[row.n_ctx]++;
        pooled_rows one;
        one.add(row);
        print_pooled(row.document, row.method, one);
    }
    std::printf("\n");
    print_heading();
    for (const method & method : methods) {
        for (const auto & [n_ctx, count] : lengths) {
            print_pooled("pooled, " + std::to_string(n_ctx), method.name, pool(rows, method.name, n_ctx));
        }
        print_pooled("pooled, all", method.name, pool(rows, method.name, 0));
    }
    std::fflush(stdout);
}

bool check_fidelity(const std::vector<fidelity_row> & rows) {
    bool all_hold = true;
    const auto bound = [&](const std::string & what, double value, double least, double most) {
        if (!(value >= least && value <= most)) {
            std::printf("MISSED: %s is %.6g, %s %.6g was expected\n", what.c_str(), value, value < least ? "at least" : "at most",
                        value < least ? least : most);
            all_hold = false;
        }
    };
    const auto check = [&](const std::string & method, double kl, double worst, double fast_4k, double fast_8k) {
        const pooled_rows all = pool(rows, method, 0);
        if (all.n_rows == 0) {
            return;
        }
        bound(method + ", pooled KL", all.fidelity.kl_mean(), 0.0, kl);
        bound(method + ", worst document's KL", all.worst_document, 0.0, worst);
        const pooled_rows at_4k = pool(rows, method, 4096);
        const pooled_rows at_8k = pool(rows, method, 7680);
        if (at_4k.n_rows > 0) {
            bound(method + ", fast tier at 4,096, of f16", at_4k.fast_fraction / at_4k.n_rows, 0.0, fast_4k);
        }
        if (at_8k.n_rows > 0) {
            bound(method + ", fast tier at 7,680, of f16", at_8k.fast_fraction / at_8k.n_rows, 0.0, fast_8k);
        }
    };
    check("ladder", 0.0010, 0.0025, 0.125, 0.115);
    check("ladder-keys", 0.0016, INFINITY, 0.105, 0.095);
    if (const pooled_rows ladder = pool(rows, "ladder", 0); ladder.n_rows > 0) {
        bound("ladder, top-1 agreement", ladder.fidelity.top1(), 0.965, 1.0);
        bound("ladder, tokens fetched a step and KV head", ladder.fetched / ladder.n_rows, 0.0, 200.0);
    }
    // A constant added to every key must not matter.
    for (const fidelity_row & row : rows) {
        const size_t suffix = row.method.rfind("+bias");
        if (suffix == std::string::npos || row.document != rows[0].document) {
            continue;
        }
        const std::string plain = row.method.substr(0, suffix);
        const pooled_rows biased = pool(rows, row.method, 0);
        const pooled_rows unbiased = pool(rows, plain, 0);
        if (unbiased.n_rows == biased.n_rows) {
            bound(row.method + ", KL over that of " + plain, biased.fidelity.kl_mean() / unbiased.fidelity.kl_mean(), 0.99, 1.01);
        }
    }
    return all_hold;
}

}  // namespace sekv_eval

#include "eval_json.h"

#include <cinttypes>
#include <cstdio>
#include <stdexcept>

namespace sekv_eval {

void write_eval_json(const std::string & path, const std::vector<fidelity_row> & rows, const std::vector<needle_row> & needles) {
    // Whole or absent: a reader never finds half a file.
    const std::string part = path + ".part";
    std::FILE * file = std::fopen(part.c_str(), "w");
    if (file == nullptr) {
        throw std::runtime_error("the file " + part + " could not be written");
    }
    // Names are ours: none needs quoting.
    std::fprintf(file, "{\"rows\": [");
    const char * separator = "\n";
    for (const fidelity_row & row : rows) {
        std::fprintf(file, "%s  {\"doc\": \"%s\", \"n_ctx\": %d, \"n_tokens\": %d, \"method\": \"%s\", \"kl_mean\": %.9f, "
                           "\"kl_max\": %.9f, \"top1\": %.6f, \"dnll\": %.9f, \"fast_bytes\": %" PRIu64
                           ", \"fast_fraction_f16\": %.6f, \"slow_bytes\": %" PRIu64 ", \"fetched_mean\": %.3f, \"fetched_p99\": %.3f}",
                     separator, row.document.c_str(), row.n_ctx, row.fidelity.n_tokens, row.method.c_str(),
                     row.fidelity.kl_mean(), row.fidelity.kl_max, row.top1(), row.dnll(), row.fast_bytes, row.fast_fraction(),
                     row.slow_bytes, row.fetched_mean, row.fetched_p99);
        separator = ",\n";
    }
    std::fprintf(file, "\n], \"needles\": [");
    separator = "\n";
    for (const needle_row & row : needles) {
        std::fprintf(file, "%s  {\"prompt\": \"%s\", \"n_ctx\": %d, \"method\": \"%s\", \"solved\": %s, \"full_solved\": %s}",
                     separator, row.prompt.c_str(), row.n_ctx, row.method.c_str(), row.solved ? "true" : "false",
                     row.full_solved ? "true" : "false");
        separator = ",\n";
    }
    std::fprintf(file, "\n]}\n");
    const bool written = std::ferror(file) == 0;
    if (std::fclose(file) != 0 || !written || std::rename(part.c_str(), path.c_str()) != 0) {
        throw std::runtime_error("the file " + path + " could not be written");
    }
}

}  // namespace sekv_eval

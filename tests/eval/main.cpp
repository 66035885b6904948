// sekv-eval: how close is libsekv to the full cache, on real documents?
#include "bounds.h"
#include "documents.h"
#include "eval_json.h"
#include "fidelity.h"
#include "needles.h"
#include "streaming.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

using namespace sekv_eval;

namespace {

const char usage[] =
    R"(sekv-eval: the fidelity of libsekv on real documents, against llama.cpp's own F32 cache

  sekv-eval [mode] [options]

Modes
  (none)             documents and needles: the table, and target/eval.json
  --quick            one document, 4,096 + 128 tokens through the hook; KL <= 0.006
  --stream           streaming prefill in chunks of 512; KL <= 0.003
  --exact            raw f32, resident and sealed: llama.cpp's own words and logits
  --drift            1,000 tokens past a prompt of 3,072; last quarter <= 1.5 x the first
  --needles          needles alone
  --bounds           how much of the scan bounds of scores could save
  --list             the documents with their token hashes

Options
  --tuning           tuning.tsv instead of documents.tsv: what may be tuned on
  --only NAME        one document, or with --needles one haystack
  --forced N         so many teacher-forced tokens instead of the list's
  --methods A,B      these methods only
  --no-needles       documents alone
  --out FILE         instead of target/eval.json
  --model FILE       an F32 model (build/models/SmolLM2-135M-Instruct.F32.gguf)
  --root FOLDER      the repository (the current folder)
  -t N               threads (all cores)

Exits with 1 when a bound is missed, with 2 on an error.
)";

struct eval_options {
    std::string mode = "documents";
    std::string only, methods, out, model;
    sekv_eval::places places = {"."};
    int32_t n_threads = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
    int32_t n_forced = 0;
    bool tuning = false;
    bool needles = true;
};

bool parse(int argument_count, char ** arguments, eval_options & options) {
    for (int i = 1; i < argument_count; i++) {
        const std::string option = arguments[i];
        const auto value = [&]() -> std::string {
            if (i + 1 >= argument_count) {
                throw std::runtime_error(option + " needs a value");
            }
            return arguments[++i];
        };
        if (option == "--quick" || option == "--stream" || option == "--exact" || option == "--drift" || option == "--needles" ||
            option == "--bounds" || option == "--list") {
            options.mode = option.substr(2);
        } else if (option == "--tuning") {
            options.tuning = true;
        } else if (option == "--no-needles") {
            options.needles = false;
        } else if (option == "--only") {
            options.only = value();
        } else if (option == "--forced") {
            options.n_forced = std::atoi(value().c_str());
        } else if (option == "--methods") {
            options.methods = value();
        } else if (option == "--out") {
            options.out = value();
        } else if (option == "--model") {
            options.model = value();
        } else if (option == "--root") {
            options.places.repository = value();
        } else if (option == "-t") {
            options.n_threads = std::atoi(value().c_str());
        } else if (option == "-h" || option == "--help") {
            std::fputs(usage, stdout);
            return false;
        } else {
            throw std::runtime_error("unknown option " + option + "; see --help");
        }
    }
    if (options.model.empty()) {
        options.model = options.places.repository + "/build/models/SmolLM2-135M-Instruct.F32.gguf";
    }
    if (options.out.empty()) {
        options.out = options.places.repository + "/target/eval.json";
    }
    return true;
}

std::vector<document> chosen_documents(const sekv_llama::loaded_model & model, const eval_options & options) {
    std::vector<document> chosen;
    for (document & document : read_documents(model, options.places, options.tuning ? "tuning.tsv" : "documents.tsv")) {
        if (!options.only.empty() && options.only != document.name) {
            continue;
        }
        if (options.n_forced > 0 && options.n_forced < document.n_forced) {
            document.n_forced = options.n_forced;
        }
        chosen.push_back(std::move(document));
    }
    if (chosen.empty()) {
        throw std::runtime_error("no document is named " + options.only);
    }
    return chosen;
}

// Does quality drift as generated tokens replace the prompt?
bool run_drift(const sekv_llama::loaded_model & model, const sekv_model * sekv, const eval_options & options) {
    document long_document;
    long_document.name = "drift";
    long_document.n_prompt = 3072;
    long_document.n_forced = 1000;
    long_document.tokens = read_tokens(model, options.places, "alice.txt", 50000, 3072 + 1000 + 1);
    constexpr int32_t n_quarters = 4;
    std::vector<std::vector<sekv_llama::fidelity>> quarters;
    const std::vector<method> methods = named_methods(options.methods.empty() ? "ladder,ladder-keys" : options.methods);
    measure_document(model, sekv, long_document, methods, options.n_threads, &quarters, n_quarters);
    bool all_hold = true;
    for (size_t m = 0; m < methods.size(); m++) {
        const double first = quarters[m].front().kl_mean();
        const double last = quarters[m].back().kl_mean();
        const bool holds = last <= 1.5 * first;
        std::printf("drift, %s: KL by quarter of 1,000 tokens", methods[m].name.c_str());
        for (const sekv_llama::fidelity & quarter : quarters[m]) {
            std::printf(" %.6f", quarter.kl_mean());
        }
        std::printf("; last over first %.2f (at most 1.5): %s\n", last / first, holds ? "holds" : "MISSED");
        all_hold = all_hold && holds;
    }
    std::fflush(stdout);
    return all_hold;
}

bool run_table(const sekv_llama::loaded_model & model, const sekv_model * sekv, const eval_options & options) {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<method> methods = options.methods.empty() ? all_methods() : named_methods(options.methods);
    std::vector<fidelity_row> rows;
    if (options.mode == "documents") {
        rows = measure_documents(model, sekv, chosen_documents(model, options), methods, options.n_threads);
    }
    std::vector<needle_row> needles;
    if (options.needles) {
        // A constant in the keys has its rows above; here it would only cost time.
        std::vector<method> asked;
        for (const method & method : methods) {
            if (!method.key_bias) {
                asked.push_back(method);
            }
        }
        std::vector<haystack> haystacks;
        for (haystack & haystack : read_haystacks(options.places)) {
            if (options.mode != "needles" || options.only.empty() || options.only == haystack.name) {
                haystacks.push_back(std::move(haystack));
            }
        }
        needles = ask_needles(model, sekv, options.places, haystacks, asked, options.n_threads);
    }
    bool all_hold = true;
    if (!rows.empty()) {
        print_fidelity(rows, methods);
        all_hold = check_fidelity(rows);
    }
    if (!needles.empty()) {
        print_needles(needles, methods);
        all_hold = check_needles(needles) && all_hold;
    }
    write_eval_json(options.out, rows, needles);
    const double minutes = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 60.0;
    std::printf("%s; %.1f minutes; written to %s\n", all_hold ? "all bounds hold" : "bounds were MISSED", minutes, options.out.c_str());
    return all_hold;
}

bool run(const eval_options & options) {
    const sekv_llama::loaded_model model(options.model);
    if (options.mode == "list") {
        for (const document & document : chosen_documents(model, options)) {
            std::printf("%s\t%d\t%d\t%s\n", document.name.c_str(), document.n_prompt, document.n_forced,
                        token_hash(document.tokens).c_str());
        }
        return true;
    }
    if (options.mode == "bounds") {
        print_bounds(model, chosen_documents(model, options), options.n_threads);
        return true;
    }
    if (options.mode == "quick" || options.mode == "stream") {
        const document document = chosen_documents(model, options)[0];
        return options.mode == "quick" ? run_quick(model, document, options.n_threads) : run_stream(model, document, options.n_threads);
    }
    if (options.mode == "exact") {
        return run_exact(model, read_tokens(model, options.places, "rst-specification.txt", 0, 2048), options.n_threads);
    }
    const model_pointer sekv = open_model(options.model);
    if (options.mode == "drift") {
        return run_drift(model, sekv.get(), options);
    }
    return run_table(model, sekv.get(), options);
}

}  // namespace

int main(int argument_count, char ** arguments) {
    try {
        eval_options options;
        if (!parse(argument_count, arguments, options)) {
            return 0;
        }
        return run(options) ? 0 : 1;
    } catch (const std::exception & problem) {
        std::fprintf(stderr, "sekv-eval: error: %s\n", problem.what());
        return 2;
    }
}

#include "needles.h"

#include "distribution.h"
#include "fan_out.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>

namespace sekv_eval {

namespace {

// The full cache itself must be sure by this much, or the prompt says nothing about a method.
constexpr double sure_margin = 0.1;
constexpr int32_t spare_cells = 256;

// The right token's logit less the best other one's.
double answer_margin(const float * logits, int32_t n_vocab, llama_token right) {
    float best_other = -1e30f;
    for (int32_t i = 0; i < n_vocab; i++) {
        if (i != right) {
            best_other = std::max(best_other, logits[i]);
        }
    }
    return logits[right] - best_other;
}

std::vector<llama_token> haystack_tokens(const sekv_llama::loaded_model & model, const places & places, const haystack & haystack) {
    // First how much text fits beside the needles, then the needles, each after a line's end.
    int32_t n_needle_tokens = 0;
    for (const needle & needle : haystack.needles) {
        n_needle_tokens += static_cast<int32_t>(model.tokenize("\n" + needle.statement + "\n", false).size()) + 2;
    }
    std::string text;
    for (const llama_token token : read_tokens(model, places, haystack.text, haystack.offset, haystack.n_ctx - n_needle_tokens)) {
        text += model.piece(token);
    }
    std::vector<needle> deepest_first = haystack.needles;
    std::sort(deepest_first.begin(), deepest_first.end(), [](const needle & a, const needle & b) { return a.depth > b.depth; });
    for (const needle & needle : deepest_first) {
        const size_t line_end = text.find('\n', static_cast<size_t>(needle.depth * text.size()));
        text.insert(line_end == std::string::npos ? text.size() : line_end + 1, "\n" + needle.statement + "\n\n");
    }
    std::vector<llama_token> tokens = model.tokenize(text, false);
    if (static_cast<int32_t>(tokens.size()) > haystack.n_ctx) {
        throw std::runtime_error(haystack.name + " has " + std::to_string(tokens.size()) + " tokens; at most " +
                                 std::to_string(haystack.n_ctx) + " were expected");
    }
    return tokens;
}

}  // namespace

std::vector<haystack> read_haystacks(const places & places) {
    std::vector<haystack> haystacks;
    for (const std::vector<std::string> & line : read_table(places.lists() + "haystacks.tsv", 5)) {
        haystack haystack;
        haystack.name = line[0];
        haystack.text = line[1];
        haystack.offset = std::strtoul(line[2].c_str(), nullptr, 10);
        haystack.n_ctx = std::atoi(line[3].c_str());
        for (const std::vector<std::string> & fields : read_table(places.lists() + "needles.tsv", 6)) {
            if (fields[0] == line[4]) {
                haystack.needles.push_back({fields[1], std::atof(fields[2].c_str()), fields[3], fields[4], fields[5]});
            }
        }
        if (haystack.needles.empty()) {
            throw std::runtime_error("needles.tsv has no group " + line[4] + ", which " + haystack.name + " names");
        }
        haystacks.push_back(std::move(haystack));
    }
    return haystacks;
}

std::vector<needle_row> ask_needles(const sekv_llama::loaded_model & model, const sekv_model * sekv, const places & places,
                                    const std::vector<haystack> & haystacks, const std::vector<method> & methods, int32_t n_threads) {
    std::vector<needle_row> rows;
    for (const haystack & haystack : haystacks) {
        const std::vector<llama_token> document = haystack_tokens(model, places, haystack);
        const int32_t n_document = static_cast<int32_t>(document.size());
        full_reader full;
        const recording recorded = record(model, document, n_document, 0, n_threads, spare_cells, &full);
        std::vector<running_method> running = start_methods(sekv, methods, recorded, n_threads);
        std::unique_ptr<fan_out> steps;
        if (!running.empty()) {
            steps = std::make_unique<fan_out>(model, running, n_threads);
        }
        std::fprintf(stderr, "%s: %d tokens, %zu questions\n", haystack.name.c_str(), n_document, haystack.needles.size());

        for (const needle & needle : haystack.needles) {
            const std::vector<llama_token> question = model.tokenize("\n" + needle.question, false);
            const std::vector<llama_token> answer = model.tokenize(needle.answer, false);
            std::vector<llama_token> asked = question;
            asked.insert(asked.end(), answer.begin(), answer.end());
            const size_t first_answer = question.size();

            full.engine->decode(asked.data(), static_cast<int32_t>(asked.size()), n_document, true);
            double full_margin = 1e30;
            for (size_t i = first_answer; i < asked.size(); i++) {
                full_margin = std::min(full_margin, answer_margin(full.engine->logits(static_cast<int32_t>(i) - 1), model.n_vocab(), asked[i]));
            }
            full.engine->truncate(n_document);

            std::vector<double> margins(methods.size(), 1e30);
            for (size_t i = 0; steps && i + 1 < asked.size(); i++) {
                steps->step(asked[i], n_document + static_cast<int32_t>(i));
                for (size_t m = 0; m < methods.size() && i + 1 >= first_answer; m++) {
                    margins[m] = std::min(margins[m], answer_margin(steps->logits(static_cast<int32_t>(m)), model.n_vocab(), asked[i + 1]));
                }
            }
            if (steps) {
                steps->truncate(n_document);
            }

            needle_row row;
            row.prompt = haystack.name + "/" + needle.name;
            row.n_ctx = haystack.n_ctx;
            row.full_solved = full_margin >= sure_margin;
            const auto add = [&](const std::string & method, double margin) {
                row.method = method;
                row.margin = margin;
                row.solved = margin > 0.0;
                rows.push_back(row);
            };
            add("full", full_margin);
            for (size_t m = 0; m < methods.size(); m++) {
                add(methods[m].name, margins[m]);
            }
        }
    }
    return rows;
}

void print_needles(const std::vector<needle_row> & rows, const std::vector<method> & methods) {
    std::map<std::string, std::pair<int32_t, int32_t>> solved;  // by method: solved, asked
    int32_t n_prompts = 0;
    int32_t n_sure = 0;
    for (const needle_row & row : rows) {
        if (row.method == "full") {
            n_prompts++;
            n_sure += row.full_solved;
            std::printf("needle %-38s full margin %8.3f%s\n", row.prompt.c_str(), row.margin, row.full_solved ? "" : "  (falls out)");
        } else if (row.full_solved) {
            solved[row.method].first += row.solved;
            solved[row.method].second++;
            if (!row.solved) {
                std::printf("needle %-38s MISSED by %s, margin %.3f\n", row.prompt.c_str(), row.method.c_str(), row.margin);
            }
        }
    }
    std::printf("needles: %d prompts, the full cache solves %d by a margin of at least %.1f\n", n_prompts, n_sure, sure_margin);
    for (const method & method : methods) {
        std::printf("  %-26s %d of %d\n", method.name.c_str(), solved[method.name].first, solved[method.name].second);
    }
    std::fflush(stdout);
}

bool check_needles(const std::vector<needle_row> & rows) {
    int32_t n_prompts = 0;
    int32_t n_out = 0;
    bool all_hold = true;
    for (const needle_row & row : rows) {
        if (row.method == "full") {
            n_prompts++;
            n_out += !row.full_solved;
        } else if (row.method == "ladder" && row.full_solved && !row.solved) {
            std::printf("MISSED: needle %s, margin %.3f\n", row.prompt.c_str(), row.margin);
            all_hold = false;
        }
    }
    if (n_prompts < 20 || n_out * 10 >= n_prompts) {
        std::printf("MISSED: %d of %d needle prompts fall out; at least 20 prompts and fewer than a tenth were expected\n", n_out, n_prompts);
        all_hold = false;
    }
    return all_hold;
}

}  // namespace sekv_eval

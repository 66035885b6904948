// Sentences hidden in long documents, and asked for after the document was compressed.
//
// A haystack is read once; each of its questions is one prompt, decoded token by token on top of
// the compressed document and then taken back.
#pragma once

#include "documents.h"
#include "methods.h"

#include <string>
#include <vector>

namespace sekv_eval {

struct needle {
    std::string name;
    double depth = 0.0;          // 0: the document's beginning, 1: its end
    std::string statement;       // hidden in the document
    std::string question;        // follows the document
    std::string answer;          // what must come next
};

struct haystack {
    std::string name;
    std::string text;            // see texts.tsv
    size_t offset = 0;
    int32_t n_ctx = 0;           // nominal; the document has at most as many tokens
    std::vector<needle> needles;
};

// One line of "needles" in eval.json.
struct needle_row {
    std::string prompt;
    int32_t n_ctx = 0;
    std::string method;
    bool solved = false;
    bool full_solved = false;    // by a margin of at least 0.1 in a logit
    double margin = 0.0;         // this method's own
};

std::vector<haystack> read_haystacks(const places & places);

std::vector<needle_row> ask_needles(const sekv_llama::loaded_model & model, const sekv_model * sekv, const places & places,
                                    const std::vector<haystack> & haystacks, const std::vector<method> & methods, int32_t n_threads);

void print_needles(const std::vector<needle_row> & rows, const std::vector<method> & methods);

// Every prompt that the full cache solves must be solved by `ladder`, and few may fall out.
bool check_needles(const std::vector<needle_row> & rows);

}  // namespace sekv_eval

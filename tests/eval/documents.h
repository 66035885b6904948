// The committed lists of documents, cut into tokens.
#pragma once

#include "engine.h"

#include <cstdint>
#include <string>
#include <vector>

namespace sekv_eval {

struct document {
    std::string name;
    std::string kind;                     // prose, reference, code, changelog
    int32_t n_prompt = 0;
    int32_t n_forced = 0;
    std::vector<llama_token> tokens;      // n_prompt + n_forced + 1: the last one is only predicted
    std::vector<llama_token> prompt() const { return {tokens.begin(), tokens.begin() + n_prompt}; }
};

// Where the texts and lists lie.
struct places {
    std::string repository;
    std::string texts() const { return repository + "/build/texts/"; }
    std::string lists() const { return repository + "/tests/eval/"; }
};

std::string read_text(const std::string & path);

// Lines of a tab-separated file without its comments. Throws std::runtime_error.
std::vector<std::vector<std::string>> read_table(const std::string & path, size_t n_columns);

// FNV-1a over the ids, as hexadecimal: shows a changed text or tokeniser.
std::string token_hash(const std::vector<llama_token> & tokens);

// Reads a list such as documents.tsv. A hash that differs is an error; `-` is accepted.
std::vector<document> read_documents(const sekv_llama::loaded_model & model, const places & places, const std::string & list);

// Any stretch of a text: n_tokens tokens from the byte offset on.
std::vector<llama_token> read_tokens(const sekv_llama::loaded_model & model, const places & places, const std::string & text,
                                     size_t offset, int32_t n_tokens);

}  // namespace sekv_eval
